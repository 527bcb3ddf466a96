"""The scheduler against a real nats-server: release, hold, fire, races, takeover, pauses."""

import asyncio
from collections import Counter
from datetime import datetime

import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.errors import Code
from laneway.core.fleet import LanePlan, Plan, PoolPlan
from laneway.core.job import JobError, cancel, claim
from laneway.core.lanes import LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.parked import ParkIndex
from laneway.policy.release import ReleaseParams
from laneway.runtime.bus import Bus
from laneway.runtime.clock import SystemClock
from laneway.runtime.headers import SCHEDULE
from laneway.runtime.lanes import LaneStore
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.plans import NewerPlan, PlanPublisher, PlanView
from laneway.runtime.puller import LanePuller
from laneway.runtime.reading import last_message, subject_pages
from laneway.runtime.records import RecordStore
from laneway.runtime.wire.plans import encode_plan
from laneway.scheduler.decisions import DecisionLog
from laneway.scheduler.parking import Parking
from laneway.scheduler.releaser import Releaser
from laneway.scheduler.stagger import Staggerer
from tests.support.lanes import pulled
from tests.support.nats import POOL, REGION, connected, eventually, make_job, make_record
from tests.support.scheduling import (
    SLOTS,
    FakeWorker,
    park_job,
    parked_jobs,
    provision_for,
    ready_jobs,
    running_scheduler,
    scheduler_settings,
)

pytestmark = pytest.mark.wire


async def test_a_lane_whose_consumer_is_gone_is_unknown_and_not_empty(nats_server: LocalNats, bus: Bus) -> None:
    settings = scheduler_settings(nats_server)
    async with running_scheduler(nats_server, settings) as scheduler, FakeWorker(bus).alive() as worker:
        await worker.show(running=SLOTS)

        def known(lanes: set[Lane]) -> bool:
            read = {lane for _, lane in scheduler.lead.planner.depths} if scheduler.lead else set()
            return read == lanes

        await eventually(lambda: known(set(LANES)))
        name = subjects.consumer(Lane.PRIORITY, POOL)
        await bus.api(f"CONSUMER.DELETE.{subjects.lane_stream(REGION, Lane.PRIORITY)}.{name}", {})
        await eventually(lambda: known(set(LANES) - {Lane.PRIORITY}))

        def full() -> bool:
            plan = scheduler.plans.plan
            return plan is not None and plan.pool(POOL).slots == SLOTS and plan.pool(POOL).free_slots == 0

        await eventually(full)


async def test_parked_jobs_are_released_into_idle_places_and_held_when_the_pool_is_full(
    nats_server: LocalNats, bus: Bus
) -> None:
    settings = scheduler_settings(nats_server)
    async with running_scheduler(nats_server, settings) as scheduler:
        jobs = [(await park_job(bus, due_in_s=500.0 + i))[0].job_id for i in range(20)]
        await eventually(lambda: scheduler.lead and len(scheduler.lead.parking.index) == 20)
        assert await ready_jobs(bus) == {}, "without a worker all are held"
        async with FakeWorker(bus).alive() as worker:
            await eventually(lambda: scheduler.released[POOL, Lane.DEFERRABLE] >= 2 * SLOTS)
            # Four for the idle places and four that wait: the first eight by latest start.
            assert await ready_jobs(bus) == dict.fromkeys(jobs[:8], 1)
            puller = LanePuller(bus, REGION, Lane.DEFERRABLE, POOL)
            await puller.start()
            running = await pulled(puller, SLOTS)
            await worker.show(running=SLOTS)
            await eventually(lambda: scheduler.released[POOL, Lane.DEFERRABLE] == 8)
            look = scheduler.plans.plan
            await eventually(lambda: scheduler.plans.plan is not look)
            assert len(await parked_jobs(bus)) == 12, "the pool is full and four wait: the rest is held"
            for delivery in running:
                await delivery.ack()
            await worker.show(running=0)
            await eventually(lambda: scheduler.released[POOL, Lane.DEFERRABLE] == 12)
            await puller.close()
        plan = scheduler.plans.plan
        assert plan is not None
        assert plan.pool(POOL).lane(Lane.DEFERRABLE).parked_device_s > 0


