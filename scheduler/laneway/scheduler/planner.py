"""Gathers what a plan is made from (leases, lane depths, parked work, pauses) and publishes plans of one term."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from laneway.core.catalogue import Catalogue
from laneway.core.clock import Clock
from laneway.core.fleet import Demand, EtaFit, Plan, TenantDepth
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.core.subjects import HOME_ANY
from laneway.policy.calibration import with_fits
from laneway.policy.demand import POINTS_MAX, demand_curve
from laneway.policy.desired import NEAR_JOBS, DesiredParams
from laneway.policy.parked import ParkIndex
from laneway.policy.plan import Depth, Parked, Snapshot, make_plan
from laneway.runtime.bus import ApiError, Bus
from laneway.runtime.lanes import LaneDepth, LaneStore
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.plans import PlanPublisher
from laneway.scheduler.capacity import Capacity
from laneway.scheduler.homes import HomeDepths, Homes, lane_totals

DEMAND_SHARE = 0.02  # of the time that reading parked work by due time may take
WAITS_MAX = 100_000  # ready messages of a pool, lane and home whose age is known


class ReadyAges:
    """How long the oldest ready message of a lane and home has waited, from the bells: messages of a home are pulled in
    their order, so the last `ready` ones that rang are those that wait."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rang_s: dict[tuple[str, Lane, str], deque[float]] = {}

    def rang(self, pool: str, lane: Lane, home: str = HOME_ANY) -> None:
        self._rang_s.setdefault((pool, lane, home), deque(maxlen=WAITS_MAX)).append(self._clock.monotonic())

    def oldest_s(self, pool: str, lane: Lane, ready: int, home: str = HOME_ANY) -> float:
        rang_s = self._rang_s.get((pool, lane, home))
        if rang_s is None:
            return 0.0
        while len(rang_s) > ready:
            rang_s.popleft()
        return self._clock.monotonic() - rang_s[0] if rang_s else 0.0

    def oldest_by_lane_s(self, depths: HomeDepths) -> dict[tuple[str, Lane], float]:
        """Of each pool and lane, whatever the home."""
        oldest_s: dict[tuple[str, Lane], float] = {}
        for (pool, lane, home), depth in depths.items():
            waited_s = self.oldest_s(pool, lane, depth.ready, home)
            oldest_s[pool, lane] = max(waited_s, oldest_s.get((pool, lane), 0.0))
        return oldest_s


