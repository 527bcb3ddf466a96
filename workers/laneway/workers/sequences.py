"""The sequences that the engine computes for this worker, and whose they are.

The engine's side of every run: hands out request ids, passes each step's output to its owner, and knows when the engine
is rid of a sequence. One owner's fault in taking a step harms no other.

Runs of identical deterministic jobs share one sequence (policy.single_flight). Each has a part of its own in it, gets
every token once and in order, and may leave without a word to the others; the engine is told to stop once the last has
left. Who joins late gets at once, as one step, what the others had before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import structlog
from msgspec import Struct

from laneway.core.clock import Clock
from laneway.core.lanes import Lane
from laneway.policy.single_flight import Flying, may_join
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


class Watcher(Protocol):
    """Who looks at the engine as a whole. Calls are short and synchronous."""

    def stepped(self, stats: EngineStats, now_s: float) -> None:
        """The engine made a step, whose output is passed on after this."""
        ...

    def closed(self, reason: str) -> None:
        """The engine died; the owners of its sequences were told."""
        ...


class EngineDown(Exception):
    """There is no engine to submit to now."""


class Flight(Struct, frozen=True):
    """How a submission may be shared, where it may."""

    key: Hashable  # equal for identical work
    lane: Lane
    prefix: tuple[int, ...] = ()  # ids of its answer that it stands by
    start: int = 0  # index of the first id that it needs from the engine


class LiveSequence:
    """One owner's part in a sequence of the engine. `ended` once nothing more comes of it: the engine is rid of the
    sequence, or it is others' now."""

    __slots__ = ("_gone", "ended", "joined", "owner", "work")

    def __init__(self, work: Work, owner: SequenceOwner, *, joined: bool = False) -> None:
        self.work = work
        self.owner = owner
        self.joined = joined  # it was there before
        self.ended = False
        self._gone: asyncio.Event | None = None

    @property
    def id(self) -> int:
        return self.work.id

    def end(self) -> None:
        self.ended = True
        if self._gone is not None:
            self._gone.set()

    async def gone(self) -> None:
        """Returns when the engine is rid of it, or others have it."""
        if not self.ended:
            self._gone = self._gone or asyncio.Event()
            await self._gone.wait()


class Work:
    """What the engine computes, and for whom."""

    __slots__ = ("begun", "done", "flight", "given", "id", "parts")

    def __init__(self, request_id: int, flight: Flight | None) -> None:
        self.id = request_id
        self.flight = flight  # of the job that it was started for
        self.parts: list[LiveSequence] = []
        self.begun = False  # its first output was passed on
        self.done = flight.prefix[: flight.start] if flight is not None else ()
        self.given: Given | None = Given([], [], []) if flight is not None else None