async def test_a_job_parked_into_an_idle_pool_is_released_at_once(nats_server: LocalNats, bus: Bus) -> None:
    """By the bell: the scheduler looks at intervals of ten seconds only."""
    settings = scheduler_settings(nats_server, plan_interval_s=10.0, plan_valid_s=60.0)
    await provision_for(bus, settings)
    async with FakeWorker(bus).alive(), running_scheduler(nats_server, settings) as scheduler:
        await eventually(lambda: scheduler.plans.plan is not None and scheduler.plans.plan.pool(POOL).free_slots)
        record, _ = await park_job(bus)
        await eventually(lambda: scheduler.released[POOL, Lane.DEFERRABLE] == 1, timeout_s=8.0)
        assert await ready_jobs(bus) == {record.job_id: 1}
        assert scheduler.lead is not None
        assert len(scheduler.lead.parking.index) == 0
        (step,) = scheduler.decisions.of(record.job_id)
        assert (step.action, step.reason) == ("released", "IDLE_CAPACITY")


async def test_a_job_fires_at_its_time_without_any_scheduler(nats_server: LocalNats, bus: Bus) -> None:
    await provision_for(bus, scheduler_settings(nats_server))
    record, _ = await park_job(bus, fire_in_s=0.3)
    later, _ = await park_job(bus)
    await eventually(lambda: ready_jobs(bus))
    assert await ready_jobs(bus) == {record.job_id: 1}
    assert await parked_jobs(bus) == {later.job_id}


async def test_a_job_about_to_fire_is_left_to_nats_and_leaves_the_index_when_it_fires(
    nats_server: LocalNats, bus: Bus
) -> None:
    async with running_scheduler(nats_server, scheduler_settings(nats_server)) as scheduler:
        await eventually(lambda: scheduler.lead is not None)
        lead = scheduler.lead
        assert lead is not None
        record, _ = await park_job(bus, fire_in_s=1.5, due_in_s=1.5)
        await eventually(lambda: record.job_id in lead.parking.index and not lead.parking.index.awake(record.job_id))
        await eventually(lambda: len(lead.parking.index) == 0)
        assert await ready_jobs(bus) == {record.job_id: 1}
        assert scheduler.released[POOL, Lane.DEFERRABLE] == 0


@pytest.mark.parametrize("seed", range(3))
async def test_two_schedulers_that_both_believe_to_lead_release_each_job_once(
    nats_server: LocalNats, bus: Bus, seed: int
) -> None:
    await provision_for(bus, scheduler_settings(nats_server))
    parked = [(await park_job(bus))[0].job_id for _ in range(60)]
    pool = PoolPlan(POOL, workers=1, slots=100, free_slots=100, lanes=(LanePlan(Lane.DEFERRABLE),))
    plan = Plan(REGION, pools=(pool,))
    released, both = Counter[tuple[str, Lane]](), asyncio.Barrier(2)
    async with connected(nats_server, "a") as bus_a, connected(nats_server, "b") as bus_b:

        async def race(own: Bus) -> None:
            lanes, clock = LaneStore(own, REGION), SystemClock()
            parking = Parking(own, REGION, clock, lambda: None)
            releaser = Releaser(lanes, parking, DecisionLog(), clock, ReleaseParams, lambda: True, released)
            async with parking.watch(lambda pool, lane, home: None):
                await both.wait()
                await releaser.release(plan)

        await asyncio.gather(race(bus_a), race(bus_b))
    copies = await ready_jobs(bus)
    assert copies == dict.fromkeys(parked, 1)
    assert released[POOL, Lane.DEFERRABLE] == 60
    assert await parked_jobs(bus) == set()


