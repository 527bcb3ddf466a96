"""Job records: one writer wins, unknown outcomes are resolved, nothing terminal changes, and time to live."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.clock import ManualClock
from laneway.core.errors import Code, NotFound
from laneway.core.ids import keyed_job_id, new_job_id
from laneway.core.job import IllegalTransition, JobError, JobRecord, cancel, claim, refuse
from laneway.core.lanes import JobState
from laneway.runtime.bus import Bus, PublishUnknown, WrongSequence
from laneway.runtime.clock import SystemClock
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.reading import subject_list
from laneway.runtime.records import RecordExists, RecordStore, StoredRecord
from tests.support.nats import REGION, TENANT, connected, eventually, make_record, provision_region

pytestmark = pytest.mark.wire

CANCELLED = JobError(Code.CANCELLED, "CANCELLED", "")


@pytest.fixture
def records(provisioned_bus: Bus) -> RecordStore:
    return RecordStore(provisioned_bus)


async def headers_of(bus: Bus, record: JobRecord) -> dict[str, str]:
    subject = subjects.record(record.region, record.tenant, record.job_id)
    msg = await bus.request(f"$JS.API.DIRECT.GET.{subjects.jobs_stream(REGION)}.{subject}", b"")
    return msg.headers or {}


async def writes(bus: Bus) -> int:
    return (await bus.api(f"STREAM.INFO.{subjects.jobs_stream(REGION)}", {}))["state"]["last_seq"]


async def test_what_was_created_is_read_back_from_a_replica_and_from_the_leader(records: RecordStore):
    record = make_record()
    sequence = await records.create(record)
    for leader in (False, True):
        assert await records.get(REGION, TENANT, record.job_id, leader=leader) == StoredRecord(record, sequence)
        assert await records.get(REGION, TENANT, "absent", leader=leader) is None
        assert await records.get(REGION, "other", record.job_id, leader=leader) is None


async def test_creating_twice_shows_the_record_that_exists(records: RecordStore):
    record = make_record()
    sequence = await records.create(record)
    with pytest.raises(RecordExists) as exists:
        await records.create(replace(record, door="another"))
    assert exists.value.stored == StoredRecord(record, sequence)


async def test_a_stale_writer_is_refused(records: RecordStore):
    record = make_record()
    first = await records.create(record)
    await records.update(claim(record, "w1", 1.0), first)
    with pytest.raises(WrongSequence):
        await records.update(claim(record, "w2", 1.0), first)


async def test_of_eight_claims_at_once_exactly_one_wins(nats_server: LocalNats, records: RecordStore):
    async with AsyncExitStack() as stack:
        stores = [RecordStore(await stack.enter_async_context(connected(nats_server, f"w{i}"))) for i in range(8)]
        for _ in range(10):
            record = make_record()
            accepted = await records.create(record)
            outcomes = await asyncio.gather(
                *(store.update(claim(record, f"w{i}", 1.0), accepted) for i, store in enumerate(stores)),
                return_exceptions=True,
            )
            winners = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, int)]
            losers = [outcome for outcome in outcomes if isinstance(outcome, WrongSequence)]
            assert (len(winners), len(losers)) == (1, 7)
            stored = await records.get(REGION, TENANT, record.job_id, leader=True)
            assert stored is not None
            assert stored.record.owner == f"w{winners[0]}"
            assert stored.record.attempt == 1


# --- change ------------------------------------------------------------------------------------------


async def test_concurrent_changes_all_take_place(records: RecordStore):
    record = make_record()
    await records.create(record)

    def step(found: JobRecord) -> JobRecord:
        return replace(found, checkpoint_index=found.checkpoint_index + 1)

    await asyncio.gather(*(records.change(REGION, TENANT, record.job_id, step) for _ in range(4)))
    stored = await records.get(REGION, TENANT, record.job_id)
    assert stored is not None
    assert stored.record.checkpoint_index == 4


async def test_a_change_starts_from_what_the_caller_has_and_goes_on_when_that_is_stale(records: RecordStore):
    record = make_record()
    old = StoredRecord(record, await records.create(record))
    new = await records.change(REGION, TENANT, record.job_id, lambda r: claim(r, "w", 1.0), stored=old)
    assert new.record.state is JobState.RUNNING
    ended = await records.change(REGION, TENANT, record.job_id, lambda r: cancel(r, CANCELLED, 2.0), stored=old)
    assert ended.record.attempt == 1
    assert await records.get(REGION, TENANT, record.job_id) == ended


async def test_a_terminal_record_never_changes(provisioned_bus: Bus, records: RecordStore):
    record = make_record()
    await records.create(record)
    await records.change(REGION, TENANT, record.job_id, lambda r: cancel(r, CANCELLED, 2.0))
    before = await writes(provisioned_bus)
    with pytest.raises(IllegalTransition) as refused:
        await records.change(REGION, TENANT, record.job_id, lambda r: claim(r, "w", 3.0))
    assert refused.value.record.state is JobState.CANCELLED
    assert await writes(provisioned_bus) == before


async def test_changing_what_is_not_there_is_not_found(records: RecordStore):
    with pytest.raises(NotFound):
        await records.change(REGION, TENANT, "absent", lambda r: r)


async def test_a_change_whose_publish_was_unknown_takes_place_once(nats_server: LocalNats, catalogue):
    async with connected(nats_server, request_timeout_s=0.3) as bus:
        await provision_region(bus, catalogue)
        records = RecordStore(bus)
        record = make_record()
        stored = StoredRecord(record, await records.create(record))
        before, sent = await writes(bus), bus.nc.stats["out_msgs"]
        nats_server.pause()
        change = asyncio.ensure_future(
            records.change(REGION, TENANT, record.job_id, lambda r: claim(r, "w", 1.0), stored=stored)
        )
        # The publish, and then the read that looks for it: by now the publish has been given up.
        await eventually(lambda: bus.nc.stats["out_msgs"] >= sent + 2)
        nats_server.resume()
        changed = await change
        assert changed.record.attempt == 1
        assert await records.get(REGION, TENANT, record.job_id, leader=True) == changed
        assert await writes(bus) == before + 1


async def test_a_change_outlives_a_restart_of_the_server(nats_server: LocalNats, catalogue):
    async with connected(nats_server, request_timeout_s=0.5) as bus:
        await provision_region(bus, catalogue)
        records = RecordStore(bus)
        record = make_record()
        await records.create(record)
        await nats_server.kill()
        change = asyncio.ensure_future(records.change(REGION, TENANT, record.job_id, lambda r: claim(r, "w", 1.0)))
        await nats_server.start()
        assert (await change).record.attempt == 1


async def test_a_create_that_was_unknown_is_found_by_trying_again(nats_server: LocalNats, catalogue):
    async with connected(nats_server, request_timeout_s=0.3) as bus:
        await provision_region(bus, catalogue)
        records = RecordStore(bus)
        record = make_record()
        nats_server.pause()
        with pytest.raises(PublishUnknown):
            await records.create(record)
        nats_server.resume()
        with pytest.raises(RecordExists) as exists:
            await records.create(record)
        assert exists.value.stored.record == record


# --- time to live ------------------------------------------------------------------------------------


async def test_a_record_lives_until_its_deadline_and_then_for_the_retention(provisioned_bus: Bus):
    clock = ManualClock(wall_s=1_000_000.0)
    records = RecordStore(provisioned_bus, retention_s=500.0, clock=clock)
    record = make_record()
    record = replace(record, contract=replace(record.contract, deadline_s=1_000_100.25))
    sequence = await records.create(record)
    headers = await headers_of(provisioned_bus, record)
    assert headers["Nats-TTL"] == "601s"
    assert headers[subjects.H_RECORD_STATE] == "waiting"
    assert headers[subjects.H_RECORD_DEADLINE] == "1000100250"
    clock.advance(1000.0)  # a late write keeps the whole retention
    ended = await records.update(cancel(record, CANCELLED, 1.0), sequence)
    assert ended > sequence
    assert (await headers_of(provisioned_bus, record))["Nats-TTL"] == "500s"


async def test_a_refusal_is_kept_for_an_hour(provisioned_bus: Bus, records: RecordStore):
    record = refuse(make_record(), JobError(Code.RESOURCE_EXHAUSTED, "LANE_SATURATED", ""), 1.0)
    await records.create(record)
    assert (await headers_of(provisioned_bus, record))["Nats-TTL"] == "3600s"


async def test_a_record_past_its_time_is_gone_and_its_id_is_free(provisioned_bus: Bus):
    records = RecordStore(provisioned_bus, retention_s=0.0)
    record = make_record()
    record = replace(record, contract=replace(record.contract, deadline_s=SystemClock().now() - 100.0))
    await records.create(record)

    async def gone() -> bool:
        return await records.get(REGION, TENANT, record.job_id) is None

    await eventually(gone)
    assert await records.create(record)


# --- lists and followers -----------------------------------------------------------------------------


async def test_thousands_of_jobs_are_listed_newest_first_and_only_the_tenants_own(
    provisioned_bus: Bus, records: RecordStore
):
    ids = [new_job_id(REGION, 1_700_000_000.0 + i, i.to_bytes(10, "big")) for i in range(3000)]
    keyed = keyed_job_id(REGION, TENANT, "key")

    async def put(tenant: str, job_id: str) -> None:
        await provisioned_bus.store(subjects.record(REGION, tenant, job_id), b"x")

    for start in range(0, 3000, 250):
        await asyncio.gather(*(put(TENANT, job_id) for job_id in ids[start : start + 250]))
    await put(TENANT, keyed)
    await put("other", "local-theirs")
    assert await records.list_ids(REGION, TENANT) == [*reversed(ids), keyed]
    assert await records.list_ids(REGION, "nobody") == []
    assert await records.find_tenant(REGION, "local-theirs") == "other"
    assert await records.find_tenant(REGION, "absent") is None


@pytest.mark.slow
async def test_a_list_longer_than_a_page_of_the_server_is_whole(provisioned_bus: Bus):
    async def put(start: int) -> None:
        for i in range(start, 100_500, 200):
            await provisioned_bus.store(subjects.record(REGION, TENANT, f"j{i}"), b"")

    await asyncio.gather(*(put(start) for start in range(200)))
    found = await subject_list(provisioned_bus, subjects.jobs_stream(REGION), subjects.records_of(REGION, TENANT))
    assert len(found) == len(set(found)) == 100_500


async def test_a_follower_sees_what_is_there_and_what_comes_also_after_a_restart(nats_server: LocalNats, catalogue):
    async with connected(nats_server) as bus:
        await provision_region(bus, catalogue)
        records = RecordStore(bus)
        first, second, third = make_record(), make_record(), make_record()
        await records.create(first)
        await records.create(make_record(tenant="other"))
        async with records.follow(REGION, TENANT) as stream:
            assert (await anext(stream)).record == first
            sequence = await records.create(second)
            assert await anext(stream) == StoredRecord(second, sequence)
            await nats_server.kill()
            await nats_server.start()
            await bus.wait_connected(10.0)
            await records.create(third)
            assert (await anext(stream)).record == third


async def test_a_follower_passes_over_what_it_cannot_read(provisioned_bus: Bus, records: RecordStore):
    await provisioned_bus.store(subjects.record(REGION, TENANT, "later"), b"\xff\xff")
    record = make_record()
    await records.create(record)
    async with records.follow(REGION, TENANT) as stream:
        assert (await anext(stream)).record == record


async def test_a_follower_loses_nothing_of_many(provisioned_bus: Bus, records: RecordStore):
    async with records.follow(REGION, TENANT) as stream:
        made = [make_record() for _ in range(500)]
        await asyncio.gather(*(records.create(record) for record in made))
        got = [(await anext(stream)).record.job_id for _ in made]
    assert sorted(got) == sorted(record.job_id for record in made)
    info = await provisioned_bus.api(f"STREAM.INFO.{subjects.jobs_stream(REGION)}", {})
    assert info["state"]["consumer_count"] == 0


async def test_heads_tell_state_and_deadline_of_all_tenants(records: RecordStore):
    mine, theirs = make_record(), make_record(tenant="other")
    await records.create(mine)
    async with records.follow_heads(REGION) as heads:
        head = await anext(heads)
        assert (head.tenant, head.job_id, head.state) == (TENANT, mine.job_id, JobState.WAITING)
        assert head.deadline_s == mine.contract.deadline_s
        await records.create(theirs)
        assert (await anext(heads)).tenant == "other"
        await records.change(REGION, TENANT, mine.job_id, lambda r: cancel(r, CANCELLED, 1.0))
        assert (await anext(heads)).state is JobState.CANCELLED


async def test_a_replica_that_is_behind_does_not_keep_a_new_record_from_being_changed(provisioned_bus: Bus) -> None:
    class Behind(RecordStore):
        async def _read(self, region: str, tenant: str, job_id: str, *, leader: bool):
            return await super()._read(region, tenant, job_id, leader=True) if leader else None

    records = Behind(provisioned_bus)
    record = make_record()
    await records.create(record)
    error = JobError(Code.CANCELLED, "CANCELLED", "by its caller")
    ended = await records.change(record.region, record.tenant, record.job_id, lambda found: cancel(found, error, 1.0))
    assert ended.record.state is JobState.CANCELLED
