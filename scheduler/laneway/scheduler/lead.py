"""What a scheduler does during one term: looks at the region, plans, releases, keeps its index right and sweeps.

A look happens at intervals, and at once when a job is parked, a lane is paused or resumed, or a worker changed. Every
act asks first whether the term still holds. Trouble with NATS is waited out; the term ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager

import structlog
from msgspec.structs import replace
from nats.aio.msg import Msg

from laneway.core import subjects
from laneway.core.catalogue import Catalogue
from laneway.core.clock import Clock
from laneway.core.fleet import Plan, PolicyVersion
from laneway.core.lanes import PARKING_LANES, Lane
from laneway.runtime import metrics
from laneway.runtime.bus import Bus, BusError, OutOfStorage
from laneway.runtime.lanes import LaneStore
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.live_policy import LivePolicy
from laneway.runtime.params import desired_params, release_params
from laneway.runtime.records import RecordStore
from laneway.runtime.settings import Settings
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.runtime.wire.records import decode_lease
from laneway.scheduler.calibration import Calibration
from laneway.scheduler.capacity import Capacity
from laneway.scheduler.decisions import DecisionLog
from laneway.scheduler.leader import Leadership
from laneway.scheduler.object_sweep import SWEEP_EVERY_S, ObjectSweep
from laneway.scheduler.parking import Parking
from laneway.scheduler.pauses import Pauses
from laneway.scheduler.planner import Planner
from laneway.scheduler.policy_reload import PolicyReload
from laneway.scheduler.policy_versions import PolicyVersions
from laneway.scheduler.releaser import Releaser
from laneway.scheduler.stagger import Staggerer
from laneway.scheduler.stranded import StrandedJobs
from laneway.scheduler.sweeps import Sweeper

LOOK_GAP_S = 0.02  # between two looks at least
LOOK_SHARE = 0.1  # of the time that looks may take, releases aside
QUIET_LOOK_S = 1.0  # between looks at a region where nothing waits or runs
RECONCILE_S = 15.0
RETRY_S = 0.5

_log = structlog.get_logger(__name__)


class Lead:
    """One term. `run` once; the attributes may be read meanwhile. `lists`: a connection for what would hold up others
    on the same one. `before`: the newest plan of the term before."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        catalogue: Catalogue,
        clock: Clock,
        *,
        lists: Bus,
        leadership: Leadership,
        leases: LeaseWatcher,
        pauses: Pauses,
        records: RecordStore,
        decisions: DecisionLog,
        released: Counter[tuple[str, Lane]],
        look_now: asyncio.Event,
        before: Plan | None = None,
        policy: LivePolicy,
        reload: PolicyReload | None = None,
    ) -> None:
        region, own = settings.region.name, settings.scheduler
        self.plan: Plan | None = None
        self._bus = bus
        self._region = region
        self._clock = clock
        self._leadership = leadership
        self._pauses = pauses
        self._look_now = look_now
        self._interval_s = own.plan_interval_s
        self._policy = policy
        published = before.policy if before is not None else PolicyVersion()
        self._versions = PolicyVersions(policy, clock, published, reload)
        self._limits = settings.admission.tenant_jobs_max.by_lane
        self._planning_s = 0.0  # of the last look
        self._workers: dict[str, tuple[object, ...]] = {}
        may_act = leadership.held
        lanes = LaneStore(bus, region)
        params = policy.derive(lambda values: release_params(values, own.plan_interval_s))
        self.parking = Parking(bus, region, clock, look_now.set, lists)
        self.capacity = Capacity(catalogue, clock, before)
        self.releaser = Releaser(
            lanes, self.parking, decisions, clock, params, may_act, released,
            leases=leases.live, forecasts=self.capacity.forecasts,
        )  # fmt: skip
        calibration = Calibration((pool.name for pool in catalogue.pools), before)
        self.planner = Planner(
            bus, region, catalogue, lanes, leases, clock, valid_s=own.plan_valid_s, fits=calibration.fits,
            capacity=self.capacity, params=policy.derive(desired_params), job_tokens=self.releaser.job_tokens,
        )  # fmt: skip
        self.sweeper = Sweeper(
            bus, region, records, lanes, leases, clock,
            parked=self.parking.index.get, ended=self.parking.forget, may_act=may_act, interval_s=own.sweep_s,
            lists=lists, before=before, outcome=calibration.heard, spent=self.releaser.ledger.ended,
        )  # fmt: skip
        self._object_sweep = ObjectSweep(bus, region, clock, may_act=may_act, lists=lists)
        self._staggerer = Staggerer(lanes, clock, may_act)
        # By the other connection: it reads whole messages, each as large as its prompt.
        self._stranded = StrandedJobs(LaneStore(lists, region), self.parking.index, self.releaser, clock, may_act)
        self.releaser.on_stranded = self._stranded.suspect

    async def run(self) -> None:
        """Until cancelled. Raises a BusError when the index cannot be built."""
        async with self.parking.watch(self.planner.rang), self._watching_workers():
            with self._gauges():
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._looks())
                    group.create_task(self._persist(self._reconcile, RECONCILE_S))
                    group.create_task(self._persist(self.sweeper.follow, RETRY_S))
                    group.create_task(self.sweeper.run())
                    group.create_task(self._stranded.run())
                    group.create_task(self._persist(self._object_sweep.sweep, SWEEP_EVERY_S))

    async def _looks(self) -> None:
        while True:
            self._look_now.clear()
            try:
                await self.look()
            except* BusError as group:
                if group.subgroup(OutOfStorage):
                    self._stranded.suspect()
                _log.warning("look_failed", error=str(group.exceptions[0]))
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(max(LOOK_GAP_S, min(self._interval_s, self._planning_s / LOOK_SHARE)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._look_now.wait()

    async def look(self) -> None:
        """One look: plan, publish, release. Raises a BusError."""
        began_s = self._clock.monotonic()
        index, epoch, paused = self.parking.index, self._leadership.epoch, self._pauses.lanes
        plan = await self.planner.make(index, epoch, paused, lambda: self.sweeper.near_limit(self._limits))
        self.plan = plan = replace(plan, policy=self._versions.now())
        if self._leadership.held():
            await self.planner.publish(plan, least_gap_s=self._interval_s)
        self._planning_s = self._clock.monotonic() - began_s
        if self._leadership.held() and await self.releaser.release(plan):
            self._look_now.set()

    def _pause_s(self) -> float:
        index, depths = self.parking.index, self.planner.depths.values()
        busy = self.planner.pending or len(index) or any(depth.ready or depth.running for depth in depths)
        pause_s = self._interval_s if busy else max(self._interval_s, QUIET_LOOK_S)
        wake_ms = index.next_wake_ms()
        return pause_s if wake_ms is None else max(0.0, min(pause_s, wake_ms / 1000.0 - self._clock.now()))

    async def _persist(self, act: Callable[[], Awaitable[None]], again_s: float) -> None:
        """Acts again and again, also after trouble with NATS."""
        while True:
            try:
                await act()
            except BusError as error:
                _log.warning("lead_task_failed", task=getattr(act, "__name__", ""), error=error.message)
            await asyncio.sleep(again_s)

    async def _reconcile(self) -> None:
        await self._pauses.refresh()
        await self.parking.reconcile(await self.planner.read_depths())
        for pool in self.plan.pools if self.plan else ():
            floor_rate = self._policy.settings.lower_lane_floor * max(1, pool.workers)
            await self._staggerer.stagger(self.parking.index, pool.pool, floor_rate=floor_rate)

    # --- workers -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _watching_workers(self) -> AsyncIterator[None]:
        """Looks at once when a worker comes, goes, changes its state or runs more or less than before."""
        bucket = subjects.workers_bucket(self._region)
        subscription = await self._bus.listen(subjects.kv_subject(bucket, ">"), self._worker_heard)
        try:
            yield
        finally:
            await self._bus.unsubscribe(subscription)

    def _worker_heard(self, msg: Msg) -> None:
        worker_id = msg.subject.rsplit(".", 1)[1]
        facts: tuple[object, ...] = ()
        if msg.data:
            try:
                lease = decode_lease(msg.data)
            except UnreadableMessage:
                return  # the lease watcher says so
            facts = (lease.state, lease.slots, lease.running)
        if facts != self._workers.pop(worker_id, None):
            self._look_now.set()
        if facts:
            self._workers[worker_id] = facts
            while len(self._workers) > 10_000:  # incarnations that are long gone
                self._workers.pop(next(iter(self._workers)))

    # --- metrics -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _gauges(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(
                metrics.live_gauge(
                    "laneway_scheduler_parked_jobs", "Parked jobs.", ("lane", "pool"), self._parked_samples
                )
            )
            stack.enter_context(
                metrics.live_gauge("laneway_scheduler_desired_workers", "Wanted.", ("pool",), self._desired_samples)
            )
            yield

    def _parked_samples(self) -> list[metrics.Sample]:
        plan = self.plan
        return [
            ({"lane": lane.value, "pool": pool.pool}, float(pool.lane(lane).parked))
            for pool in (plan.pools if plan else ())
            for lane in PARKING_LANES
        ]

    def _desired_samples(self) -> list[metrics.Sample]:
        plan = self.plan
        return [({"pool": pool.pool}, float(pool.desired_workers)) for pool in (plan.pools if plan else ())]
