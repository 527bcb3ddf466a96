"""What the classes of a generated `tensorrt_llm` do (trtllm_package.py): invented tokens, iteration by iteration.

The tokens come from the simulated core, so each is a function of those before it. Around it, as upstream's sources
say or may be read: outputs are cumulative; the overlap scheduler computes one iteration more of what was aborted;
iterations are told of until somebody asks, and in old versions no more once there were none; a request that is aborted
while it waits ends, in old versions, without a word. Where versions differ and it is not known which does what, each of
them is one of the possible ways. Runs on the event loop of who calls generate_async, as the real one answers there.

`model` is JSON of Options.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec

from laneway.core.lanes import FinishReason
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, SequenceStep
from laneway.workers.engines.simulated import SimulatedCore, StepOutcome, make_core

BLOCK_TOKENS = 32
LATER_ITERATIONS = 1  # that the overlap scheduler computes of what was aborted during one
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "cancelled"}


class RequestError(RuntimeError):
    """As upstream names it."""


class CapacitySchedulerPolicy(StrEnum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class FcfsPolicy(StrEnum):
    FCFS = "fcfs"


class PriorityPolicy(StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    vocabulary_size: int = 260
    pace_s: float = 0.002
    eos_mean_tokens: float = 30.0
    kv_tokens_found: int = 0  # what the GPU has room for; 0: all that is asked for
    journal: str = ""  # a file that gets a line of JSON for LLM() and each request
    refused_token_id: int = -1  # a prompt with it fails by itself
    fatal_token_id: int = -1  # a prompt with it ends the executor
    lost_token_id: int = -1  # a prompt with it hurts its health, and gives nothing
    deaf_token_id: int = -1  # after a prompt with it get_stats fails, and all else goes on
    spawns: bool = False  # a process of its own, as the real one has for each GPU


@dataclass(frozen=True)
class Behaviour:
    """What differs by version and is in no signature."""

    logprobs: str  # floats; chosen: dictionaries of the likeliest and the chosen one
    end_id_given: bool  # whether an end token is among the ids
    cached_tokens: bool  # whether an output tells them
    stall: bool  # get_stats finds nothing more, once it found nothing, until the next request
    silent_abort: bool  # of what waits
    health: bool  # whether it tells how it is


BEHAVIOURS = {
    "1.0": Behaviour("floats", True, False, True, True, False),
    "1.2": Behaviour("chosen", False, True, False, True, False),
    "1.4": Behaviour("chosen", True, True, False, False, True),
}


class Values:
    """An object that keeps what it was made of."""

    def do_init(self, **given: Any) -> None:
        self.__dict__.update(given)


class Completion:
    """One answer: all of it so far."""

    def do_init(self, **given: Any) -> None:
        self.__dict__.update(given)
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.finish_reason: str | None = None

    def get(self, name: str) -> Any:
        raise AssertionError(f"the adapter reads {name}, which newer versions do not clear")


class Output:
    """One request. Its answer comes through a queue, response by response."""

    def begin(self, llm: Llm, number: int, prompt_ids: list[int], params: Any, completion: Any) -> None:
        self._llm, self._number, self._prompt_ids, self.params = llm, number, prompt_ids, params
        self._outputs = [completion]
        self._responses: asyncio.Queue[tuple[SequenceStep | None, Exception | None]] = asyncio.Queue()
        self._finished = self._aborted = False
        self.made = 0  # tokens that were computed, whether anybody has read them or not

    def put(self, step: SequenceStep | None, error: Exception | None = None) -> None:
        self._responses.put_nowait((step, error))

    def get(self, name: str) -> Any:
        own = {"outputs": self._outputs, "finished": self._finished, "request_id": self._number}
        return own.get(name)

    def do_abort(self) -> None:
        self._aborted = True
        self._llm.abort(self._number)

    def do_aborted(self) -> bool:
        return self._aborted

    async def do_aresult(self) -> Output:
        async for _ in self:
            pass
        return self

    def do_result(self, timeout: float | None) -> Output:
        raise AssertionError("this would block the event loop")

    def __aiter__(self) -> Output:
        return self

    async def __anext__(self) -> Output:
        if self._finished:
            raise StopAsyncIteration
        step, error = await self._responses.get()
        if error is not None:
            raise error
        assert step is not None
        completion, behaviour = self._outputs[0], self._llm.BEHAVIOUR
        ids = list(step.token_ids)
        if step.finish is FinishReason.STOP and behaviour.end_id_given and not self.params.ignore_eos:
            ids.append(self.params.end_id)
        completion.token_ids.extend(ids)
        if self.params.logprobs:
            completion.logprobs.extend(_logprobs(step, behaviour.logprobs))
            completion.logprobs.extend([-1.0] * (len(completion.token_ids) - len(completion.logprobs)))
        if behaviour.cached_tokens:
            self.cached_tokens = getattr(self, "cached_tokens", 0) or step.cached_tokens
        if step.finish is not None:
            self._finished, completion.finish_reason = True, _REASONS[step.finish]
        return self


def _logprobs(step: SequenceStep, shape: str) -> list[Any]:
    if shape == "floats":
        return list(step.logprobs or ())
    return [
        {token_id: SimpleNamespace(logprob=logprob, rank=rank + 1) for rank, (token_id, logprob) in enumerate(top)}
        for top in step.top or ()
    ]


class Llm:
    """The executor: a loop of iterations over the simulated core."""

    BEHAVIOUR: ClassVar[Behaviour]
    ARGUMENTS: ClassVar[tuple[str, ...]]
    OUTPUT: ClassVar[Any]
    COMPLETION: ClassVar[Any]

    def do_init(self, **given: Any) -> None:
        if unknown := set(given) - set(self.ARGUMENTS):
            raise ValueError(f"unknown arguments: {sorted(unknown)}")
        assert threading.current_thread() is threading.main_thread()
        self._given = given
        self._options = options = msgspec.json.decode(given["model"], type=Options)
        if options.spawns:
            self._rank = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600.0,), daemon=True)
            self._rank.start()
            self._note({"rank": self._rank.pid})
        self._core = self._make_core(options, given)
        self._note({"llm": {name: _plain(value) for name, value in given.items()}, "process_id": os.getpid()})
        self._outputs: dict[int, Any] = {}
        self._aborting: dict[int, int] = {}  # iterations until each is carried out
        self._stats: deque[dict[str, Any]] = deque()
        self._iterations = self._prefilled = self._read = 0
        self._busy_s = 0.0
        self._timer: asyncio.Handle | None = None
        self._count = 0
        self._well = True
        self._shut = self._deaf = False
        self._iter_stats_result = SimpleNamespace(mark_undone=self._mark_undone)
        self._done = True
        self._executor = self

    def _make_core(self, options: Options, given: dict[str, Any]) -> SimulatedCore:
        kv, scheduler = given["kv_cache_config"], given["scheduler_config"]
        assert given["skip_tokenizer_init"] == ("guided_decoding_backend" not in given)
        tokens = kv.max_tokens if not options.kv_tokens_found else min(kv.max_tokens, options.kv_tokens_found)
        capacity = EngineCapacity(
            given["max_batch_size"],
            tokens // BLOCK_TOKENS * BLOCK_TOKENS,
            given["max_seq_len"],
            options.vocabulary_size,
        )
        engine = EngineOptions(
            pace_s=options.pace_s,
            eos_mean_tokens=options.eos_mean_tokens,
            alphabet="unicode",
            prefix_cache=kv.enable_block_reuse,
            prefill_chunk_tokens=given["max_num_tokens"] if given.get("enable_chunked_prefill") else 2**20,
            paged=scheduler.capacity_scheduler_policy == "MAX_UTILIZATION",
        )
        self._by_priority = getattr(scheduler, "waiting_queue_policy", "fcfs") == "priority"
        return make_core(capacity, load_tokenizer("bytes").eos_ids, engine)

    # --- requests ------------------------------------------------------------------------------------

    def do_generate_async(self, inputs: list[int], sampling_params: Any, **given: Any) -> Any:
        if self._shut:
            raise RuntimeError("LLM is shutting down")
        if sampling_params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id")
        assert given["streaming"]
        self._count += 1
        self._mark_undone()
        output = self.OUTPUT.__new__(self.OUTPUT)
        output.begin(self, self._count, inputs, sampling_params, self.COMPLETION(0))
        asked = {name: _plain(value) for name, value in given.items() if value is not None}
        self._note({"request": {**asked, "prompt_tokens": len(inputs)}, "params": _plain(sampling_params)})
        if self._options.lost_token_id in inputs:
            self._well = False
            return output
        self._deaf = self._deaf or self._options.deaf_token_id in inputs
        if self._options.refused_token_id in inputs:
            output.put(None, RequestError("/a/path.cpp:7: no"))
            return output
        if self._options.fatal_token_id in inputs:
            self._shut = True
            output.put(None, RuntimeError("CUDA error"))
            return output
        request = _engine_request(self._count, inputs, sampling_params, given)
        self._core.add(request if self._by_priority else msgspec.structs.replace(request, priority=0.5))
        self._outputs[self._count] = output
        self._go_on()
        return output

    def abort(self, number: int) -> None:
        if number not in self._outputs:
            return
        if any(each.request.id == number for each in self._core._queue):
            self._core.abort(number)
            if self.BEHAVIOUR.silent_abort:
                del self._outputs[number]
        else:
            self._aborting.setdefault(number, LATER_ITERATIONS)

    # --- iterations ----------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._timer is None and self._core.busy() and not self._shut:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_soon(self._iterate)

    def _iterate(self) -> None:
        loop = asyncio.get_running_loop()
        outcome = self._core.step(loop.time())
        self._timer = loop.call_at(outcome.ends_s, self._iterated, outcome)

    def _iterated(self, outcome: StepOutcome) -> None:
        self._timer = None
        decoded = 0
        for step in outcome.steps:
            output = self._outputs.get(step.id)
            if output is None:
                continue
            decoded += output.made > 0 and step.finish is not FinishReason.CANCELLED
            output.made += len(step.token_ids)
            output.put(step)
            if step.finish is not None:
                del self._outputs[step.id]
                self._aborting.pop(step.id, None)
        for number, left in list(self._aborting.items()):
            self._aborting[number] = left - 1
            if left <= 0:
                del self._aborting[number]
                self._core.abort(number)
        if self._given.get("enable_iter_perf_stats") and outcome.stats.steps > self._iterations:
            self._stats.append(self._told(outcome, decoded))
        self._go_on()

    def _told(self, outcome: StepOutcome, decoded: int) -> dict[str, Any]:
        stats, self._iterations = outcome.stats, outcome.stats.steps
        busy_s, self._busy_s = stats.busy_s - self._busy_s, stats.busy_s
        computed, self._prefilled = stats.prefilled_tokens - self._prefilled, stats.prefilled_tokens
        return {
            "iter": self._iterations - 1,
            "iterLatencyMS": busy_s * 1000.0,
            "numQueuedRequests": stats.queued,
            "kvCacheStats": {
                "maxNumBlocks": self._core.capacity.kv_tokens // BLOCK_TOKENS,
                "usedNumBlocks": -(-stats.kv_tokens_used // BLOCK_TOKENS),
                "tokensPerBlock": BLOCK_TOKENS,
            },
            "inflightBatchingStats": {
                "numScheduledRequests": stats.running,
                "numContextRequests": stats.running - stats.decoding,
                "numGenRequests": decoded,
                "numCtxTokens": computed,
            },
        }

    # --- the rest of its interface -------------------------------------------------------------------

    def do_get_stats(self, timeout: float | None) -> list[dict[str, Any]]:
        assert threading.current_thread() is not threading.main_thread(), "it may block"
        if self._deaf:
            raise RuntimeError("no connection")
        if self.BEHAVIOUR.stall and self._done:
            return []
        told = []
        while self._stats:
            told.append(self._stats.popleft())
        self._done = True
        if told:
            self._read += len(told)
            self._note({"stats": {"read": self._read, "made": self._iterations}})
        return told

    def _mark_undone(self) -> None:
        self._done = False

    def do_get_kv_cache_capacity(self) -> dict[str, int]:
        blocks = self._core.capacity.kv_tokens // BLOCK_TOKENS
        return {
            "maxNumBlocks": blocks,
            "tokensPerBlock": BLOCK_TOKENS,
            "maxNumTokens": blocks * BLOCK_TOKENS,
        }

    def __getattr__(self, name: str) -> Any:
        if name == "_check_health" and self.BEHAVIOUR.health:
            return lambda: self._well
        if name.startswith("do_"):
            raise NotImplementedError(f"the fake has no {name.removeprefix('do_')}")
        raise AttributeError(name)

    def do_shutdown(self) -> None:
        self._shut = True
        self._note({"shutdown": {"live": len(self._outputs)}})

    def get(self, name: str) -> Any:
        raise NotImplementedError(name)

    def _note(self, line: dict[str, Any]) -> None:
        if self._options.journal:
            with Path(self._options.journal).open("ab") as journal:
                journal.write(msgspec.json.encode(line) + b"\n")


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, (str, int, float, bool, type(None), list, tuple, dict)):
        return value
    return {type(value).__name__: {k: _plain(v) for k, v in value.__dict__.items() if v is not None}}


def _engine_request(number: int, inputs: list[int], params: Any, given: dict[str, Any]) -> EngineRequest:
    return EngineRequest(
        number,
        tuple(inputs),
        params.max_tokens,
        temperature=0.0 if params.top_k == 1 else params.temperature,
        stop_token_ids=tuple(params.stop_token_ids or ()),
        logprobs=bool(params.logprobs),
        top_logprobs=params.logprobs or 0,
        min_tokens=params.min_tokens or 0,
        ignore_eos=params.ignore_eos,
        priority=given.get("priority", 0.5),
    )
