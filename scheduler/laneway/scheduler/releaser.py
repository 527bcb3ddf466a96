"""Releases what the policy chose, and learns from what became of it.

A chosen job leaves the index before its release is tried, so that it is chosen once; it comes back when NATS is about
to fire it, when somebody else moved it, or when the release failed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import structlog
from prometheus_client import Counter as PrometheusCounter

from laneway.core.clock import Clock
from laneway.core.fleet import Plan, PoolPlan, WorkerLease
from laneway.core.lanes import Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.fairness import Ledger, nominal_tokens_per_ms
from laneway.policy.forecast import PoolForecast
from laneway.policy.holding import NO_HOLD
from laneway.policy.holds import Holds
from laneway.policy.release import (
    FIRE_GUARD_S,
    HoldReason,
    Release,
    ReleaseParams,
    ReleaseReason,
    Room,
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
_reasons = metrics.counter(
    "laneway_release_reasons_total", "Jobs released early, by reason.", ("lane", "pool", "reason")
)
_holds = metrics.counter("laneway_hold_reasons_total", "Jobs held when parked, by reason.", ("lane", "pool", "reason"))
_outcomes = metrics.counter("laneway_releases_total", "Releases tried.", ("lane", "pool", "outcome"))


@lru_cache(1024)  # looking a counter up costs more than counting
def _hold_count(lane: Lane, pool: str, reason: str) -> PrometheusCounter:
    return _holds.labels(lane=lane.value, pool=pool, reason=reason)


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
        *,
        leases: Callable[[], Sequence[WorkerLease]] = lambda: (),
        forecasts: Mapping[str, PoolForecast] | None = None,
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
        self.ledger = Ledger(params().fair)
        parking.on_fired = lambda park: self.ledger.charge(park, params().urgent_charge)
        self._leases = leases
        self._holds = Holds(forecasts or {})
        self._rooms: dict[str, Room] = {}  # by pool, as of the last look
        self._free = asyncio.Semaphore(CONCURRENT_MAX)

    async def release(self, plan: Plan) -> bool:
        """Decides for every pool and acts; whether more is to be decided at once."""
        now_s = self._clock.now()
        params = self._params()
        self.ledger.params, self._parking.gathering.params = params.fair, params.coalesce
        index = self._parking.index
        index.wake(int(now_s * 1000))
        chosen: list[Release] = []
        for pool in plan.pools:
            chosen += self._choose(pool, plan.paused, now_s, params)
        self._note_held(plan, now_s)
        await self._act_all(chosen)
        return len(chosen) >= params.releases_max

    def _choose(self, pool: PoolPlan, paused: frozenset[Lane], now_s: float, params: ReleaseParams) -> list[Release]:
        """Of one pool: decides, and takes what was chosen out of the index."""
        index, parking = self._parking.index, self._parking
        self.ledger.nominal(pool.pool, nominal_tokens_per_ms(pool, params.fair))
        room = self._rooms[pool.pool] = self._room(pool, params)
        parking.gathered(pool.pool, room.idle + min(room.queue, room.workers), now_s)
        chosen = choose(
            index, room, self.ledger, now_s=now_s, paused=paused, params=params,
            hold=self._holds.look(pool, index, now_s, params.hold),
            coalesced=parking.gathering.together, busy=parking.group_homes.busy(pool),
        )  # fmt: skip
        for release in chosen:
            self.ledger.charge(release.park, release.charge)
            self._holds.released(release.park)
            parking.group_homes.released(release.park)
            parking.forget(release.park.job)
        return chosen

    def _room(self, pool: PoolPlan, params: ReleaseParams) -> Room:
        return room_of(pool, params, leases=self._leases(), prompt_tokens=self.ledger.means(pool.pool).computed_tokens)

    def job_tokens(self, pool: str) -> float:
        """Prompt and output of a job of the lower lanes on average; 0 before any ended."""
        return self.ledger.means(pool).kv_tokens

    async def rescue(self, parks: Iterable[ParkSubject]) -> None:
        """Releases jobs whose schedule did not fire, whatever room there is."""
        rescued = [Release(park, ReleaseReason.STRANDED, 1.0) for park in parks if self._parking.forget(park.job)]
        for release in rescued:
            self.ledger.charge(release.park, release.charge)
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
        hold, gathers = self._holds.now.get(park.pool, NO_HOLD), self._parking.gathering.holds(park)
        room = self._rooms.get(park.pool) or self._room(pool, self._params())
        reason = why_held(
            park, room, awake=self._parking.index.awake(park.job), now_s=now_s,
            paused=plan.paused, hold=hold, gathers=gathers,
        )  # fmt: skip
        facts = {
            "workers": str(pool.workers),
            "free_slots": str(pool.free_slots),
            "ready": str(pool.lane(park.lane).ready),
            "parked": str(self._parking.index.count(park.pool, park.lane)),
            "latest_start_ms": str(park.due_ms),
        }
        if reason is HoldReason.HELD_FOR_TROUGH:
            facts |= self._holds.facts(park)
        return Step(now_s, "held", reason.value, facts)

    def _note_held(self, plan: Plan, now_s: float) -> None:
        for job in self._parking.newcomers():
            park = self._parking.index.get(job)
            if park is not None:
                step = self.held_because(park, plan)
                _hold_count(park.lane, park.pool, step.reason).inc()
                self._decisions.add(job, step)

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
                _reasons.labels(lane=park.lane.value, pool=park.pool, reason=release.reason.value).inc()
                facts = {"latest_start_ms": str(park.due_ms)}
                self._decisions.add(park.job, Step(now_s, "released", release.reason.value, facts))
            case ReleaseOutcome.TOO_CLOSE:
                self._parking.take_back(park, now_s + FIRE_GUARD_S + 0.5)
            case ReleaseOutcome.LOST:
                self._parking.take_back(park, now_s + RETRY_S)
            case ReleaseOutcome.GONE:
                pass
