"""Running batch work that yields to priority, on a real nats-server with the simulated engine: it goes back among the
parked with what it has, and ends once and whole, wherever its worker dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from laneway.core import job as jobs
from laneway.core.errors import Code
from laneway.core.job import JobError, JobRecord
from laneway.core.lanes import JobState, Lane
from laneway.core.subjects import ParkSubject
from laneway.runtime.bus import OutOfStorage
from laneway.runtime.clock import SystemClock
from laneway.runtime.lanes import LaneStore, ReleaseOutcome
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.metrics import exposition
from laneway.runtime.records import StoredRecord
from laneway.workers.endings import Endings
from laneway.workers.reparking import Reparking
from tests.support.nats import eventually
from tests.support.worker import ByteDoor, RunningWorker, Yard, yard

TOKENS = 300
YIELDING = {"policy__preemptions_max": 2}
ONE_SLOT = {"model__slots": 1, "engine__pace_s": 0.005, **YIELDING}


async def running_batch(place: Yard, worker: RunningWorker, **changes: Any) -> StoredRecord:
    """A batch job with some tokens, in the worker's only slot."""
    batch = await place.submit(lane=Lane.BATCH, max_tokens=TOKENS, **changes)
    await eventually(lambda: tokens_of(worker, batch) > 20)
    return batch


def tokens_of(worker: RunningWorker, stored: StoredRecord) -> int:
    run = worker.worker.runs.running(stored.record.job_id) if worker.worker.runs is not None else None
    return getattr(run, "generated", 0)


async def undisturbed(place: Yard, **changes: Any) -> tuple[int, ...]:
    alone = await place.submit(lane=Lane.BATCH, max_tokens=TOKENS, **changes)
    return ids((await place.ended(alone.record.job_id))[0])


def ids(record: JobRecord) -> tuple[int, ...]:
    assert record.state is JobState.SUCCEEDED, record.error
    assert record.result is not None
    return record.result.token_ids


async def release(place: Yard) -> None:
    """As a scheduler does once there is room."""
    (park,) = await eventually(lambda: parked(place))
    assert await place.lanes.release(park, now_s=SystemClock().now(), reason="TEST") is ReleaseOutcome.RELEASED


async def parked(place: Yard) -> list[ParkSubject]:
    return await place.lanes.parked(Lane.BATCH)


def preemptions_shown() -> float:
    prefix = 'laneway_worker_preemptions_total{lane="batch",pool="chat-small",reason="no_slot"} '
    lines = exposition().decode().splitlines()
    return sum(float(line.removeprefix(prefix)) for line in lines if line.startswith(prefix))


async def test_a_batch_job_yields_its_slot_and_goes_on_where_it_was(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **ONE_SLOT) as place, ByteDoor(place.bus) as door:
        (worker,) = place.workers
        shown = preemptions_shown()
        batch = await running_batch(place, worker)
        urgent = await place.submit(max_tokens=4, caller_at=door)
        (first,) = await place.ended(urgent.record.job_id)
        assert len(ids(first)) == 4
        (park,) = await eventually(lambda: parked(place))
        found = await place.record(batch.record.job_id)
        assert (found.state, found.attempt, found.starts, found.clean) == (JobState.WAITING, 1, 1, 1)
        assert found.preemptions == 1
        assert found.lineage[-1].yielded_s >= found.timings.claimed_s
        assert found.lineage[-1].yield_reason == f"NO_SLOT {urgent.record.job_id}"
        assert found.checkpoint_index > 20
        assert (park.job, park.due_ms) == (found.job_id, round(found.latest_start_s * 1000))
        assert await eventually(lambda: holds(place, 1)), "the parked message is the job, and no other is left"
        assert preemptions_shown() == shown + 1
        await release(place)
        (record,) = await place.ended(batch.record.job_id)
        assert (record.attempt, record.starts, record.clean, record.preemptions) == (2, 2, 1, 1)
        assert record.lineage[-1].start_index > 20, "it did not begin again"
        assert ids(record) == await undisturbed(place)
        assert await eventually(place.lanes_empty)
        assert await eventually(worker.idle)


async def holds(place: Yard, messages: int) -> bool:
    return await place.messages(Lane.BATCH) == messages


@pytest.mark.slow
async def test_the_caller_of_a_job_that_yields_gets_each_token_once(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **ONE_SLOT) as place, ByteDoor(place.bus) as door:
        batch = await running_batch(place, place.workers[0], caller_at=door)
        job_id = batch.record.job_id
        urgent = await place.submit(max_tokens=4)
        await place.ended(urgent.record.job_id)
        await release(place)
        (record,) = await place.ended(job_id)
        await eventually(lambda: len(door.ids(job_id)) == TOKENS)
        assert tuple(door.ids(job_id)) == ids(record)
        states = [event.state for event in door.events[job_id]]
        assert len(states) == 4, "running, waiting, running, ended"
        assert record.preemptions == 1


