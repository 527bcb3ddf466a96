"""Large prompts and results at the worker: fetched before the claim, given back while they cannot be had, never lost
without a word."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.core.errors import Code, ObjectStoreFull
from laneway.core.job import (
    GenerateTask,
    JobError,
    JobRecord,
    ReferredJob,
    Result,
    Sampling,
    Usage,
    cancel,
    claim,
    succeed,
)
from laneway.core.lanes import FinishReason, JobState, Lane, Phase
from laneway.core.objects import ObjectName, ObjectRef
from laneway.runtime.bus import NoAnswer, PayloadTooLarge
from laneway.runtime.clock import SystemClock
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.objects import ObjectStore
from laneway.runtime.records import StoredRecord
from laneway.runtime.references import References
from laneway.runtime.wire.records import encode_task
from laneway.workers import endings as endings_module
from laneway.workers.endings import Endings
from tests.support.nats import REGION, eventually, make_record
from tests.support.worker import Yard, yard

pytestmark = pytest.mark.wire

CLOCK = SystemClock()
PROMPT = tuple(number % 250 for number in range(3000))


async def submit_large(place: Yard, lane: Lane = Lane.BATCH, **changes: Any) -> tuple[JobRecord, ObjectRef]:
    """A job in its lane whose task is an object, whatever its size."""
    references = References(ObjectStore(place.bus, REGION))
    record = make_record(lane=lane, prompt_tokens=len(PROMPT), max_tokens=8, **changes)
    task = GenerateTask(PROMPT, Sampling(max_tokens=8, temperature=0.0))
    stored = await references.put_task(record, encode_task(task), CLOCK.now())
    await place.lanes.put_ready(ReferredJob(record, stored), await place.records.create(record))
    return record, stored


async def listed(place: Yard) -> list[ObjectName]:
    return [each.name for each in await ObjectStore(place.bus, REGION).listed()]


async def at_rest(place: Yard) -> None:
    await eventually(place.lanes_empty)
    await eventually(lambda: all(each.idle() for each in place.workers if not each.task.done()))


async def test_a_large_prompt_runs_as_the_same_prompt_in_its_message_does(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place:
        plain = await place.submit(prompt=PROMPT, max_tokens=8)
        large, _ = await submit_large(place)
        one, other = await place.ended(plain.record.job_id, large.job_id)
        assert other.state is JobState.SUCCEEDED
        assert one.result is not None
        assert other.result is not None
        assert other.result.token_ids == one.result.token_ids
        assert other.result.usage.prompt_tokens == len(PROMPT)
        assert (other.attempt, other.starts) == (1, 1)
        await at_rest(place)
        assert len(await listed(place)) == 1, "kept as long as its record, for those who want to run it again"


async def test_a_prompt_that_is_gone_ends_its_job_by_name(nats_server: LocalNats):
    async with yard(nats_server) as place:
        record, stored = await submit_large(place)
        damaged, ref = await submit_large(place)
        objects = ObjectStore(place.bus, REGION)
        await objects.remove(ObjectName.parse(stored.name))
        subject = f"$O.OBJECTS_{REGION}.C.{ref.name.replace('/', '.')}.0"
        await place.bus.store(subject, b"something else")
        await place.start_worker()
        for ended in await place.ended(record.job_id, damaged.job_id):
            assert (ended.state, ended.starts) == (JobState.FAILED, 0)
            assert ended.error is not None
            assert (ended.error.code, ended.error.reason) == (Code.DATA_LOSS, "TASK_LOST")
        await at_rest(place)
        small = await place.submit()
        (after,) = await place.ended(small.record.job_id)
        assert after.state is JobState.SUCCEEDED


@pytest.mark.slow
async def test_a_prompt_that_cannot_be_had_now_is_fetched_at_the_next_delivery(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("laneway.workers.runs.RETRY_S", 0.05)
    monkeypatch.setattr("laneway.workers.fetching.RETRY_S", 0.05)
    failures = 2
    true_get = ObjectStore.get

    async def get(store: ObjectStore, ref: ObjectRef) -> bytes:
        nonlocal failures
        if failures:
            failures -= 1
            raise NoAnswer
        return await true_get(store, ref)

    monkeypatch.setattr(ObjectStore, "get", get)
    async with yard(nats_server, workers=1) as place:
        record, _ = await submit_large(place)
        (ended,) = await place.ended(record.job_id)
        assert (ended.state, ended.attempt, ended.starts) == (JobState.SUCCEEDED, 1, 1)
        assert failures == 0
        await at_rest(place)


class Stuck:
    """Fetches wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.go = asyncio.Event()
        true_get = ObjectStore.get

        async def get(store: ObjectStore, ref: ObjectRef) -> bytes:
            self.begun += 1
            await self.go.wait()
            return await true_get(store, ref)

        monkeypatch.setattr(ObjectStore, "get", get)


