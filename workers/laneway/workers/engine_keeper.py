"""The worker's engine: started, watched, and started again when it dies, but not for ever.

Owns the engine object and how often it may be made anew. What the engine computes is the business of Sequences.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from laneway.core.clock import Clock
from laneway.core.errors import Unavailable
from laneway.core.fleet import WorkerState
from laneway.workers.engines.protocol import Engine, EngineCapacity, EngineStartError
from laneway.workers.sequences import Sequences

RESTARTS_MAX = 5  # within RESTART_WINDOW_S; then the worker gives up and lets its supervisor decide
RESTART_WINDOW_S = 600.0
RESTART_DELAY_S_MIN = 0.25
RESTART_DELAY_S_MAX = 10.0

_log = structlog.get_logger(__name__)


class WorkerBroken(Unavailable):
    """The engine died too often."""

    default_reason = "WORKER_BROKEN"


def restart_delay_s(deaths_s: Sequence[float], now_s: float) -> float | None:
    """How long to wait before the engine is started again; None: not at all. `deaths_s` includes the last death."""
    recent = sum(now_s - died_s < RESTART_WINDOW_S for died_s in deaths_s)
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
    ) -> None:
        self._make = make
        self._sequences = sequences
        self._clock = clock
        self._on_change = on_change  # awaited after each change of state
        self._engine: Engine | None = None
        self._lost: asyncio.Future[str] | None = None
        self._deaths_s: list[float] = []
        self._busy_s = 0.0  # of engines that are gone
        self._ready = asyncio.Event()
        self.state = WorkerState.STARTING
        self.detail = ""
        self.capacity: EngineCapacity | None = None

    @property
    def busy_s(self) -> float:
        return self._busy_s + self._sequences.stats().busy_s

    async def ready(self) -> EngineCapacity:
        """The capacity, once an engine has started."""
        await self._ready.wait()
        assert self.capacity is not None
        return self.capacity

    async def run(self) -> None:
        """Raises EngineStartError when the first start fails, WorkerBroken when the engine dies too often."""
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
            self.capacity = await self._engine.start(self._sequences)
        except EngineStartError as error:
            if not self._deaths_s:
                raise
            return str(error)
        self._sequences.attach(self._engine)
        await self._change(WorkerState.READY, "")
        self._ready.set()
        reason = await self._lost
        self._busy_s += self._engine.stats().busy_s
        await self._engine.close()
        return reason

    async def _restart(self, reason: str) -> None:
        now_s = self._clock.monotonic()
        self._deaths_s.append(now_s)
        delay_s = restart_delay_s(self._deaths_s, now_s)
        if delay_s is None:
            await self._change(WorkerState.BROKEN, reason)
            raise WorkerBroken(f"the engine died {len(self._deaths_s)} times, last: {reason}")
        _log.warning("engine_restarting", reason=reason, delay_s=delay_s, deaths=len(self._deaths_s))
        await self._change(WorkerState.STARTING, reason)
        await asyncio.sleep(delay_s)

    async def _change(self, state: WorkerState, detail: str) -> None:
        self.state, self.detail = state, detail
        await self._on_change()

    def _on_lost(self, reason: str) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(reason)

    def give_up(self, reason: str) -> None:
        """Takes an engine that hangs for dead: its sequences are lost, its process is ended, and a new one started."""
        _log.error("engine_hung", reason=reason)
        self._sequences.on_closed(reason)