async def test_a_standby_takes_over_when_the_leader_stops_renewing(nats_server: LocalNats, bus: Bus) -> None:
    settings = scheduler_settings(nats_server)
    async with running_scheduler(nats_server, settings, "first") as first:
        await eventually(lambda: first.plans.plan is not None)
        async with running_scheduler(nats_server, settings, "second") as second:
            epoch = first.leadership.epoch
            assert second.lead is None
            # As a process that hangs in its renewal: it neither renews nor resigns, and its other tasks go on.
            first.leadership._renew = asyncio.Event().wait  # type: ignore[method-assign,assignment]  # hangs
            await eventually(lambda: second.lead is not None)
            assert not first.leadership.held(), "the first gave up before the second took over"
            assert second.leadership.epoch > epoch
            plan = await eventually(lambda: second.plans.plan and second.plans.plan.epoch > epoch and second.plans.plan)
            assert second.plans.fresh()
            # A late plan of the first changes nothing for anyone who watches.
            late = replace(plan, epoch=epoch, version=10_000_000)
            with pytest.raises(NewerPlan):
                await PlanPublisher(bus, REGION).publish(late)
            await bus.store(subjects.plan_changes(REGION), encode_plan(late))
            view = PlanView(bus, REGION, SystemClock())
            await view.start()
            newer = await eventually(lambda: view.plan and view.plan.epoch > epoch and view.plan)
            assert newer.version < 10_000_000
            await view.close()
            async with FakeWorker(bus).alive():
                record, _ = await park_job(bus)
                await eventually(lambda: second.released[POOL, Lane.DEFERRABLE] == 1)
                assert await ready_jobs(bus) == {record.job_id: 1}
                assert not first.released, "a lost term releases nothing"
            assert first.plans.plan is not None
            assert first.plans.plan.epoch > epoch, "and publishes nothing"


async def test_a_leader_that_stops_hands_over_at_once(nats_server: LocalNats, bus: Bus) -> None:
    settings = scheduler_settings(nats_server, leader_ttl_s=600.0)
    async with running_scheduler(nats_server, settings, "second-to-be") as second:
        await eventually(lambda: second.lead is not None)
        async with running_scheduler(nats_server, settings, "third") as third:
            await eventually(lambda: third.plans.plan is not None)
            await second.leadership.resign()
            await eventually(lambda: third.leadership.held() or second.leadership.held())


async def test_what_was_parked_while_no_scheduler_listened_is_found(nats_server: LocalNats, bus: Bus) -> None:
    settings = scheduler_settings(nats_server)
    await provision_for(bus, settings)
    for lane in (Lane.DEFERRABLE, Lane.BATCH):
        await park_job(bus, lane=lane)
    async with running_scheduler(nats_server, settings) as scheduler:
        await eventually(lambda: scheduler.lead and len(scheduler.lead.parking.index) == 2)


async def test_the_index_is_mended_when_it_differs_twice_in_a_row(nats_server: LocalNats, bus: Bus) -> None:
    await provision_for(bus, scheduler_settings(nats_server))
    lanes = LaneStore(bus, REGION)
    changes: list[None] = []
    parking = Parking(bus, REGION, SystemClock(), lambda: changes.append(None))
    kept, _ = await park_job(bus)
    gone, gone_park = await park_job(bus)
    async with parking.watch(lambda pool, lane, home: None):
        assert len(parking.index) == 2
        await lanes.purge(gone)  # a cancelled job: nothing rings
        parking.forget(kept.job_id)  # and one that was forgotten
        parking.index.add(replace(gone_park, job=f"{REGION}-ghost"), now_ms=0)
        await parking.reconcile({})
        assert kept.job_id not in parking.index, "once may be a moment's difference"
        await parking.reconcile({})
        assert parking.index.jobs() == [kept.job_id]
        assert changes


async def test_jobs_that_a_new_list_does_not_have_leave_no_group_behind(nats_server: LocalNats, bus: Bus) -> None:
    """A job of a group that gathers may be cancelled: nothing rings, and nobody waits for it for good."""
    await provision_for(bus, scheduler_settings(nats_server))
    parking = Parking(bus, REGION, SystemClock(), lambda: None)
    _, park = await park_job(bus)
    async with parking.watch(lambda pool, lane, home: None):
        now_s, gathering = 1_000.0, parking.gathering
        parks = [replace(park, job=f"{REGION}-ghost{n}", due_ms=10_000_000_000, group="ghosts") for n in range(5)]
        for n, ghost in enumerate(parks):
            if n == 4:
                gathering.take(POOL, 1)
            parking.index.add(ghost, now_ms=0)
            gathering.arrived(ghost, now_s + n)
        assert gathering.together
        assert len(gathering) == 1
        for _ in range(2):
            await parking.reconcile({})
        assert (len(parking.index), len(gathering), gathering.together) == (1, 0, set())


