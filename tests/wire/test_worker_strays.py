"""Messages and records that a worker cannot read, and messages that are no jobs: they cost nobody anything."""

from __future__ import annotations

from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.lanes import JobState, Lane
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.wire.records import encode_lane_job
from tests.support.nats import REGION, eventually, make_job, make_record
from tests.support.worker import Yard, yard


async def still_serves(place: Yard) -> None:
    assert not place.workers[0].task.done(), "the worker ended"
    stored = await place.submit()
    (record,) = await place.ended(stored.record.job_id)
    assert record.state is JobState.SUCCEEDED
    assert await eventually(place.workers[0].idle)


async def test_a_record_that_cannot_be_read_ends_no_worker(nats_server: LocalNats):
    """As a later release may have written it, with a lane message of this release and with one of its own."""
    async with yard(nats_server, workers=1) as place:
        readable = make_record("local-foreign-record")
        both = make_record("local-foreign-both")
        for record, message in ((readable, None), (both, b"\xff\xff of a later release")):
            await place.bus.store(subjects.record(REGION, record.tenant, record.job_id), b"\xff\xff of a later release")
            job = replace(make_job(record), record=replace(record, attempt=1))  # claimed before: the record is read
            subject = subjects.ready(REGION, Lane.PRIORITY, record.pool, record.tenant, record.job_id)
            await place.bus.store(subject, encode_lane_job(job) if message is None else message)

        async def all_delivered() -> bool:
            info = await place.bus.api(
                f"CONSUMER.INFO.{subjects.lane_stream(REGION, Lane.PRIORITY)}"
                f".{subjects.consumer(Lane.PRIORITY, readable.pool)}",
                {},
            )
            return bool(info["delivered"]["consumer_seq"] >= 2)

        await eventually(all_delivered)
        await still_serves(place)

        async def both_are_left() -> bool:  # the acknowledgement of the other is on its way
            return await place.messages(Lane.PRIORITY) == 2

        assert await eventually(both_are_left), "nobody may end what nobody could read"


async def test_a_record_that_becomes_unreadable_under_a_run_takes_the_job_away_and_no_more(nats_server: LocalNats):
    async with yard(nats_server, workers=1, engine__pace_s=0.01) as place:
        stored = await place.submit(max_tokens=50)
        record = stored.record

        async def runs() -> bool:
            return (await place.record(record.job_id)).state is JobState.RUNNING

        await eventually(runs)
        await place.bus.store(subjects.record(REGION, record.tenant, record.job_id), b"\xff\xff of a later release")
        await eventually(place.workers[0].idle)
        await still_serves(place)


async def test_a_stray_message_in_a_lane_ends_no_worker(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place:
        pool = make_record().pool
        for stray in ("x", "a.b.c", "a.b.c.d"):
            await place.bus.store(f"lane.{REGION}.priority.{pool}.any.{stray}", b"\xff\xff not a job")
        await eventually(place.lanes_empty)
        await still_serves(place)
