"""Releases what the policy chose, and learns from what became of it.

A chosen job leaves the index before its release is tried, so that it is chosen once; it comes back when NATS is about
to fire it, when somebody else moved it, or when the release failed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import structlog

from laneway.core.clock import Clock
from laneway.core.fleet import Plan
from laneway.core.lanes import Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.release import (
    FIRE_GUARD_S,
    Ledger,
    Release,
    ReleaseParams,
    ReleaseReason,
    choose,
    room_of,
    why_held,
)
from laneway.runtime import metrics
from laneway.runtime.bus import BusError, OutOfStorage
from laneway.runtime.lanes import LaneStore, ReleaseOutcome
from laneway.scheduler.decisions import DecisionLog, Step
from laneway.scheduler.parking import Parking

CONCURRENT_MAX = 32
RETRY_S = 1.0

_log = structlog.get_logger(__name__)
_outcomes = metrics.counter("laneway_releases_total", "Releases tried.", ("lane", "pool", "outcome"))


class Releaser:
    def __init__(
        self,
        lanes: LaneStore,
        parking: Parking,
        decisions: DecisionLog,
        clock: Clock,
        params: Callable[[], ReleaseParams],
        may_act: Callable[[], bool],
        released: Counter[tuple[str, Lane]],
    ) -> None:
        self.acting: set[str] = set()  # jobs whose release is under way: in the index no more, and not yet ready
        self.on_stranded: Callable[[], None] = lambda: None  # NATS had no storage, or a stranded job was not released
        self._lanes = lanes
        self._parking = parking
        self._decisions = decisions
        self._clock = clock
        self._params = params
        self._may_act = may_act
        self._released = released
        self._ledger = Ledger(params())
        self._free = asyncio.Semaphore(CONCURRENT_MAX)

    async def release(self, plan: Plan) -> bool:
        """Decides for every pool and acts; whether more is to be decided at once."""
        now_s = self._clock.now()
        params = self._ledger.params = self._params()
        index = self._parking.index
        index.wake(int(now_s * 1000))
        chosen: list[Release] = []
        for pool in plan.pools:
            room = room_of(pool, params)
            some = choose(index, room, self._ledger, now_s=now_s, paused=plan.paused, params=params)
            for release in some:
                self._parking.forget(release.park.job)
                self._ledger.charge(release)
            chosen += some
        self._note_held(plan, now_s)
        await self._act_all(chosen)
        return len(chosen) >= params.releases_max

    async def rescue(self, parks: Iterable[ParkSubject]) -> None:
        """Releases jobs whose schedule did not fire, whatever room there is."""
        rescued = [Release(park, ReleaseReason.STRANDED, 1.0) for park in parks if self._parking.forget(park.job)]
        for release in rescued:
            self._ledger.charge(release)
        await self._act_all(rescued)

    async def _act_all(self, releases: Sequence[Release]) -> None:
        acting = {release.park.job for release in releases}
        self.acting |= acting
        try:
            async with asyncio.TaskGroup() as group:
                for release in releases:
                    group.create_task(self._act(release))
        finally:
            self.acting -= acting

    def held_because(self, park: ParkSubject, plan: Plan) -> Step:
        """Why a job is parked at this moment."""
        now_s = self._clock.now()
        pool = plan.pool(park.pool)
        room = room_of(pool, self._params())
        reason = why_held(park, room, awake=self._parking.index.awake(park.job), now_s=now_s, paused=plan.paused)
        parked = self._parking.index.count(park.pool, park.lane)
        facts = {
            "workers": str(pool.workers),
            "free_slots": str(pool.free_slots),
            "ready": str(pool.lane(park.lane).ready),
            "parked": str(parked),
            "latest_start_ms": str(park.due_ms),
        }
        return Step(now_s, "held", reason.value, facts)

    def _note_held(self, plan: Plan, now_s: float) -> None:
        for job in self._parking.newcomers():
            park = self._parking.index.get(job)
            if park is not None:
                self._decisions.add(job, self.held_because(park, plan))

    async def _act(self, release: Release) -> None:
        park = release.park
        async with self._free:
            stranded = release.reason is ReleaseReason.STRANDED
            if not self._may_act():
                # The next leader builds its own index; but a late renewal may still save this term.
                self._parking.take_back(park, self._clock.now() + RETRY_S)
                if stranded:
                    self.on_stranded()
                return
            try:
                outcome = await self._lanes.release(park, now_s=self._clock.now(), reason=release.reason.value)
            except BusError as error:
                if isinstance(error, OutOfStorage) or stranded:
                    self.on_stranded()
                _log.warning("release_failed", job_id=park.job, lane=park.lane.value, error=error.message)
                _outcomes.labels(lane=park.lane.value, pool=park.pool, outcome="failed").inc()
                self._parking.take_back(park, self._clock.now() + RETRY_S)
                return
        _outcomes.labels(lane=park.lane.value, pool=park.pool, outcome=outcome.value).inc()
        now_s = self._clock.now()
        match outcome:
            case ReleaseOutcome.RELEASED:
                self._released[park.pool, park.lane] += 1
                facts = {"latest_start_ms": str(park.due_ms)}
                self._decisions.add(park.job, Step(now_s, "released", release.reason.value, facts))
            case ReleaseOutcome.TOO_CLOSE:
                self._parking.take_back(park, now_s + FIRE_GUARD_S + 0.5)
            case ReleaseOutcome.LOST:
                self._parking.take_back(park, now_s + RETRY_S)
            case ReleaseOutcome.GONE:
                pass
