"""The worker's engine: started, tried out, watched, and started again when it dies.

Owns the engine object, how often it may be made anew, and what the worker says of it. What the engine computes is the
business of Sequences.

An engine that dies is started again, later each time. One that died more than RESTARTS_MAX times within
RESTART_WINDOW_S is BROKEN: the worker takes no work, says why for as long as it lasts, and tries once every
BROKEN_RETRY_S. It does not end for it: whoever started it again would have the same engine, and nobody the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from laneway.core.clock import Clock
from laneway.core.fleet import WorkerState
from laneway.workers.engines.protocol import Engine, EngineCapacity, EngineRequest, EngineStartError, TellsStart
from laneway.workers.first_token import FirstToken
from laneway.workers.sequences import Sequences

RESTARTS_MAX = 5  # within RESTART_WINDOW_S; then it is broken
RESTART_WINDOW_S = 600.0
RESTART_DELAY_S_MIN = 0.25
RESTART_DELAY_S_MAX = 10.0
BROKEN_RETRY_S = 60.0
LOADING_MOST = 0.99  # what is told of a start that takes longer than is known of earlier ones

_log = structlog.get_logger(__name__)


def deaths_lately(deaths_s: Sequence[float], now_s: float) -> int:
    return sum(now_s - died_s < RESTART_WINDOW_S for died_s in deaths_s)


def restart_delay_s(deaths_s: Sequence[float], now_s: float) -> float | None:
    """How long to wait before the engine is started again; None: it is broken. `deaths_s` includes the last death."""
    recent = deaths_lately(deaths_s, now_s)
    if recent > RESTARTS_MAX:
        return None
    return min(RESTART_DELAY_S_MAX, RESTART_DELAY_S_MIN * 2.0 ** (recent - 1))


class EngineKeeper:
    """`run` keeps an engine going until cancelled."""

    def __init__(
        self,
        make: Callable[[], Engine],
        sequences: Sequences,
        clock: Clock,
        on_change: Callable[[], Awaitable[None]],
        trial: EngineRequest,
        *,
        load_s: float,
        trial_s: float,
    ) -> None:
        """`trial`: the first request of every engine. `load_s`: how long a start is expected to take, until one was
        measured. `trial_s`: most time for the first token."""
        self._make = make
        self._sequences = sequences
        self._clock = clock
        self._on_change = on_change  # awaited after each change of state
        self._trial = trial
        self._load_s = load_s
        self._trial_s = trial_s
        self._engine: Engine | None = None
        self._lost: asyncio.Future[str] | None = None
        self._deaths_s: list[float] = []
        self._busy_s = 0.0  # of engines that are gone
        self._ready = asyncio.Event()
        self._reason = ""  # why it is not ready, if it died
        self._doing = ""  # of a start that is under way, once the engine has loaded
        self._began_s: float | None = None  # of that start
        self.state = WorkerState.STARTING
        self.capacity: EngineCapacity | None = None

    @property
    def busy_s(self) -> float:
        return self._busy_s + self._sequences.stats().busy_s

    @property
    def deaths(self) -> int:
        """How often its engine died, or did not start, lately."""
        return deaths_lately(self._deaths_s, self._clock.monotonic())

    @property
    def load_progress(self) -> float:
        """How far the start is that is under way, 0 to 1, by how long it takes; 0: there is none."""
        if self._began_s is None:
            return 0.0
        return min(LOADING_MOST, (self._clock.monotonic() - self._began_s) / max(self._load_s, 1e-3))

    @property
    def detail(self) -> str:
        """Why it is not ready."""
        if self.state is WorkerState.READY:
            return ""
        died = self._reason
        if self.deaths:
            died += f"; died {times(self.deaths)} in {RESTART_WINDOW_S / 60:.0f} minutes"
        if self._began_s is None:
            return died
        spent_s = self._clock.monotonic() - self._began_s
        doing = f"{self._doing or loading(self._engine)}, {spent_s:.0f} s of about {self._load_s:.0f} s"
        return f"{died}; {doing}" if died else doing

    async def ready(self) -> EngineCapacity:
        """The capacity, once an engine has started."""
        await self._ready.wait()
        assert self.capacity is not None
        return self.capacity

    async def run(self) -> None:
        """Raises EngineStartError when the first start fails."""
        self._sequences.on_lost = self._on_lost
        try:
            while True:
                reason = await self._one_engine()
                await self._restart(reason)
        finally:
            if self._engine is not None:
                await self._engine.close()

    async def _one_engine(self) -> str:
        """Starts an engine and returns why it died."""
        self._lost = asyncio.get_running_loop().create_future()
        self._engine = self._make()
        try:
            self.capacity = await self._started(self._engine)
        except EngineStartError as error:
            await self._engine.close()
            if not self._ready.is_set():
                await self._change(WorkerState.BROKEN, str(error))
                raise
            return str(error)
        self._sequences.attach(self._engine)
        await self._change(WorkerState.READY, "")
        self._ready.set()
        reason = await self._lost
        self._busy_s += self._engine.stats().busy_s
        await self._engine.close()
        return reason

    async def _started(self, engine: Engine) -> EngineCapacity:
        """Loads the engine, and has it give a token. Raises EngineStartError."""
        sink = FirstToken(self._sequences)
        self._doing, self._began_s = "", self._clock.monotonic()
        try:
            capacity = await engine.start(sink)
            if isinstance(engine, TellsStart) and engine.gave_token:
                sink.passed = True
            else:
                self._doing = "waiting for its first token"
                await sink.of(engine, self._trial, self._trial_s)
            self._load_s = self._clock.monotonic() - self._began_s
        finally:
            self._began_s = None
        return capacity

    async def _restart(self, reason: str) -> None:
        now_s = self._clock.monotonic()
        self._deaths_s = [died_s for died_s in self._deaths_s if now_s - died_s < RESTART_WINDOW_S] + [now_s]
        delay_s = restart_delay_s(self._deaths_s, now_s)
        if delay_s is None:
            _log.error("engine_broken", reason=reason, deaths=len(self._deaths_s), retry_s=BROKEN_RETRY_S)
            await self._change(WorkerState.BROKEN, reason)
            await asyncio.sleep(BROKEN_RETRY_S)
            return
        _log.warning("engine_restarting", reason=reason, delay_s=delay_s, deaths=len(self._deaths_s))
        await self._change(WorkerState.STARTING, reason)
        await asyncio.sleep(delay_s)

    async def _change(self, state: WorkerState, reason: str) -> None:
        self.state, self._reason = state, reason
        await self._on_change()

    def _on_lost(self, reason: str) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(reason)

    def give_up(self, reason: str) -> None:
        """Takes an engine that hangs for dead: its sequences are lost, its process is ended, and a new one started."""
        _log.error("engine_hung", reason=reason)
        self._sequences.on_closed(reason)


def loading(engine: object) -> str:
    return engine.loading if isinstance(engine, TellsStart) else "loading"


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
