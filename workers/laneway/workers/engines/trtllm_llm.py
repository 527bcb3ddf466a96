"""The installed `tensorrt_llm`: what of it is there, how `LLM()` is called, and what its objects say.

Versions differ. What a version has is asked of its signatures, never of its number, but for penalties, which old ones
take and ignore. Only this module and `trtllm.py` touch the library; its types end here.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from laneway.core.catalogue import Capabilities
from laneway.core.errors import ConfigError
from laneway.core.lanes import FinishReason
from laneway.runtime.engine_options import EngineOptions
from laneway.workers.engines.iterations import Iteration
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, SequenceStep
from laneway.workers.engines.remote import RemoteRefusal
from laneway.workers.engines.trtllm_answers import end_ids_of, finish_of, has_penalties
from laneway.workers.engines.trtllm_settings import LlmFile, SpeculationFile

CAPACITY_POLICIES = {"reserve": "GUARANTEED_NO_EVICT", "page": "MAX_UTILIZATION"}
SPECULATIONS = {
    "draft": "DraftTargetDecodingConfig",
    "eagle": "EagleDecodingConfig",
    "mtp": "MTPDecodingConfig",
    "ngram": "NGramDecodingConfig",
}


class Library:
    """The package and what this version of it can do."""

    def __init__(self) -> None:
        """Raises ConfigError where it is not installed."""
        try:
            self._package: Any = importlib.import_module("tensorrt_llm")
            self._llmapi: Any = importlib.import_module("tensorrt_llm.llmapi")
        except ImportError as error:
            raise ConfigError(
                f"the trtllm engine needs TensorRT-LLM: pip install 'laneway[trtllm]', on a host with its GPU ({error})"
            ) from error
        self.version: str = getattr(self._package, "__version__", "")
        generate = inspect.signature(self._package.LLM.generate_async).parameters
        self.has_priority = "priority" in generate and self._priority_queue() is not None
        self.has_cache_salt = "cache_salt" in generate

    def able(self, offered: Capabilities) -> Capabilities:
        return replace(
            offered,
            cache_salt=offered.cache_salt and self.has_cache_salt,
            priority_inside=offered.priority_inside and self.has_priority,
            penalties=offered.penalties and has_penalties(self.version),
        )

    def make_llm(self, file: LlmFile, capacity: EngineCapacity, options: EngineOptions) -> Any:
        """Loads the model. Raises whatever the library does."""
        return self._package.LLM(**self.llm_arguments(file, capacity, options))

    def llm_arguments(self, file: LlmFile, capacity: EngineCapacity, options: EngineOptions) -> dict[str, Any]:
        given = {
            "guided_decoding_backend": options.guided_decoding or None,
            "lora_config": self._lora(file, options.adapter_folders) if options.adapters else None,
            "tokenizer": file.tokenizer or None,
            "revision": file.revision or None,
            "moe_tensor_parallel_size": file.moe_tensor_parallel_size,
            "moe_expert_parallel_size": file.moe_expert_parallel_size,
            "attn_backend": file.attn_backend or None,
            "enable_attention_dp": file.enable_attention_dp or None,
            "disable_overlap_scheduler": None if file.overlap_scheduler else True,
            "speculative_config": self._speculation(file.speculation) if file.speculation is not None else None,
        }
        return {
            "model": file.model,
            "skip_tokenizer_init": not options.guided_decoding,  # ids in and out; schemas speak of text
            "trust_remote_code": file.trust_remote_code,
            "dtype": file.dtype,
            "tensor_parallel_size": file.tensor_parallel_size,
            "pipeline_parallel_size": file.pipeline_parallel_size,
            "max_batch_size": capacity.slots,
            "max_seq_len": capacity.context_length,
            "max_num_tokens": capacity.chunk_tokens,
            "enable_chunked_prefill": True,
            "enable_iter_perf_stats": True,
            "scheduler_config": self._scheduler(file),
            "kv_cache_config": self._kv_cache(file, capacity, prefix_cache=options.prefix_cache),
            **{name: value for name, value in given.items() if value is not None},
        }

    def generate_arguments(self, request: EngineRequest, adapters: Mapping[str, str]) -> dict[str, Any]:
        """Beside inputs and sampling parameters. Raises RemoteRefusal for an adapter that is not there."""
        given: dict[str, Any] = {"streaming": True}
        if request.cache_salt:
            given["cache_salt"] = request.cache_salt
        if self.has_priority:
            given["priority"] = request.priority
        if request.adapter:
            if request.adapter not in adapters:
                raise RemoteRefusal(f"there is no adapter of that name; the pool's are {', '.join(adapters)}")
            number = list(adapters).index(request.adapter) + 1  # 0 is none
            requests = importlib.import_module("tensorrt_llm.executor.request")
            given["lora_request"] = requests.LoRARequest(request.adapter, number, adapters[request.adapter])
        return given

    def sampling_params(self, request: EngineRequest, eos_ids: frozenset[int]) -> Any:
        """The ends of an answer that the pool's tokenizer knows go along as stop tokens: it takes one end id only."""
        end_id = min(eos_ids, default=-1)
        given: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "end_id": end_id,
            "pad_id": end_id,
            "stop_token_ids": sorted(end_ids_of(request, eos_ids)) or None,
            "ignore_eos": request.ignore_eos,
            "detokenize": False,
            "min_tokens": request.min_tokens or None,
            "repetition_penalty": request.repetition_penalty,
            "presence_penalty": request.presence_penalty,
            "frequency_penalty": request.frequency_penalty,
            # Of the chosen token alone: old releases take 0 for none.
            "logprobs": max(1, request.top_logprobs) if request.logprobs else None,
        }
        if request.json_schema:
            given["guided_decoding"] = self._llmapi.GuidedDecodingParams(json=request.json_schema)
        if request.temperature <= 0.0:
            given["top_k"] = 1  # greedy by temperature alone is known to newer releases only
        else:
            given |= {"temperature": request.temperature, "top_k": request.top_k, "min_p": request.min_p}
            # Without either of the two, old releases take a temperature for greedy.
            given["top_p"] = request.top_p if request.top_p is not None or request.top_k is not None else 1.0
        return self._package.SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def is_refusal(self, error: Exception) -> bool:
        """Whether it concerns one request, and the others go on. Its other errors may mean its end."""
        return isinstance(error, (ValueError, TypeError, self._llmapi.RequestError))

    def _priority_queue(self) -> Any | None:
        """The policy that orders its queue by priority, where this version has it."""
        arguments = importlib.import_module("tensorrt_llm.llmapi.llm_args")
        policies = getattr(arguments, "WaitingQueuePolicy", None)
        known = inspect.signature(self._llmapi.SchedulerConfig).parameters
        return getattr(policies, "PRIORITY", None) if "waiting_queue_policy" in known else None

    def _scheduler(self, file: LlmFile) -> Any:
        policy = getattr(self._llmapi.CapacitySchedulerPolicy, CAPACITY_POLICIES[file.capacity])
        queue = {"waiting_queue_policy": self._priority_queue()} if self.has_priority else {}
        return self._llmapi.SchedulerConfig(capacity_scheduler_policy=policy, **queue)

    def _kv_cache(self, file: LlmFile, capacity: EngineCapacity, *, prefix_cache: bool) -> Any:
        given: dict[str, Any] = {
            "enable_block_reuse": prefix_cache,
            "enable_partial_reuse": file.kv.partial_reuse,
            "max_tokens": capacity.kv_tokens,
            "free_gpu_memory_fraction": file.kv.free_gpu_memory_fraction,
        }
        if file.kv.host_cache_bytes:
            given["host_cache_size"] = file.kv.host_cache_bytes
        if file.kv.dtype != "auto":
            given["dtype"] = file.kv.dtype
        if file.kv.tokens_per_block:
            given["tokens_per_block"] = file.kv.tokens_per_block
        return self._llmapi.KvCacheConfig(**given)

    def _lora(self, file: LlmFile, adapters: Mapping[str, str]) -> Any:
        """All of them are known from the start, and stay in memory."""
        config = importlib.import_module("tensorrt_llm.llmapi.llm_args").LoraConfig
        count = len(adapters)
        return config(
            lora_dir=list(adapters.values()), max_lora_rank=file.max_lora_rank, max_loras=count, max_cpu_loras=count
        )

    def _speculation(self, asked: SpeculationFile) -> Any:
        """Raises ConfigError where this version cannot do it."""
        config = getattr(self._llmapi, SPECULATIONS[asked.kind], None)
        if config is None:
            raise ConfigError(f"TensorRT-LLM {self.version} has no {SPECULATIONS[asked.kind]}")
        given: dict[str, Any] = {"max_draft_len": asked.max_draft_len}
        if asked.model:
            given["speculative_model"] = asked.model
        if asked.draft_len_schedule:
            given["draft_len_schedule"] = asked.schedule
        for name in given.keys() - inspect.signature(config).parameters.keys():
            raise ConfigError(f"{SPECULATIONS[asked.kind]} of TensorRT-LLM {self.version} has no {name}")
        return config(**given)


