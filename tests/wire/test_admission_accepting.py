"""From a verdict to an accepted job when something dies, comes twice or is not answered in between."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from laneway.admission.accept import Acceptor
from laneway.admission.ending import Ender
from laneway.admission.service import digest_of
from laneway.core import job as jobs
from laneway.core import subjects
from laneway.core.errors import Code, OutcomeUnknown, StorageFull, Unavailable
from laneway.core.ids import keyed_job_id
from laneway.core.job import JobError, JobRecord
from laneway.core.lanes import JobState, Lane
from laneway.policy.admit import Candidate, Decision, Placement
from laneway.runtime.bus import Bus, BusError, NoAnswer, NoStream, NotConnected, OutOfStorage, PublishUnknown
from laneway.runtime.draining import Draining
from laneway.runtime.lanes import LaneStore
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.objects import ObjectStore
from laneway.runtime.records import RecordStore, StoredRecord
from laneway.runtime.references import References
from laneway.v1 import admission_pb2 as pb
from tests.support.admission import (
    CLOCK,
    TENANT,
    WIRE_LANE,
    Gate,
    admission_settings,
    error_of_call,
    generate,
    open_gate,
    opening,
    spec,
)
from tests.support.nats import REGION, eventually, make_job, make_record, small_catalogue

CANCELLED = JobError(Code.CANCELLED, "CANCELLED", "by its caller")


async def left_behind(door: Gate, job_id: str, digest: bytes, state: JobState = JobState.WAITING) -> JobRecord:
    """The record of a door that died before its job was in the lane."""
    record = make_record(job_id, Lane.BATCH, state=state, body_digest=digest, door="door-dead", tenant=TENANT)
    record = replace(record, publish_by_s=CLOCK.now() + 10.0)
    await door.records.create(record)
    return record


async def test_a_key_whose_door_died_before_the_lane_is_accepted_anew(nats_server: LocalNats, tmp_path: Path):
    async with open_gate(nats_server, tmp_path) as (door, worker):
        request = pb.SubmitRequest(spec=spec(lane=Lane.BATCH), idempotency_key="k1")
        job_id = keyed_job_id(REGION, TENANT, "k1")
        await left_behind(door, job_id, digest_of(request.spec))
        assert (await door.stub.Submit(request)).job_id == job_id
        assert await door.messages() == 1, "who is told accepted has a job that can run"
        assert (await door.stub.Submit(request)).job_id == job_id
        assert await door.messages() == 1
        await worker.finish(await worker.take(Lane.BATCH), "ok")
        await door.reaches(job_id, JobState.SUCCEEDED)
        other = pb.SubmitRequest(spec=spec("another body", lane=Lane.BATCH), idempotency_key="k2")
        await left_behind(door, keyed_job_id(REGION, TENANT, "k2"), b"of the first body")
        error = await error_of_call(door.stub.Submit(other))
        assert error.reason == "IDEMPOTENCY_CONFLICT"


async def test_a_producers_message_whose_door_died_before_the_lane_is_not_lost(nats_server: LocalNats, tmp_path: Path):
    async with open_gate(nats_server, tmp_path) as (door, worker):
        request = pb.SubmitRequest(spec=spec(lane=Lane.BATCH))
        assert request.spec.contract.lane == WIRE_LANE[Lane.BATCH]
        info = await door.bus.api(f"STREAM.INFO.{subjects.ingest_stream(REGION)}", {})
        job_id = keyed_job_id(REGION, f"ingest {info['created']}", "1")
        await left_behind(door, job_id, digest_of(request.spec))
        await door.bus.store(subjects.ingest(REGION, Lane.BATCH, TENANT), request.SerializeToString())

        async def told() -> bool:
            return await door.messages(subjects.verdict_stream(REGION)) == 1

        await eventually(told)
        held = await worker.take(Lane.BATCH)
        assert held.record.job_id == job_id


async def test_a_refused_key_tried_by_many_at_once_is_one_job_for_all(nats_server: LocalNats, tmp_path: Path):
    async with open_gate(nats_server, tmp_path) as (door, _):
        request = pb.SubmitRequest(spec=spec(lane=Lane.BATCH), idempotency_key="k1")
        job_id = keyed_job_id(REGION, TENANT, "k1")
        await left_behind(door, job_id, digest_of(request.spec), JobState.REFUSED)
        answers = await asyncio.gather(*(door.stub.Submit(request) for _ in range(8)))
        assert {answer.job_id for answer in answers} == {job_id}
        assert await door.messages() == 1


async def test_who_loses_the_race_for_a_refused_key_is_not_sent_away(provisioned_bus: Bus):
    class Overtaken(RecordStore):
        overtaken = False

        async def update(self, record: JobRecord, expected_sequence: int) -> int:
            if expected_sequence and not self.overtaken:
                self.overtaken = True
                await super().update(replace(record, door="door-b"), expected_sequence)
            return await super().update(record, expected_sequence)

    records, lanes = Overtaken(provisioned_bus), LaneStore(provisioned_bus, REGION)
    record = replace(make_record(), publish_by_s=CLOCK.now() + 5.0)
    await records.create(replace(record, state=JobState.REFUSED, door="door-a"))
    accepted = await Acceptor(records, lanes, CLOCK).accept(record, make_job(record).task, decided(record), lambda: 1.0)
    assert accepted.record.state is JobState.WAITING
    assert await lanes.holds(record)


async def test_a_job_asked_for_again_counts_once(nats_server: LocalNats, tmp_path: Path):
    async with open_gate(nats_server, tmp_path, admission_settings(nats_server, slots=4)) as (door, _):
        request = pb.SubmitRequest(spec=spec(lane=Lane.BATCH), idempotency_key="k1")
        for _ in range(8):
            await door.stub.Submit(request)
        quote = await door.stub.Quote(pb.QuoteRequest(spec=spec(lane=Lane.BATCH)))
        assert quote.verdict.reason == "LANE_OPEN"


class Unanswered(RecordStore):
    """Stores the first record, of which its writer hears nothing; then does what the test wants."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self.tries = 0
        self.away = False

    async def create(self, record: JobRecord, data: bytes = b"") -> int:
        self.tries += 1
        if self.tries == 1:
            await super().create(record, data)
            if not self.away:
                await self.change(
                    record.region, record.tenant, record.job_id, lambda found: jobs.cancel(found, CANCELLED, 1.0)
                )
            raise PublishUnknown
        if self.away:
            raise NotConnected
        return await super().create(record, data)