async def test_a_stray_message_hides_no_parked_job(nats_server: LocalNats, bus: Bus) -> None:
    await provision_for(bus, scheduler_settings(nats_server))
    record, _ = await park_job(bus)
    for stray in ("x", "a.b.c.d.e.f.g", "a.b.not.numbers.at.all.c"):
        await bus.store(f"park.{REGION}.{Lane.DEFERRABLE}.{stray}", b"not a job")
    parking = Parking(bus, REGION, SystemClock(), lambda: None)
    async with parking.watch(lambda pool, lane, home: None):
        assert parking.index.jobs() == [record.job_id]


async def test_a_job_whose_release_was_called_off_stays_in_the_index(nats_server: LocalNats, bus: Bus) -> None:
    """A term may look lost for a moment, while its renewal is on its way."""
    await provision_for(bus, scheduler_settings(nats_server))
    record, _ = await park_job(bus)
    pool = PoolPlan(POOL, workers=1, slots=1, free_slots=1, lanes=(LanePlan(Lane.DEFERRABLE),))
    parking = Parking(bus, REGION, SystemClock(), lambda: None)
    released = Counter[tuple[str, Lane]]()
    lanes = LaneStore(bus, REGION)
    releaser = Releaser(lanes, parking, DecisionLog(), SystemClock(), ReleaseParams, lambda: False, released)
    async with parking.watch(lambda pool, lane, home: None):
        await releaser.release(Plan(REGION, pools=(pool,)))
        assert not released
        assert parking.index.jobs() == [record.job_id]


async def test_a_cancelled_job_leaves_the_index(nats_server: LocalNats, bus: Bus) -> None:
    """Its purge rings no bell; its record tells."""
    async with running_scheduler(nats_server, scheduler_settings(nats_server)) as scheduler:
        record, _ = await park_job(bus)
        await eventually(lambda: scheduler.lead and len(scheduler.lead.parking.index) == 1)
        error = JobError(Code.CANCELLED, "CANCELLED", "by its caller")
        await RecordStore(bus).change(REGION, record.tenant, record.job_id, lambda r: cancel(r, error, 1.0))
        await LaneStore(bus, REGION).purge(record)
        await eventually(lambda: scheduler.lead and len(scheduler.lead.parking.index) == 0)


async def test_a_paused_lane_releases_nothing_and_stays_paused_over_a_restart(nats_server: LocalNats, bus: Bus) -> None:
    settings = scheduler_settings(nats_server)
    async with running_scheduler(nats_server, settings) as scheduler:
        await scheduler.pauses.set(Lane.BATCH, True)
        await scheduler.pauses.set(Lane.BATCH, True)
        await eventually(lambda: scheduler.plans.plan and Lane.BATCH in scheduler.plans.plan.paused)
    async with FakeWorker(bus).alive(), running_scheduler(nats_server, settings) as scheduler:
        batch, _ = await park_job(bus, lane=Lane.BATCH)
        await park_job(bus, lane=Lane.DEFERRABLE)
        await eventually(lambda: scheduler.released[POOL, Lane.DEFERRABLE] == 1)
        assert await ready_jobs(bus, Lane.BATCH) == {}
        assert scheduler.decisions.of(batch.job_id)[0].reason == "LANE_PAUSED"
        await scheduler.pauses.set(Lane.BATCH, False)
        await eventually(lambda: scheduler.released[POOL, Lane.BATCH] == 1)
        plan = await eventually(
            lambda: scheduler.plans.plan and not scheduler.plans.plan.paused and scheduler.plans.plan
        )
        assert plan.paused == frozenset()


async def test_a_pause_by_another_scheduler_reaches_the_leader(nats_server: LocalNats, bus: Bus) -> None:
    settings = scheduler_settings(nats_server)
    async with running_scheduler(nats_server, settings, "one") as one:
        await eventually(lambda: one.lead is not None)
        async with running_scheduler(nats_server, settings, "two") as two:
            await two.pauses.set(Lane.DEFERRABLE, True)
            await eventually(lambda: one.pauses.lanes == {Lane.DEFERRABLE})


async def test_the_leader_carries_on_after_a_restart_of_nats(nats_server: LocalNats, bus: Bus) -> None:
    async with running_scheduler(nats_server, scheduler_settings(nats_server)) as scheduler:
        await eventually(lambda: scheduler.plans.plan is not None)
        held, _ = await park_job(bus)
        await nats_server.kill()
        await nats_server.restart()
        await bus.wait_connected(10.0)
        async with FakeWorker(bus).alive():
            await eventually(lambda: scheduler.released[POOL, Lane.DEFERRABLE] == 1, timeout_s=20.0)
        assert await ready_jobs(bus) == {held.job_id: 1}


