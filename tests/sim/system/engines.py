"""Engines that are looked at: what each was asked, what it gave, and when it let go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

import msgspec

from laneway.core.catalogue import Capabilities
from laneway.core.lanes import FinishReason
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStats, SequenceStep, StepSink
from laneway.workers.engines.simulated import SimulatedCore, make_core
from laneway.workers.engines.simulated_inline import InlineEngine

PROMPT_END = 0x7C  # "|": the last token of every prompt, and in no answer


@dataclass(slots=True)
class EngineRun:
    """One sequence at one engine."""

    worker_id: str
    prompt: tuple[int, ...]  # the caller's
    before: tuple[int, ...]  # of the answer, made elsewhere
    began_s: float
    made: list[int] = field(default_factory=list)
    stepped_s: float = 0.0  # when the last token came
    ended_s: float | None = None
    finish: FinishReason | None = None  # None: the engine died

    @property
    def whole(self) -> tuple[int, ...]:
        return (*self.before, *self.made)


class EngineBook:
    def __init__(self) -> None:
        self.runs: dict[tuple[int, ...], list[EngineRun]] = {}  # by the caller's prompt

    def begin(self, worker_id: str, request: EngineRequest, now_s: float) -> EngineRun:
        cut = request.prompt_ids.index(PROMPT_END) + 1
        run = EngineRun(worker_id, request.prompt_ids[:cut], request.prompt_ids[cut:], now_s)
        self.runs.setdefault(run.prompt, []).append(run)
        return run

    def of(self, prompt: tuple[int, ...]) -> list[EngineRun]:
        return self.runs.get(prompt, [])


class WatchedEngine(InlineEngine):
    """Answers that are sampled without a seed differ from run to run, so that a splice of two shows."""

    def __init__(
        self, core: SimulatedCore, capabilities: Capabilities, worker_id: str, book: EngineBook, random: Random
    ) -> None:
        super().__init__(core, capabilities, load_s=random.uniform(0.05, 0.5))
        self._worker_id = worker_id
        self._book = book
        self._random = random
        self._runs: dict[int, EngineRun] = {}

    async def start(self, sink: StepSink) -> EngineCapacity:
        return await super().start(_Watching(sink, self))

    def submit(self, request: EngineRequest) -> None:
        if PROMPT_END not in request.prompt_ids:  # the beginning of a long prompt, computed ahead: of no answer
            super().submit(request)
            return
        now_s = asyncio.get_running_loop().time()
        drawn = request
        if request.seed is None and request.temperature > 0.0:
            drawn = msgspec.structs.replace(request, seed=self._random.getrandbits(32))
        super().submit(drawn)
        self._runs[request.id] = self._book.begin(self._worker_id, request, now_s)

    def took(self, steps: Sequence[SequenceStep]) -> None:
        now_s = asyncio.get_running_loop().time()
        for step in steps:
            run = self._runs.get(step.id)
            if run is None:
                continue
            if step.token_ids:
                run.made += step.token_ids
                run.stepped_s = now_s
            if step.finish is not None:
                run.ended_s, run.finish = now_s, step.finish

    async def close(self) -> None:
        await super().close()
        self.died()

    def died(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for run in self._runs.values():
            if run.ended_s is None:
                run.ended_s = now_s


class _Watching:
    def __init__(self, sink: StepSink, engine: WatchedEngine) -> None:
        self._sink = sink
        self._engine = engine

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        self._engine.took(steps)
        self._sink.on_step(steps, stats)

    def on_closed(self, reason: str) -> None:
        self._engine.died()
        self._sink.on_closed(reason)


@lru_cache(4096)
def expected_answer(
    prompt: tuple[int, ...],
    max_tokens: int,
    temperature: float,
    seed: int | None,
    options: EngineOptions,
    *,
    whole: bool = False,
) -> tuple[int, ...]:
    """What an engine that nobody disturbs answers, where that is decided by the request."""
    tokenizer = load_tokenizer("bytes")
    options = msgspec.structs.replace(options, fault_error_token_id=-1, fault_crash_token_id=-1)
    capacity = EngineCapacity(1, 4096, 4096, tokenizer.vocabulary_size)
    core = make_core(capacity, tokenizer.eos_ids, options)
    core.add(EngineRequest(1, prompt, max_tokens, temperature=temperature, seed=seed, ignore_eos=whole))
    answer: list[int] = []
    while core.busy():
        for step in core.step(0.0).steps:
            answer += step.token_ids
    return tuple(answer)
