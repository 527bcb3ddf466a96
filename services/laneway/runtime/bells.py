"""The doorbell: headers-only copies of lane messages that the server republishes on core NATS.

A hint that something is there, at most once and without delay. Whoever relies on it also looks at intervals.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType

from msgspec import Struct
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from laneway.core import subjects
from laneway.core.lanes import LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.runtime.bus import Bus
from laneway.runtime.headers import SCHEDULER

# Why a scheduler releases a job whatever the room: its latest start has come (policy.release.ReleaseReason).
DUE_REASONS = frozenset({"LATEST_START_NEAR", "OVERDUE", "STRANDED"})


class Ring(Struct, frozen=True):
    """What a bell says: there may be a job in this home slot of this lane."""

    lane: Lane
    home: str = ""  # empty: in any slot, as after a reconnect
    due: bool = False  # its latest start has come


def is_due(headers: Mapping[str, str] | None) -> bool:
    """Whether a lane message became ready because its time had come: its schedule fired, or a release says so."""
    if not headers:
        return False
    released = headers.get(subjects.H_RELEASED_BY)
    return released in DUE_REASONS if released is not None else SCHEDULER in headers


class Bell:
    """Rings for each ready message of a pool, in any lane and home slot, and after a reconnect. The listener clears
    `ring`.

    `on_ring`, where given, is told what rang, and every lane after a reconnect; it must be short.
    """

    def __init__(self, bus: Bus, region: str, pool: str, on_ring: Callable[[Ring], None] = lambda ring: None) -> None:
        self.ring = asyncio.Event()
        self._on_ring = on_ring
        self._bus = bus
        self._subject = subjects.bell(f"lane.{region}.*.{pool}.>")
        self._subscription: Subscription | None = None
        self._unregister: Callable[[], None] = lambda: None

    async def __aenter__(self) -> Bell:
        self._unregister = self._bus.on_reconnect(self._reconnected)
        self._subscription = await self._bus.listen(self._subject, self._rang)
        return self

    def _rang(self, msg: Msg) -> None:
        self.ring.set()
        parts = msg.subject.split(".", 6)
        self._on_ring(Ring(Lane(parts[3]), parts[5], is_due(msg.headers)))

    def _reconnected(self) -> None:
        self.ring.set()
        for lane in LANES:
            self._on_ring(Ring(lane, due=True))  # what rang meanwhile was not heard

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unregister()
        await self._bus.unsubscribe(self._subscription)

    @staticmethod
    @asynccontextmanager
    async def parked(bus: Bus, region: str, callback: Callable[[ParkSubject], None]) -> AsyncIterator[None]:
        """Calls back for each job parked or re-staggered in the region. The callback must be short."""

        def parked(msg: Msg) -> None:
            callback(ParkSubject.parse(msg.subject.removeprefix(subjects.bell(""))))

        subscription = await bus.listen(subjects.bell(f"park.{region}.>"), parked)
        try:
            yield
        finally:
            await bus.unsubscribe(subscription)
