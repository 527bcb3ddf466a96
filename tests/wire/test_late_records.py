"""Attached jobs whose record is left to their first claim: found by all a moment later, claimed once, ended once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.admission.accept import Acceptor
from laneway.admission.chores import Chores
from laneway.admission.late_records import LateRecords
from laneway.admission.streams import Stream, StreamLimits
from laneway.core import ids, job, subjects
from laneway.core.clock import ManualClock
from laneway.core.errors import Code, DeadlineExceeded, LaneSaturated, OutcomeUnknown
from laneway.core.job import JobError, JobRecord
from laneway.core.lanes import JobState, Lane, Phase
from laneway.policy.admit import Candidate, Decision, Placement
from laneway.runtime.bus import Bus, PublishUnknown, StreamFull
from laneway.runtime.clock import SYSTEM_RANDOM, SystemClock
from laneway.runtime.lanes import LaneStore
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.reading import subject_list
from laneway.runtime.records import RecordStore, StoredRecord
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import common_pb2
from laneway.workers.claims import Ack, Claims, Delivered, Nak, Term
from tests.support.admission import (
    Gate,
    PuppetWorker,
    admission_settings,
    error_of_call,
    generate,
    open_gate,
    opening,
    rest,
    text_of,
)
from tests.support.nats import POOL, REGION, eventually, make_job, make_record, small_catalogue

CLOCK = SystemClock()


@pytest.fixture
async def opened(nats_server: LocalNats, tmp_path: Path) -> AsyncIterator[tuple[Gate, PuppetWorker]]:
    async with open_gate(nats_server, tmp_path) as both:
        yield both


@pytest.fixture
def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door stores no record by itself."""
    monkeypatch.setattr("laneway.admission.late_records.LATE_S", 3600.0)


def attached(**changes: Any) -> JobRecord:
    # Of two jobs of one millisecond each has a name of its own.
    job_id = ids.new_job_id(REGION, CLOCK.now(), SYSTEM_RANDOM.randbytes(10))
    return make_record(job_id, attached=True, door="door-a", **changes)


async def writes(bus: Bus) -> int:
    """Of records, in all."""
    info = await bus.api(f"STREAM.INFO.{subjects.jobs_stream(REGION)}", {})
    return int(info["state"]["last_seq"])


# --- through a door --------------------------------------------------------------------------------


