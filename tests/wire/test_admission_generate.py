"""Generate through a real door: Accepted first, every token once and in order, Finished last, whatever happens."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from laneway.core import subjects
from laneway.core.errors import Aborted, DeadlineExceeded, EngineFailed, JobCancelled, LaneSaturated, Unavailable
from laneway.core.job import claim, set_start_index
from laneway.core.lanes import JobState, Lane, Phase
from laneway.runtime import metrics
from laneway.runtime.grpc_errors import job_error_of
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.records import StoredRecord
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import bus_pb2, common_pb2
from tests.support.admission import (
    Gate,
    Held,
    PuppetWorker,
    admission_settings,
    error_of_call,
    generate,
    ids_of,
    open_gate,
    opening,
    rest,
    text_of,
)
from tests.support.nats import REGION, eventually


@pytest.fixture
async def opened(nats_server: LocalNats, tmp_path: Path) -> AsyncIterator[tuple[Gate, PuppetWorker]]:
    async with open_gate(nats_server, tmp_path) as both:
        yield both


@pytest.fixture
def door(opened: tuple[Gate, PuppetWorker]) -> Gate:
    return opened[0]


@pytest.fixture
def worker(opened: tuple[Gate, PuppetWorker]) -> PuppetWorker:
    return opened[1]


def streams() -> float:
    return metrics.REGISTRY.get_sample_value("laneway_door_streams", {"lane": "priority"}) or 0.0


async def test_accepted_first_then_all_tokens_then_finished(door: Gate, worker: PuppetWorker):
    call = door.stub.Generate(generate())
    accepted = await opening(call)
    assert accepted.job_id.startswith("local-")
    assert accepted.verdict.reason == "LANE_OPEN"
    held = await worker.take()
    assert (held.record.tenant, held.record.attached, held.record.origin) == ("default", True, "GRPC")
    assert held.task.prompt_ids == tuple(b"Hello")
    await worker.send(held, 0, "ab")
    await worker.send(held, 2, "c")
    await worker.finish(held, "abc")
    events = await rest(call)
    assert text_of(events) == "abc"
    assert ids_of(events) == list(b"abc")
    finished = events[-1].finished
    assert (finished.job_id, finished.attempt) == (accepted.job_id, 1)
    assert finished.state == common_pb2.JOB_STATE_SUCCEEDED
    assert finished.usage.completion_tokens == 3
    await eventually(lambda: streams() == 0)
    assert await door.messages() == 0


async def test_doubled_shuffled_and_foreign_batches_leave_no_trace(door: Gate, worker: PuppetWorker):
    first, second = door.stub.Generate(generate("one")), door.stub.Generate(generate("two"))
    await asyncio.gather(first.read(), second.read())
    held = {bytes(h.task.prompt_ids): h for h in [await worker.take(), await worker.take()]}
    one, two = held[b"one"], held[b"two"]
    await worker.send_batch([(one, 0, "ab"), (two, 0, "x")])
    await worker.send_batch([(one, 0, "ab"), (two, 0, "x")])
    await worker.send_batch([(one, 3, "d"), (two, 2, "z")])  # ahead of what is missing
    await worker.send_batch([(one, 2, "c"), (two, 1, "y")])
    await worker.send(one, 0, "zz", attempt=7, door="door-nobody")
    await worker.bus.emit(f"tok.{one.record.door}", b"\xff\xff not a batch")
    await worker.send_batch([(one, 3, "d"), (two, 2, "z")])
    await worker.send_batch([(one, 1, "b"), (one, 2, "c")])
    await worker.finish(one, "abcd")
    await worker.finish(two, "xyz")
    assert text_of(await rest(first)) == "abcd"
    assert text_of(await rest(second)) == "xyz"


async def test_a_gap_is_asked_for_again(door: Gate, worker: PuppetWorker):
    call = door.stub.Generate(generate())
    await call.read()
    held = await worker.take()
    await worker.send(held, 0, "a")
    await worker.send(held, 2, "c")
    job_id = held.record.job_id

    def asked() -> bool:
        return any(a.job_id == job_id and a.replay and a.next_index == 1 for b in worker.beats for a in b.attachments)

    await eventually(asked)
    await worker.send(held, 1, "b")
    await worker.send(held, 2, "c")
    await worker.finish(held, "abc")
    assert text_of(await rest(call)) == "abc"


async def test_nonsense_from_the_bus_about_a_live_job_ends_no_stream(door: Gate, worker: PuppetWorker):
    call = door.stub.Generate(generate())
    accepted = await opening(call)
    held = await worker.take()
    for odd in ("*", "a.>", "a worker"):
        event = bus_pb2.JobEvent(
            job_id=accepted.job_id, state=common_pb2.JOB_STATE_RUNNING, attempt=held.record.attempt, worker_id=odd
        )
        await door.bus.emit(subjects.event(REGION, accepted.job_id), event.SerializeToString())
        delta = bus_pb2.SequenceDelta(job_id=accepted.job_id, attempt=1, first_index=7, count=1)
        batch = bus_pb2.TokenBatch(worker_id=odd, deltas=[delta])
        await door.bus.emit(subjects.tokens(held.record.door), batch.SerializeToString())
    await asyncio.sleep(0.5)  # two beats
    assert not door.task.done(), "the door ended"
    await worker.finish(held, "ok")
    assert text_of(await rest(call)) == "ok"


async def test_beats_say_what_is_still_missing(door: Gate, worker: PuppetWorker):
    call = door.stub.Generate(generate())
    await call.read()
    held = await worker.take()
    await worker.send(held, 0, "abc")

    def confirmed() -> bool:
        return any(a.next_index == 3 and not a.replay for b in worker.beats for a in b.attachments)

    await eventually(confirmed)
    assert {b.door for b in worker.beats} == {held.record.door}
    await worker.finish(held, "abc")
    assert text_of(await rest(call)) == "abc"


@pytest.mark.parametrize(("with_record", "tell"), [(True, True), (False, True), (True, False)])
async def test_what_was_never_sent_comes_from_the_record(
    door: Gate, worker: PuppetWorker, with_record: bool, tell: bool
):
    call = door.stub.Generate(generate())
    await call.read()
    held = await worker.take()
    await worker.send(held, 0, "a")
    await worker.finish(held, "abcdé", with_record=with_record, tell=tell)
    events = await rest(call)
    assert text_of(events) == "abcdé"
    assert events[-1].HasField("finished")


async def test_a_job_goes_on_where_a_dead_worker_stopped(door: Gate, worker: PuppetWorker):
    call = door.stub.Generate(generate())
    await call.read()
    held = await worker.take()
    await worker.send(held, 0, "ab")
    other = PuppetWorker(door.bus, "other")
    async with other.alive():
        job_id = held.record.job_id
        await eventually(lambda: any(a.next_index == 2 for b in worker.beats for a in b.attachments))
        record = claim(held.record, other.id, 0.0, owner_is_dead=True)
        sequence = await door.records.update(record, held.stored.sequence)
        taken = Held(held.delivery, StoredRecord(record, sequence))
        await other.announce(taken)
        await worker.send(held, 2, "X")  # the dead one lives a little longer: too late

        def offered() -> list[int]:
            found = [a for b in other.beats for a in b.attachments if a.job_id == job_id and a.delivered_ids]
            return list(found[0].delivered_ids) if found else []

        assert await eventually(offered) in (list(b"ab"), list(b"abX"))
        prefix = bytes(offered()).decode()
        record = set_start_index(record, other.id, 2, len(prefix))
        sequence = await door.records.update(record, sequence)
        taken = Held(held.delivery, StoredRecord(record, sequence))
        await other.send(taken, len(prefix), "cd")
        await other.finish(taken, prefix + "cd")
        events = await rest(call)
    assert text_of(events) == prefix + "cd"
    assert events[-1].finished.attempt == 2


async def test_another_runs_answer_is_never_spliced_on(door: Gate, worker: PuppetWorker):
    call = door.stub.Generate(generate())
    await call.read()
    held = await worker.take()
    await worker.send(held, 0, "ab")
    await worker.send(held, 0, "xyz", attempt=2)
    error = await error_of_call(call)
    assert isinstance(error, Aborted)
    assert error.facts["next_index"] == "2"
    record = await door.reaches(held.record.job_id, JobState.CANCELLED)
    assert record.error is not None


async def test_a_failed_job_ends_with_its_error(door: Gate, worker: PuppetWorker):
    call = door.stub.Generate(generate())
    await call.read()
    held = await worker.take()
    await worker.fail(held, job_error_of(EngineFailed("the engine failed", phase=Phase.DECODE)))
    error = await error_of_call(call)
    assert isinstance(error, EngineFailed)
    assert (error.job_id, error.phase) == (held.record.job_id, Phase.DECODE)


async def test_a_deadline_that_passes_in_the_queue_says_so(door: Gate, worker: PuppetWorker):
    call = door.stub.Generate(generate(due_s=0.6))
    accepted = await opening(call)
    error = await error_of_call(call)
    assert isinstance(error, DeadlineExceeded)
    assert error.phase is Phase.QUEUE
    record = await door.record(accepted.job_id)
    assert (record.state, record.error) == (JobState.EXPIRED, job_error_of(error))
    assert await door.messages() == 0


async def test_the_calls_own_deadline_bounds_the_job_and_its_phase_arrives(door: Gate, worker: PuppetWorker):
    call = door.stub.Generate(generate(), timeout=1.0)
    await call.read()
    error = await error_of_call(call)
    assert isinstance(error, DeadlineExceeded)
    assert error.phase is Phase.QUEUE, "our status came before the library's own timer"


async def test_a_deadline_that_passes_while_running_names_the_phase(door: Gate, worker: PuppetWorker):
    call = door.stub.Generate(generate(due_s=0.8))
    await call.read()
    held = await worker.take()
    await worker.send(held, 0, "a")
    error = await error_of_call(call)
    assert isinstance(error, DeadlineExceeded)
    assert error.phase is Phase.DECODE
    await eventually(lambda: held.record.job_id in worker.hints)


@pytest.mark.parametrize("claimed", [False, True])
async def test_a_caller_who_vanishes_frees_everything(door: Gate, worker: PuppetWorker, claimed: bool):
    call = door.stub.Generate(generate())
    accepted = await opening(call)
    job_id = accepted.job_id
    if claimed:
        held = await worker.take()
        await worker.send(held, 0, "a")
        await call.read()
    call.cancel()
    record = await door.reaches(job_id, JobState.CANCELLED)
    assert record.error is not None
    if claimed:
        await eventually(lambda: job_id in worker.hints)

    async def empty() -> bool:
        return await door.messages() == 0

    await eventually(empty)
    await eventually(lambda: streams() == 0)


async def test_a_hint_is_repeated_until_the_owner_answers(door: Gate, worker: PuppetWorker):
    worker.answers_hints = False
    call = door.stub.Generate(generate())
    await call.read()
    held = await worker.take()
    job_id = held.record.job_id
    await door.stub.CancelJob(pb.CancelJobRequest(job_id=job_id))
    await eventually(lambda: worker.hints.count(job_id) >= 3)
    await worker.answer_hint(job_id)
    assert isinstance(await error_of_call(call), JobCancelled)
    await worker.bus.nc.flush()
    told = len(worker.hints)
    # Another job's whole life passes by: had hints gone on, one would have come.
    for _ in range(2):
        other = door.stub.Generate(generate(due_s=0.6))
        await error_of_call(other)
    assert len(worker.hints) <= told + 1


async def test_a_job_that_is_to_be_kept_goes_on_without_its_caller(door: Gate, worker: PuppetWorker):
    call = door.stub.Generate(generate(on_disconnect=common_pb2.ON_DISCONNECT_KEEP))
    accepted = await opening(call)
    held = await worker.take()
    call.cancel()
    await eventually(lambda: streams() == 0)
    await worker.finish(held, "abc")
    record = await door.record(accepted.job_id)
    assert record.state is JobState.SUCCEEDED


async def test_a_full_lane_refuses_and_leaves_nothing_in_it(nats_server: LocalNats, tmp_path: Path):
    settings = admission_settings(nats_server, slots=1, queue_length=1)
    async with open_gate(nats_server, tmp_path, settings) as (door, _):
        request = generate(due_s=900.0)
        request.spec.contract.ttft_target.FromSeconds(600)
        waiting = [door.stub.Generate(request) for _ in range(2)]
        await asyncio.gather(*(call.read() for call in waiting))
        error = await error_of_call(door.stub.Generate(request))
        assert isinstance(error, LaneSaturated)
        assert error.retry_after_s is not None
        assert error.retry_after_s > 0
        assert await door.messages() == 2
        refused = await door.record(error.job_id)
        assert refused.state is JobState.REFUSED
        for call in waiting:
            call.cancel()


async def test_a_refusal_by_policy_stores_nothing(door: Gate):
    await door.plan(workers=0, free_slots=0)
    await door.quotes("NO_WORKER")
    error = await error_of_call(door.stub.Generate(generate()))
    assert isinstance(error, Unavailable)
    assert error.reason == "NO_WORKER"
    assert error.retry_after_s is not None
    assert await door.messages() == 0
    assert await door.job_ids() == []


async def test_held_work_is_parked_and_says_until_when(door: Gate, worker: PuppetWorker):
    await door.plan(free_slots=0)
    await door.quotes("HELD_FOR_CAPACITY", lane=Lane.BATCH)
    answer = await door.stub.Submit(pb.SubmitRequest(spec=generate(lane=Lane.BATCH, due_s=3600.0).spec))
    assert answer.verdict.kind == common_pb2.VERDICT_KIND_HELD
    assert answer.verdict.hold_until.seconds
    job = (await door.stub.GetJob(pb.GetJobRequest(job_id=answer.job_id))).job
    assert job.state == common_pb2.JOB_STATE_PARKED
    cancelled = await door.stub.CancelJob(pb.CancelJobRequest(job_id=answer.job_id))
    assert cancelled.state == common_pb2.JOB_STATE_CANCELLED
    assert await door.messages() == 0


async def test_streams_that_outlast_the_drain_end_unavailable(door: Gate, worker: PuppetWorker):
    call = door.stub.Generate(generate())
    await call.read()
    quick = door.stub.Generate(generate())
    await quick.read()
    first = await worker.take()
    second = await worker.take()
    door.stop.set()
    await worker.finish(second, "ok")
    error = await error_of_call(call)
    assert isinstance(error, Unavailable)
    assert text_of(await rest(quick)) == "ok"
    await door.task
    assert (await door.record(first.record.job_id)).state is JobState.CANCELLED


async def test_a_reader_who_is_slow_gets_everything_and_holds_up_nobody(nats_server: LocalNats, tmp_path: Path):
    settings = admission_settings(nats_server, stream_buffer_bytes=1024)
    async with open_gate(nats_server, tmp_path, settings) as (door, worker):
        slow, quick = door.stub.Generate(generate("slow")), door.stub.Generate(generate("quick"))
        await asyncio.gather(opening(slow), opening(quick))
        held = {bytes(h.task.prompt_ids): h for h in [await worker.take(), await worker.take()]}
        text = "x" * 50_000  # far beyond what HTTP/2 and this door keep for a reader
        for first in range(0, 200_000, len(text)):
            await worker.send(held[b"slow"], first, text)
        await worker.send(held[b"quick"], 0, "ab")
        await worker.finish(held[b"quick"], "ab")
        assert text_of(await rest(quick)) == "ab"
        await worker.finish(held[b"slow"], "x" * 200_000)
        events = await rest(slow)
        assert text_of(events) == "x" * 200_000
        assert events[-1].HasField("finished")
