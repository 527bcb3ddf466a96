"""The scheduler ends what nobody else will: overdue jobs, and jobs whose lane message was never stored."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.job import JobRecord, claim
from laneway.core.lanes import JobState, Lane
from laneway.runtime.bus import Bus
from laneway.runtime.clock import SystemClock
from laneway.runtime.lanes import LaneStore
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.records import RecordStore
from laneway.runtime.wire.records import decode_record
from laneway.scheduler.sweeps import LOOK_AFTER_S, Sweeper
from laneway.v1 import bus_pb2, common_pb2
from tests.support.nats import REGION, eventually, make_job, make_record
from tests.support.scheduling import (
    FakeWorker,
    park_job,
    parked_jobs,
    provision_for,
    ready_jobs,
    running_scheduler,
    scheduler_settings,
)

pytestmark = pytest.mark.wire


class ShiftedClock(Clock):
    """The real time, ahead by as much as the test says."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._clock = SystemClock()

    def now(self) -> float:
        return self._clock.now() + self.ahead_s

    def monotonic(self) -> float:
        return self._clock.monotonic() + self.ahead_s


@asynccontextmanager
async def sweeper(bus: Bus, clock: Clock) -> AsyncIterator[Sweeper]:
    leases = LeaseWatcher(bus, REGION, SystemClock())
    await leases.start()
    sweep = Sweeper(
        bus, REGION, RecordStore(bus), LaneStore(bus, REGION), leases, clock,
        parked=lambda job: None, ended=lambda job: None, may_act=lambda: True, interval_s=60.0,
    )  # fmt: skip
    follow = asyncio.ensure_future(sweep.follow())
    try:
        yield sweep
    finally:
        follow.cancel()
        await asyncio.gather(follow, return_exceptions=True)
        await leases.close()


@pytest.fixture
async def region(nats_server: LocalNats, bus: Bus) -> Bus:
    await provision_for(bus, scheduler_settings(nats_server))
    return bus


async def state_of(bus: Bus, record: JobRecord) -> JobState:
    stored = await RecordStore(bus).get(REGION, record.tenant, record.job_id)
    assert stored is not None
    return stored.record.state


async def accepted(bus: Bus, **changes) -> JobRecord:
    """A record and its ready message."""
    record = make_record(**changes)
    await LaneStore(bus, REGION).put_ready(make_job(record), await RecordStore(bus).create(record))
    return record


async def test_jobs_that_waited_past_their_deadline_are_expired_and_leave_their_lanes(
    nats_server: LocalNats, region: Bus
) -> None:
    """With the whole scheduler, no worker, and deadlines that come soon."""
    events: list[bus_pb2.JobEvent] = []
    await region.listen(subjects.events(REGION), lambda msg: events.append(bus_pb2.JobEvent.FromString(msg.data)))
    now_s = SystemClock().now()
    soon = replace(make_record(lane=Lane.DEFERRABLE).contract, deadline_s=round(now_s + 0.2, 3))
    async with running_scheduler(nats_server, scheduler_settings(nats_server)) as scheduler:
        parked, _ = await park_job(region, contract=soon, fire_in_s=300.0, due_in_s=300.0)
        ready = await accepted(region, contract=replace(soon, lane=Lane.PRIORITY))
        other = await accepted(region)
        await eventually(lambda: len(events) == 2)
        assert await state_of(region, parked) is JobState.EXPIRED
        assert await state_of(region, ready) is JobState.EXPIRED
        assert await state_of(region, other) is JobState.WAITING
        assert await parked_jobs(region) == set()
        assert await ready_jobs(region, Lane.PRIORITY) == {other.job_id: 1}
        assert {e.job_id for e in events} == {parked.job_id, ready.job_id}
        assert all(e.state == common_pb2.JOB_STATE_EXPIRED for e in events)
        record = decode_record(events[0].record)
        assert record.error is not None
        assert (record.error.reason, record.error.phase) == ("DEADLINE_EXCEEDED", "queue")
        await eventually(lambda: scheduler.lead is not None and len(scheduler.lead.sweeper.open) == 1)