@dataclass(slots=True)
class Given:
    """All that the engine gave to a sequence which others may join."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]

    def take(self, step: SequenceStep) -> None:
        self.ids.extend(step.token_ids)
        self.logprobs.extend(step.logprobs or ())
        self.top.extend(step.top or ())

    def since(self, request_id: int, start: int) -> SequenceStep:
        return SequenceStep(request_id, self.ids[start:], self.logprobs[start:] or None, self.top[start:] or None)


class Sequences:
    """The StepSink of the present engine; survives engines."""

    def __init__(self, clock: Clock, before_step: Callable[[], None], after_step: Callable[[], None]) -> None:
        self._clock = clock
        self._before_step = before_step
        self._after_step = after_step  # called when owners were told, once or twice a step
        self._engine: Engine | None = None
        self._live: dict[int, Work] = {}
        self._shared: dict[Hashable, Work] = {}  # of them, those that others may join: the newest of each key
        self._late: list[tuple[LiveSequence, int]] = []  # who joined, and from which id on it is to have what was given
        self._count = 0
        self.followers_max = 0  # parts that may be in others' sequences at once
        self._rest: tuple[Sequence[SequenceStep], float] | None = None  # of the present step, with its time
        self.on_lost: Callable[[str], None] = lambda reason: None  # who restarts the engine
        self.watcher: Watcher | None = None

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

    def submit(
        self, owner: SequenceOwner, request: Callable[[int], EngineRequest], flight: Flight | None = None
    ) -> LiveSequence:
        """A new sequence, or a part in one of the same flight that is there already. Raises EngineDown."""
        if self._engine is None:
            raise EngineDown
        if flight is not None and (there := self._joinable(flight)) is not None:
            return self._join(there, owner, flight)
        self._count += 1
        work = Work(self._count, flight)
        self._engine.submit(request(work.id))
        part = LiveSequence(work, owner)
        work.parts.append(part)
        self._live[work.id] = work
        if flight is not None:
            self._shared[flight.key] = work
        return part

    def together(self) -> AbstractContextManager[None]:
        """What is submitted within it reaches the engine at once: no step begins with a part of it."""
        return self._engine.together() if self._engine is not None else nullcontext()

    def joinable(self, flight: Flight) -> bool:
        """Whether a submission of this flight would have part in a sequence that is there."""
        return self._joinable(flight) is not None

    @property
    def followers(self) -> int:
        return sum(len(work.parts) - 1 for work in self._live.values())

    def _joinable(self, flight: Flight) -> Work | None:
        work = self._shared.get(flight.key)
        if work is None or work.flight is None or work.given is None or self.followers >= self.followers_max:
            return None
        flying = Flying(work.flight.lane, work.done, work.given.ids)
        return work if may_join(flying, flight.lane, flight.prefix, flight.start) else None

    def _join(self, work: Work, owner: SequenceOwner, flight: Flight) -> LiveSequence:
        part = LiveSequence(work, owner, joined=True)
        work.parts.append(part)
        self._late.append((part, flight.start - len(work.done)))
        asyncio.get_running_loop().call_soon(self._catch_up)
        return part

    def _catch_up(self) -> None:
        """Before any later step is taken: what was given before they joined."""
        late, self._late = self._late, []
        if not late:
            return
        self._before_step()
        now_s = self._clock.monotonic()
        for part, start in late:
            given = part.work.given
            if given is not None and len(given.ids) > start and not part.ended:
                self._give(part, given.since(part.id, start), now_s)
        self._after_step()

    def abort(self, sequence: LiveSequence) -> None:
        """Its owner wants no more. The engine goes on while others do."""
        work = sequence.work
        if sequence.ended or self._engine is None:
            return
        if any(part is not sequence for part in work.parts):
            work.parts.remove(sequence)
            sequence.end()
            return
        self._forget(work)
        self._engine.abort(work.id)

    def _forget(self, work: Work) -> None:
        """Nobody joins it any more."""
        if work.flight is not None and self._shared.get(work.flight.key) is work:
            del self._shared[work.flight.key]

    async def discard(self, sequence: LiveSequence) -> None:
        """Aborts a sequence whose output nobody wants; returns when the engine is rid of it."""
        sequence.owner = _Nobody()
        self.abort(sequence)
        await sequence.gone()

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        """First outputs leave at once, before anything else of the step is looked at: they are waited for most."""
        self._take_rest()
        now_s = self._clock.monotonic()
        if self.watcher is not None:
            self.watcher.stepped(stats, now_s)
        live = self._live
        rest: list[SequenceStep] = []
        first: list[SequenceStep] = []
        for step in steps:
            if (work := live.get(step.id)) is not None:
                (rest if work.begun else first).append(step)
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
        self._catch_up()
        self._before_step()
        live = self._live
        for step in steps:
            work = live.get(step.id)
            if work is None:
                continue
            work.begun = True
            if work.given is not None:
                work.given.take(step)
            parts = tuple(work.parts)
            if step.finish is not None:
                del live[step.id]
                self._forget(work)
                for part in parts:
                    part.end()
            for part in parts:
                self._give(part, step, now_s)
        self._after_step()

    def _give(self, part: LiveSequence, step: SequenceStep, now_s: float) -> None:
        try:
            part.owner.on_step(step, now_s)
        except Exception as error:  # noqa: BLE001 - a fault with one output must not cost the others theirs
            _log.error("step_not_taken", error=repr(error), exc_info=error)
            self.abort(part)
            part.owner.on_fault(error)

    def on_closed(self, reason: str) -> None:
        self._take_rest()
        self._catch_up()
        self._engine = None
        lost, self._live = list(self._live.values()), {}
        self._shared.clear()
        for part in [part for work in lost for part in work.parts]:
            part.end()
            part.owner.on_engine_lost(reason)
        if self.watcher is not None:
            self.watcher.closed(reason)
        self.on_lost(reason)


class _Nobody:
    def on_step(self, step: SequenceStep, now_s: float) -> None: ...

    def on_engine_lost(self, reason: str) -> None: ...

    def on_fault(self, error: Exception) -> None: ...
