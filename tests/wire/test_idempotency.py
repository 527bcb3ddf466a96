"""A key and a body are one job, whichever doors they come to, when, and wherever an earlier door died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.admission.accept import Acceptor
from laneway.admission.answers import end_error
from laneway.admission.service import digest_of
from laneway.core import job as jobs
from laneway.core.dead_letters import POISON
from laneway.core.errors import AlreadyExists, Code
from laneway.core.ids import keyed_job_id
from laneway.core.job import NOT_ACCEPTED, GenerateTask, JobError, JobRecord, LaneJob, QueuedJob, Sampling
from laneway.core.lanes import JobState, Lane, Phase
from laneway.policy.admit import Candidate, Decision, Placement
from laneway.runtime.bus import Bus
from laneway.runtime.dead_letters import DeadLetterStore
from laneway.runtime.lanes import LaneStore
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.records import RecordStore
from laneway.v1 import admission_pb2 as pb
from tests.support.admission import (
    CLOCK,
    TENANT,
    Gate,
    admission_settings,
    error_of_call,
    gate,
    generate,
    ids_of,
    open_gate,
    opening,
    rest,
    spec,
    text_of,
)
from tests.support.nats import REGION, make_record, small_catalogue
from tests.support.worker import Yard, yard

KEY = "k1"
JOB = keyed_job_id(REGION, TENANT, KEY)
ANSWER_TOKENS = 12


def asked(text: str = "Hello") -> pb.SubmitRequest:
    return pb.SubmitRequest(spec=spec(text, lane=Lane.BATCH), idempotency_key=KEY)


# --- what became of an earlier try -----------------------------------------------------------------


async def stored(door: Gate, state: JobState, error: JobError | None = None, **changes: Any) -> JobRecord:
    """The record of an earlier try with this key and body."""
    digest = digest_of(asked().spec)
    record = make_record(JOB, Lane.BATCH, state=state, body_digest=digest, door="door-dead", tenant=TENANT, **changes)
    record = replace(record, error=error, idempotency_key=KEY)
    await door.records.create(record)
    return record


GIVEN_UP = JobError(Code.UNAVAILABLE, NOT_ACCEPTED, "never in its lane; nothing ran", Phase.QUEUE)
REFUSED = JobError(Code.RESOURCE_EXHAUSTED, "LANE_SATURATED", "the lane is full")
BY_CALLER = JobError(Code.CANCELLED, "CANCELLED", "by its caller")


@pytest.mark.parametrize(("state", "error"), [(JobState.CANCELLED, GIVEN_UP), (JobState.REFUSED, REFUSED)])
async def test_a_key_whose_job_was_never_accepted_is_free_for_the_same_request(
    nats_server: LocalNats, tmp_path: Path, state: JobState, error: JobError
) -> None:
    async with open_gate(nats_server, tmp_path) as (door, worker):
        await stored(door, state, error)
        assert (await door.stub.Submit(asked())).job_id == JOB
        assert (await door.stub.Submit(asked())).job_id == JOB
        assert await door.messages() == 1
        await worker.finish(await worker.take(Lane.BATCH), "ok")
        assert (await door.reaches(JOB, JobState.SUCCEEDED)).attempt == 1


async def test_another_body_may_have_a_refused_key_but_not_one_whose_message_may_still_come(
    nats_server: LocalNats, tmp_path: Path
) -> None:
    async with open_gate(nats_server, tmp_path) as (door, _):
        given_up = await stored(door, JobState.CANCELLED, GIVEN_UP)
        assert isinstance(await error_of_call(door.stub.Submit(asked("other"))), AlreadyExists)
        found = await door.records.get(REGION, TENANT, JOB, leader=True)
        assert found is not None
        await door.records.update(replace(given_up, state=JobState.REFUSED, error=REFUSED), found.sequence)
        assert (await door.stub.Submit(asked("other"))).job_id == JOB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "error", "attempt"),
    [
        (JobState.CANCELLED, BY_CALLER, 0),
        (JobState.CANCELLED, GIVEN_UP, 1),  # whatever it says, it ran
        (JobState.EXPIRED, JobError(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "late", Phase.QUEUE), 0),
        (JobState.FAILED, JobError(Code.INTERNAL, POISON, "it never ends"), 3),
        (JobState.SUCCEEDED, None, 1),
        (JobState.RUNNING, None, 1),
    ],
)
async def test_the_key_of_any_other_job_stays_its_own(
    nats_server: LocalNats, tmp_path: Path, state: JobState, error: JobError | None, attempt: int
) -> None:
    async with open_gate(nats_server, tmp_path) as (door, _):
        before = await stored(door, state, error, attempt=attempt)
        assert (await door.stub.Submit(asked())).job_id == JOB
        assert await door.record(JOB) == before
        assert await door.messages() == 0
        assert isinstance(await error_of_call(door.stub.Submit(asked("other"))), AlreadyExists)


async def test_a_message_of_a_given_up_try_that_came_and_went_is_not_taken_for_the_next_one(
    nats_server: LocalNats, tmp_path: Path
) -> None:
    """It was stored late, found its record ended, and was acknowledged; NATS still remembers its id."""
    async with open_gate(nats_server, tmp_path) as (door, worker):
        record = await stored(door, JobState.CANCELLED, GIVEN_UP)
        await door.lanes.put_ready(job_of(record), 1)
        await (await worker.pull(Lane.BATCH)).ack()
        await door.stub.Submit(asked())
        await worker.finish(await worker.take(Lane.BATCH), "ok")
        await door.reaches(JOB, JobState.SUCCEEDED)


@pytest.mark.slow
async def test_a_requeue_leaves_the_key_with_the_job_that_was_given_up(nats_server: LocalNats, tmp_path: Path) -> None:
    async with open_gate(nats_server, tmp_path) as (door, worker):
        await door.stub.Submit(asked())
        held = await worker.take(Lane.BATCH)
        failed = await worker.fail(held, JobError(Code.INTERNAL, POISON, "3 attempts ended without a result"))
        await DeadLetterStore(door.bus, REGION).store(failed, held.delivery.data)
        again = await door.stub.RequeueDeadLetter(pb.RequeueDeadLetterRequest(job_id=JOB))
        assert again.job_id != JOB
        assert (await door.stub.Submit(asked())).job_id == JOB
        assert (await door.record(JOB)).state is JobState.FAILED
        assert await door.messages() == 1  # of the requeue alone
        held = await worker.take(Lane.BATCH)
        assert (held.record.job_id, held.record.requeued_from) == (again.job_id, JOB)
        await worker.finish(held, "ok")


# --- where the first door died ---------------------------------------------------------------------


class Crash(Exception):
    """The door is gone."""


def crashing_lanes(bus: Bus, *, sent: bool) -> LaneStore:
    class Crashing(LaneStore):
        async def put_ready(self, job: QueuedJob, record_sequence: int, data: bytes = b"", **more: Any) -> None:
            if sent:
                await super().put_ready(job, record_sequence, data, **more)
            raise Crash

    return Crashing(bus, REGION)


def job_of(record: JobRecord) -> LaneJob:
    return LaneJob(record, GenerateTask(tuple(b"Hello"), Sampling(max_tokens=16, temperature=0.0)))


async def accepted_up_to(door: Gate, point: str, request: pb.GenerateRequest, lane: Lane) -> None:
    """Another door's part, to where it died."""
    record = make_record(JOB, lane, tenant=TENANT, door="door-dead", attached=True, body_digest=digest_of(request.spec))
    record = replace(record, idempotency_key=KEY, publish_by_s=CLOCK.now() + 5.0)
    pool = small_catalogue().pools[0]
    decision = Decision(record.verdict, Candidate(pool, 5, 5, 5, 5), record.contract, Placement.READY)
    lanes = LaneStore(door.bus, REGION) if point == "told nobody" else crashing_lanes(door.bus, sent=point == "sent")
    accepting = Acceptor(RecordStore(door.bus), lanes, CLOCK).accept(record, job_of(record).task, decision, lambda: 1.0)
    if point == "told nobody":
        await accepting
    else:
        with pytest.raises(Crash):
            await accepting


