"""Gathers what a plan is made from (leases, lane depths, parked work, pauses) and publishes plans of one term."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from laneway.core.catalogue import Catalogue
from laneway.core.clock import Clock
from laneway.core.fleet import Plan, TenantDepth
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.policy.parked import ParkIndex
from laneway.policy.plan import Depth, Parked, Snapshot, make_plan
from laneway.runtime.bus import ApiError, Bus
from laneway.runtime.lanes import LaneStore
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.plans import PlanPublisher

DEMAND_AGE_S = 1.0
WAITS_MAX = 100_000  # ready messages of a pool and lane whose age is known


class ReadyAges:
    """How long the oldest ready message of a lane has waited, from the bells: messages are pulled in their order, so
    the last `ready` ones that rang are those that wait."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rang_s: dict[tuple[str, Lane], deque[float]] = {}

    def rang(self, pool: str, lane: Lane) -> None:
        self._rang_s.setdefault((pool, lane), deque(maxlen=WAITS_MAX)).append(self._clock.monotonic())

    def oldest_s(self, pool: str, lane: Lane, ready: int) -> float:
        rang_s = self._rang_s.get((pool, lane))
        if rang_s is None:
            return 0.0
        while len(rang_s) > ready:
            rang_s.popleft()
        return self._clock.monotonic() - rang_s[0] if rang_s else 0.0


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
    ) -> None:
        self.depths: dict[tuple[str, Lane], Depth] = {}
        self.ages = ReadyAges(clock)
        self.pending = False  # the last plan made says something that is not published yet
        self._region = region
        self._catalogue = catalogue
        self._lanes = lanes
        self._leases = leases
        self._clock = clock
        self._valid_s = valid_s
        self._publisher = PlanPublisher(bus, region)
        self._version = 0
        self._demand: Mapping[str, Sequence[tuple[float, float]]] = {}
        self._demand_s = float("-inf")  # monotonic
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
        self.depths = await self.read_depths()
        parked = {
            (pool, lane): Parked(index.count(pool, lane), index.device_s(pool, lane))
            for pool in index.pools()
            for lane in PARKING_LANES
        }
        snapshot = Snapshot(
            leases=self._leases.live(),
            depths=self.depths,
            parked=parked,
            demand=self._demand_of(index),
            oldest_wait_s={key: self.ages.oldest_s(*key, depth.ready) for key, depth in self.depths.items()},
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
        )
        tenants, sequence = near_limit()
        return replace(plan, tenants=tenants, counted_before=sequence)

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

    def _demand_of(self, index: ParkIndex) -> Mapping[str, Sequence[tuple[float, float]]]:
        """Parked work by due time; it is long where much is parked, and need not be young."""
        now_s = self._clock.monotonic()
        if now_s - self._demand_s >= DEMAND_AGE_S:
            self._demand = {pool.name: index.demand(pool.name, PARKING_LANES) for pool in self._catalogue.pools}
            self._demand_s = now_s
        return self._demand

    async def read_depths(self) -> dict[tuple[str, Lane], Depth]:
        """Of every pool and lane that has a consumer; what a missing one would say is unknown. Raises a BusError."""
        keys = [(pool.name, lane) for pool in self._catalogue.pools for lane in LANES]
        depths = await asyncio.gather(*(self._depth(pool, lane) for pool, lane in keys))
        return {key: depth for key, depth in zip(keys, depths, strict=True) if depth is not None}

    async def _depth(self, pool: str, lane: Lane) -> Depth | None:
        try:
            depth = await self._lanes.depths(lane, pool)
        except ApiError:  # no such consumer: not provisioned yet, or taken away
            return None
        return Depth(depth.ready, depth.running)


def _essence(plan: Plan) -> Plan:
    """What readers act on; the age of waiting messages always grows and does not count."""
    pools = tuple(
        replace(pool, lanes=tuple(replace(lane, oldest_wait_s=0.0) for lane in pool.lanes)) for pool in plan.pools
    )
    return replace(plan, version=0, made_s=0.0, valid_until_s=0.0, counted_before=0, pools=pools)
