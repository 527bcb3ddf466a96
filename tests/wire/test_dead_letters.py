"""Jobs that workers give up, and what is kept of them: stored after the end, before the message goes, within limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.admission.dead_letter_watch import DeadLetterWatch
from laneway.core import subjects
from laneway.core.dead_letters import POISON, TASK_LOST, UNREADABLE_JOB, DeadLetter
from laneway.core.errors import Code
from laneway.core.job import Attempt, GenerateTask, JobError, JobRecord, LaneJob, ReferredJob, Sampling, Timings
from laneway.core.lanes import JobState, Lane
from laneway.core.objects import TASK, ObjectName, ObjectRef
from laneway.runtime.bus import Bus
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.dead_letters import SCAN_MAX, DeadLetterFilter, DeadLetterStore
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.metrics import REGISTRY
from laneway.runtime.reading import StoredMessage
from laneway.runtime.records import StoredRecord
from laneway.runtime.walking import Place, Walk
from laneway.runtime.wire.records import encode_lane_job
from tests.support.nats import REGION, eventually, make_job, make_record, provision_region, small_catalogue
from tests.support.worker import ByteDoor, RunningWorker, Yard, yard

pytestmark = pytest.mark.wire
CRASH_ID = 7
DEAD = subjects.dead_stream(REGION)


def counted(name: str, lane: Lane = Lane.PRIORITY, reason: str = POISON) -> float:
    return REGISTRY.get_sample_value(name, {"lane": lane.value, "reason": reason}) or 0.0


async def worn_out(place: Yard, lane: Lane = Lane.PRIORITY, **changes: Any) -> StoredRecord:
    """A job in its lane whose three starts have failed."""
    lineage = tuple(Attempt(n, 0, f"w{n}-1a", 1000.0 + n, True) for n in (1, 2, 3))
    return await place.submit(lane=lane, attempt=3, starts=3, lineage=lineage, **changes)


async def letters(bus: Bus, **wanted: Any) -> list[DeadLetter]:
    page, rest = await DeadLetterStore(bus, REGION).page(DeadLetterFilter(**wanted), None, 100)
    assert rest is None
    return page


async def one_letter(bus: Bus) -> DeadLetter:
    found: list[DeadLetter] = await eventually(lambda: letters(bus))
    (listed,) = found
    letter = await DeadLetterStore(bus, REGION).get(listed.record.job_id)
    assert letter is not None
    assert (listed.record, listed.requeueable) == (letter.record, letter.requeueable)
    return letter


# --- workers give up ---------------------------------------------------------------------------------


async def test_a_job_that_is_given_up_ends_once_and_leaves_a_dead_letter(nats_server: LocalNats):
    before = counted("laneway_dead_letters_total", Lane.BATCH)
    async with yard(nats_server) as place, ByteDoor(place.bus) as door:
        stored = await worn_out(place, Lane.BATCH, contract={"labels": {"team": "a"}})
        good = [await place.submit(lane=Lane.BATCH, max_tokens=2) for _ in range(3)]
        await place.start_worker()
        record, *others = await place.ended(stored.record.job_id, *(each.record.job_id for each in good))
        assert all(other.state is JobState.SUCCEEDED for other in others)
        letter = await one_letter(place.bus)
        assert await eventually(place.lanes_empty)
        assert letter.record == record
        assert letter.job == LaneJob(stored.record, GenerateTask(tuple(b"Hello"), Sampling(8, temperature=0.0)))
        assert (letter.reason, letter.died_s) == (POISON, record.timings.ended_s)
        assert [attempt.owner for attempt in letter.record.lineage] == ["w1-1a", "w2-1a", "w3-1a"]
        assert counted("laneway_dead_letters_total", Lane.BATCH) == before + 1
        ends = [event for event in door.events[record.job_id] if event.record]
        assert len(ends) == 1, "its caller is told one end"
        info = await place.bus.api(f"STREAM.INFO.{DEAD}", {"subjects_filter": ">"})
        assert list(info["state"]["subjects"]) == [f"dead.{REGION}.batch.POISON.{record.job_id}"]


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_a_request_that_kills_its_engine_each_time_is_kept_with_all_its_attempts(nats_server: LocalNats):
    async with yard(
        nats_server, workers=2, engine__fault_crash_token_id=CRASH_ID, nats__ack_wait_priority_s=1.0
    ) as place:
        bad = await place.submit(prompt=(1, CRASH_ID), max_tokens=20)
        letter: DeadLetter = (await eventually(lambda: letters(place.bus), 60))[0]
        workers = {running.id for running in place.workers}
        assert letter.record.job_id == bad.record.job_id
        assert [attempt.attempt for attempt in letter.record.lineage] == [1, 2, 3]
        assert {attempt.owner for attempt in letter.record.lineage} <= workers
        assert await eventually(place.lanes_empty)
        after = await place.submit(max_tokens=2)
        (record,) = await place.ended(after.record.job_id)
        assert record.state is JobState.SUCCEEDED, "the lane flows on"


async def test_a_message_that_cannot_be_read_leaves_a_letter_that_cannot_be_requeued(nats_server: LocalNats):
    before = counted("laneway_dead_letters_total", reason=UNREADABLE_JOB)
    async with yard(nats_server, workers=1) as place:
        record = make_record()
        await place.records.create(record)
        subject = subjects.ready(REGION, Lane.PRIORITY, record.pool, record.tenant, record.job_id)
        await place.bus.store(subject, b"\xff\xff not a job")
        letter = await one_letter(place.bus)
        assert (letter.reason, letter.job, letter.record.job_id) == (UNREADABLE_JOB, None, record.job_id)
        assert await eventually(place.lanes_empty)
        assert counted("laneway_dead_letters_total", reason=UNREADABLE_JOB) == before + 1


@pytest.mark.slow
async def test_a_job_whose_prompt_is_gone_from_the_object_store_leaves_a_letter(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place:
        record = make_record()
        name = ObjectName(record.tenant, record.job_id, TASK, 1000, 2000, "0a1b2c3d")
        job = ReferredJob(record, ObjectRef(str(name), 1_000_000, bytes(32)))
        await place.lanes.put_ready(job, await place.records.create(record))
        letter = await one_letter(place.bus)
        assert (letter.reason, letter.job, letter.requeueable) == (TASK_LOST, job, False)
        assert await eventually(place.lanes_empty)


@pytest.mark.slow
async def test_other_ends_leave_no_letter(nats_server: LocalNats):
    async with yard(nats_server, workers=1, engine__fault_error_token_id=CRASH_ID) as place:
        ends = [
            await place.submit(prompt=(1, CRASH_ID)),  # the engine refuses it
            await place.submit(prompt=bytes(100), max_tokens=30_000),  # it can never fit
            await place.submit(contract={"deadline_s": 1000.0}),
        ]
        records = await place.ended(*(each.record.job_id for each in ends))
        assert [record.state for record in records] == [JobState.FAILED, JobState.FAILED, JobState.EXPIRED]
        assert await eventually(place.lanes_empty)
        assert await letters(place.bus) == []


# --- between the end and the letter ------------------------------------------------------------------


def held_up(running: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once the worker is about to store a letter, which it then never does."""
    reached = asyncio.Event()

    async def store(record: JobRecord, message: bytes) -> bool:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(running.worker._bench.dead_letters._store, "store", store)
    return reached


