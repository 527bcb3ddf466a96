"""The time of jobs: the clock of NATS, on every host, however that host's own clock is set.

Deadlines, fire times and the times in records are written by one process and compared by others, and parked jobs fire
by the server's clock. So every service takes the time of jobs from here: the server's time as it was last measured,
carried on by this process's monotonic clock. A host clock that is wrong, or that is set while jobs wait and run,
changes nothing. Spans, leases and timeouts are monotonic and have nothing to do with it.

Until the server was asked, and where its answer cannot be right, the host's clock counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import structlog

from laneway.core.clock import Clock
from laneway.runtime import metrics
from laneway.runtime.bus import Bus, BusError

MEASURE_EVERY_S = 15.0
LOOK_EVERY_S = 1.0  # for a clock that was set, or a host that slept
STEP_S = 0.5  # by which wall and monotonic clock part where one of them was set
ROUND_TRIP_S_MAX = 1.0  # an answer that took longer says too little
ROUND_TRIP_S_GOOD = 0.01
TRIES = 3  # of which the quickest counts, until one is good
SKEW_S_MAX = 86_400.0  # of host and server; beyond it one of them has no idea of the date
TOLD_S = 1.0  # changes of the skew above this are logged

_log = structlog.get_logger(__name__)


class NatsClock:
    """laneway.core.clock.Clock whose `now` is the server's. `system`: this host's clock."""

    def __init__(self, bus: Bus, system: Clock) -> None:
        self._bus = bus
        self._system = system
        self.monotonic = system.monotonic
        self._origin_s: float | None = None  # NATS time minus our monotonic time; None: not known
        self._told_s = 0.0  # the skew that was last logged
        self._parted_s = self._wall_minus_monotonic()  # when last measured
        self._measured_s = float("-inf")  # monotonic
        self._wake = asyncio.Event()

    def now(self) -> float:
        return self._system.now() if self._origin_s is None else self._origin_s + self.monotonic()

    @property
    def skew_s(self) -> float | None:
        """NATS time minus this host's wall clock; None while it is not known."""
        return None if self._origin_s is None else self._origin_s - self._wall_minus_monotonic()

    async def measure(self) -> bool:
        """Asks the server for its time; whether the answer can be believed. Raises a BusError."""
        origin_s, round_trip_s = await self._ask()
        self._measured_s, self._parted_s = self.monotonic(), self._wall_minus_monotonic()
        if round_trip_s > ROUND_TRIP_S_MAX:
            _log.warning("clock_not_measured", round_trip_s=round(round_trip_s, 3))
            return False
        skew_s = origin_s - self._parted_s
        if not abs(skew_s) <= SKEW_S_MAX:
            if abs(skew_s - self._told_s) > TOLD_S:
                self._told_s = skew_s
                _log.error("clock_not_believed", skew_s=round(skew_s, 3), skew_s_max=SKEW_S_MAX)
            return False
        self._take(origin_s, round_trip_s)
        if abs(skew_s - self._told_s) > TOLD_S:
            self._told_s = skew_s
            _log.warning("clock_differs", skew_s=round(skew_s, 3))
        return True

    def _take(self, origin_s: float, round_trip_s: float) -> None:
        known_s = self._origin_s
        if known_s is None or abs(origin_s - known_s) > STEP_S:
            self._origin_s = origin_s
        elif abs(origin_s - known_s) > round_trip_s / 2:  # nearer to each other they say the same
            self._origin_s = (origin_s + known_s) / 2

    async def _ask(self) -> tuple[float, float]:
        """The origin by the quickest of some answers, and how long that one took."""
        best: tuple[float, float] | None = None
        for _ in range(TRIES):
            began_s = self.monotonic()
            server_s = await self._bus.server_time_s(ROUND_TRIP_S_MAX)
            took_s = self.monotonic() - began_s
            if best is None or took_s < best[1]:
                best = server_s - (began_s + took_s / 2), took_s
            if took_s <= ROUND_TRIP_S_GOOD:
                break
        assert best is not None
        return best

    def _wall_minus_monotonic(self) -> float:
        return self._system.now() - self._system.monotonic()

    def due(self) -> bool:
        parted_s = abs(self._wall_minus_monotonic() - self._parted_s)
        return self.monotonic() - self._measured_s >= MEASURE_EVERY_S or parted_s > STEP_S

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Measured, if the server answers now, and kept right until the block ends."""
        await self._try_to_measure()
        keeping = asyncio.create_task(self._keep(), name="nats-clock")
        text = "Clock of NATS minus this host's; no sample while it is not known."
        try:
            with metrics.live_gauge("laneway_clock_skew_seconds", text, (), self._samples):
                yield
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})

    async def _keep(self) -> None:
        """Measures at intervals, after each reconnect, and when the host's clock was set; until cancelled."""
        unregister = self._bus.on_reconnect(self._reconnected)
        try:
            while True:
                if self.due() and self._bus.connected:
                    await self._try_to_measure()
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._wake.wait()
        finally:
            unregister()

    def _reconnected(self) -> None:
        """Perhaps to another server."""
        self._measured_s = float("-inf")
        self._wake.set()

    async def _try_to_measure(self) -> None:
        try:
            await self.measure()
        except BusError as error:  # the clock runs on as it did
            _log.warning("clock_not_measured", error=error.message)

    def _samples(self) -> Iterable[metrics.Sample]:
        skew_s = self.skew_s
        return [] if skew_s is None else [({}, skew_s)]