async def test_a_job_that_waits_is_found_by_everybody_a_moment_later(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    call = door.stub.Generate(generate())
    job_id = (await opening(call)).job_id
    found = (await door.stub.GetJob(pb.GetJobRequest(job_id=job_id))).job
    assert (found.job_id, found.state) == (job_id, common_pb2.JOB_STATE_READY)
    assert [j.job_id for j in (await door.stub.ListJobs(pb.ListJobsRequest())).jobs] == [job_id]
    assert (await door.record(job_id)).state is JobState.WAITING
    await worker.finish(await worker.take(), "abc")
    assert text_of(await rest(call)) == "abc"


async def test_a_job_that_is_claimed_at_once_is_written_twice_in_all(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    before = await writes(door.bus)
    taking = asyncio.ensure_future(worker.take())
    call = door.stub.Generate(generate())
    await opening(call)
    await worker.finish(await taking, "abc")
    assert text_of(await rest(call)) == "abc"
    await asyncio.sleep(0.2)  # twice as long as the door waits
    assert await writes(door.bus) == before + 2


@pytest.mark.usefixtures("never_late")
async def test_who_leaves_before_the_claim_leaves_a_cancelled_job(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    call = door.stub.Generate(generate())
    job_id = (await opening(call)).job_id
    call.cancel()
    await door.reaches(job_id, JobState.CANCELLED)
    assert await eventually(lambda: _empty(door))
    assert worker.hints == []


async def test_a_job_that_its_caller_keeps_is_stored_though_the_caller_left_at_once(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    for _ in range(10):
        call = door.stub.Generate(generate(on_disconnect=common_pb2.ON_DISCONNECT_KEEP))
        leaving = asyncio.ensure_future(opening(call))
        await eventually(door.messages)
        call.cancel()
        await asyncio.wait({leaving})
        job_id = await eventually(lambda: _job_in_lane(door))
        await door.reaches(job_id, JobState.WAITING)
        await door.stub.CancelJob(pb.CancelJobRequest(job_id=job_id))
        await eventually(lambda: _empty(door))


async def _job_in_lane(door: Gate) -> str:
    name = subjects.lane_stream(REGION, Lane.PRIORITY)
    found = await subject_list(door.bus, name, subjects.ready_filter(REGION, Lane.PRIORITY, POOL))
    return found[0].rsplit(".", 1)[1] if found else ""


async def _empty(door: Gate) -> bool:
    return await door.messages() == 0


@pytest.mark.usefixtures("never_late")
async def test_a_deadline_passes_without_a_record_too(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    call = door.stub.Generate(generate(due_s=1.0))
    job_id = (await opening(call)).job_id
    error = await error_of_call(call)
    assert isinstance(error, DeadlineExceeded)
    assert error.phase is Phase.QUEUE
    assert (await door.record(job_id)).state is JobState.EXPIRED


@pytest.mark.usefixtures("never_late")
async def test_a_door_that_closes_stores_what_waits(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    call = door.stub.Generate(generate())
    job_id = (await opening(call)).job_id
    door.stop.set()
    await door.task
    assert (await door.record(job_id)).state in (JobState.WAITING, JobState.CANCELLED)


async def test_a_record_that_cannot_be_stored_now_is_stored_later(provisioned_bus: Bus):
    class Away(RecordStore):
        tries = 0

        async def create(self, record: JobRecord, data: bytes = b"") -> int:
            self.tries += 1
            if self.tries == 1:
                raise PublishUnknown("publish")
            return await super().create(record, data)

    records, chores, record = Away(provisioned_bus), Chores(), attached()
    late = LateRecords(records, chores, CLOCK)
    late.watch(Stream(record, StreamLimits()))
    late.close()
    await eventually(lambda: len(chores) == 0)
    assert records.tries == 2
    stored = await records.get(REGION, record.tenant, record.job_id)
    assert stored is not None
    assert stored.record.state is JobState.WAITING


# --- accepting -------------------------------------------------------------------------------------


class Answering(LaneStore):
    """A lane that answers each publish with the same error."""

    def __init__(self, bus: Bus, error: Exception) -> None:
        super().__init__(bus, REGION)
        self._error = error

    async def put_ready(
        self, job: job.QueuedJob, record_sequence: int, data: bytes = b"", *, again: bool = False
    ) -> None:
        raise self._error

    def begin_put_ready(self, job: job.QueuedJob, record_sequence: int, data: bytes) -> Any:
        return self.put_ready(job, record_sequence, data)


def accept(bus: Bus, record: JobRecord, lanes: LaneStore) -> Any:
    pool = small_catalogue().pools[0]
    decision = Decision(record.verdict, Candidate(pool, 5, 5, 5, 5), record.contract, Placement.READY)
    return Acceptor(RecordStore(bus), lanes, CLOCK).accept(record, make_job(record).task, decision, lambda: 1.0)


async def test_a_job_that_is_perhaps_in_its_lane_gets_its_record(
    nats_server: LocalNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The scheduler ends it, once it is sure that nobody will."""
    monkeypatch.setattr(LaneStore, "put_ready", Answering.put_ready)
    monkeypatch.setattr(LaneStore, "begin_put_ready", Answering.begin_put_ready)
    monkeypatch.setattr(LaneStore, "_error", PublishUnknown("publish"), raising=False)
    async with open_gate(nats_server, tmp_path, admission_settings(nats_server, publish_s_max=0.3)) as (door, _):
        error = await error_of_call(door.stub.Generate(generate()))
        assert isinstance(error, OutcomeUnknown)
        await door.reaches(error.job_id, JobState.WAITING)


async def test_a_publish_without_an_answer_that_a_worker_got_is_an_acceptance(
    nats_server: LocalNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put = LaneStore.begin_put_ready

    async def unanswered(self: LaneStore, job: job.LaneJob, record_sequence: int, data: bytes = b"") -> None:
        await put(self, job, record_sequence, data)
        raise PublishUnknown("publish")

    monkeypatch.setattr(LaneStore, "put_ready", unanswered)
    monkeypatch.setattr(LaneStore, "begin_put_ready", unanswered)
    async with open_gate(nats_server, tmp_path, admission_settings(nats_server, publish_s_max=1.0)) as (door, worker):
        call = door.stub.Generate(generate())
        held = await worker.take()
        await opening(call)
        await worker.finish(held, "abc")
        assert text_of(await rest(call)) == "abc"


async def test_a_full_lane_leaves_a_refused_record(provisioned_bus: Bus):
    record = attached(publish_by_s=CLOCK.now() + 5.0)
    with pytest.raises(LaneSaturated):
        await accept(provisioned_bus, record, Answering(provisioned_bus, StreamFull("full")))
    stored = await RecordStore(provisioned_bus).get(REGION, record.tenant, record.job_id)
    assert stored is not None
    assert stored.record.state is JobState.REFUSED


# --- claiming --------------------------------------------------------------------------------------


def claims(bus: Bus, me: str) -> Claims:
    return Claims(RecordStore(bus), me, CLOCK, lambda owner: True)


def delivered(record: JobRecord, *, redelivered: bool = False) -> Delivered:
    return Delivered(REGION, record.tenant, record.job_id, StoredRecord(record, 0), redelivered, 3.0)


async def alone() -> bool:
    return True


async def test_a_job_whose_first_taker_died_before_its_claim_is_claimed_by_the_next(provisioned_bus: Bus):
    record = attached()
    claimed = await claims(provisioned_bus, "w2").claim(delivered(record, redelivered=True), alone)
    assert isinstance(claimed, StoredRecord)
    assert (claimed.record.state, claimed.record.owner) == (JobState.RUNNING, "w2")
    detached = replace(record, job_id=f"{record.job_id}x", attached=False)
    second = delivered(detached, redelivered=True)
    assert await claims(provisioned_bus, "w2").claim(second, alone) == Term("NO_RECORD")


async def test_of_many_first_claims_one_stores_the_record(provisioned_bus: Bus):
    for _ in range(10):
        record = attached()
        takers = [claims(provisioned_bus, f"w{i}").claim(delivered(record), alone) for i in range(6)]
        answers = await asyncio.gather(*takers)
        assert [type(a) for a in answers if isinstance(a, StoredRecord)] == [StoredRecord]
        assert sum(isinstance(a, Nak) for a in answers) == 5


async def test_a_claim_after_the_door_stored_the_record_goes_on_from_there(provisioned_bus: Bus):
    record = attached()
    await RecordStore(provisioned_bus).create(record)
    claimed = await claims(provisioned_bus, "w").claim(delivered(record), alone)
    assert isinstance(claimed, StoredRecord)
    assert claimed.record.attempt == 1


async def test_a_cancellation_and_a_first_claim_at_once_leave_a_cancelled_job(provisioned_bus: Bus):
    error = JobError(Code.CANCELLED, "CANCELLED", "the caller went away")
    seen = set()
    for _ in range(30):
        record, records = attached(), RecordStore(provisioned_bus)
        change = records.change(
            REGION,
            record.tenant,
            record.job_id,
            lambda found: job.cancel(found, error, CLOCK.now()),
            unstored=record,
        )
        cancelled, answer = await asyncio.gather(change, claims(provisioned_bus, "w").claim(delivered(record), alone))
        stored = await records.get(REGION, record.tenant, record.job_id)
        assert stored is not None
        assert stored.record.state is cancelled.record.state is JobState.CANCELLED
        assert isinstance(answer, StoredRecord) or answer == Ack(stored)
        seen.add(type(answer))
    assert seen, "which of both came first is chance"


def test_ids_say_when_they_were_made():
    clock = ManualClock(wall_s=1_800_000_000.123)
    assert ids.made_s(ids.new_job_id("eu-west", clock.now(), bytes(10))) == pytest.approx(1_800_000_000.123)
    for other in (ids.keyed_job_id("eu", "t", "k"), "", "eu", "eu-zzzzzzzz-0000-7000-8000-000000000000"):
        assert ids.made_s(other) == 0.0
