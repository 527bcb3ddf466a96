"""Keeps the index of parked jobs equal to what NATS holds.

Built from the park subjects, kept by doorbells (parked; became ready, whoever released it), and compared at intervals
with the number of messages in the lanes: the subjects are listed again only where the numbers differ twice in a row or
the connection was lost.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import structlog
from nats.aio.msg import Msg

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.lanes import PARKING_LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.coalesce import Gathering
from laneway.policy.parked import ParkIndex
from laneway.policy.plan import Depth
from laneway.runtime.bells import Bell
from laneway.runtime.bus import Bus
from laneway.runtime.reading import subject_pages
from laneway.scheduler.group_homes import GroupHomes

CHUNK = 5_000  # subjects taken in without letting go of the loop
NEWCOMERS_MAX = 1_000  # between two looks; only these get a line in the decision log

_log = structlog.get_logger(__name__)


class Parking:
    """The index, and the means to keep it. `changed` is called for what was parked; a ready message needs no look.

    `lists` is the connection for lists of subjects: the server answers nothing else on it while it makes one.
    """

    def __init__(
        self,
        bus: Bus,
        region: str,
        clock: Clock,
        changed: Callable[[], None],
        lists: Bus | None = None,
    ) -> None:
        self.index = ParkIndex()
        self.gathering = Gathering()
        self.group_homes = GroupHomes()
        self.on_fired: Callable[[ParkSubject], None] = lambda park: None  # it became ready, and nobody here released it
        self._bus = bus
        self._region = region
        self._clock = clock
        self._changed = changed
        self._lists = lists or bus
        self._newcomers: list[str] = []
        self._gone: set[str] | None = None  # what left while a listing is under way
        self._suspect: set[Lane] = set()

    @asynccontextmanager
    async def watch(self, became_ready: Callable[[str, Lane, str], None]) -> AsyncIterator[None]:
        """Subscribes to the bells, then builds the index; `became_ready` gets pool, lane and home of each ready
        message."""

        def ready(msg: Msg) -> None:
            _, _, _, lane, pool, home, _, job = msg.subject.split(".")
            park = self.forget(job)
            self.group_homes.became_ready(job, home, park)
            if park is not None:
                self.on_fired(park)
            became_ready(pool, Lane(lane), home)

        async with AsyncExitStack() as stack:
            stack.callback(self._bus.on_reconnect(self._suspect_all))
            await stack.enter_async_context(Bell.parked(self._bus, self._region, self._parked))
            subscription = await self._bus.listen(subjects.bell(f"lane.{self._region}.>"), ready)
            stack.push_async_callback(self._bus.unsubscribe, subscription)
            began_s = self._clock.monotonic()
            for lane in PARKING_LANES:
                await self._list(lane)
            _log.info("park_index_built", jobs=len(self.index), took_s=round(self._clock.monotonic() - began_s, 3))
            yield

    def forget(self, job: str) -> ParkSubject | None:
        if self._gone is not None:
            self._gone.add(job)
        park = self.index.discard(job)
        if park is not None:
            self.gathering.left(park)
        return park

    def take_back(self, park: ParkSubject, until_s: float) -> None:
        """A job whose release did not take place; left alone until then."""
        self.index.add(park, now_ms=self._now_ms())
        self.index.leave_alone(park.job, int(until_s * 1000))

    def newcomers(self) -> list[str]:
        """The jobs parked since the last call, as far as they are few."""
        taken, self._newcomers = self._newcomers, []
        return taken

    def gathered(self, pool: str, places: int, now_s: float) -> None:
        """Lets groups go that wait no longer for more jobs, and those for which the pool has nothing else to run in so
        many places."""
        groups = self.gathering.flush(now_s)
        if places > 0 and self.index.few(pool, places):
            groups += self.gathering.take(pool, places)
        for group in groups:
            for park in group:
                self.index.rouse(park.job)

    async def reconcile(self, depths: Mapping[tuple[str, Lane], Depth]) -> None:
        """Compares counts, and lists a lane again where they disagreed the last time as well. Raises a BusError."""
        for lane in PARKING_LANES:
            info = await self._bus.api(f"STREAM.INFO.{subjects.lane_stream(self._region, lane)}", {})
            in_lane = sum(d.ready + d.running for (_, of), d in depths.items() if of is lane)
            parked = info["state"]["messages"] - in_lane
            known = sum(self.index.count(pool, lane) for pool in self.index.pools())
            if parked == known:
                self._suspect.discard(lane)
            elif lane not in self._suspect:
                self._suspect.add(lane)
            else:
                self._suspect.discard(lane)
                await self._list(lane)

    async def _list(self, lane: Lane) -> None:
        """Makes the index of one lane what the subjects say. What comes or goes meanwhile is known from the bells."""
        lost = self.index.jobs_of(lane)  # until they are found
        mending = bool(lost)
        self._gone = gone = set[str]()
        new = 0
        try:
            wanted = subjects.park_filter(self._region, lane)
            stream = subjects.lane_stream(self._region, lane)
            async with aclosing(subject_pages(self._lists, stream, wanted)) as pages:
                async for page in pages:
                    for start in range(0, len(page), CHUNK):
                        await asyncio.sleep(0)  # bells that are already here come first; the term must be renewed
                        parks = [park for each in page[start : start + CHUNK] if (park := _parse(each))]
                        lost.difference_update([park.job for park in parks])
                        new += self._add([park for park in parks if park.job not in gone])
        finally:
            self._gone = None
        removed = sum(self.forget(job) is not None for job in lost)
        if mending and (removed or new):
            _log.info("park_index_mended", lane=lane.value, added=new, removed=removed)
        if new:
            self._changed()

    def _add(self, parks: list[ParkSubject]) -> int:
        self._newcomers += [
            park.job for park in parks[: NEWCOMERS_MAX - len(self._newcomers)] if park.job not in self.index
        ]
        return self.index.add_all(parks, now_ms=self._now_ms())

    def _parked(self, park: ParkSubject) -> None:
        now_s = self._clock.now()
        if self.index.add(park, now_ms=int(now_s * 1000)):
            until_s = self.gathering.arrived(park, now_s)
            if until_s is not None:
                self.index.leave_alone(park.job, math.ceil(until_s * 1000))
            if len(self._newcomers) < NEWCOMERS_MAX:
                self._newcomers.append(park.job)
            self._changed()

    def _suspect_all(self) -> None:
        self._suspect.update(PARKING_LANES)

    def _now_ms(self) -> int:
        return int(self._clock.now() * 1000)


def _parse(subject: str) -> ParkSubject | None:
    """None for a stray message, which must not keep a scheduler from seeing the jobs."""
    try:
        return ParkSubject.parse(subject)
    except ValueError:
        _log.warning("park_subject_unreadable", subject=subject)
        return None
