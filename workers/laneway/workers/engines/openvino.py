"""The embedded default: OpenVINO GenAI's continuous batching on this machine's CPU, token ids in and out.

The pipeline holds at most as many sequences as the pool has slots; more wait here, in order of priority, so that what
is queued and what runs can be told apart. Every request is checked before the pipeline sees it, and what the pipeline
says of an error never reaches a caller: its texts carry paths of its sources.

Facts of 2026.4.1 that this adapter rests on: `step` holds the GIL; dropping or cancelling a handle frees the sequence
with the next step; an end token is the last of the generated ids; ids beyond the context length and outside the
vocabulary are taken without a word; a request that does not fit the KV cache ends IGNORED, and running ones that
outgrow it together are preempted and computed again, with the same ids in exact mode; every request draws from a
generator of its own, so that a seed holds whoever else is in the batch.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy
import openvino
import openvino_genai

from laneway.core.lanes import FinishReason
from laneway.runtime import model_files
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.gguf_metadata import GgufMetadata, read_gguf
from laneway.workers.engines.checks import check_request
from laneway.workers.engines.protocol import (
    EngineCapacity,
    EngineRequest,
    EngineStartError,
    EngineStats,
    SequenceStep,
)

BLOCK_TOKENS = 32  # of the CPU plugin's paged attention
CHUNK_TOKENS = 128  # suits two cores: about 50 ms of stall for running streams
MIN_P_MAX = 1.0 - 1e-6  # 1 itself is refused; either leaves the likeliest token alone
# The library keeps these as 32-bit floats, where a smaller one may become 0, which it refuses.
TOP_P_MIN = 1e-6  # leaves the likeliest token alone
REPETITION_PENALTY_MIN = 1e-3
TEMPERATURE_MIN = 1e-3  # below it, dividing logits by it overflows; it is greedy in all but name
READABLE_TENSORS = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"})
# Float32 for weights, activations and KV cache: sums do not depend on who else is in the batch.
EXACT_PROPERTIES = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "KV_CACHE_PRECISION": "f32",
}
_FINISHED = openvino_genai.GenerationStatus.FINISHED
_IGNORED = openvino_genai.GenerationStatus.IGNORED
_STOPPED = openvino_genai.GenerationFinishReason.STOP


# Types that openvino_genai does not export by name.


class _Output(Protocol):
    @property
    def generated_ids(self) -> list[int]: ...

    @property
    def generated_log_probs(self) -> list[float]: ...

    @property
    def finish_reason(self) -> openvino_genai.GenerationFinishReason: ...


class _Handle(Protocol):
    def can_read(self) -> bool: ...

    def read(self) -> Mapping[int, _Output]: ...

    def cancel(self) -> None: ...

    def get_status(self) -> openvino_genai.GenerationStatus: ...


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    handle: _Handle
    made: int = 0
    left: int = 0  # prompt tokens that no step is known to have computed, in the order in which the steps take them
    offered: int = 0  # prompt tokens there was room for in the steps so far; what was needed beyond came from the cache


class OpenVinoEngine:
    """A StepEngine."""

    def __init__(
        self, capacity: EngineCapacity, tokenizer: str, eos_ids: frozenset[int], options: EngineOptions
    ) -> None:
        self._asked = capacity
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._options = options
        self._chunk_tokens = options.prefill_chunk_tokens or CHUNK_TOKENS
        self._capacity = capacity
        self._pipeline: openvino_genai.ContinuousBatchingPipeline
        self._main_eos_id = -1
        self._queue: deque[EngineRequest] = deque()
        self._running: dict[int, _Running] = {}
        self._cancelled: list[int] = []
        self._steps = 0
        self._busy_s = 0.0
        self._prefilled = 0
        self._decoded = 0

    def load(self) -> EngineCapacity:
        path = self._model_path()
        meta = read_gguf(path) if path.suffix == ".gguf" else None
        asked = self._asked
        if meta is not None and asked.context_length > meta.context_length:
            raise EngineStartError(
                f"context_length = {asked.context_length} is more than the {meta.context_length} tokens that "
                f"{path.name} was made for"
            )
        blocks = -(-asked.kv_tokens // BLOCK_TOKENS)
        try:
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(
                path, self._scheduler(blocks), "CPU", self._properties()
            )
        except RuntimeError as error:
            raise EngineStartError(_load_failure(path, meta)) from error
        self._main_eos_id = self._pipeline.get_config().eos_token_id
        self._warm_up()
        self._capacity = EngineCapacity(
            slots=asked.slots,
            kv_tokens=blocks * BLOCK_TOKENS,
            context_length=asked.context_length,
            vocabulary_size=asked.vocabulary_size,
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=self._step_tokens,
            paged=True,
        )
        return self._capacity

    def _warm_up(self) -> None:
        """The first steps allocate the KV cache and build kernels, for a second length of prompt once more.

        Over a second (measured) that no caller should wait.
        """
        config = openvino_genai.GenerationConfig(max_new_tokens=2, ignore_eos=True, do_sample=False)
        longest = min(self._chunk_tokens, self._asked.context_length - 2)
        try:
            for tokens in (longest, max(1, longest // 3)):
                handle = self._pipeline.add_request(0, _tensor((0,) * tokens), config)
                while self._pipeline.has_non_finished_requests():
                    self._pipeline.step()
                del handle  # held until here: dropping it cancels the request
        except RuntimeError as error:
            raise EngineStartError(
                f"OpenVINO GenAI could not run the model with a KV cache of {self._asked.kv_tokens} tokens; "
                "its own message is in the worker's log. If it lacks memory, lower kv_tokens of the pool"
            ) from error

    def add(self, request: EngineRequest) -> None:
        check_request(request, self._capacity)
        position = len(self._queue)
        while position and self._queue[position - 1].priority < request.priority:
            position -= 1
        self._queue.insert(position, request)

    def abort(self, request_id: int) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:
            running.handle.cancel()
            self._cancelled.append(request_id)
            return
        for request in self._queue:
            if request.id == request_id:
                self._queue.remove(request)
                self._cancelled.append(request_id)
                return

    def busy(self) -> bool:
        return bool(self._running or self._queue or self._cancelled)

    def step(self) -> tuple[list[SequenceStep], EngineStats]:
        began_s = time.monotonic()
        out = [SequenceStep(i, [], finish=FinishReason.CANCELLED) for i in self._cancelled]
        self._cancelled.clear()
        self._admit(out)
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._count_prefill_room()
        for request_id in list(self._running):
            delta = self._read(self._running[request_id])
            if delta is not None:
                out.append(delta)
                self._decoded += len(delta.token_ids)
                if delta.finish is not None:
                    del self._running[request_id]
        self._steps += 1
        self._busy_s += time.monotonic() - began_s
        return out, self._stats()

    def close(self) -> None:
        if self._running:
            for running in self._running.values():
                running.handle.cancel()
            self._running.clear()
            self._pipeline.step()  # frees their blocks; the pipeline complains of leaks otherwise

    def _admit(self, out: list[SequenceStep]) -> None:
        while self._queue and len(self._running) < self._capacity.slots:
            request = self._queue.popleft()
            try:
                handle = self._pipeline.add_request(request.id, _tensor(request.prompt_ids), self._config(request))
            except RuntimeError as error:
                print(f"add_request: {error}", file=sys.stderr)  # into the worker's log; never to the caller
                out.append(_failed(request.id, "the engine refused the request's sampling parameters"))
            else:
                self._running[request.id] = _Running(request, handle, left=len(request.prompt_ids))

    def _read(self, running: _Running) -> SequenceStep | None:
        """What the last step gave to one sequence; None if nothing."""
        request, handle = running.request, running.handle
        ids: list[int] = []
        logprobs: list[float] = []
        stopped = False
        while handle.can_read():
            for output in handle.read().values():  # one sequence each: n is 1
                ids += output.generated_ids
                logprobs += output.generated_log_probs
                stopped = output.finish_reason == _STOPPED
        status = handle.get_status()
        finish = None
        if status == _FINISHED:
            finish = FinishReason.STOP if stopped else FinishReason.LENGTH
            if stopped and ids:
                del ids[-1], logprobs[-1]  # the end token itself
        elif status == _IGNORED:
            return _failed(request.id, "the engine's KV cache has no room for the request")
        if not ids and finish is None:
            return None
        delta = SequenceStep(request.id, ids, logprobs if request.logprobs else None, finish=finish)
        if not running.made:
            # A lower bound, in whole blocks: tokens that no step had room for can only have come from the cache.
            found = len(request.prompt_ids) - running.offered
            delta.cached_tokens = max(0, found // BLOCK_TOKENS * BLOCK_TOKENS)
        running.made += len(ids)
        return delta

    def _count_prefill_room(self) -> None:
        decoding = sum(1 for r in self._running.values() if r.made)
        room = max(1, self._chunk_tokens - decoding)
        unused = room
        behind = False  # another prompt, which took all that was left of this step
        for running in self._running.values():
            if not running.made:
                if not behind:
                    running.offered += room
                    behind = not running.handle.can_read()
                computed = min(running.left, unused)
                running.left -= computed
                unused -= computed
        # What came from the cache is not known before the first token: of a prompt that did, its last step may count
        # more than was computed, but for no more than the room of one step.
        self._prefilled += room - unused

    def _stats(self) -> EngineStats:
        prefilling = [r for r in self._running.values() if not r.made]
        left = [max(0, len(r.request.prompt_ids) - r.offered) for r in prefilling]
        held = sum(len(r.request.prompt_ids) + r.made for r in self._running.values())
        return EngineStats(
            running=len(self._running),
            queued=len(self._queue),
            prefilling_tokens=sum(left) + sum(len(q.prompt_ids) for q in self._queue),
            kv_tokens_used=held - sum(left),
            steps=self._steps,
            busy_s=self._busy_s,
            prefilled_tokens=self._prefilled,
            decoded_tokens=self._decoded,
            decoding=len(self._running) - len(prefilling),
        )

    def _config(self, request: EngineRequest) -> openvino_genai.GenerationConfig:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.min_new_tokens = min(request.min_tokens, request.max_tokens)
        stops = set(request.stop_token_ids) if request.ignore_eos else self._eos_ids | set(request.stop_token_ids)
        if stops:
            # Its own ignore_eos refuses stop ids beside it; but what is not in this set stops nothing anyway.
            config.stop_token_ids = stops
            config.eos_token_id = self._main_eos_id if self._main_eos_id in stops else min(stops)
        else:
            config.ignore_eos = True
        config.logprobs = 1 if request.logprobs else 0
        config.do_sample = request.temperature >= TEMPERATURE_MIN
        if config.do_sample:
            config.temperature = request.temperature
            config.top_p = 1.0 if request.top_p is None else max(TOP_P_MIN, request.top_p)
            if request.top_k is not None:
                config.top_k = request.top_k
            if request.min_p is not None:
                config.min_p = min(request.min_p, MIN_P_MAX)
            config.rng_seed = _seed_of(request)
        if request.repetition_penalty is not None:
            config.repetition_penalty = max(REPETITION_PENALTY_MIN, request.repetition_penalty)
        if request.presence_penalty is not None:
            config.presence_penalty = request.presence_penalty
        if request.frequency_penalty is not None:
            config.frequency_penalty = request.frequency_penalty
        return config

    def _scheduler(self, blocks: int) -> openvino_genai.SchedulerConfig:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = blocks
        scheduler.max_num_batched_tokens = self._step_tokens
        scheduler.max_num_seqs = self._asked.slots
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = self._options.prefix_cache
        return scheduler

    @property
    def _step_tokens(self) -> int:
        """Most tokens of one step."""
        return max(self._chunk_tokens, self._asked.slots)

    def _properties(self) -> dict[str, str | int]:
        threads = self._options.threads or max(1, (os.cpu_count() or 1) - 1)
        properties: dict[str, str | int] = {"INFERENCE_NUM_THREADS": threads}
        return properties | (EXACT_PROPERTIES if self._options.exact else {})

    def _model_path(self) -> Path:
        if self._options.model_file:
            path = Path(self._options.model_file)
        elif self._tokenizer == model_files.SMOLLM2.name:
            path = model_files.find(model_files.SMOLLM2)
        else:
            path = Path(self._tokenizer)
        if not path.exists():
            raise EngineStartError(f"there is no model file {path}; set model_file in engine_options")
        return path


def _tensor(ids: tuple[int, ...]) -> openvino.Tensor:
    return openvino.Tensor(numpy.array([ids], dtype=numpy.int64))


def _seed_of(request: EngineRequest) -> int:
    """Its default would be the same for every request, and of a seed it takes the lowest 32 bits only."""
    if request.seed is None:
        return random.getrandbits(32)
    return (request.seed ^ request.seed >> 32) & 0xFFFF_FFFF


def _failed(request_id: int, message: str) -> SequenceStep:
    return SequenceStep(request_id, [], finish=FinishReason.ERROR, message=message)


def _load_failure(path: Path, meta: GgufMetadata | None) -> str:
    unreadable = sorted(meta.tensor_types - READABLE_TENSORS) if meta is not None else []
    if unreadable:
        return (
            f"{path.name} holds {', '.join(unreadable)} tensors, which OpenVINO GenAI cannot read; "
            "requantise it to Q4_0, Q8_0 or Q4_K_M without Q5_0 tensors, or give an OpenVINO IR folder"
        )
    return (
        f"OpenVINO GenAI could not load {path}; its own message is in the worker's log. "
        "Check that the file is whole and its architecture supported, or give another model_file"
    )