class Planner:
    def __init__(
        self,
        bus: Bus,
        region: str,
        catalogue: Catalogue,
        lanes: LaneStore,
        leases: LeaseWatcher,
        clock: Clock,
        *,
        valid_s: float,
        capacity: Capacity,
        params: Callable[[], DesiredParams] = DesiredParams,
        job_tokens: Callable[[str], float] = lambda pool: 0.0,
        fits: Callable[[], Mapping[tuple[str, Lane], tuple[EtaFit, EtaFit]]] = dict,
    ) -> None:
        """`job_tokens`: of a job of a pool on average, 0 where that is not known; `fits`: how earlier verdicts of a
        pool and lane compare with what came of them."""
        self.depths: dict[tuple[str, Lane], Depth] = {}
        self.ages = ReadyAges(clock)
        self.pending = False  # the last plan made says something that is not published yet
        self._region = region
        self._catalogue = catalogue
        self._lanes = lanes
        self._leases = leases
        self._clock = clock
        self._valid_s = valid_s
        self._fits = fits
        self._publisher = PlanPublisher(bus, region)
        self._homes = Homes(catalogue)
        self._capacity = capacity
        self._params = params
        self._job_tokens = job_tokens
        self._version = 0
        self._demand: Mapping[tuple[str, Lane], tuple[Demand, ...]] = {}
        self._near: Mapping[str, Sequence[tuple[str, float, float]]] = {}
        self._demand_due_s = float("-inf")  # monotonic
        self._published: Plan | None = None
        self._published_s = float("-inf")  # monotonic

    async def make(
        self,
        index: ParkIndex,
        epoch: int,
        paused: frozenset[Lane],
        near_limit: Callable[[], tuple[tuple[TenantDepth, ...], int]] = lambda: ((), 0),
    ) -> Plan:
        """The plan of this moment; `near_limit` as Sweeper has it. Raises a BusError."""
        by_home = await self._read_home_depths()
        self.depths = lane_totals(by_home)
        leases = self._leases.live()
        parked = {
            (pool, lane): Parked(index.count(pool, lane), index.device_s(pool, lane))
            for pool in index.pools()
            for lane in PARKING_LANES
        }
        self._read_demand(index)
        snapshot = Snapshot(
            leases=leases,
            depths=self.depths,
            parked=parked,
            demand=self._demand,
            near=self._near,
            outlook=self._capacity.observe(self.depths),
            job_tokens={pool.name: self._job_tokens(pool.name) for pool in self._catalogue.pools},
            oldest_wait_s=self.ages.oldest_by_lane_s(by_home),
            homes=self._homes.plans(by_home, leases, self.ages.oldest_s),
            paused=paused,
        )
        self._version += 1
        plan = make_plan(
            snapshot,
            self._catalogue,
            region=self._region,
            epoch=epoch,
            version=self._version,
            now_s=self._clock.now(),
            valid_s=self._valid_s,
            params=self._params(),
        )
        plan = self._capacity.calm(plan, self._params())
        tenants, sequence = near_limit()
        return with_fits(replace(plan, tenants=tenants, counted_before=sequence), self._fits())

    def rang(self, pool: str, lane: Lane, home: str) -> None:
        """A message became ready."""
        self.ages.rang(pool, lane, home)
        self._capacity.arrived(pool, lane)

    async def publish(self, plan: Plan, *, least_gap_s: float) -> None:
        """Publishes unless the last plan says the same and is still long valid, or is younger than `least_gap_s`: then
        the news is `pending`, and the caller comes back soon. Raises a BusError."""
        age_s = self._clock.monotonic() - self._published_s
        new = self._published is None or _essence(plan) != _essence(self._published)
        urgent = self._published is None or plan.paused != self._published.paused
        if urgent or age_s >= (least_gap_s if new else self._valid_s / 3):
            await self._publisher.publish(plan)
            self._published, self._published_s = plan, self._clock.monotonic()
            new = False
        self.pending = new

    def _read_demand(self, index: ParkIndex) -> None:
        """Parked work by due time; it is long where much is parked, and need not be young."""
        now_s = self._clock.monotonic()
        if now_s < self._demand_due_s:
            return
        unix_s = self._clock.now()
        keys = [(pool.name, lane) for pool in self._catalogue.pools for lane in PARKING_LANES]
        grains = {(pool, lane): index.demand(pool, [lane]) for pool, lane in keys}
        share = POINTS_MAX // max(1, sum(map(bool, grains.values())))
        self._demand = {key: demand_curve(each, unix_s, share) for key, each in grains.items()}
        self._near = {pool.name: index.near(pool.name, NEAR_JOBS) for pool in self._catalogue.pools}
        ended_s = self._clock.monotonic()
        self._demand_due_s = ended_s + (ended_s - now_s) / DEMAND_SHARE

    async def read_depths(self) -> dict[tuple[str, Lane], Depth]:
        """Of every pool and lane that has a consumer; what a missing one would say is unknown. Raises a BusError."""
        return lane_totals(await self._read_home_depths())

    async def _read_home_depths(self) -> HomeDepths:
        found = await asyncio.gather(*(self._lane_depths(lane) for lane in LANES))
        known = {pool.name for pool in self._catalogue.pools}
        return {
            (pool, lane, home): Depth(depth.ready, depth.running)
            for lane, depths in zip(LANES, found, strict=True)
            for (pool, home), depth in depths.items()
            if pool in known
        }

    async def _lane_depths(self, lane: Lane) -> Mapping[tuple[str, str], LaneDepth]:
        try:
            return await self._lanes.all_depths(lane)
        except ApiError:  # no such stream: not provisioned yet, or taken away
            return {}


def _essence(plan: Plan) -> Plan:
    """What readers act on; the age of waiting messages always grows and does not count, nor does what is hot."""
    pools = tuple(
        replace(
            pool,
            lanes=tuple(replace(lane, oldest_wait_s=0.0) for lane in pool.lanes),
            homes=tuple(replace(home, oldest_wait_s=0.0) for home in pool.homes),
            hot_prefixes=(),
        )
        for pool in plan.pools
    )
    return replace(plan, version=0, made_s=0.0, valid_until_s=0.0, counted_before=0, pools=pools)
