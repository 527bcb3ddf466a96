"""Releases jobs whose schedule should have fired and did not.

A schedule that is due while NATS has no storage left never fires: the server forgets it until it is started again. A
scheduler that lives releases such a job at its latest start like any other, but the fire time, which a park subject
does not show, may lie long before that, and with every scheduler dead nobody would ever release it. So after trouble
with storage, and once at the start of a term, which may follow on such trouble, each parked job's message is read and
what is overdue by its own schedule is released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from laneway.core.clock import Clock
from laneway.core.subjects import ParkSubject
from laneway.policy.parked import ParkIndex
from laneway.policy.release import FIRE_GUARD_S
from laneway.runtime.bus import BusError
from laneway.runtime.lanes import LaneStore
from laneway.scheduler.releaser import Releaser

READS_AT_ONCE = 25
READS_PER_S_MAX = 500.0  # a look at a million jobs takes half an hour and a tenth of a core
SETTLE_S = FIRE_GUARD_S + 0.5  # after trouble: what was about to fire has fired by then

_log = structlog.get_logger(__name__)


class StrandedJobs:
    """Of a paused lane too: NATS would have fired these jobs whatever the lane's state."""

    def __init__(
        self, lanes: LaneStore, index: ParkIndex, releaser: Releaser, clock: Clock, may_act: Callable[[], bool]
    ) -> None:
        self._lanes = lanes
        self._index = index
        self._releaser = releaser
        self._clock = clock
        self._may_act = may_act
        self._suspected = asyncio.Event()
        self._suspected.set()

    def suspect(self) -> None:
        """NATS had no storage for something a moment ago, or a rescue failed."""
        self._suspected.set()

    async def run(self) -> None:
        """Looks whenever there is a reason to, without an end."""
        while True:
            await self._suspected.wait()
            self._suspected.clear()
            await asyncio.sleep(SETTLE_S)
            await self.look()

    async def look(self) -> int:
        """Reads the message of each parked job, at a bounded rate; how many jobs it had released."""
        jobs, rescued = self._index.jobs(), 0
        for start in range(0, len(jobs), READS_AT_ONCE):
            if not self._may_act():
                self.suspect()  # a late renewal may still save this term
                break
            parks = [park for job in jobs[start : start + READS_AT_ONCE] if (park := self._index.get(job))]
            overdue = await asyncio.gather(*(self._overdue(park) for park in parks))
            stranded = [park for park in overdue if park is not None]
            await self._releaser.rescue(stranded)
            rescued += len(stranded)
            await asyncio.sleep(READS_AT_ONCE / READS_PER_S_MAX)
        if rescued:
            _log.warning("stranded_jobs_released", jobs=rescued)
        return rescued

    async def _overdue(self, park: ParkSubject) -> ParkSubject | None:
        try:
            fires_s = await self._lanes.fires_at_s(park)
        except BusError as error:
            _log.warning("parked_job_unread", job_id=park.job, error=error.message)
            self.suspect()
            return None
        if fires_s is None or fires_s + FIRE_GUARD_S >= self._clock.now():
            return None
        return park
