"""The measuring side of an engine: submits prompts that nobody needs, and notes what each step took and did.

The length of a step is what the engine says it computed for, where it counts that; otherwise the time between two
reports. Nothing here decides what to measure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from laneway.core.clock import Clock
from laneway.core.lanes import FinishReason
from laneway.policy.step_fit import StepSeen
from laneway.workers.engines.protocol import Engine, EngineCapacity, EngineRequest, EngineStats, SequenceStep

PLAIN_IDS_FROM = 256  # smaller ones are bytes or control tokens in most vocabularies
SILENCE_S_MAX = 120.0  # an engine with work that says nothing for so long is given up


class CalibrationFailed(Exception):
    """The engine could not be measured; the message says why."""


@dataclass(slots=True, eq=False)
class Trial:
    """One sequence. Times are monotonic."""

    id: int
    prompt_tokens: int
    submitted_s: float
    busy_before_s: float  # what the engine had computed for by then
    made: int = 0
    cached_tokens: int = 0
    first_s: float = 0.0
    first_busy_s: float = 0.0
    ended_s: float = 0.0
    finish: FinishReason | None = None

    @property
    def began(self) -> bool:
        return self.made > 0

    @property
    def ended(self) -> bool:
        return self.finish is not None

    @property
    def prefill_s(self) -> float:
        """From submission to the first token: what the engine computed for, or else what passed."""
        return self.first_busy_s - self.busy_before_s or self.first_s - self.submitted_s


class Probe:
    """The StepSink of an engine that is measured."""

    def __init__(self, clock: Clock, random: Random) -> None:
        self._clock = clock
        self._random = random
        self._engine: Engine | None = None
        self._ids: Sequence[int] = ()
        self._ignore_eos = True
        self._trials: dict[int, Trial] = {}
        self._count = 0
        self._at_s = clock.monotonic()
        self._changed = asyncio.Event()
        self._closed = ""
        self.stats = EngineStats()
        self.seen: list[StepSeen] = []  # every step that can be told from others
        self.chunk_tokens = 0  # most prompt tokens of a step so far

    async def start(self, engine: Engine) -> tuple[float, EngineCapacity]:
        """Starts the engine; returns how long that took, and what it holds."""
        self._engine = engine
        began_s = self._clock.monotonic()
        capacity = await engine.start(self)
        size = capacity.vocabulary_size
        self._ids = range(PLAIN_IDS_FROM, size) if size > 2 * PLAIN_IDS_FROM else range(0x21, min(0x7F, size))
        self._ignore_eos = engine.capabilities().ignore_eos
        return self._clock.monotonic() - began_s, capacity

    def prompt(self, tokens: int) -> tuple[int, ...]:
        """Tokens that no earlier prompt began with."""
        return tuple(self._random.choices(self._ids, k=tokens))

    def submit(self, prompt_ids: tuple[int, ...], max_tokens: int) -> Trial:
        assert self._engine is not None
        self._count += 1
        trial = Trial(self._count, len(prompt_ids), self._clock.monotonic(), self.stats.busy_s)
        self._trials[trial.id] = trial
        self._engine.submit(
            EngineRequest(trial.id, prompt_ids, max_tokens, temperature=0.0, ignore_eos=self._ignore_eos)
        )
        return trial

    def abort(self, trial: Trial) -> None:
        assert self._engine is not None
        self._engine.abort(trial.id)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something of what the engine says. CalibrationFailed where it says nothing, or has ended."""
        while not condition():
            if self._closed:
                raise CalibrationFailed(f"the engine ended: {self._closed}")
            self._changed.clear()
            try:
                async with asyncio.timeout(SILENCE_S_MAX):
                    await self._changed.wait()
            except TimeoutError:
                raise CalibrationFailed(f"the engine said nothing for {SILENCE_S_MAX:g} s") from None

    async def run(self, prompt_ids: tuple[int, ...], max_tokens: int = 1) -> Trial:
        """A prompt that has the engine to itself, to its end."""
        trial = self.submit(prompt_ids, max_tokens)
        await self.until(lambda: trial.ended)
        return trial

    async def end(self, trials: Sequence[Trial]) -> None:
        """Aborts what still runs; returns when the engine is rid of it."""
        for trial in trials:
            if not trial.ended:
                self.abort(trial)
        await self.until(lambda: all(trial.ended for trial in trials))

    # --- the StepSink --------------------------------------------------------------------------------

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        now_s = self._clock.monotonic()
        decoding = context_tokens = firsts = 0
        for step in steps:
            trial = self._trials[step.id]
            if step.finish is FinishReason.ERROR:
                raise_later = f"the engine refused a prompt of {trial.prompt_tokens} tokens: {step.message}"
                self._closed = self._closed or raise_later
            if step.token_ids and trial.began:
                decoding += 1
                context_tokens += trial.prompt_tokens + trial.made
            elif step.token_ids:
                firsts += 1
                trial.first_s, trial.first_busy_s = now_s, stats.busy_s
                trial.cached_tokens = step.cached_tokens
            trial.made += len(step.token_ids)
            if step.finish is not None:
                trial.finish, trial.ended_s = step.finish, now_s
                del self._trials[step.id]
        self._note(stats, now_s, decoding, context_tokens, firsts)
        self.stats, self._at_s = stats, now_s
        self._changed.set()

    def _note(self, stats: EngineStats, now_s: float, decoding: int, context_tokens: int, firsts: int) -> None:
        counts = stats.steps > 0
        if counts and stats.steps - self.stats.steps != 1:
            return  # none, or several in one report
        prompt_tokens = stats.prefilled_tokens - self.stats.prefilled_tokens
        self.chunk_tokens = max(self.chunk_tokens, prompt_tokens)
        if not prompt_tokens and (firsts or stats.prefilling_tokens < self.stats.prefilling_tokens):
            return  # it prefilled, and the engine does not say how much
        length_s = stats.busy_s - self.stats.busy_s if counts and stats.busy_s else now_s - self._at_s
        if length_s > 0.0 and (decoding or prompt_tokens):
            self.seen.append(StepSeen(length_s, decoding, context_tokens, prompt_tokens))

    def on_closed(self, reason: str) -> None:
        self._closed = reason
        self._changed.set()