async def test_a_running_job_is_left_to_its_living_owner_for_a_while(region: Bus) -> None:
    clock = ShiftedClock()
    hints: list[bus_pb2.WorkerControl] = []
    await region.listen("ctl.*", lambda msg: hints.append(bus_pb2.WorkerControl.FromString(msg.data)))
    async with FakeWorker(region).alive() as worker, sweeper(region, clock) as sweep:
        owned = await accepted(region)
        await RecordStore(region).change(
            REGION, owned.tenant, owned.job_id, lambda r: claim(r, worker.lease.worker_id, 1.0)
        )
        orphan = await accepted(region)
        await RecordStore(region).change(REGION, orphan.tenant, orphan.job_id, lambda r: claim(r, "long-dead", 1.0))
        await eventually(lambda: len(sweep.open) == 2)
        await eventually(lambda: sweep._leases.alive("long-dead") is False)
        clock.ahead_s = 603.0
        await sweep.sweep()
        assert await state_of(region, owned) is JobState.RUNNING
        assert await state_of(region, orphan) is JobState.EXPIRED
        clock.ahead_s = 615.0
        await sweep.sweep()
        assert await state_of(region, owned) is JobState.EXPIRED
        await eventually(lambda: owned.job_id in {hint.cancel.job_id for hint in hints})
        assert await ready_jobs(region, Lane.PRIORITY) == {}


async def test_a_record_without_a_lane_message_is_ended_after_publish_by(region: Bus) -> None:
    clock = ShiftedClock()
    now_s = SystemClock().now()
    records = RecordStore(region)
    lost = make_record(publish_by_s=now_s + 10.0)
    slow = make_record(publish_by_s=now_s + 60.0)
    for record in (lost, slow):
        await records.create(record)
    ready = await accepted(region, publish_by_s=now_s + 10.0)
    parked, _ = await park_job(region, publish_by_s=now_s + 10.0)
    async with sweeper(region, clock) as sweep:
        await eventually(lambda: len(sweep.open) == 4)
        clock.ahead_s = 8.0
        await sweep.sweep()
        assert await state_of(region, lost) is JobState.WAITING
        clock.ahead_s = LOOK_AFTER_S + 1.0
        await sweep.sweep()
        assert await state_of(region, lost) is JobState.CANCELLED
        for record in (slow, ready, parked):
            assert await state_of(region, record) is JobState.WAITING
        stored = await records.get(REGION, lost.tenant, lost.job_id)
        assert stored is not None
        assert stored.record.error is not None
        assert stored.record.error.reason == "NOT_ACCEPTED"
        clock.ahead_s = 70.0
        await sweep.sweep()
        assert await state_of(region, slow) is JobState.CANCELLED
        for record in (ready, parked):
            assert await state_of(region, record) is JobState.WAITING


async def test_a_claimed_job_without_a_lane_message_is_not_ended(region: Bus) -> None:
    clock = ShiftedClock()
    records = RecordStore(region)
    record = make_record(publish_by_s=SystemClock().now())
    await records.create(record)
    async with sweeper(region, clock) as sweep:
        await eventually(lambda: len(sweep.open) == 1)
        clock.ahead_s = 30.0
        # The claim lands after the sweep found the job, before it acts.
        await records.change(REGION, record.tenant, record.job_id, lambda r: claim(r, "w1", 1.0))
        await sweep.sweep()
        assert await state_of(region, record) is JobState.RUNNING


async def test_a_crowd_that_timed_out_leaves_nothing_behind(nats_server: LocalNats, region: Bus) -> None:
    """No worker, many jobs with a deadline that passes, then a worker and one job: it does not wait behind orphans."""
    now_s = SystemClock().now()
    contract = replace(make_record(lane=Lane.BATCH).contract, deadline_s=round(now_s + 1.0, 3))
    crowd = [
        (await park_job(region, lane=Lane.BATCH, contract=contract, fire_in_s=600.0, due_in_s=600.0))[0]
        for _ in range(150)
    ]
    async with running_scheduler(nats_server, scheduler_settings(nats_server)) as scheduler:

        async def all_expired() -> bool:
            return not await parked_jobs(region, Lane.BATCH)

        await eventually(all_expired)
        assert {await state_of(region, record) for record in crowd} == {JobState.EXPIRED}
        async with FakeWorker(region).alive():
            record, _ = await park_job(region, lane=Lane.BATCH)
            await eventually(lambda: scheduler.released[record.pool, Lane.BATCH] == 1)
            assert await ready_jobs(region, Lane.BATCH) == {record.job_id: 1}


async def test_one_sweep_ends_a_crowd_of_any_size_and_leaves_what_is_not_due(
    region: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laneway.scheduler.sweeps.SWEEP_MAX", 10)
    clock = ShiftedClock()
    records = RecordStore(region)
    crowd = [make_record() for _ in range(45)]
    later = make_record(contract=replace(crowd[0].contract, deadline_s=crowd[0].contract.deadline_s + 3600.0))
    for record in (*crowd, later):
        await records.create(record)
    async with sweeper(region, clock) as sweep:
        await eventually(lambda: len(sweep.open) == 46)
        clock.ahead_s = 620.0
        await sweep.sweep()
        assert {await state_of(region, record) for record in crowd} == {JobState.EXPIRED}
        assert len(sweep.open) <= 1
        assert await state_of(region, later) is not JobState.EXPIRED
