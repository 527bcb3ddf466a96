"""What we rely on of NATS for records: held by the real server and by the one that simulations use."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.errors import Code
from laneway.core.ids import new_job_id
from laneway.core.job import JobError, JobRecord, cancel, claim
from laneway.core.lanes import JobState
from laneway.runtime.bus import ApiError, NoStream, PublishUnknown, StreamFull, WrongSequence
from laneway.runtime.reading import last_from_leader, last_message, subject_list
from laneway.runtime.records import RecordExists, RecordStore, StoredRecord
from laneway.runtime.walking import Walk
from tests.contract.nats_twins import Twin, Twins, twins_of
from tests.support.nats import REGION, TENANT, eventually, make_record

STREAM = subjects.jobs_stream(REGION)
CANCELLED = JobError(Code.CANCELLED, "CANCELLED", "")


@pytest.fixture(
    params=[pytest.param("real", marks=pytest.mark.wire), pytest.param("memory", marks=pytest.mark.looptime)]
)
def twins(request: pytest.FixtureRequest, tmp_path: Path) -> Twins:
    return twins_of(request.param, tmp_path)


def subject_of(record: JobRecord) -> str:
    return subjects.record(record.region, record.tenant, record.job_id)


async def state_of(twin: Twin, stream: str = STREAM) -> dict[str, Any]:
    return (await twin.bus.api(f"STREAM.INFO.{stream}", {}))["state"]


async def test_what_was_created_is_read_back_from_a_replica_and_from_the_leader(twins: Twins):
    async with twins() as twin:
        records, record = RecordStore(twin.bus, clock=twin.clock), make_record()
        sequence = await records.create(record)
        for leader in (False, True):
            assert await records.get(REGION, TENANT, record.job_id, leader=leader) == StoredRecord(record, sequence)
            assert await records.get(REGION, TENANT, "absent", leader=leader) is None
        stored = await last_message(twin.bus, STREAM, subject_of(record))
        assert stored is not None
        assert stored.headers["Nats-Subject"] == subject_of(record)
        assert stored.headers["Nats-Stream"] == STREAM


async def test_creating_twice_shows_the_record_that_exists(twins: Twins):
    async with twins() as twin:
        records, record = RecordStore(twin.bus, clock=twin.clock), make_record()
        sequence = await records.create(record)
        with pytest.raises(RecordExists) as exists:
            await records.create(replace(record, door="another"))
        assert exists.value.stored == StoredRecord(record, sequence)


async def test_of_eight_claims_at_once_exactly_one_wins_and_one_record_is_kept(twins: Twins):
    async with twins() as twin:
        stores = [RecordStore(await twin.connect(f"w{i}"), clock=twin.clock) for i in range(8)]
        for _ in range(5):
            record = make_record()
            accepted = await stores[0].create(record)
            claims = (store.update(claim(record, f"w{i}", 1.0), accepted) for i, store in enumerate(stores))
            outcomes = await asyncio.gather(*claims, return_exceptions=True)
            assert sum(isinstance(outcome, WrongSequence) for outcome in outcomes) == 7
            (sequence,) = [outcome for outcome in outcomes if isinstance(outcome, int)]
            stored = await stores[1].get(REGION, TENANT, record.job_id, leader=True)
            assert stored is not None
            assert stored.sequence == sequence
        assert (await state_of(twin))["messages"] == 5
        assert (await state_of(twin))["last_seq"] == 10


async def test_a_stale_writer_is_told_the_error_that_means_it(twins: Twins):
    async with twins() as twin:
        subject = subject_of(make_record())
        first = await twin.bus.store(subject, b"1", {"Nats-Expected-Last-Subject-Sequence": "0"})
        await twin.bus.store(subject, b"2", {"Nats-Expected-Last-Subject-Sequence": str(first)})
        for stale in (0, first, first + 7):
            with pytest.raises(WrongSequence, match=f"wrong last sequence: {first + 1} .10071."):
                await twin.bus.store(subject, b"3", {"Nats-Expected-Last-Subject-Sequence": str(stale)})


async def test_a_record_past_its_time_is_gone_and_its_id_is_free(twins: Twins):
    async with twins() as twin:
        records, record = RecordStore(twin.bus, retention_s=0.0, clock=twin.clock), make_record()
        over = replace(record, contract=replace(record.contract, deadline_s=twin.clock.now() - 1.0))
        await records.create(over)

        async def gone() -> bool:
            return await records.get(REGION, TENANT, record.job_id, leader=True) is None

        assert not await gone()
        await eventually(gone)
        await records.create(record)


@pytest.mark.parametrize("text", ["0.5s", "nonsense"])
async def test_a_time_to_live_below_a_second_is_refused(twins: Twins, text: str):
    async with twins() as twin:
        with pytest.raises(ApiError, match="10165"):
            await twin.bus.store(subject_of(make_record()), b"", {"Nats-TTL": text})


async def test_a_create_that_was_unknown_is_found_by_trying_again(twins: Twins):
    async with twins() as twin:
        records = RecordStore(await twin.connect("hasty", request_timeout_s=0.2), clock=twin.clock)
        record = make_record()
        twin.pause()
        with pytest.raises(PublishUnknown):
            await records.create(record)
        twin.resume()
        with pytest.raises(RecordExists):
            await records.create(record)


async def test_a_change_whose_publish_was_unknown_takes_place_once(twins: Twins):
    async with twins() as twin:
        records = RecordStore(await twin.connect("hasty", request_timeout_s=0.2), clock=twin.clock)
        record = make_record()
        stored = StoredRecord(record, await records.create(record))
        asked = itertools.count()

        def transition(record: JobRecord) -> JobRecord:
            next(asked)
            return cancel(record, CANCELLED, 1.0)

        twin.pause()
        change = asyncio.ensure_future(records.change(REGION, TENANT, record.job_id, transition, stored=stored))
        await asyncio.sleep(0.3)
        twin.resume()
        changed = await change
        assert changed.record.state is JobState.CANCELLED
        assert 1 <= next(asked) <= 2  # what is read may be older than a write that is on its way
        assert (await state_of(twin))["last_seq"] == 2


async def test_lists_hold_the_tenants_own_newest_first(twins: Twins):
    async with twins() as twin:
        records = RecordStore(twin.bus, clock=twin.clock)
        ids = [new_job_id(REGION, 1_800_000_000.0 + n, bytes(10)) for n in range(5)]
        for job_id in ids:
            await records.create(make_record(job_id))
        await records.create(make_record(tenant="other"))
        assert await records.list_ids(REGION, TENANT) == ids[::-1]
        assert await records.list_ids(REGION, "nobody") == []
        assert await records.find_tenant(REGION, ids[2]) == TENANT
        assert await subject_list(twin.bus, STREAM, subjects.records_of(REGION)) == sorted(
            await subject_list(twin.bus, STREAM, subjects.records_of(REGION))
        )


async def test_a_walk_gives_the_last_written_first(twins: Twins):
    async with twins() as twin:
        records = RecordStore(twin.bus, clock=twin.clock)
        made = [make_record(tenant=tenant) for tenant in (TENANT, "other") * 4]
        sequences = [await records.create(record) for record in made]
        await records.update(claim(made[0], "w", 1.0), sequences[0])
        walk = Walk(twin.bus, STREAM, subjects.records_of(REGION, TENANT))
        place = await walk.start()
        seen: list[int] = []
        while not await walk.at_end(place):
            found, place = await walk.step(place, 2)
            seen += [message.sequence for message in found]
        assert seen == [len(made) + 1, *sequences[2::2][::-1]]


async def test_a_full_stream_of_records_refuses_and_keeps_what_it_has(twins: Twins):
    async with twins(records_bytes_max=8_000) as twin:
        kept = [subjects.record(REGION, TENANT, f"job-{n}") for n in range(7)]
        for subject in kept:
            await twin.bus.store(subject, b"x" * 1000)
        with pytest.raises(StreamFull, match="maximum bytes exceeded"):
            await twin.bus.store(subjects.record(REGION, TENANT, "job-7"), b"x" * 1000)
        assert await subject_list(twin.bus, STREAM, subjects.records_of(REGION)) == kept
        # A record that is there may still be written again, if it does not grow.
        await twin.bus.store(kept[0], b"y" * 1000)
        with pytest.raises(StreamFull):
            await twin.bus.store(kept[0], b"y" * 2000)


async def test_who_follows_sees_what_is_there_and_what_comes(twins: Twins):
    async with twins() as twin:
        records = RecordStore(twin.bus, clock=twin.clock)
        made = [make_record() for _ in range(3)]
        sequences = [await records.create(record) for record in made]
        await records.create(make_record(tenant="other"))
        changed = await records.update(claim(made[0], "w", 1.0), sequences[0])
        async with records.follow(REGION, TENANT) as followed:
            first = [await anext(followed) for _ in made]
            assert [stored.sequence for stored in first] == [*sequences[1:], changed]
            waiting = asyncio.ensure_future(anext(followed))
            await asyncio.sleep(0)
            last = await records.update(claim(made[1], "w", 1.0), sequences[1])
            assert (await waiting).sequence == last
        async with records.follow_heads(REGION) as heads:
            found = [await anext(heads) for _ in range(4)]
            assert {head.state for head in found} == {JobState.WAITING, JobState.RUNNING}
            assert {head.tenant for head in found} == {TENANT, "other"}


async def test_who_follows_goes_on_after_the_server_was_killed(twins: Twins):
    async with twins() as twin:
        records = RecordStore(twin.bus, clock=twin.clock)
        made = [make_record() for _ in range(2)]
        await records.create(made[0])
        async with records.follow(REGION, TENANT) as followed:
            assert (await anext(followed)).record == made[0]
            await twin.kill()
            await eventually(lambda: not twin.bus.connected)
            await twin.start()
            await twin.bus.wait_connected(10.0)
            await records.create(made[1])
            assert (await anext(followed)).record == made[1]


async def test_the_leader_reads_the_last_of_many_subjects(twins: Twins):
    async with twins() as twin:
        for n in range(3):
            await twin.bus.store(subjects.record(REGION, f"t{n}", "j"), str(n).encode())
        found = await last_from_leader(twin.bus, STREAM, subjects.record(REGION, "*", "j"))
        assert found is not None
        assert (found.data, found.sequence) == (b"2", 3)


async def test_nobody_serves_what_does_not_exist(twins: Twins):
    async with twins() as twin:
        with pytest.raises(NoStream):
            await twin.bus.store("job.elsewhere.t.j", b"")
        with pytest.raises(NoStream):
            await twin.bus.request("$JS.API.DIRECT.GET.NONE.x", b"")
        with pytest.raises(ApiError, match="10059"):
            await twin.bus.api("STREAM.INFO.NONE", {})
        with pytest.raises(ApiError, match="10037"):
            await twin.bus.api(f"STREAM.MSG.GET.{STREAM}", {"last_by_subj": "job.none"})
        with pytest.raises(ApiError, match="10014"):
            await twin.bus.api(f"CONSUMER.INFO.{STREAM}.none", {})
