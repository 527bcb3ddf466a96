"""Identical deterministic jobs that meet in a worker: the engine computes once, and each ends as if it were alone."""

from __future__ import annotations

import pytest

from laneway.core.job import JobRecord, Sampling
from laneway.core.lanes import JobState, Lane
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.metrics import exposition
from laneway.runtime.records import StoredRecord
from tests.support.nats import eventually
from tests.support.worker import ByteDoor, RunningWorker, Yard, yard
from tests.wire.test_worker_ends import cancel, kill_engine

SHARED = {"policy__single_flight": True, "engine__pace_s": 0.005}
TOKENS = 120
TRIAL_STEPS = 1  # of an engine before it is ready


def engine_steps(worker: RunningWorker) -> int:
    """For jobs."""
    return worker.worker.sequences.stats().steps - TRIAL_STEPS


def shown() -> float:
    prefix = "laneway_worker_shared_total{"
    return sum(float(line.split()[-1]) for line in exposition().decode().splitlines() if line.startswith(prefix))


def made(worker: RunningWorker, stored: StoredRecord) -> int:
    run = worker.worker.runs.running(stored.record.job_id) if worker.worker.runs is not None else None
    return getattr(run, "generated", 0)


async def two(place: Yard, door: ByteDoor, lane: Lane = Lane.PRIORITY) -> tuple[StoredRecord, StoredRecord]:
    """The second comes when the first has some tokens."""
    (worker,) = place.workers
    first = await place.submit(caller_at=door, max_tokens=TOKENS, lane=lane)
    await eventually(lambda: made(worker, first) > 20)
    second = await place.submit(caller_at=door, max_tokens=TOKENS)
    await eventually(lambda: made(worker, second) > 20)
    return first, second


async def whole(place: Yard, door: ByteDoor, stored: StoredRecord) -> JobRecord:
    (record,) = await place.ended(stored.record.job_id)
    assert record.state is JobState.SUCCEEDED, record.error
    assert record.result is not None
    assert len(record.result.token_ids) == TOKENS
    await eventually(lambda: len(door.ids(record.job_id)) == TOKENS)
    assert tuple(door.ids(record.job_id)) == record.result.token_ids
    assert door.text(record.job_id) == record.result.text
    return record


async def test_two_identical_jobs_cost_one_sequence_and_both_streams_are_whole(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **SHARED) as place, ByteDoor(place.bus) as door:
        (worker,) = place.workers
        before = shown()
        first, second = await two(place, door)
        assert len(worker.worker.sequences) == 1
        lease = worker.worker.snapshot()
        assert (lease.running, lease.kv_tokens_used) == (1, TOKENS + len(b"Hello")), "a place for both of them"
        records = [await whole(place, door, each) for each in (first, second)]
        usages = [record.result.usage for record in records if record.result is not None]
        assert [usage.cached_tokens for usage in usages] == [0, usages[1].prompt_tokens]
        assert usages[0].completion_tokens == usages[1].completion_tokens == TOKENS
        assert [(record.attempt, record.starts) for record in records] == [(1, 1), (1, 1)]
        assert engine_steps(worker) == TOKENS, "as many as one job takes"
        assert shown() == before + 1
        assert await eventually(worker.idle)
        assert await eventually(place.lanes_empty)
        assert worker.worker.rates.jobs_done == 2


@pytest.mark.parametrize("leaves", [0, 1])
async def test_one_that_is_cancelled_leaves_the_other_alone(nats_server: LocalNats, leaves: int):
    async with yard(nats_server, workers=1, **SHARED) as place, ByteDoor(place.bus) as door:
        (worker,) = place.workers
        pair = await two(place, door)
        gone, stays = pair[leaves], pair[1 - leaves]
        await cancel(place, gone.record.job_id)
        await whole(place, door, stays)
        assert engine_steps(worker) == TOKENS
        assert len(door.ids(gone.record.job_id)) < TOKENS
        assert await eventually(worker.idle)


async def test_the_engine_stops_when_the_last_is_cancelled(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **SHARED) as place, ByteDoor(place.bus) as door:
        (worker,) = place.workers
        for each in await two(place, door):
            await cancel(place, each.record.job_id)
        assert await eventually(worker.engine_empty)
        assert await eventually(worker.idle)
        assert engine_steps(worker) < TOKENS


async def test_jobs_of_other_tenants_and_sampled_ones_run_by_themselves(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **SHARED) as place:
        (worker,) = place.workers
        before = shown()
        drawn = Sampling(max_tokens=TOKENS, temperature=0.8)
        stored = [await place.submit(sampling=drawn) for _ in range(2)]
        await eventually(lambda: len(worker.worker.sequences) == 2)
        await place.ended(*(each.record.job_id for each in stored))
        assert shown() == before


async def test_both_go_on_and_share_again_after_their_engine_died(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **SHARED) as place, ByteDoor(place.bus) as door:
        (worker,) = place.workers
        pair = await two(place, door)
        await kill_engine(worker)
        for each in pair:
            record = await whole(place, door, each)
            assert (record.attempt, record.starts) == (2, 2)
            assert record.lineage[-1].start_index > 20
        assert await eventually(worker.idle)


async def test_a_batch_job_whose_sequence_priority_shares_does_not_yield(nats_server: LocalNats):
    changes = {**SHARED, "policy__preemptions_max": 2, "model__slots": 1}
    async with yard(nats_server, workers=1, **{**changes, "model__slots": 2}) as place, ByteDoor(place.bus) as door:
        (worker,) = place.workers
        batch, urgent = await two(place, door, Lane.BATCH)
        other = await place.submit(prompt=b"Another", max_tokens=TOKENS)
        third = await place.submit(prompt=b"A third", max_tokens=8)
        for each in (batch, urgent):
            await whole(place, door, each)
        records = await place.ended(other.record.job_id, third.record.job_id)
        assert {record.state for record in records} == {JobState.SUCCEEDED}
        assert (await place.record(batch.record.job_id)).preemptions == 0
        assert await eventually(worker.idle)