@pytest.mark.slow
@pytest.mark.parametrize("lane", [Lane.PRIORITY, Lane.BATCH])
@pytest.mark.parametrize("point", ["record created", "sent", "told nobody"])
async def test_the_next_try_completes_what_a_dying_door_left(
    nats_server: LocalNats, tmp_path: Path, point: str, lane: Lane
) -> None:
    async with open_gate(nats_server, tmp_path) as (door, worker):
        request = generate(key=KEY, lane=lane)
        await accepted_up_to(door, point, request, lane)
        other = await error_of_call(door.stub.Generate(generate("other", key=KEY, lane=lane)))
        assert isinstance(other, AlreadyExists)
        call = door.stub.Generate(request)
        assert (await opening(call)).job_id == JOB
        assert await door.messages() == 1
        held = await worker.take(lane)
        await worker.finish(held, "abc")
        assert text_of(await rest(call)) == "abc"
        assert (await door.record(JOB)).attempt == 1
        assert await door.messages() == 0


# --- two doors at once -----------------------------------------------------------------------------


@asynccontextmanager
async def two_doors(server: LocalNats, folder: Path) -> AsyncIterator[tuple[Gate, Gate, Yard]]:
    """Whose beats and looks at records are far apart, so that only what is told at once helps."""
    settings = admission_settings(server, beat_s=30.0, silence_s=60.0, queue_length=100)
    for name in ("a", "b"):
        (folder / name).mkdir()
    async with (
        gate(server, folder / "a", settings) as one,
        gate(server, folder / "b", settings) as two,
        yard(server, workers=1, engine__pace_s=0.01) as place,
    ):
        for door in (one, two):
            await door.plan(workers=1)
            await door.quotes("LANE_OPEN")
        yield one, two, place


