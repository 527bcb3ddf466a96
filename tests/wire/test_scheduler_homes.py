"""Home slots in the plan: who serves them, what waits in them, and that it stays so when workers or leaders change."""

from __future__ import annotations

from msgspec.structs import replace

from laneway.core.fleet import HomePlan, PoolPlan, WorkerState
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus
from laneway.runtime.lanes import LaneStore
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.puller import LanePuller
from laneway.runtime.settings import Settings
from laneway.scheduler.loop import Scheduler
from tests.support.lanes import pulled
from tests.support.nats import POOL, REGION, eventually, make_job, make_record
from tests.support.scheduling import FakeWorker, provision_for, running_scheduler, scheduler_settings


def two_homes(server: LocalNats, **scheduler: float) -> Settings:
    settings = scheduler_settings(server, **scheduler)
    return replace(settings, models=(replace(settings.models[0], workers=2, home_slots=2),))


def homely(bus: Bus, name: str) -> FakeWorker:
    """A worker of a release that knows home slots."""
    worker = FakeWorker(bus, name)
    worker.lease = replace(worker.lease, theta=0.8)
    return worker


def pool_of(scheduler: Scheduler) -> PoolPlan:
    return scheduler.plans.plan.pool(POOL) if scheduler.plans.plan is not None else PoolPlan(POOL)


async def serves(scheduler: Scheduler, *workers: str) -> None:
    """Waits until the homes in turn are served by these."""
    await eventually(lambda: tuple(home.worker_id for home in pool_of(scheduler).homes) == workers)


async def test_each_ready_worker_serves_a_home_and_a_dead_one_none(nats_server: LocalNats, bus: Bus) -> None:
    async with running_scheduler(nats_server, two_homes(nats_server)) as scheduler:
        await serves(scheduler, "", "")
        first, second = homely(bus, "a"), homely(bus, "b")
        async with first.alive():
            async with second.alive():
                await serves(scheduler, "a-1a", "b-1a")
                await second.show(state=WorkerState.DRAINING)
                await serves(scheduler, "a-1a", "")
            await second.keeper.release()
            again = homely(bus, "b")
            again.lease = replace(again.lease, worker_id="b-2b")
            async with again.alive():
                await serves(scheduler, "a-1a", "b-2b")


async def test_a_worker_of_a_release_before_homes_serves_none(nats_server: LocalNats, bus: Bus) -> None:
    """It takes jobs of `any` alone, and what went to its home would wait for a worker that steals."""
    async with running_scheduler(nats_server, two_homes(nats_server)) as scheduler, FakeWorker(bus, "old").alive():
        await eventually(lambda: pool_of(scheduler).workers == 1)
        assert [home.worker_id for home in pool_of(scheduler).homes] == ["", ""]
        async with homely(bus, "a").alive():
            await serves(scheduler, "a-1a", "")


async def test_the_plan_shows_what_waits_and_runs_in_each_home_and_lanes_are_their_sums(
    nats_server: LocalNats, bus: Bus
) -> None:
    async with running_scheduler(nats_server, two_homes(nats_server)) as scheduler:
        await serves(scheduler, "", "")
        lanes = LaneStore(bus, REGION)
        for lane, home in ((Lane.PRIORITY, "h1"), (Lane.BATCH, "h1"), (Lane.BATCH, "h1"), (Lane.BATCH, "")):
            await lanes.put_ready(make_job(make_record(lane=lane, home=home)), 1)
        async with LanePuller(bus, REGION, Lane.BATCH, POOL, "h1") as puller:
            await pulled(puller, 1)

            def counted() -> bool:
                pool = pool_of(scheduler)
                homes = tuple(replace(home, oldest_wait_s=0.0) for home in pool.homes)
                batch = pool.lane(Lane.BATCH)
                return homes == (HomePlan("h0"), HomePlan("h1", ready=2, running=1)) and (
                    (batch.ready, batch.running) == (2, 1)
                )

            await eventually(counted)

            def waited_s() -> list[float]:  # by the plan as it is made: one that says nothing else is not published
                made = scheduler.lead.plan if scheduler.lead is not None else None
                return [home.oldest_wait_s for home in made.pool(POOL).homes] if made is not None else [0.0, 0.0]

            await eventually(lambda: waited_s()[1] > 0.05)
            assert waited_s()[0] == 0.0


async def test_assignments_outlive_their_leader(nats_server: LocalNats, bus: Bus) -> None:
    first, second = homely(bus, "a"), homely(bus, "b")
    first.lease, second.lease = replace(first.lease, home="h1"), replace(second.lease, home="h0")
    await provision_for(bus, two_homes(nats_server))
    async with first.alive(), second.alive(), running_scheduler(nats_server, two_homes(nats_server)) as scheduler:
        await serves(scheduler, "b-1a", "a-1a")


async def test_a_pool_of_one_worker_has_no_homes(nats_server: LocalNats, bus: Bus) -> None:
    async with running_scheduler(nats_server, scheduler_settings(nats_server)) as scheduler, FakeWorker(bus).alive():
        await eventually(lambda: pool_of(scheduler).workers)
        assert pool_of(scheduler).homes == ()


async def test_jobs_left_in_a_home_that_the_catalogue_has_no_more_are_shown_as_nobodys(
    nats_server: LocalNats, bus: Bus
) -> None:
    settings = two_homes(nats_server)
    async with running_scheduler(nats_server, settings):
        await LaneStore(bus, REGION).put_ready(make_job(make_record(home="h1")), 1)
    fewer = replace(settings, models=(replace(settings.models[0], home_slots=0),))
    async with running_scheduler(nats_server, fewer) as scheduler, FakeWorker(bus).alive():
        await eventually(lambda: pool_of(scheduler).workers)
        await eventually(lambda: pool_of(scheduler).homes == (HomePlan("h1", ready=1),))


async def test_the_hot_prefixes_of_workers_are_in_the_plan(nats_server: LocalNats, bus: Bus) -> None:
    async with running_scheduler(nats_server, two_homes(nats_server)) as scheduler:
        worker = homely(bus, "a")
        worker.lease = replace(worker.lease, hot_prefixes=(7, 2**63))
        async with worker.alive():
            await eventually(lambda: pool_of(scheduler).hot_prefixes == (7, 2**63))