@pytest.mark.slow
async def test_a_pinned_job_runs_to_its_end_while_priority_waits(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **ONE_SLOT) as place:
        batch = await running_batch(place, place.workers[0], preemptions=2, clean=2, starts=2, attempt=2)
        urgent = await place.submit(max_tokens=4)
        late, soon = await place.ended(batch.record.job_id, urgent.record.job_id)
        assert late.preemptions == 2
        assert late.timings.ended_s <= soon.timings.claimed_s


@pytest.mark.slow
async def test_of_several_full_workers_one_run_yields_to_one_job(nats_server: LocalNats):
    async with yard(nats_server, workers=4, model__slots=2, engine__pace_s=0.01, **YIELDING) as place:
        batch = [await place.submit(lane=Lane.BATCH, max_tokens=TOKENS) for _ in range(8)]
        await eventually(lambda: sum(len(w.worker.seats or ()) for w in place.workers) == 8)
        urgent = await place.submit(max_tokens=4)
        await place.ended(urgent.record.job_id)
        await asyncio.sleep(0.5)  # for any further one to show
        records = [await place.record(stored.record.job_id) for stored in batch]
        assert sorted(record.preemptions for record in records) == [0] * 7 + [1]
        await release(place)
        records = await place.ended(*(stored.record.job_id for stored in batch))
        assert {len(ids(record)) for record in records} == {TOKENS}
        assert await eventually(place.lanes_empty)


# --- the worker dies between two steps -------------------------------------------------------------


class Stuck:
    """Stops whoever calls it, and says so."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    async def __call__(self, *_: Any, **__: Any) -> Any:
        self.reached.set()
        await asyncio.Event().wait()


def before_the_record(monkeypatch: pytest.MonkeyPatch, stuck: Stuck) -> None:
    write = Endings.write

    async def stop_at_the_end(self: Endings, owned: StoredRecord, change: Callable[[JobRecord], JobRecord]) -> Any:
        if change(owned.record).state is JobState.WAITING:
            await stuck()
        return await write(self, owned, change)

    monkeypatch.setattr(Endings, "write", stop_at_the_end)


def before_the_park(monkeypatch: pytest.MonkeyPatch, stuck: Stuck) -> None:
    monkeypatch.setattr(Reparking, "park", stuck)


def before_the_ack(monkeypatch: pytest.MonkeyPatch, stuck: Stuck) -> None:
    park = Reparking.park

    async def park_and_stop(self: Reparking, *args: Any) -> Any:
        assert await park(self, *args)
        await stuck()

    monkeypatch.setattr(Reparking, "park", park_and_stop)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "yielded", "copies"), [(before_the_record, 0, 1), (before_the_park, 1, 1), (before_the_ack, 1, 2)]
)
async def test_a_death_between_any_two_steps_leaves_the_job_alive_once(
    nats_server: LocalNats,
    monkeypatch: pytest.MonkeyPatch,
    point: Callable[[pytest.MonkeyPatch, Stuck], None],
    yielded: int,
    copies: int,
):
    stuck = Stuck()
    async with yard(nats_server, workers=1, nats__ack_wait_batch_s=1.0, **ONE_SLOT) as place:
        batch = await running_batch(place, place.workers[0])
        with monkeypatch.context() as patch:
            point(patch, stuck)
            urgent = await place.submit(max_tokens=4)
            await stuck.reached.wait()
            assert await eventually(lambda: holds(place, copies))
            await place.workers[0].die()
        await place.start_worker("next")
        await place.ended(urgent.record.job_id)
        if copies == 2:
            await release(place)
        (record,) = await place.ended(batch.record.job_id)
        assert ids(record) == await undisturbed(place)
        assert record.preemptions == yielded
        assert record.starts == 2
        assert await eventually(place.lanes_empty, 20.0)
        assert await eventually(place.workers[1].idle)


@pytest.mark.slow
async def test_a_job_that_cannot_be_parked_stays_in_its_lane(nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch):
    async def full(*_: Any, **__: Any) -> Awaitable[Any]:
        raise OutOfStorage("the storage is full")

    monkeypatch.setattr(LaneStore, "park", full)
    async with yard(nats_server, workers=1, **ONE_SLOT) as place:
        batch = await running_batch(place, place.workers[0])
        urgent = await place.submit(max_tokens=4)
        await place.ended(urgent.record.job_id)
        (record,) = await place.ended(batch.record.job_id)
        assert ids(record) == await undisturbed(place)
        assert record.preemptions == 1
        assert not await parked(place)
        assert await eventually(place.lanes_empty)


@pytest.mark.slow
async def test_a_job_that_is_cancelled_while_it_yields_stays_cancelled(nats_server: LocalNats):
    async with yard(nats_server, workers=1, **ONE_SLOT) as place:
        batch = await running_batch(place, place.workers[0])
        await place.submit(max_tokens=50)
        await eventually(lambda: parked(place))
        error = JobError(Code.CANCELLED, "CANCELLED", "by its caller")
        record = batch.record
        await place.records.change(
            record.region, record.tenant, record.job_id, lambda found: jobs.cancel(found, error, SystemClock().now())
        )
        assert await place.lanes.purge(record) == 1
        await eventually(lambda: holds(place, 0))
        assert (await place.record(record.job_id)).state is JobState.CANCELLED
        assert await eventually(place.lanes_empty)
