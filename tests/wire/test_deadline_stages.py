"""A deadline that strikes while a job is parked, ready, in its prefill or decoding: whoever ends it names the stage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.core import job as jobs
from laneway.core.errors import Code, DeadlineExceeded
from laneway.core.ids import new_job_id
from laneway.core.job import JobRecord
from laneway.core.lanes import JobState, Lane, Phase
from laneway.runtime.bus import Bus
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.clock import SYSTEM_RANDOM, SystemClock
from laneway.runtime.lanes import LaneStore
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.records import RecordStore, StoredRecord
from laneway.v1 import admission_pb2 as pb
from tests.support.admission import TENANT, error_of_call, gate
from tests.support.nats import REGION, connected, eventually, make_job, make_record, provision_region
from tests.support.scheduling import running_scheduler, scheduler_settings
from tests.support.worker import yard

STAGES = {"parked": Phase.QUEUE, "ready": Phase.QUEUE, "prefill": Phase.PREFILL, "decode": Phase.DECODE}
DEAD = "w-dead-1a"
LATE_S_MAX = 2.0


async def left(bus: Bus, stage: str, due_s: float) -> JobRecord:
    """A job in this stage that nobody works on any more."""
    records, lanes, now_s = RecordStore(bus), LaneStore(bus, REGION), SystemClock.now()
    lane = Lane.BATCH if stage == "parked" else Lane.PRIORITY
    job_id = new_job_id(REGION, now_s, SYSTEM_RANDOM.randbytes(10))
    record = make_record(job_id, lane, tenant=TENANT)
    record = replace(record, contract=replace(record.contract, deadline_s=now_s + due_s))
    sequence = await records.create(record)
    if stage == "parked":
        await lanes.park(make_job(record), sequence, fire_at_s=now_s + 300.0, group="g")
        return record
    await lanes.put_ready(make_job(record), sequence)
    if stage in ("prefill", "decode"):
        record = jobs.claim(record, DEAD, now_s)
        sequence = await records.update(record, sequence)
    if stage == "decode":  # as its record has it once the job goes on after an earlier attempt
        await records.update(jobs.set_start_index(record, DEAD, 1, 5), sequence)
    return record


async def ended(bus: Bus, record: JobRecord) -> JobRecord:
    async def there() -> StoredRecord | None:
        found = await RecordStore(bus).get(REGION, record.tenant, record.job_id, leader=True)
        return found if found is not None and found.record.state.terminal else None

    return (await eventually(there, timeout_s=20.0)).record


def check(record: JobRecord, phase: Phase, late_s_max: float = LATE_S_MAX) -> None:
    assert record.state is JobState.EXPIRED
    assert record.error is not None
    assert (record.error.code, record.error.reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
    assert record.error.phase is phase
    assert 0.0 <= record.timings.ended_s - record.contract.deadline_s <= late_s_max


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
async def test_a_doors_timer_names_the_stage(nats_server: LocalNats, tmp_path: Path, stage: str) -> None:
    async with gate(nats_server, tmp_path) as door:
        record = await left(door.bus, stage, 0.5)
        error = await error_of_call(door.stub.Watch(pb.WatchRequest(job_id=record.job_id)))
        assert isinstance(error, DeadlineExceeded)
        assert (error.phase, error.job_id) == (STAGES[stage], record.job_id)
        check(await ended(door.bus, record), STAGES[stage])


@pytest.mark.slow
async def test_the_schedulers_sweep_names_the_stage(nats_server: LocalNats) -> None:
    """It waits until nobody can be alive who would do it."""
    settings = scheduler_settings(nats_server)
    async with connected(nats_server) as bus:
        await provision_region(bus, catalogue_of(settings))
        async with running_scheduler(nats_server, settings):
            records = {stage: await left(bus, stage, 1.0) for stage in STAGES}
            for stage, record in records.items():
                check(await ended(bus, record), STAGES[stage], late_s_max=8.0)


@pytest.mark.slow
async def test_a_worker_names_the_stage(nats_server: LocalNats) -> None:
    """Parked and ready jobs come to it too late; of the others one has a long prompt, and one a long answer."""
    async with yard(nats_server, engine__prefill_chunk_tokens=1, engine__pace_s=0.01) as place:
        now_s = SystemClock.now()
        contract: dict[str, Any] = {"deadline_s": now_s + 0.5}
        parked = replace(make_record(lane=Lane.BATCH), tenant="acme")
        parked = replace(parked, contract=replace(parked.contract, **contract))
        sequence = await place.records.create(parked)
        await place.lanes.park(make_job(parked), sequence, fire_at_s=now_s + 0.6, group="g")
        ready = await place.submit(contract=contract)
        await asyncio.sleep(max(0.0, now_s + 0.6 - SystemClock.now()))
        await place.start_worker()
        contract = {"deadline_s": SystemClock.now() + 1.0}
        decode = await place.submit(prompt=b"ab", max_tokens=2000, contract=contract)
        prefill = await place.submit(prompt=bytes(1000), max_tokens=5, contract=contract)
        found = await place.ended(parked.job_id, *(each.record.job_id for each in (ready, prefill, decode)))
        for record, phase in zip(found, STAGES.values(), strict=True):
            late_s_max = 20.0 if phase is Phase.QUEUE else LATE_S_MAX  # no worker was there
            check(record, phase, late_s_max)
        assert [record.attempt for record in found] == [0, 0, 1, 1]


@pytest.mark.parametrize("stage", STAGES)
def test_a_record_knows_its_stage(stage: str) -> None:
    record = make_record()
    if stage in ("prefill", "decode"):
        record = jobs.claim(record, DEAD, 1.0)
    assert jobs.stage(record) is (Phase.PREFILL if stage == "decode" else STAGES[stage])
    if stage == "decode":
        for known in (
            jobs.set_start_index(record, DEAD, 1, 1),
            replace(record, checkpoint_index=1),
            replace(record, timings=replace(record.timings, first_token_s=1.0)),
        ):
            assert jobs.stage(known) is Phase.DECODE