class Answer:
    """Reads the outputs of one request: all of it so far, again and again, until it has finished."""

    def __init__(self, request: EngineRequest, eos_ids: frozenset[int], vocabulary_size: int) -> None:
        self._request = request
        self._ends = end_ids_of(request, eos_ids)
        self._vocabulary_size = vocabulary_size
        self._received = 0  # tokens, an end token among them

    def read(self, output: Any) -> SequenceStep | None:
        """None where it says nothing new. Raises RemoteRefusal where it makes no sense."""
        completion = output.outputs[0]
        ids: list[int] = completion.token_ids or []
        logprobs: list[Any] = completion.logprobs or []
        step = self._delta(
            list(ids[self._received :]),
            list(logprobs[self._received :]),
            int(getattr(output, "cached_tokens", 0) or 0),
        )
        if step.finish is None and output.finished:
            reason = completion.finish_reason or ""
            step.finish, step.message = finish_of(reason, self._received, self._request.max_tokens)
        return step if step.token_ids or step.finish is not None else None

    def _delta(self, ids: list[int], logprobs: list[Any], cached_tokens: int) -> SequenceStep:
        """The new ids up to the end of the answer, where an end token is among them."""
        if ids and max(ids) >= self._vocabulary_size:
            raise RemoteRefusal(f"TensorRT-LLM gave a token outside the vocabulary of {self._vocabulary_size}")
        first, self._received = not self._received, self._received + len(ids)
        end = next((i for i, token_id in enumerate(ids) if token_id in self._ends), None)
        step = SequenceStep(self._request.id, ids[:end], cached_tokens=cached_tokens if first and ids else 0)
        if self._request.logprobs:
            if len(logprobs) < len(step.token_ids):
                raise RemoteRefusal(f"TensorRT-LLM gave {len(logprobs)} log probabilities for {len(ids)} tokens")
            pairs = list(zip(step.token_ids, logprobs, strict=False))
            step.logprobs = [_of_chosen(token_id, each) for token_id, each in pairs]
            if count := self._request.top_logprobs:
                step.top = [_likeliest(each, count) for _, each in pairs]
        if end is not None:
            step.finish = FinishReason.STOP
        return step


