"""The sequences that the engine computes for this worker, and whose they are.

The engine's side of every run: hands out request ids, passes each step's output to its owner, and knows when the engine
is rid of a sequence. One owner's fault in taking a step harms no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from laneway.core.clock import Clock
from laneway.workers.engines.protocol import Engine, EngineRequest, EngineStats, SequenceStep

_log = structlog.get_logger(__name__)


class SequenceOwner(Protocol):
    """Who asked for a sequence. Calls are short and synchronous."""

    def on_step(self, step: SequenceStep, now_s: float) -> None:
        """New tokens or the end; nothing follows a step with a finish."""
        ...

    def on_engine_lost(self, reason: str) -> None:
        """The engine died; the sequence is gone."""
        ...

    def on_fault(self, error: Exception) -> None:
        """Our own code failed on the sequence's output."""
        ...


class EngineDown(Exception):
    """There is no engine to submit to now."""


class LiveSequence:
    """One submission. `ended` once the engine is rid of it."""

    __slots__ = ("_gone", "begun", "ended", "id", "owner")

    def __init__(self, request_id: int, owner: SequenceOwner) -> None:
        self.id = request_id
        self.owner = owner
        self.begun = False  # its first output was passed on
        self.ended = False
        self._gone: asyncio.Event | None = None

    def end(self) -> None:
        self.ended = True
        if self._gone is not None:
            self._gone.set()

    async def gone(self) -> None:
        """Returns when the engine is rid of it."""
        if not self.ended:
            self._gone = self._gone or asyncio.Event()
            await self._gone.wait()


class Sequences:
    """The StepSink of the present engine; survives engines."""

    def __init__(self, clock: Clock, before_step: Callable[[], None], after_step: Callable[[], None]) -> None:
        self._clock = clock
        self._before_step = before_step
        self._after_step = after_step  # called when owners were told, once or twice a step
        self._engine: Engine | None = None
        self._live: dict[int, LiveSequence] = {}
        self._count = 0
        self._rest: tuple[Sequence[SequenceStep], float] | None = None  # of the present step, with its time
        self.on_lost: Callable[[str], None] = lambda reason: None  # who restarts the engine

    def __len__(self) -> int:
        return len(self._live)

    @property
    def ready(self) -> bool:
        return self._engine is not None

    def attach(self, engine: Engine) -> None:
        """From now on sequences go to this engine."""
        assert not self._live, "a new engine begins empty"
        self._engine = engine

    def stats(self) -> EngineStats:
        return self._engine.stats() if self._engine is not None else EngineStats()

    def submit(self, owner: SequenceOwner, request: Callable[[int], EngineRequest]) -> LiveSequence:
        """Raises EngineDown."""
        if self._engine is None:
            raise EngineDown
        self._count += 1
        sequence = LiveSequence(self._count, owner)
        self._engine.submit(request(sequence.id))
        self._live[sequence.id] = sequence
        return sequence

    def abort(self, sequence: LiveSequence) -> None:
        if not sequence.ended and self._engine is not None:
            self._engine.abort(sequence.id)

    async def discard(self, sequence: LiveSequence) -> None:
        """Aborts a sequence whose output nobody wants; returns when the engine is rid of it."""
        sequence.owner = _Nobody()
        self.abort(sequence)
        await sequence.gone()

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        """First outputs leave at once, before anything else of the step is looked at: they are waited for most."""
        self._take_rest()
        now_s = self._clock.monotonic()
        live = self._live
        rest: list[SequenceStep] = []
        first: list[SequenceStep] = []
        for step in steps:
            if (sequence := live.get(step.id)) is not None:
                (rest if sequence.begun else first).append(step)
        if not first or not rest:
            self._take(first or rest, now_s)
            return
        self._take(first, now_s)
        self._rest = rest, now_s
        # A turn of the loop later: what was sent until then is on its way.
        asyncio.get_running_loop().call_soon(self._take_rest)

    def _take_rest(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            self._take(*rest)

    def _take(self, steps: Sequence[SequenceStep], now_s: float) -> None:
        self._before_step()
        live = self._live
        for step in steps:
            sequence = live.get(step.id)
            if sequence is None:
                continue
            sequence.begun = True
            if step.finish is not None:
                del live[step.id]
                sequence.end()
            try:
                sequence.owner.on_step(step, now_s)
            except Exception as error:  # noqa: BLE001 - a fault with one output must not cost the others theirs
                _log.error("step_not_taken", error=repr(error), exc_info=error)
                self.abort(sequence)
                sequence.owner.on_fault(error)
        self._after_step()

    def on_closed(self, reason: str) -> None:
        self._take_rest()
        self._engine = None
        lost, self._live = list(self._live.values()), {}
        for sequence in lost:
            sequence.end()
            sequence.owner.on_engine_lost(reason)
        self.on_lost(reason)


class _Nobody:
    def on_step(self, step: SequenceStep, now_s: float) -> None: ...

    def on_engine_lost(self, reason: str) -> None: ...

    def on_fault(self, error: Exception) -> None: ...
