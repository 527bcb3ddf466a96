"""That `tensorrt_llm` has what the adapter calls: of the installed one where there is one, and of those generated.

Nothing of it is run, but for a class of values or two: it is to pass on a host with the package, with a GPU or not.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.trtllm_package import VERSIONS, facts_of, importable

# What the adapter gives: class, method, and names of parameters. Optional ones are probed, and are not here.
CALLED = {
    ("LLM", "generate_async"): {"inputs", "sampling_params", "streaming"},
    ("LLM", "get_stats"): {"timeout"},
    ("LLM", "shutdown"): set[str](),
    ("RequestOutput", "abort"): set[str](),
    ("SamplingParams", "__init__"): {
        *("max_tokens", "end_id", "pad_id", "stop_token_ids", "ignore_eos", "detokenize", "min_tokens", "logprobs"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p", "min_p"),
    },
    ("KvCacheConfig", "__init__"): {
        *("enable_block_reuse", "enable_partial_reuse", "max_tokens", "free_gpu_memory_fraction", "host_cache_size"),
        *("dtype", "tokens_per_block"),
    },
    ("SchedulerConfig", "__init__"): {"capacity_scheduler_policy"},
}
READ = {"RequestOutput": {"outputs", "finished"}}
ARGUMENTS = {  # of LLM()
    *("model", "tokenizer", "revision", "skip_tokenizer_init", "trust_remote_code", "dtype", "tensor_parallel_size"),
    *("pipeline_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size", "enable_attention_dp"),
    *("max_batch_size", "max_seq_len", "max_num_tokens", "enable_chunked_prefill", "enable_iter_perf_stats"),
    *("scheduler_config", "kv_cache_config", "attn_backend", "disable_overlap_scheduler", "speculative_config"),
}


def missing(llmapi: Any, arguments: set[str]) -> list[str]:
    """What the adapter would not find."""
    found = [f"LLM(): {name}" for name in sorted(ARGUMENTS - arguments)]
    for (owner, method), names in CALLED.items():
        kind = getattr(llmapi, owner)
        has = inspect.signature(kind if method == "__init__" else getattr(kind, method)).parameters
        found += [f"{owner}.{method}: {name}" for name in sorted(names - has.keys())]
    for owner, names in READ.items():
        found += [f"{owner}.{name}" for name in sorted(names) if not hasattr(getattr(llmapi, owner), name)]
    policies = llmapi.CapacitySchedulerPolicy
    found += [name for name in ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION") if not hasattr(policies, name)]
    if not issubclass(llmapi.RequestError, Exception):
        found.append("RequestError")
    return found


@pytest.fixture(params=VERSIONS)
def generated(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A version, whose package is found by imports."""
    with importable(tmp_path, request.param, monkeypatch):
        yield request.param


def test_the_installed_library_has_what_the_adapter_calls():
    if importlib.util.find_spec("tensorrt_llm") is None:
        pytest.skip("tensorrt_llm is not installed here: pip install 'laneway[trtllm]' on a host with its GPU")
    arguments = importlib.import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs.model_fields
    assert missing(importlib.import_module("tensorrt_llm.llmapi"), set(arguments)) == []


def test_generated_ones_have_it(generated: str):
    llmapi = importlib.import_module("tensorrt_llm.llmapi")
    assert missing(llmapi, set(llmapi.LLM.ARGUMENTS)) == []


def test_what_is_missing_is_named(generated: str):
    llmapi = importlib.import_module("tensorrt_llm.llmapi")
    del llmapi.LLM.generate_async.__annotations__
    llmapi.LLM.get_stats = lambda self: []
    del llmapi.RequestOutput.finished
    assert missing(llmapi, set(llmapi.LLM.ARGUMENTS) - {"model"}) == [
        "LLM(): model",
        "LLM.get_stats: timeout",
        "RequestOutput.finished",
    ]


def test_generated_signatures_are_those_of_the_references(generated: str):
    llmapi, facts = importlib.import_module("tensorrt_llm.llmapi"), facts_of(generated)
    assert importlib.import_module("tensorrt_llm").__version__ == facts.version
    for owner, methods in facts.methods.items():
        for name, method in methods.items():
            has = dict(inspect.signature(getattr(getattr(llmapi, owner), name)).parameters)
            del has["self"]
            expected = {p.name: p for p in method.parameters}
            if (owner, name) == ("LLM", "__init__"):
                assert has.pop("kwargs").kind is inspect.Parameter.VAR_KEYWORD
                assert set(has) == set(facts.explicit)
                assert set(llmapi.LLM.ARGUMENTS) == set(expected)
            else:
                assert list(has) == list(expected), (owner, name)
            for parameter in has.values():
                assert parameter.annotation == expected[parameter.name].annotation
                default = expected[parameter.name].default
                assert parameter.default == (inspect.Parameter.empty if default is None else eval(default))


def test_the_versions_differ_in_what_is_probed():
    found = {}
    for version in VERSIONS:
        methods = facts_of(version).methods["LLM"]
        names = {parameter.name for parameter in methods["generate_async"].parameters}
        found[version] = ("cache_salt" in names, "priority" in names, "get_kv_cache_capacity" in methods)
    assert found == {"1.0": (False, False, False), "1.2": (True, False, False), "1.4": (True, True, True)}
