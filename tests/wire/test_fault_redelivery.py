"""The time until a job is delivered again neither doubles work that goes on nor loses work that stopped."""

import pytest

from laneway.core import subjects
from laneway.core.lanes import JobState, Lane
from laneway.runtime.local_nats import LocalNats
from tests.support.nats import POOL, REGION, eventually
from tests.support.worker import ByteDoor, Yard, yard


async def deliveries(place: Yard) -> int:
    """How many messages the priority lane has delivered, repetitions included."""
    stream, consumer = subjects.lane_stream(REGION, Lane.PRIORITY), subjects.consumer(Lane.PRIORITY, POOL)
    return int((await place.bus.api(f"CONSUMER.INFO.{stream}.{consumer}", {}))["delivered"]["consumer_seq"])


async def test_a_job_that_runs_longer_than_the_ack_wait_is_delivered_once(nats_server: LocalNats):
    async with yard(nats_server, workers=1, engine__pace_s=0.01, nats__ack_wait_priority_s=1.0) as place:
        stored = await place.submit(max_tokens=170)  # 1.7 s or more
        (record,) = await place.ended(stored.record.job_id)
        assert (record.state, record.attempt) == (JobState.SUCCEEDED, 1)
        assert record.timings.ended_s - record.timings.claimed_s > 1.5, "it would have been delivered again"
        assert await deliveries(place) == 1
        assert await eventually(place.lanes_empty)


@pytest.mark.slow
async def test_a_worker_that_dies_between_claim_and_first_token_leaves_nobody_waiting(nats_server: LocalNats):
    async with (
        yard(nats_server, engine__pace_s=0.15, nats__ack_wait_priority_s=1.0) as place,
        ByteDoor(place.bus) as door,
    ):
        doomed = await place.start_worker("doomed")
        stored = await place.submit(caller_at=door, prompt=bytes(3000), max_tokens=3)  # six steps of prefill
        job_id = stored.record.job_id

        async def claimed() -> bool:
            return (await place.record(job_id)).state is JobState.RUNNING

        await eventually(claimed)
        await doomed.die()
        assert door.ids(job_id) == []
        taker = await place.start_worker("taker")
        healthy = await place.submit(max_tokens=1)
        (other,) = await place.ended(healthy.record.job_id)
        assert (other.state, other.attempt) == (JobState.SUCCEEDED, 1)
        (record,) = await place.ended(job_id)
        assert (record.state, record.attempt, record.lineage[1].owner) == (JobState.SUCCEEDED, 2, taker.id)
        assert record.lineage[1].start_index == 0
        assert record.result is not None
        await eventually(lambda: tuple(door.ids(job_id)) == record.result.token_ids)  # type: ignore[union-attr] # above