def decided(record: JobRecord) -> Decision:
    pool = small_catalogue().pools[0]
    return Decision(record.verdict, Candidate(pool, 5, 5, 5, 5), record.contract, Placement.READY)


async def test_a_job_cancelled_while_its_acceptance_was_unknown_stays_cancelled(provisioned_bus: Bus):
    """Its lane message would carry the sequence of the cancellation, and be claimed from there without a read."""
    records = Unanswered(provisioned_bus)
    record = replace(make_record(), publish_by_s=CLOCK.now() + 5.0, timings=jobs.Timings(created_s=CLOCK.now()))
    lanes = LaneStore(provisioned_bus, REGION)
    accepted = await Acceptor(records, lanes, CLOCK).accept(record, make_job(record).task, decided(record), lambda: 1.0)
    assert accepted.record.state is JobState.CANCELLED
    assert not await lanes.holds(record)


async def test_a_record_that_may_be_stored_is_never_answered_as_not_stored(provisioned_bus: Bus):
    records = Unanswered(provisioned_bus)
    records.away = True
    record = replace(make_record(), publish_by_s=CLOCK.now() + 0.4)
    acceptor = Acceptor(records, LaneStore(provisioned_bus, REGION), CLOCK)
    with pytest.raises(OutcomeUnknown) as caught:
        await acceptor.accept(record, make_job(record).task, decided(record), lambda: 1.0)
    assert caught.value.job_id == record.job_id


async def test_what_may_be_in_its_lane_is_not_refused_for_storage_that_filled_up_since(provisioned_bus: Bus):
    """A cluster out of storage says so before it looks for a duplicate, so that this says nothing of the first try."""
    lanes = LaneStore(provisioned_bus, REGION)

    class Filling(LaneStore):
        tries = 0

        async def put_ready(
            self, job: jobs.QueuedJob, record_sequence: int, data: bytes = b"", *, again: bool = False
        ) -> None:
            self.tries += 1
            if self.tries > 1:
                raise OutOfStorage
            await super().put_ready(job, record_sequence, data, again=again)
            raise PublishUnknown

    record = replace(make_record(), publish_by_s=CLOCK.now() + 0.4, timings=jobs.Timings(created_s=CLOCK.now()))
    records = RecordStore(provisioned_bus)
    acceptor = Acceptor(records, Filling(provisioned_bus, REGION), CLOCK)
    with pytest.raises(OutcomeUnknown):
        await acceptor.accept(record, make_job(record).task, decided(record), lambda: 1.0)
    stored = await records.get(REGION, record.tenant, record.job_id)
    assert stored is not None
    assert stored.record.state is JobState.WAITING, "its job is in its lane and runs"
    assert await lanes.holds(record)


@pytest.mark.parametrize("trouble", [NoStream, OutOfStorage])
async def test_a_job_whose_record_could_not_be_stored_leaves_no_prompt_behind(
    provisioned_bus: Bus, trouble: type[BusError]
):
    class Away(RecordStore):
        async def create(self, record: JobRecord, data: bytes = b"") -> int:
            raise trouble("away")

    record = replace(make_record(), publish_by_s=CLOCK.now() + 5.0)
    objects = ObjectStore(provisioned_bus, REGION)
    acceptor = Acceptor(
        Away(provisioned_bus), LaneStore(provisioned_bus, REGION), CLOCK, References(objects, inline_bytes_max=1)
    )
    with pytest.raises((Unavailable, StorageFull)) as caught:
        await acceptor.accept(record, make_job(record).task, decided(record), lambda: 1.0)
    assert caught.value.retry_after_s is not None
    assert await objects.listed() == []