async def test_a_crash_between_the_end_and_the_letter_loses_no_letter(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    async with yard(nats_server, workers=1, nats__ack_wait_priority_s=0.5) as place:
        first = place.workers[0]
        reached = held_up(first, monkeypatch)
        stored = await worn_out(place)
        await asyncio.wait_for(reached.wait(), 10)
        (record,) = await place.ended(stored.record.job_id)
        assert record.error is not None
        assert record.error.reason == POISON, "its caller has its end already"
        assert await place.messages(Lane.PRIORITY) == 1
        await first.die()
        assert await letters(place.bus) == []
        await place.start_worker()
        letter = await one_letter(place.bus)
        assert letter.record == record, "the end was written once"
        assert await eventually(place.lanes_empty)


@pytest.mark.slow
async def test_a_letter_waits_for_a_stream_that_is_away_and_its_caller_does_not(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("laneway.workers.dead_letters.RETRY_S", 0.1)
    async with yard(nats_server, workers=1) as place:
        await place.bus.api(f"STREAM.DELETE.{DEAD}", {})
        stored = await worn_out(place)
        await place.ended(stored.record.job_id)
        assert await place.messages(Lane.PRIORITY) == 1, "the lane message is what the letter is made of"
        after = await place.submit(max_tokens=2)
        (record,) = await place.ended(after.record.job_id)
        assert record.state is JobState.SUCCEEDED
        await provision_region(place.bus, catalogue_of(place.settings))
        assert (await one_letter(place.bus)).record.job_id == stored.record.job_id
        assert await eventually(place.lanes_empty)


@pytest.mark.slow
async def test_a_letter_that_cannot_be_stored_for_too_long_is_lost_and_counted(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("laneway.workers.dead_letters.RETRY_S", 0.05)
    monkeypatch.setattr("laneway.workers.dead_letters.TRY_S_MAX", 0.3)
    lost, kept = counted("laneway_dead_letters_lost_total"), counted("laneway_dead_letters_total")
    async with yard(nats_server, workers=1) as place:
        await place.bus.api(f"STREAM.DELETE.{DEAD}", {})
        stored = await worn_out(place)
        assert await eventually(place.lanes_empty), "a place in the lane is not taken for ever"
        assert (await place.record(stored.record.job_id)).state is JobState.FAILED
        assert counted("laneway_dead_letters_lost_total") == lost + 1
        assert counted("laneway_dead_letters_total") == kept


@pytest.mark.slow
async def test_a_second_delivery_of_a_dead_job_neither_counts_nor_comes_back_after_a_purge(nats_server: LocalNats):
    before = counted("laneway_dead_letters_total")
    async with yard(nats_server, workers=1, nats__ack_wait_priority_s=0.2) as place:
        stored = await worn_out(place, copies=2)
        await eventually(place.lanes_empty)
        assert len(await letters(place.bus)) == 1
        assert await DeadLetterStore(place.bus, REGION).remove(stored.record.job_id) == 1
        await place._copy(make_job(stored.record), stored.sequence)
        await eventually(place.lanes_empty)
        assert await letters(place.bus) == []
        assert counted("laneway_dead_letters_total") == before + 1


# --- what is kept ------------------------------------------------------------------------------------


@pytest.fixture
def store(provisioned_bus: Bus) -> DeadLetterStore:
    return DeadLetterStore(provisioned_bus, REGION)


async def put(store: DeadLetterStore, number: int, **changes: Any) -> str:
    """Stores the letter of a job given up at second `number`; its size depends on nothing else."""
    lane, reason = changes.pop("lane", Lane.BATCH), changes.pop("reason", POISON)
    record = make_record(f"{REGION}-d{number}", lane, latest_start_s=1.8e9, timings=Timings(), **changes)
    record = replace(record, contract=replace(record.contract, deadline_s=1.8e9))
    error = JobError(Code.INTERNAL, str(reason), "given up")
    dead = replace(record, state=JobState.FAILED, error=error, timings=Timings(ended_s=float(number)))
    await store.store(dead, encode_lane_job(make_job(record)))
    return record.job_id


async def ids_of(store: DeadLetterStore, size: int = 100, **wanted: Any) -> list[str]:
    found, place = [], None
    while True:
        page, place = await store.page(DeadLetterFilter(**wanted), place, size)
        assert len(page) <= size
        found += [letter.record.job_id for letter in page]
        if place is None:
            return found


async def test_a_page_ends_at_its_size_and_the_last_one_says_so(store: DeadLetterStore):
    ids = [await put(store, n) for n in range(1, 5)][::-1]
    assert await ids_of(store, 2) == await ids_of(store, 3) == ids
    for size, more in ((3, True), (4, False), (5, False)):
        page, place = await store.page(DeadLetterFilter(), None, size)
        assert [letter.record.job_id for letter in page] == ids[:size]
        assert (place is not None) is more


@pytest.mark.slow
async def test_letters_are_filtered_by_lane_reason_tenant_and_time(store: DeadLetterStore):
    a = await put(store, 1)
    b = await put(store, 2, lane=Lane.PRIORITY)
    c = await put(store, 3, reason=UNREADABLE_JOB)
    d = await put(store, 4, tenant="other")
    assert await ids_of(store) == [d, c, b, a]
    assert await ids_of(store, lane=Lane.PRIORITY) == [b]
    assert await ids_of(store, reason=UNREADABLE_JOB) == [c]
    assert await ids_of(store, tenant="other") == [d]
    assert await ids_of(store, tenant="nobody") == []
    assert await ids_of(store, before_s=3.0) == [b, a]
    assert await ids_of(store, lane=Lane.BATCH, tenant="acme", before_s=3.0) == [a]


PURGES = [
    (DeadLetterFilter(), []),
    (DeadLetterFilter(lane=Lane.PRIORITY), [4, 3, 1]),
    (DeadLetterFilter(reason=UNREADABLE_JOB), [4, 2, 1]),
    (DeadLetterFilter(tenant="other"), [3, 2, 1]),
    (DeadLetterFilter(before_s=3.0), [4, 3]),
    (DeadLetterFilter(before_s=3.0, lane=Lane.BATCH), [4, 3, 2]),
    (DeadLetterFilter(tenant="nobody"), [4, 3, 2, 1]),
]


async def test_a_purge_removes_what_it_selects_and_no_more(store: DeadLetterStore):
    for number, (wanted, left) in enumerate(PURGES, start=1):
        base = 10 * number
        await put(store, base + 1)
        await put(store, base + 2, lane=Lane.PRIORITY)
        await put(store, base + 3, reason=UNREADABLE_JOB)
        await put(store, base + 4, tenant="other")
        before_s = wanted.before_s and base + wanted.before_s
        assert await store.purge(replace(wanted, before_s=before_s)) == 4 - len(left)
        assert await ids_of(store) == [f"{REGION}-d{base + n}" for n in left], wanted
        await store.purge(DeadLetterFilter())


@pytest.mark.slow
async def test_a_purge_of_a_tenant_takes_all_of_its_letters_however_many(
    store: DeadLetterStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("laneway.runtime.dead_letters.READ_AT_ONCE", 5)
    for number in range(24):
        await put(store, number, tenant="acme" if number % 2 else "other")
    assert await store.purge(DeadLetterFilter(tenant="acme")) == 12
    assert len(await ids_of(store)) == 12
    assert await ids_of(store, tenant="acme") == []


async def test_a_list_holds_few_letters_whole_and_none_of_their_prompts(
    store: DeadLetterStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("laneway.runtime.dead_letters.READ_AT_ONCE", 4)
    counts: list[int] = []
    step = Walk.step

    async def counted(walk: Walk, place: Place, count: int) -> tuple[list[StoredMessage], Place]:
        counts.append(count)
        return await step(walk, place, count)

    monkeypatch.setattr(Walk, "step", counted)
    ids = [await put(store, number) for number in range(9)]
    page, place = await store.page(DeadLetterFilter(), None, 1000)
    assert [letter.record.job_id for letter in page] == ids[::-1]
    assert place is None
    assert max(counts) == 4
    assert {letter.job for letter in page} == {None}
    assert all(letter.requeueable for letter in page)


@pytest.mark.slow
async def test_one_letter_is_found_and_removed_by_its_job(store: DeadLetterStore):
    ids = [await put(store, n) for n in (1, 2)]
    letter = await store.get(ids[0])
    assert letter is not None
    assert letter.record.job_id == ids[0]
    assert await store.get(f"{REGION}-d3") is None
    assert [await store.remove(ids[0]) for _ in range(2)] == [1, 0]
    assert await ids_of(store) == ids[1:]


async def test_a_job_has_one_letter_however_often_it_is_stored(store: DeadLetterStore, provisioned_bus: Bus):
    await put(store, 1)
    letter = await provisioned_bus.api(f"STREAM.MSG.GET.{DEAD}", {"seq": 1})
    for _ in range(2):  # as after the time in which the server knows a message again
        await provisioned_bus.store(f"dead.{REGION}.batch.POISON.{REGION}-d1", letter["message"]["data"].encode())
    assert (await store.depth()).letters == 1


@pytest.mark.slow
async def test_letters_of_a_later_release_hide_no_others(store: DeadLetterStore, provisioned_bus: Bus):
    await put(store, 1)
    await provisioned_bus.store(f"dead.{REGION}.batch.POISON.{REGION}-x", b"\xff\xff of a later release")
    await put(store, 2)
    assert await ids_of(store) == [f"{REGION}-d2", f"{REGION}-d1"]
    assert (await store.depth()).letters == 3
    assert await store.purge(DeadLetterFilter(lane=Lane.BATCH)) == 3


@pytest.mark.slow
async def test_a_filter_that_matches_little_reads_no_more_than_its_bound(
    store: DeadLetterStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("laneway.runtime.dead_letters.SCAN_MAX", 4)
    assert SCAN_MAX == 1000
    mine = await put(store, 0, tenant="rare")
    for number in range(1, 10):
        await put(store, number)
    page, place = await store.page(DeadLetterFilter(tenant="rare"), None, 2)
    assert page == []
    assert place is not None
    assert await ids_of(store, 2, tenant="rare") == [mine]


async def test_a_full_stream_lets_the_oldest_letters_go(bus: Bus):
    """At most `nats.dead_bytes_max`: as many as fit, and with one more the first is gone."""
    limit = 64 * 1024
    await provision_region(bus, small_catalogue(), dead_bytes_max=limit)
    store = DeadLetterStore(bus, REGION)
    await put(store, 200)
    each = (await store.depth()).size_bytes
    fitting = limit // each
    for number in range(201, 200 + fitting):
        await put(store, number)
    assert (await store.depth()).letters == fitting
    assert await store.get(f"{REGION}-d200") is not None
    await put(store, 200 + fitting)
    assert await store.get(f"{REGION}-d200") is None
    depth = await store.depth()
    assert (depth.letters, depth.size_bytes) == (fitting, fitting * each)


@pytest.mark.slow
async def test_a_letter_above_the_limit_of_a_message_is_kept_without_its_job(
    store: DeadLetterStore, provisioned_bus: Bus
):
    provisioned_bus.nc._max_payload = 8192
    record = make_record(f"{REGION}-big", Lane.BATCH, prompt_tokens=4000)
    job = LaneJob(record, GenerateTask((65,) * 4000, Sampling(8)))
    dead = replace(record, state=JobState.FAILED, error=JobError(Code.INTERNAL, POISON, "given up"))
    assert await store.store(dead, encode_lane_job(job))
    letter = await store.get(record.job_id)
    assert letter is not None
    assert (letter.job, letter.record.prompt_tokens) == (None, 4000)


async def test_a_region_of_an_earlier_release_learns_to_keep_one_letter_a_job(
    store: DeadLetterStore, provisioned_bus: Bus
):
    """Its stream of dead letters has no such limit; so it is again after a rollback, with letters in it."""
    config = (await provisioned_bus.api(f"STREAM.INFO.{DEAD}", {}))["config"]
    earlier = config | {"max_msgs_per_subject": -1, "subjects": [f"dead.{REGION}.>"]}
    await provisioned_bus.api(f"STREAM.UPDATE.{DEAD}", earlier)
    ids = [await put(store, n) for n in (1, 2)]
    (change,) = await provision_region(provisioned_bus, small_catalogue())
    assert "max_msgs_per_subject -1 -> 1" in change
    assert await ids_of(store) == ids[::-1]


@pytest.mark.slow
async def test_gauges_show_how_many_letters_are_kept_and_nothing_while_that_is_unknown(
    store: DeadLetterStore, provisioned_bus: Bus
):
    def kept() -> float | None:
        return REGISTRY.get_sample_value("laneway_dead_letters_kept_jobs", {})

    watch = DeadLetterWatch(store, poll_s=0.01)
    with watch.gauges():
        assert kept() is None
        running = asyncio.ensure_future(watch.run())
        await eventually(lambda: kept() == 0)
        await put(store, 1)
        await eventually(lambda: kept() == 1)
        size_bytes = REGISTRY.get_sample_value("laneway_dead_letters_kept_bytes", {})
        assert size_bytes == (await store.depth()).size_bytes
        await provisioned_bus.api(f"STREAM.DELETE.{DEAD}", {})
        await eventually(lambda: kept() is None)
        running.cancel()
    assert kept() is None