def request_of(key: str, text: str = "Hello", tokens: int = ANSWER_TOKENS) -> pb.GenerateRequest:
    request = generate(text, key=key)
    request.spec.generate.sampling.max_tokens = tokens
    return request


async def streamed(door: Gate, request: pb.GenerateRequest) -> tuple[str, str, list[int], int]:
    """Job, text, ids, and in how many chunks they came: in one where the stream was silent until the end."""
    call = door.stub.Generate(request)
    job_id = (await opening(call)).job_id
    events = await rest(call)
    return job_id, text_of(events), ids_of(events), sum(event.HasField("chunk") for event in events)


@pytest.mark.slow
async def test_two_doors_with_one_key_and_body_are_one_job_and_two_whole_streams(
    nats_server: LocalNats, tmp_path: Path
) -> None:
    async with two_doors(nats_server, tmp_path) as (one, two, place):
        for key in ("k1", "k2", "k3", "k4"):
            streams = await asyncio.gather(*(streamed(door, request_of(key)) for door in (one, two)))
            (job, text, ids, _), other = streams
            assert (job, text, ids) == other[:3]
            assert len(ids) == ANSWER_TOKENS
            record = await one.record(job)
            assert (record.state, record.attempt) == (JobState.SUCCEEDED, 1)
        assert place.workers[0].worker.rates.jobs_done == 4
        assert await one.messages() == 0


@pytest.mark.slow
async def test_a_door_that_is_overtaken_between_record_and_lane_streams_as_well(
    nats_server: LocalNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thinks that the other has died; the record names the later one, and the worker knows only that."""
    put_ready, both = LaneStore.put_ready, asyncio.Barrier(2)

    async def together(lanes: LaneStore, *args: Any, **more: Any) -> None:
        await both.wait()
        await put_ready(lanes, *args, **more)

    async with two_doors(nats_server, tmp_path) as (one, two, _):
        monkeypatch.setattr(LaneStore, "put_ready", together)
        asking = (streamed(door, request_of(KEY, tokens=60)) for door in (one, two))
        (job, text, ids, chunks), other = await asyncio.gather(*asking)
        assert (job, text, ids) == other[:3]
        assert len(ids) == 60
        assert min(chunks, other[3]) > 1
        assert (await one.record(job)).attempt == 1
        assert await one.messages() == 0


@pytest.mark.slow
async def test_of_two_bodies_at_two_doors_one_has_the_key_everywhere(nats_server: LocalNats, tmp_path: Path) -> None:
    async with two_doors(nats_server, tmp_path) as (one, two, _):
        bodies = {"Hello": one, "Other": two}
        tries = [streamed(door, request_of(KEY, text)) for text, door in bodies.items()]
        outcomes = await asyncio.gather(*tries, return_exceptions=True)
        winner = [text for text, outcome in zip(bodies, outcomes, strict=True) if isinstance(outcome, tuple)]
        assert len(winner) == 1
        for door in (one, two):
            for text in bodies:
                if text == winner[0]:
                    assert (await streamed(door, request_of(KEY, text)))[0] == JOB
                else:
                    error = await error_of_call(door.stub.Generate(request_of(KEY, text)))
                    assert isinstance(error, AlreadyExists)
                    assert error.job_id == JOB
        assert (await one.record(JOB)).attempt == 1


@pytest.mark.parametrize(
    ("end", "again"),
    [
        (lambda record: jobs.refuse(record, REFUSED, 1.0), True),
        (lambda record: jobs.cancel(record, GIVEN_UP, 1.0), True),
        (lambda record: jobs.cancel(record, BY_CALLER, 1.0), False),
        (lambda record: jobs.expire(record, JobError(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", ""), 1.0), False),
        (lambda record: jobs.reject(record, JobError(Code.RESOURCE_EXHAUSTED, "RESULT_TOO_LARGE", ""), 1.0), False),
    ],
)
def test_whoever_shares_the_end_of_what_never_ran_is_told_when_to_ask_again(
    end: Callable[[JobRecord], JobRecord], again: bool
) -> None:
    """As one who asked with the same key while the first was being refused."""
    assert (end_error(end(make_record())).retry_after_s is not None) == again


def test_what_was_never_accepted_is_told_by_its_end() -> None:
    waiting = make_record()
    assert not jobs.never_accepted(waiting)
    assert jobs.never_accepted(jobs.refuse(waiting, REFUSED, 1.0))
    assert jobs.never_accepted(jobs.cancel(waiting, GIVEN_UP, 1.0))
    assert not jobs.never_accepted(jobs.cancel(waiting, BY_CALLER, 1.0))
    assert not jobs.never_accepted(jobs.cancel(jobs.claim(waiting, "w", 1.0), GIVEN_UP, 2.0))