async def test_a_job_released_after_it_was_claimed_elsewhere_is_gone(nats_server: LocalNats, bus: Bus) -> None:
    """A cancelled or claimed job whose park message is gone costs the scheduler one look."""
    await provision_for(bus, scheduler_settings(nats_server))
    record, park = await park_job(bus)
    records, lanes = RecordStore(bus), LaneStore(bus, REGION)
    await records.change(REGION, record.tenant, record.job_id, lambda r: claim(r, "w1", 1.0))
    await lanes.purge(record)
    parking = Parking(bus, REGION, SystemClock(), lambda: None)
    parking.index.add(park, now_ms=0)
    released = Counter[tuple[str, Lane]]()
    releaser = Releaser(lanes, parking, DecisionLog(), SystemClock(), ReleaseParams, lambda: True, released)
    await releaser.release(Plan(REGION, pools=(PoolPlan(POOL, workers=1, slots=4, free_slots=4),)))
    assert len(parking.index) == 0
    assert not released
    assert await ready_jobs(bus) == {}


async def test_fire_times_of_jobs_that_meet_are_moved_forward_once(nats_server: LocalNats, bus: Bus) -> None:
    """Three jobs of 0.12 device-seconds due together, a floor of 0.001: each needs two minutes."""
    await provision_for(bus, scheduler_settings(nats_server))
    parks = [(await park_job(bus, fire_in_s=500.0))[1] for _ in range(3)]
    index = ParkIndex(parks, now_ms=0)
    staggerer = Staggerer(LaneStore(bus, REGION), SystemClock(), lambda: True)
    before = await fire_times(bus, parks)
    assert await staggerer.stagger(index, POOL, floor_rate=0.001) == 2
    after = await fire_times(bus, parks)
    gained = sorted(round(b - a, 1) for b, a in zip(before, after, strict=True))
    assert gained[0] == 0.0
    assert gained[1:] == [pytest.approx(120.0, abs=1.0), pytest.approx(240.0, abs=1.0)]
    assert await staggerer.stagger(index, POOL, floor_rate=0.001) == 0
    assert await parked_jobs(bus) == {park.job for park in parks}


async def fire_times(bus: Bus, parks: list[ParkSubject]) -> list[float]:
    out: list[float] = []
    for park in parks:
        message = await last_message(bus, subjects.lane_stream(REGION, park.lane), str(park))
        assert message is not None
        out.append(datetime.fromisoformat(message.headers[SCHEDULE].removeprefix("@at ")).timestamp())
    return out


async def test_a_listing_in_chunks_counts_each_job_once(
    nats_server: LocalNats, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laneway.scheduler.parking.CHUNK", 300)
    await provision_for(bus, scheduler_settings(nats_server))
    lanes = LaneStore(bus, REGION)
    now_s = SystemClock().now()

    async def park(_: int) -> None:
        record = make_record(lane=Lane.BATCH, latest_start_s=now_s + 500.0)
        await lanes.park(make_job(record), 1, fire_at_s=now_s + 400.0, group="g")

    for _ in range(4):
        await asyncio.gather(*(park(i) for i in range(500)))
    parking = Parking(bus, REGION, SystemClock(), lambda: None)
    async with parking.watch(lambda pool, lane, home: None):
        await asyncio.gather(*(park(i) for i in range(20)))
        await eventually(lambda: len(parking.index) == 2020)


@pytest.mark.slow
async def test_a_list_longer_than_a_page_of_the_server_is_complete(bus: Bus) -> None:
    await bus.api(
        "STREAM.CREATE.MANY", {"name": "MANY", "subjects": ["many.*"], "storage": "memory", "max_bytes": 1 << 27}
    )
    count = 101_500
    for number in range(count):
        bus.nc.post(f"many.{number}", b"")
        if number % 5_000 == 0:
            await bus.flush()

    async def stored() -> bool:
        return bool((await bus.api("STREAM.INFO.MANY", {}))["state"]["messages"] == count)

    await eventually(stored, timeout_s=60.0)
    pages = [page async for page in subject_pages(bus, "MANY", "many.*")]
    assert len(pages) == 2
    assert {subject for page in pages for subject in page} == {f"many.{number}" for number in range(count)}