async def test_a_job_that_was_given_up_before_its_acknowledgement_is_not_accepted(provisioned_bus: Bus):
    """The lane answered after publish_by, and the scheduler had ended the record as NOT_ACCEPTED."""
    records, lanes = RecordStore(provisioned_bus), LaneStore(provisioned_bus, REGION)
    gone = JobError(Code.UNAVAILABLE, "NOT_ACCEPTED", "the job was never stored in its lane; nothing ran")

    class Late(LaneStore):
        async def put_ready(
            self, job: jobs.QueuedJob, record_sequence: int, data: bytes = b"", *, again: bool = False
        ) -> None:
            await records.change(
                record.region, record.tenant, record.job_id, lambda found: jobs.cancel(found, gone, 1.0)
            )

    record = replace(make_record(), publish_by_s=CLOCK.now() - 1.0, timings=jobs.Timings(created_s=CLOCK.now()))
    acceptor = Acceptor(records, Late(provisioned_bus, REGION), CLOCK)
    with pytest.raises(Unavailable) as caught:
        await acceptor.accept(record, make_job(record).task, decided(record), lambda: 1.0)
    assert (caught.value.reason, caught.value.job_id) == ("NOT_ACCEPTED", record.job_id)
    assert caught.value.retry_after_s is not None
    assert not await lanes.holds(record)


@pytest.mark.parametrize("trouble", [NotConnected, NoAnswer, NoStream])
async def test_what_is_in_its_lane_is_never_answered_as_not_stored(provisioned_bus: Bus, trouble: type[BusError]):
    """Its acknowledgement came late, and whether it still counts cannot be read."""

    class Unread(RecordStore):
        async def get(self, *args: object, **more: object) -> StoredRecord | None:
            raise trouble("away")

    record = replace(make_record(), publish_by_s=CLOCK.now() - 1.0)
    lanes = LaneStore(provisioned_bus, REGION)
    acceptor = Acceptor(Unread(provisioned_bus), lanes, CLOCK)
    with pytest.raises(OutcomeUnknown) as caught:
        await acceptor.accept(record, make_job(record).task, decided(record), lambda: 1.0)
    assert caught.value.job_id == record.job_id
    assert await lanes.holds(record)


async def test_a_caller_who_leaves_while_nats_refuses_is_not_forgotten(
    nats_server: LocalNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cancel = Ender.cancel
    refused: list[str] = []

    async def refuses_once(ender: Ender, record: JobRecord, **more: str) -> JobRecord:
        if not refused:
            refused.append(record.job_id)
            raise Unavailable
        return await cancel(ender, record, **more)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(Ender, "cancel", refuses_once)
    async with open_gate(nats_server, tmp_path) as (door, _):
        call = door.stub.Generate(generate())
        accepted = await opening(call)
        call.cancel()
        await door.reaches(accepted.job_id, JobState.CANCELLED)
        assert refused == [accepted.job_id]


async def test_a_region_that_drains_keeps_new_work_out_and_finishes_what_it_has(nats_server: LocalNats, tmp_path: Path):
    async with open_gate(nats_server, tmp_path) as (door, worker):
        request = pb.SubmitRequest(spec=spec(lane=Lane.BATCH), idempotency_key="k1")
        earlier = await door.stub.Submit(request)
        draining = Draining(door.bus, REGION, lambda: None)
        await draining.set(True)
        await door.quotes("REGION_DRAINING")
        for call in (
            door.stub.Generate(generate()),
            door.stub.Submit(pb.SubmitRequest(spec=spec(lane=Lane.BATCH))),
        ):
            error = await error_of_call(call)
            assert isinstance(error, Unavailable)
            assert error.reason == "REGION_DRAINING"
            assert error.retry_after_s is not None
        ingested = pb.SubmitRequest(spec=spec("later", lane=Lane.BATCH))
        await door.bus.store(subjects.ingest(REGION, Lane.BATCH, TENANT), ingested.SerializeToString())
        assert (await door.stub.Submit(request)).job_id == earlier.job_id, "what was accepted stays accepted"
        await worker.finish(await worker.take(Lane.BATCH), "ok")
        await door.reaches(earlier.job_id, JobState.SUCCEEDED)
        assert await door.messages(subjects.ingest_stream(REGION)) == 1, "producers' work is put off, not refused"
        assert await door.messages(subjects.verdict_stream(REGION)) == 0
        await draining.set(False)
        await door.quotes("LANE_OPEN")