def _of_chosen(token_id: int, each: Any) -> float:
    """It is a number, or a dictionary of objects by id: the likeliest, and the chosen one."""
    if not isinstance(each, Mapping):
        return float(each)
    if token_id not in each:
        raise RemoteRefusal("TensorRT-LLM gave no log probability of a chosen token")
    return float(each[token_id].logprob)


def _likeliest(each: Any, count: int) -> list[tuple[int, float]]:
    if not isinstance(each, Mapping):
        raise RemoteRefusal("this TensorRT-LLM gives log probabilities of chosen tokens only: top_logprobs has none")
    ranked = sorted(((token_id, float(value.logprob)) for token_id, value in each.items()), key=lambda top: -top[1])
    return ranked[:count]


def iterations_of(told: Iterable[Any]) -> list[Iteration]:
    """What get_stats gives: dictionaries, or JSON of them. Times are in milliseconds."""
    found = []
    for each in told:
        stats = json.loads(each) if isinstance(each, (str, bytes)) else each
        batch = stats.get("inflightBatchingStats") or {}
        found.append(
            Iteration(
                length_s=float(stats.get("iterLatencyMS") or 0.0) / 1000.0,
                decoding=int(batch.get("numGenRequests") or 0),
                prompt_tokens=int(batch.get("numCtxTokens") or 0),
            )
        )
    return found


def kv_told(llm: Any, told: Iterable[Any]) -> tuple[int, int]:
    """Tokens of its KV cache and of a block; 0 where neither its capacity nor an iteration says."""
    kv: Mapping[str, Any] = {}
    if hasattr(llm, "get_kv_cache_capacity"):
        kv = llm.get_kv_cache_capacity() or {}
    if not kv.get("maxNumBlocks"):
        for each in told:
            stats = json.loads(each) if isinstance(each, (str, bytes)) else each
            kv = stats.get("kvCacheStats") or kv
    block_tokens = int(kv.get("tokensPerBlock") or 0)
    return int(kv.get("maxNumBlocks") or 0) * block_tokens, block_tokens