@pytest.mark.slow
async def test_a_fetch_holds_a_seat_and_no_more_jobs_are_taken_than_there_are_seats(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    stuck = Stuck(monkeypatch)
    async with yard(nats_server, workers=1, model__slots=2, policy__lower_lane_prefills_max=2) as place:
        records = [(await submit_large(place))[0] for _ in range(4)]
        await eventually(lambda: stuck.begun == 2)
        depth = await place.lanes.depths(Lane.BATCH, records[0].pool)
        assert (depth.ready, depth.running) == (2, 2)
        assert place.workers[0].worker.snapshot().running == 2
        stuck.go.set()
        ended = await place.ended(*(record.job_id for record in records))
        assert {record.state for record in ended} == {JobState.SUCCEEDED}
        await at_rest(place)


@pytest.mark.slow
async def test_a_worker_that_drains_gives_back_at_once_what_it_still_fetches(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    stuck = Stuck(monkeypatch)
    async with yard(nats_server, workers=1) as place:
        record, _ = await submit_large(place)
        await eventually(lambda: stuck.begun)
        await place.workers[0].drain()
        assert (await place.record(record.job_id)).state is JobState.WAITING
        stuck.go.set()
        await place.start_worker()
        (ended,) = await place.ended(record.job_id)
        assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)
        await at_rest(place)


@pytest.mark.slow
async def test_an_operators_drain_gives_back_at_once_what_is_still_fetched(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    stuck = Stuck(monkeypatch)
    async with yard(nats_server, workers=1) as place:
        record, _ = await submit_large(place)
        await eventually(lambda: stuck.begun)
        await place.tell(place.workers[0].id, drain={"draining": True})
        await eventually(place.workers[0].idle)
        stuck.go.set()
        assert (await place.record(record.job_id)).state is JobState.WAITING
        await place.tell(place.workers[0].id, drain={"draining": False})
        (ended,) = await place.ended(record.job_id)
        assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)
        await at_rest(place)


@pytest.mark.slow
async def test_a_job_that_is_cancelled_while_its_prompt_is_fetched_never_runs(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    stuck = Stuck(monkeypatch)
    async with yard(nats_server, workers=1) as place:
        record, _ = await submit_large(place)
        await eventually(lambda: stuck.begun)
        error = JobError(Code.CANCELLED, "CANCELLED", "")
        await place.records.change(
            REGION, record.tenant, record.job_id, lambda found: cancel(found, error, CLOCK.now())
        )
        await place.tell(place.workers[0].id, cancel={"job_id": record.job_id})
        stuck.go.set()
        await at_rest(place)
        ended = await place.record(record.job_id)
        assert (ended.state, ended.attempt) == (JobState.CANCELLED, 0)


@pytest.mark.slow
@pytest.mark.parametrize("comes", [True, False])
async def test_a_job_whose_prompt_comes_after_its_deadline_never_runs(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch, comes: bool
):
    if not comes:
        monkeypatch.setattr("laneway.workers.fetching.FETCH_S_MAX", 0.5)
    stuck = Stuck(monkeypatch)
    async with yard(nats_server, workers=1) as place:
        contract = replace(make_record(lane=Lane.BATCH).contract, deadline_s=round(CLOCK.now() + 0.4, 3))
        record, _ = await submit_large(place, contract=contract)
        await eventually(lambda: stuck.begun)
        await asyncio.sleep(max(0.0, record.contract.deadline_s - CLOCK.now()))
        if comes:
            stuck.go.set()
        (ended,) = await place.ended(record.job_id)
        assert (ended.state, ended.attempt) == (JobState.EXPIRED, 0)
        assert ended.error is not None
        assert ended.error.phase is Phase.QUEUE
        await at_rest(place)
        assert stuck.begun == 1


@pytest.mark.slow
async def test_a_message_that_comes_again_while_its_prompt_is_fetched_starts_nothing_twice(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    stuck = Stuck(monkeypatch)
    async with yard(nats_server, workers=1, nats__ack_wait_priority_s=0.3) as place:
        record, _ = await submit_large(place, Lane.PRIORITY)
        await eventually(lambda: stuck.begun)

        async def delivered_again() -> bool:
            fetch = place.workers[0].worker.runs.running(record.job_id)  # type: ignore[union-attr]  # it works
            return fetch is not None and fetch.delivery.deliveries > 1

        await eventually(delivered_again)
        assert stuck.begun == 1
        stuck.go.set()
        (ended,) = await place.ended(record.job_id)
        assert (ended.state, ended.attempt, ended.starts) == (JobState.SUCCEEDED, 1, 1)
        await at_rest(place)


# --- results ----------------------------------------------------------------------------------------


async def owned(place: Yard) -> StoredRecord:
    """A job that this test claims as worker w-1."""
    record = make_record()
    sequence = await place.records.create(record)
    mine = claim(record, "w-1", CLOCK.now())
    return StoredRecord(mine, await place.records.update(mine, sequence))


def ends(place: Yard, references: References | None = None) -> Endings:
    references = references or References(ObjectStore(place.bus, REGION))
    bus = place.bus
    return Endings(place.records, bus.emit, "w-1", CLOCK, bus.payload_bytes_max, references=references)


def answer(size: int) -> Result:
    """Of so many bytes of text."""
    return Result("a" * size, (97,), (size,), FinishReason.LENGTH, Usage(3, 0, 1, 0.5))


async def largest_inline(place: Yard, stored: StoredRecord) -> int:
    """Bytes of text with which this record fits into one message exactly."""
    too_much = place.bus.payload_bytes_max
    with pytest.raises(PayloadTooLarge) as refused:
        await place.records.update(succeeded(stored.record, answer(too_much)), stored.sequence)
    return too_much - (refused.value.size_bytes - refused.value.limit_bytes)


def succeeded(record: JobRecord, result: Result) -> JobRecord:
    return succeed(record, "w-1", record.attempt, result, record.timings)


@pytest.mark.parametrize(("beyond", "stored_objects"), [(0, 0), (1, 1)])
async def test_a_result_that_fits_stays_in_its_record_and_one_byte_more_goes_by_reference(
    nats_server: LocalNats, beyond: int, stored_objects: int
):
    async with yard(nats_server) as place:
        stored = await owned(place)
        size = await largest_inline(place, stored) + beyond
        done = await ends(place).write(stored, lambda record: succeeded(record, answer(size)))
        assert done is not None
        record = await place.record(stored.record.job_id)
        assert (record.state, record) == (JobState.SUCCEEDED, done.record)
        assert (record.result_object is not None) is bool(stored_objects)
        assert len(await listed(place)) == stored_objects
        assert record.result is not None
        assert record.result.usage == answer(0).usage
        whole = await References(ObjectStore(place.bus, REGION)).record(record)
        assert whole.result == answer(size)


@pytest.mark.slow
async def test_a_result_that_the_object_store_refuses_ends_the_job_by_name(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    async with yard(nats_server) as place:

        async def full(*_: object, **__: object) -> ObjectRef:
            raise ObjectStoreFull

        monkeypatch.setattr(ObjectStore, "put", full)
        stored = await owned(place)
        size = place.bus.payload_bytes_max
        done = await ends(place).write(stored, lambda record: succeeded(record, answer(size)))
        assert done is not None
        assert done.record.state is JobState.FAILED
        assert done.record.error is not None
        assert (done.record.error.code, done.record.error.reason) == (Code.RESOURCE_EXHAUSTED, "RESULT_TOO_LARGE")
        assert "object store" in done.record.error.message
        assert (await place.record(stored.record.job_id)) == done.record


@pytest.mark.slow
async def test_a_result_is_tried_again_until_the_object_store_answers_and_not_for_ever(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    async with yard(nats_server) as place:
        true_put, tries = ObjectStore.put, 0

        async def put(self: ObjectStore, *args: Any, **more: Any) -> ObjectRef:
            nonlocal tries
            tries += 1
            if tries <= failures:
                raise NoAnswer
            return await true_put(self, *args, **more)

        monkeypatch.setattr(ObjectStore, "put", put)
        size = place.bus.payload_bytes_max
        failures, stored = 2, await owned(place)
        done = await ends(place).write(stored, lambda record: succeeded(record, answer(size)))
        assert done is not None
        assert (done.record.state, tries) == (JobState.SUCCEEDED, 3)
        monkeypatch.setattr(endings_module, "RESULT_TRY_S", 0.0)
        tries, failures, stored = 0, 10**9, await owned(place)
        done = await ends(place).write(stored, lambda record: succeeded(record, answer(size)))
        assert done is not None
        assert done.record.error is not None
        assert (done.record.error.reason, tries) == ("RESULT_TOO_LARGE", 1)


async def test_a_worker_that_lost_its_job_leaves_no_result_and_replaces_nobodys(nats_server: LocalNats):
    async with yard(nats_server) as place:
        stored = await owned(place)
        size = place.bus.payload_bytes_max
        theirs = claim(stored.record, "w-2", CLOCK.now(), owner_is_dead=True)
        sequence = await place.records.update(theirs, stored.sequence)
        good = replace(answer(size), text="b" * size)
        other = Endings(
            place.records, place.bus.emit, "w-2", CLOCK, place.bus.payload_bytes_max,
            references=References(ObjectStore(place.bus, REGION)),
        )  # fmt: skip
        done = await other.write(
            StoredRecord(theirs, sequence), lambda record: succeed(record, "w-2", 2, good, record.timings)
        )
        stale = await ends(place).write(stored, lambda record: succeeded(record, answer(size)))
        assert stale is not None
        assert done is not None
        assert stale.record == done.record, "it reads how the job ended"
        (name,) = await listed(place)
        assert name.kind == "result-2"
        whole = await References(ObjectStore(place.bus, REGION)).record(await place.record(stored.record.job_id))
        assert whole.result == good


@pytest.mark.slow
async def test_a_long_answer_with_probabilities_is_whole_at_its_end(nats_server: LocalNats):
    async with yard(
        nats_server, workers=1, engine__pace_s=0.0005, model__context_length=16_384, model__kv_tokens=65_536
    ) as place:
        sampling = Sampling(max_tokens=15_000, temperature=0.0, logprobs=True, top_logprobs=5)
        stored = await place.submit(sampling=sampling)
        (record,) = await place.ended(stored.record.job_id, timeout_s=60.0)
        assert (record.state, record.error) == (JobState.SUCCEEDED, None)
        assert record.result_object is not None
        assert record.result_object.size_bytes > place.bus.payload_bytes_max
        whole = await References(ObjectStore(place.bus, REGION)).record(record)
        assert whole.result is not None
        assert (len(whole.result.token_ids), len(whole.result.logprobs)) == (15_000, 15_000)
        await at_rest(place)
