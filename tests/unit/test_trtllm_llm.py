"""What is given to `tensorrt_llm` and read of it, object by object, with packages generated at three versions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.core.errors import ConfigError
from laneway.core.lanes import FinishReason
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.workers.engines.iterations import Iteration
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest
from laneway.workers.engines.remote import RemoteRefusal
from laneway.workers.engines.trtllm_llm import Answer, Library, iterations_of, kv_told
from laneway.workers.engines.trtllm_settings import KvFile, LlmFile, SpeculationFile
from tests.support.trtllm_package import importable

CAPACITY = EngineCapacity(8, 16_384, 2048, 260, chunk_tokens=512)
FILE = LlmFile(model="/models/m")
REQUEST = EngineRequest(3, (65, 66), 4)
EOS = frozenset({257, 258})
OFFERED = capabilities_of("trtllm")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Library]]:
    with ExitStack() as stack:

        def made(version: str) -> Library:
            stack.enter_context(importable(tmp_path, version, monkeypatch))
            return Library()

        yield made


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(ConfigError, match=r"laneway\[trtllm\]"):
        Library()


@pytest.mark.parametrize(
    ("version", "salts", "priority", "penalties"),
    [("1.0", False, False, False), ("1.2", True, False, False), ("1.4", True, True, True)],
)
def test_what_a_version_lacks_is_not_offered(library, version, salts, priority, penalties):
    able = library(version).able(OFFERED)
    assert (able.cache_salt, able.priority_inside, able.penalties) == (salts, priority, penalties)
    assert able == replace(OFFERED, cache_salt=salts, priority_inside=priority, penalties=penalties)


class TestLlmArguments:
    def test_the_pool_and_the_file_say_how_it_is_made(self, library):
        given = library("1.4").llm_arguments(FILE, CAPACITY, EngineOptions())
        kv, scheduler = given.pop("kv_cache_config"), given.pop("scheduler_config")
        assert given == {
            "model": "/models/m",
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
            "dtype": "auto",
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "max_batch_size": 8,
            "max_seq_len": 2048,
            "max_num_tokens": 512,
            "enable_chunked_prefill": True,
            "enable_iter_perf_stats": True,
        }
        assert (kv.enable_block_reuse, kv.max_tokens, kv.free_gpu_memory_fraction) == (True, 16_384, 0.9)
        assert (kv.dtype, kv.host_cache_size, kv.event_buffer_max_size) == ("auto", None, 0)
        assert scheduler.capacity_scheduler_policy == "GUARANTEED_NO_EVICT"
        assert scheduler.waiting_queue_policy == "priority"

    def test_what_the_file_says_beyond_that(self, library):
        file = LlmFile(
            model="m",
            tokenizer="t",
            revision="r",
            moe_tensor_parallel_size=2,
            moe_expert_parallel_size=4,
            enable_attention_dp=True,
            attn_backend="FLASHINFER",
            overlap_scheduler=False,
            capacity="page",
            kv=KvFile(dtype="fp8", host_cache_bytes=7, tokens_per_block=64, partial_reuse=False),
        )
        given = library("1.4").llm_arguments(file, CAPACITY, EngineOptions(prefix_cache=False))
        assert (given["tokenizer"], given["revision"], given["attn_backend"]) == ("t", "r", "FLASHINFER")
        assert (given["moe_tensor_parallel_size"], given["moe_expert_parallel_size"]) == (2, 4)
        assert given["enable_attention_dp"]
        assert given["disable_overlap_scheduler"]
        assert given["scheduler_config"].capacity_scheduler_policy == "MAX_UTILIZATION"
        kv = given["kv_cache_config"]
        assert (kv.enable_block_reuse, kv.enable_partial_reuse) == (False, False)
        assert (kv.dtype, kv.host_cache_size, kv.tokens_per_block) == ("fp8", 7, 64)

    def test_a_version_whose_queue_has_no_priority_is_asked_for_none(self, library):
        given = library("1.2").llm_arguments(FILE, CAPACITY, EngineOptions())
        assert given["scheduler_config"].waiting_queue_policy == "fcfs"

    def test_drafting_goes_by_the_size_of_the_batch(self, library):
        schedule = {"1": 4, "16": 2, "32": 0}
        asked = SpeculationFile(kind="eagle", model="/d", max_draft_len=4, draft_len_schedule=schedule)
        given = library("1.4").llm_arguments(replace(FILE, speculation=asked), CAPACITY, EngineOptions())
        config = given["speculative_config"]
        assert type(config).__name__ == "EagleDecodingConfig"
        assert (config.max_draft_len, config.speculative_model) == (4, "/d")
        assert config.draft_len_schedule == {1: 4, 16: 2, 32: 0}

    def test_a_version_that_cannot_draft_so_says_it(self, library):
        asked = replace(FILE, speculation=SpeculationFile(kind="ngram", max_draft_len=4))
        with pytest.raises(ConfigError, match=r"1\.2\.0rc3 has no NGramDecodingConfig"):
            library("1.2").llm_arguments(asked, CAPACITY, EngineOptions())

    def test_schemas_need_its_tokenizer(self, library):
        given = library("1.4").llm_arguments(FILE, CAPACITY, EngineOptions(guided_decoding="xgrammar"))
        assert (given["guided_decoding_backend"], given["skip_tokenizer_init"]) == ("xgrammar", False)

    def test_every_adapter_is_known_from_the_start(self, library):
        options = EngineOptions(adapters=("sql=/a/sql", "law=/a/law"))
        config = library("1.4").llm_arguments(replace(FILE, max_lora_rank=16), CAPACITY, options)["lora_config"]
        assert config.lora_dir == ["/a/law", "/a/sql"]
        assert (config.max_lora_rank, config.max_loras, config.max_cpu_loras) == (16, 2, 2)


class TestRequests:
    def test_a_greedy_one_is_so_in_every_version(self, library):
        params = library("1.0").sampling_params(replace(REQUEST, temperature=0.0), EOS)
        assert (params.top_k, params.temperature, params.top_p) == (1, None, None)
        assert (params.max_tokens, params.detokenize, params.logprobs, params.seed) == (4, False, None, None)

    def test_a_temperature_alone_is_no_greedy_one_in_old_versions(self, library):
        params = library("1.0").sampling_params(replace(REQUEST, temperature=0.7), EOS)
        assert (params.temperature, params.top_p, params.top_k) == (0.7, 1.0, None)

    def test_what_is_asked_for_goes_along(self, library):
        request = replace(
            REQUEST,
            temperature=0.5,
            top_p=0.9,
            top_k=20,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            min_tokens=2,
        )
        params = library("1.4").sampling_params(request, EOS)
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 20, 0.1)
        assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, 0.3)
        assert params.min_tokens == 2

    def test_every_end_that_the_tokenizer_knows_ends_it(self, library):
        newest = library("1.4")
        params = newest.sampling_params(replace(REQUEST, stop_token_ids=(7,)), EOS)
        assert (params.end_id, params.stop_token_ids, params.ignore_eos) == (257, [7, 257, 258], False)
        ignoring = newest.sampling_params(replace(REQUEST, stop_token_ids=(7,), ignore_eos=True), EOS)
        assert (ignoring.stop_token_ids, ignoring.ignore_eos) == ([7], True)

    @pytest.mark.parametrize(("logprobs", "top", "asked"), [(False, 0, None), (True, 0, 1), (True, 5, 5)])
    def test_log_probabilities_of_the_chosen_are_never_asked_for_as_0(self, library, logprobs, top, asked):
        params = library("1.4").sampling_params(replace(REQUEST, logprobs=logprobs, top_logprobs=top), EOS)
        assert params.logprobs == asked

    def test_salt_and_priority_go_where_the_version_has_them(self, library):
        request = replace(REQUEST, cache_salt="tenant", priority=0.9)
        assert library("1.2").generate_arguments(request, {}) == {"streaming": True, "cache_salt": "tenant"}

    def test_newer_ones_have_priority(self, library):
        request = replace(REQUEST, cache_salt="tenant", priority=0.9)
        expected = {"streaming": True, "cache_salt": "tenant", "priority": 0.9}
        assert library("1.4").generate_arguments(request, {}) == expected

    def test_an_adapter_goes_by_its_number_and_folder(self, library):
        adapters, newest = {"law": "/a/law", "sql": "/a/sql"}, library("1.4")
        lora = newest.generate_arguments(replace(REQUEST, adapter="sql"), adapters)["lora_request"]
        assert (lora.lora_name, lora.lora_int_id, lora.lora_path) == ("sql", 2, "/a/sql")
        with pytest.raises(RemoteRefusal, match="the pool's are law, sql"):
            newest.generate_arguments(replace(REQUEST, adapter="other"), adapters)

    def test_a_schema_goes_along(self, library):
        params = library("1.4").sampling_params(replace(REQUEST, json_schema='{"type": "object"}'), EOS)
        assert params.guided_decoding.json == '{"type": "object"}'


def output(ids: list[int], reason: str | None = None, logprobs: list[Any] | None = None, **more: Any) -> Any:
    completion = SimpleNamespace(token_ids=ids, finish_reason=reason, logprobs=logprobs)
    return SimpleNamespace(outputs=[completion], finished=reason is not None, **more)


def value(logprob: float) -> Any:
    return SimpleNamespace(logprob=logprob, rank=1)


class TestAnswers:
    def test_outputs_are_all_of_it_so_far(self):
        answer = Answer(REQUEST, EOS, 260)
        first = answer.read(output([1], cached_tokens=32))
        assert first is not None
        assert (first.token_ids, first.finish, first.cached_tokens) == ([1], None, 32)
        assert answer.read(output([1], cached_tokens=32)) is None
        last = answer.read(output([1, 2, 3, 4], "length", cached_tokens=32))
        assert last is not None
        assert (last.token_ids, last.finish, last.cached_tokens) == ([2, 3, 4], FinishReason.LENGTH, 0)

    @pytest.mark.parametrize("given_out", [True, False])
    def test_an_end_token_is_hidden_whether_it_is_given_out_or_not(self, given_out):
        answer = Answer(REQUEST, EOS, 260)
        step = answer.read(output([1, 257] if given_out else [1], "stop"))
        assert step is not None
        assert (step.token_ids, step.finish) == ([1], FinishReason.STOP)

    def test_a_stop_token_that_was_taken_back_changes_nothing(self):
        answer = Answer(replace(REQUEST, stop_token_ids=(9,)), EOS, 260)
        assert answer.read(output([1, 2])) is not None
        step = answer.read(output([1], "stop"))
        assert step is not None
        assert (step.token_ids, step.finish) == ([], FinishReason.STOP)

    @pytest.mark.parametrize(
        ("reason", "said"),
        [
            ("length", "context is shorter"),
            ("timeout", "time limit"),
            ("cancelled", "somebody else"),
            ("else", "not known"),
        ],
    )
    def test_an_end_that_nobody_asked_for_is_an_error(self, reason, said):
        step = Answer(REQUEST, EOS, 260).read(output([1], reason))
        assert step is not None
        assert step.finish is FinishReason.ERROR
        assert said in step.message

    @pytest.mark.parametrize(
        "logprobs", [[-0.5, -0.25], [{1: value(-0.5), 9: value(-1.0)}, {2: value(-0.25), 1: value(-0.1)}]]
    )
    def test_log_probabilities_come_as_numbers_or_by_id(self, logprobs):
        step = Answer(replace(REQUEST, logprobs=True), EOS, 260).read(output([1, 2], None, logprobs))
        assert step is not None
        assert step.logprobs == [-0.5, -0.25]

    def test_the_likeliest_are_ranked_and_as_many_as_asked_for(self):
        told = [{7: value(-2.0), 1: value(-3.0), 9: value(-1.0)}]
        step = Answer(replace(REQUEST, logprobs=True, top_logprobs=2), EOS, 260).read(output([1], None, told))
        assert step is not None
        assert (step.logprobs, step.top) == ([-3.0], [[(9, -1.0), (7, -2.0)]])

    @pytest.mark.parametrize(
        ("ids", "logprobs", "top", "said"),
        [
            ([1, 2], [-0.5], 0, "1 log probabilities for 2 tokens"),
            ([1], [{9: value(-0.5)}], 0, "chosen token"),
            ([1], [-0.5], 2, "top_logprobs has none"),
            ([260], [-0.5], 0, "vocabulary of 260"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, ids, logprobs, top, said):
        request = replace(REQUEST, logprobs=True, top_logprobs=top)
        with pytest.raises(RemoteRefusal, match=said):
            Answer(request, EOS, 260).read(output(ids, None, logprobs))


class TestStatistics:
    def test_iterations_are_dictionaries_or_json_of_them(self):
        told = {"iterLatencyMS": 12.5, "inflightBatchingStats": {"numGenRequests": 3, "numCtxTokens": 64}}
        assert iterations_of([told, json.dumps(told)]) == [Iteration(0.0125, 3, 64)] * 2

    def test_what_an_iteration_does_not_say_is_0(self):
        assert iterations_of([{}, {"inflightBatchingStats": None}]) == [Iteration(0.0, 0, 0)] * 2

    def test_kv_is_what_the_capacity_says_or_else_the_last_iteration(self):
        new = SimpleNamespace(get_kv_cache_capacity=lambda: {"maxNumBlocks": 10, "tokensPerBlock": 32})
        assert kv_told(new, []) == (320, 32)
        told = [{"kvCacheStats": {"maxNumBlocks": 4, "tokensPerBlock": 64}}, {"iter": 2}]
        assert kv_told(SimpleNamespace(get_kv_cache_capacity=dict), told) == (256, 64)
        assert kv_told(SimpleNamespace(), told) == (256, 64)
        assert kv_told(SimpleNamespace(), []) == (0, 0)
