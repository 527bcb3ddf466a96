"""How a job may end at a worker: cancelled in each state, too late, too large, abandoned by its caller, failed."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from laneway.core import job as jobs
from laneway.core import subjects
from laneway.core.errors import Code
from laneway.core.fleet import Plan, WorkerState
from laneway.core.job import GenerateTask, JobError, Sampling
from laneway.core.lanes import JobState, Lane, OnDisconnect, Phase
from laneway.runtime.clock import SystemClock
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.plans import PlanPublisher
from laneway.runtime.records import StoredRecord
from laneway.v1 import bus_pb2
from laneway.workers.engine_requests import request_of
from laneway.workers.engines.protocol import EngineRequest
from tests.support.nats import REGION, TENANT, eventually, make_record
from tests.support.worker import ByteDoor, RunningWorker, Yard, yard

CRASH_ID, ERROR_ID = 7, 8


async def cancel(place: Yard, job_id: str) -> StoredRecord:
    """As a door cancels: the record first, then the lanes, then a hint to the owner."""
    found = await place.records.get(REGION, TENANT, job_id, leader=True)
    assert found is not None
    owner = found.record.owner
    error = JobError(Code.CANCELLED, "CANCELLED", "cancelled by its caller")
    now_s = SystemClock().now()
    stored = await place.records.change(REGION, TENANT, job_id, lambda record: jobs.cancel(record, error, now_s))
    await place.lanes.purge(stored.record)
    for running in place.workers:
        if owner in ("", running.id):
            await place.tell(running.id, cancel=bus_pb2.CancelHint(job_id=job_id))
    return stored


async def running_state(place: Yard, job_id: str) -> bool:
    return (await place.record(job_id)).state is JobState.RUNNING


async def nothing_left(place: Yard) -> None:
    """No lane message, no seat, no sequence, and a small job runs at once."""
    assert await eventually(place.lanes_empty)
    for running in place.workers:
        await eventually(running.idle)
        await eventually(running.engine_empty)
    after = await place.submit(max_tokens=2)
    (record,) = await place.ended(after.record.job_id)
    assert record.state is JobState.SUCCEEDED


async def test_cancel_while_queued(nats_server: LocalNats):
    async with yard(nats_server, workers=1, model__slots=1) as place:
        first = await place.submit(max_tokens=400)
        await eventually(lambda: running_state(place, first.record.job_id))
        queued = await place.submit(max_tokens=400)
        await cancel(place, queued.record.job_id)
        (record,) = await place.ended(queued.record.job_id)
        assert record.state is JobState.CANCELLED
        assert record.attempt == 0
        await cancel(place, first.record.job_id)
        await nothing_left(place)


async def test_cancel_while_staged_for_kv(nats_server: LocalNats):
    async with yard(nats_server, workers=1, model__kv_tokens=4096, engine__pace_s=0.01) as place:
        worker = place.workers[0].worker
        first = await place.submit(max_tokens=3000)
        await eventually(lambda: running_state(place, first.record.job_id))
        staged = await place.submit(lane=Lane.BATCH, max_tokens=3000)
        await eventually(lambda: worker.staged_by_lane()[Lane.BATCH])
        await cancel(place, staged.record.job_id)
        await eventually(lambda: not worker.staged_by_lane()[Lane.BATCH])
        await cancel(place, first.record.job_id)
        await nothing_left(place)


async def test_cancel_during_a_long_prefill(nats_server: LocalNats):
    async with yard(nats_server, workers=1, model__slots=1, engine__pace_s=0.05) as place:
        stored = await place.submit(prompt=bytes(3000), max_tokens=8)  # six chunks of 512
        await eventually(lambda: running_state(place, stored.record.job_id))
        await cancel(place, stored.record.job_id)
        await nothing_left(place)
        assert place.workers[0].worker.rates.tokens_done == 2


async def test_cancel_while_decoding_is_answered_on_ev(nats_server: LocalNats):
    async with yard(nats_server, workers=1, model__slots=1) as place, ByteDoor(place.bus) as door:
        stored = await place.submit(caller_at=door, max_tokens=2000)
        job_id = stored.record.job_id
        await eventually(lambda: len(door.ids(job_id)) >= 3)
        await cancel(place, job_id)
        last = await eventually(lambda: next((e for e in door.events[job_id] if e.record), None))
        assert last.worker_id == place.workers[0].id
        await nothing_left(place)
        seen = len(door.ids(job_id))
        assert seen < 2000
        assert (await place.record(job_id)).state is JobState.CANCELLED


async def test_a_hint_about_a_job_that_is_not_here_is_answered(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place, ByteDoor(place.bus) as door:
        await place.tell(place.workers[0].id, cancel=bus_pb2.CancelHint(job_id="local-nobody"))
        (event,) = await eventually(lambda: door.events.get("local-nobody"))
        assert event.worker_id == place.workers[0].id


async def test_a_false_cancel_hint_costs_a_job_nothing_but_time(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place:
        stored = await place.submit(max_tokens=300)
        await eventually(lambda: running_state(place, stored.record.job_id))
        await place.tell(place.workers[0].id, cancel=bus_pb2.CancelHint(job_id=stored.record.job_id))
        (record,) = await place.ended(stored.record.job_id)
        assert record.state is JobState.SUCCEEDED
        assert record.starts - record.clean == 1


@pytest.mark.slow
async def test_a_job_that_comes_back_before_the_engine_let_go_of_it_is_not_forgotten(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    """Its message is delivered again at once; a run that has answered already must not take that delivery."""
    async with yard(nats_server, workers=1, engine__pace_s=0.005) as place:
        sequences = place.workers[0].worker.sequences
        abort = sequences.abort
        monkeypatch.setattr(
            sequences, "abort", lambda sequence: asyncio.get_running_loop().call_later(1.0, abort, sequence)
        )
        stored = await place.submit(lane=Lane.BATCH, max_tokens=1000)
        await eventually(lambda: running_state(place, stored.record.job_id))
        await place.tell(place.workers[0].id, cancel=bus_pb2.CancelHint(job_id=stored.record.job_id))
        (record,) = await place.ended(stored.record.job_id)  # a batch job's ack wait is longer
        assert (record.state, record.attempt) == (JobState.SUCCEEDED, 2)
        await nothing_left(place)


async def test_a_deadline_in_the_queue_and_while_running(nats_server: LocalNats):
    async with yard(nats_server, workers=1, model__slots=1, engine__pace_s=0.01) as place:
        now_s = SystemClock().now()
        running = await place.submit(max_tokens=2000, contract={"deadline_s": now_s + 1.0})
        queued = await place.submit(max_tokens=5, contract={"deadline_s": now_s + 0.5})
        first, second = await place.ended(running.record.job_id, queued.record.job_id)
        assert (first.state, first.error and first.error.phase) == (JobState.EXPIRED, Phase.DECODE)
        assert (second.state, second.error and second.error.phase) == (JobState.EXPIRED, Phase.QUEUE)
        assert second.error is not None
        assert second.error.code is Code.DEADLINE_EXCEEDED
        assert second.attempt == 0
        await nothing_left(place)


@pytest.mark.parametrize("wait", ["read", "write"])
@pytest.mark.slow
async def test_a_deadline_frees_the_engine_while_nats_answers_nobody(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch, wait: str
):
    async with yard(nats_server, workers=1, engine__pace_s=0.01) as place:
        worker = place.workers[0].worker
        endings, answered = worker._bench.endings, asyncio.Event()
        asks = getattr(endings, wait)

        async def slowly(*given: Any) -> Any:
            await answered.wait()
            return await asks(*given)

        monkeypatch.setattr(endings, wait, slowly)
        deadline = {"deadline_s": SystemClock().now() + 1.0}
        earlier: dict[str, Any] = {"attempt": 1, "starts": 1, "clean": 1} if wait == "write" else {}
        stored = await place.submit(max_tokens=2000, contract=deadline, **earlier)
        runs = worker.runs
        assert runs is not None
        run = await eventually(lambda: runs.running(stored.record.job_id))
        await eventually(lambda: len(worker.sequences))
        if wait == "read":
            run.confirm_ownership()
        await eventually(place.workers[0].engine_empty, 3.0)
        assert worker.sequences.stats().steps < 200, "it was not computed to its end"
        assert runs.running(stored.record.job_id) is run
        answered.set()
        (record,) = await place.ended(stored.record.job_id)
        assert record.state is JobState.EXPIRED
        await nothing_left(place)


async def test_a_job_is_not_started_before_its_time(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place:
        now_s = SystemClock().now()
        stored = await place.submit(lane=Lane.BATCH, contract={"not_before_s": now_s + 0.5})
        (record,) = await place.ended(stored.record.job_id)
        assert record.state is JobState.SUCCEEDED
        assert record.timings.claimed_s >= now_s + 0.5


@pytest.mark.slow  # three ack waits
async def test_a_fault_of_ours_with_one_job_costs_no_slot_and_is_not_met_for_ever(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    def request(request_id: int, task: GenerateTask, *rest: Any, **more: Any) -> EngineRequest:
        if len(task.prompt_ids) == 7:
            raise ValueError("cannot be asked for")
        return request_of(request_id, task, *rest, **more)

    monkeypatch.setattr("laneway.workers.generation.request_of", request)
    async with yard(nats_server, workers=1) as place:
        bad = [await place.submit(prompt=bytes(7), max_tokens=2)]
        good = await place.submit(max_tokens=2)
        (after,) = await place.ended(good.record.job_id)
        assert after.state is JobState.SUCCEEDED
        for record in await place.ended(*(each.record.job_id for each in bad)):
            assert record.error is not None
            assert (record.state, record.starts, record.error.reason) == (JobState.FAILED, 3, "POISON")
        await eventually(lambda: len(place.workers[0].worker.seats or ()) == 0)


async def test_a_job_that_can_never_fit_fails_with_both_numbers_and_blocks_nobody(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place:
        stored = [await place.submit(prompt=bytes(100), max_tokens=n) for n in (4096 - 100, 4097 - 100, 30_000)]
        small = await place.submit(max_tokens=2)
        await cancel(place, stored[0].record.job_id)  # it fits, and would take a while
        *_, over, far_over, after = await place.ended(*(s.record.job_id for s in (*stored, small)))
        assert after.state is JobState.SUCCEEDED
        for record in (over, far_over):
            assert record.state is JobState.FAILED
            assert record.error is not None
            assert record.error.reason == "CONTEXT_EXCEEDED"
            assert "100 + " in record.error.message
            assert "4096" in record.error.message
            assert record.starts == 0
        await nothing_left(place)


@pytest.mark.parametrize(
    ("policy", "state"), [(OnDisconnect.CANCEL, JobState.CANCELLED), (OnDisconnect.KEEP, JobState.SUCCEEDED)]
)
async def test_a_dead_door_cancels_or_keeps_by_contract(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch, policy: OnDisconnect, state: JobState
):
    monkeypatch.setattr("laneway.workers.run.DOOR_SILENCE_S", 0.6)
    async with yard(nats_server, workers=1) as place:
        stored = await place.submit(attached=True, door="door-dead", max_tokens=700, contract={"on_disconnect": policy})
        (record,) = await place.ended(stored.record.job_id)
        assert record.state is state
        if state is JobState.CANCELLED:
            assert record.error is not None
            assert record.error.reason == "CALLER_GONE"
        await nothing_left(place)


async def test_a_living_door_keeps_its_job(nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("laneway.workers.run.DOOR_SILENCE_S", 0.8)
    async with yard(nats_server, workers=1) as place, ByteDoor(place.bus) as door:
        stored = await place.submit(caller_at=door, max_tokens=1000)
        (record,) = await place.ended(stored.record.job_id)
        assert record.state is JobState.SUCCEEDED
        await eventually(lambda: len(door.ids(stored.record.job_id)) == 1000)


async def test_one_failing_request_harms_no_other(nats_server: LocalNats):
    async with yard(nats_server, workers=1, engine__fault_error_token_id=ERROR_ID) as place:
        good = [await place.submit(max_tokens=50) for _ in range(3)]
        bad = await place.submit(prompt=(1, ERROR_ID), max_tokens=50)
        *others, failed = await place.ended(*(s.record.job_id for s in (*good, bad)))
        assert failed.state is JobState.FAILED
        assert failed.error is not None
        assert failed.error.reason == "ENGINE_FAILED"
        assert all(record.state is JobState.SUCCEEDED and record.attempt == 1 for record in others)
        await nothing_left(place)


async def test_an_answer_that_neither_its_record_nor_the_object_store_takes_fails_clearly(nats_server: LocalNats):
    async with yard(nats_server, workers=1, engine__pace_s=0.0005) as place:
        place.workers[0].worker._bench.endings._records._bus.nc._max_payload = 8192
        stream = subjects.objects_stream(REGION)
        config = (await place.bus.api(f"STREAM.INFO.{stream}", {}))["config"]
        await place.bus.api(f"STREAM.UPDATE.{stream}", config | {"max_bytes": 16_384})
        sampling = Sampling(max_tokens=600, temperature=0.0, logprobs=True, top_logprobs=5)
        stored = await place.submit(sampling=sampling)
        (record,) = await place.ended(stored.record.job_id)
        assert record.state is JobState.FAILED
        assert record.error is not None
        assert record.error.reason == "RESULT_TOO_LARGE"
        await nothing_left(place)


async def kill_engine(running: RunningWorker) -> None:
    engine = running.worker.engine._engine
    assert engine is not None
    process_id = engine.process_id  # type: ignore[attr-defined] # a ProcessEngine
    os.kill(process_id, signal.SIGKILL)


async def test_kill_of_the_engine_process_gives_the_jobs_back_and_they_end(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place, ByteDoor(place.bus) as door:
        stored = [await place.submit(caller_at=door, max_tokens=200, prompt=f"{i}".encode()) for i in range(3)]
        ids = [s.record.job_id for s in stored]
        await eventually(lambda: all(len(door.ids(job_id)) > 10 for job_id in ids))
        await kill_engine(place.workers[0])
        records = await place.ended(*ids)
        for record in records:
            assert (record.state, record.attempt, record.starts - record.clean) == (JobState.SUCCEEDED, 2, 2)
            assert record.lineage[1].start_index > 10
            assert record.result is not None
            await eventually(lambda: all(len(door.ids(job_id)) == 200 for job_id in ids))
            assert tuple(door.ids(record.job_id)) == record.result.token_ids
        await nothing_left(place)


@pytest.mark.timeout(90)
async def test_a_job_that_kills_engines_is_given_up_and_takes_nobody_with_it(nats_server: LocalNats):
    async with yard(
        nats_server, workers=2, engine__fault_crash_token_id=CRASH_ID, nats__ack_wait_priority_s=1.0
    ) as place:
        good = [await place.submit(max_tokens=600) for _ in range(4)]
        poison = await place.submit(prompt=(1, CRASH_ID), max_tokens=20)
        *others, bad = await place.ended(*(s.record.job_id for s in (*good, poison)), timeout_s=60)
        assert bad.state is JobState.FAILED
        assert bad.error is not None
        assert bad.error.reason == "POISON"
        assert bad.starts - bad.clean == 3
        assert all(record.state is JobState.SUCCEEDED for record in others)
        await nothing_left(place)


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_a_hung_engine_is_started_again(nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("laneway.workers.engines.host.CLOSE_GRACE_S", 0.1)
    async with yard(nats_server, engine__fault_hang_step=5, worker__step_timeout_s=0.6) as place:
        await place.start_worker()
        hangs = await place.submit(max_tokens=50)
        (record,) = await place.ended(hangs.record.job_id, timeout_s=60)
        assert record.error is not None
        assert record.error.reason == "POISON"
        await nothing_left(place)


async def test_a_worker_whose_engine_keeps_dying_says_so_and_takes_nothing(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("laneway.workers.engine_keeper.RESTARTS_MAX", 1)
    async with yard(nats_server, engine__fault_crash_token_id=CRASH_ID) as place:
        watcher = LeaseWatcher(place.bus, REGION, SystemClock())
        await watcher.start()
        running = await place.start_worker()
        stored = await place.submit(prompt=(1, CRASH_ID))
        await eventually(lambda: [lease.state for lease in watcher.live()] == [WorkerState.BROKEN])
        (lease,) = watcher.live()
        assert "SIGKILL" in lease.detail
        assert lease.engine_deaths == 2

        async def handed_back() -> bool:
            record = await place.record(stored.record.job_id)
            return (record.state, record.owner, record.starts) == (JobState.WAITING, "", 2)

        await eventually(handed_back)
        await running.drain()
        await eventually(lambda: not watcher.live())
        await watcher.close()


async def test_a_paused_lane_is_left_alone(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place:
        plans = PlanPublisher(place.bus, REGION)
        now_s = SystemClock().now()
        await plans.publish(Plan(REGION, 1, 1, now_s, now_s + 60, paused=frozenset({Lane.BATCH})))
        await eventually(place.workers[0].worker._paused)  # until the plan has arrived
        held = await place.submit(lane=Lane.BATCH)
        passed = await place.submit(lane=Lane.DEFERRABLE)
        await place.ended(passed.record.job_id)
        await asyncio.sleep(0.6)  # more than two of the loop's own looks
        assert (await place.record(held.record.job_id)).state is JobState.WAITING
        await plans.publish(Plan(REGION, 1, 2, now_s, now_s + 60))
        await place.ended(held.record.job_id)


async def test_a_message_that_cannot_be_read_ends_its_job_and_leaves_the_lane(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place:
        record = make_record()
        await place.records.create(record)
        subject = subjects.ready(REGION, Lane.PRIORITY, record.pool, record.tenant, record.job_id)
        await place.bus.store(subject, b"\xff\xff not a job")
        await place.bus.store(subject.replace(record.job_id, "local-nobody"), b"\xff\xff not a job")
        (found,) = await place.ended(record.job_id)
        assert found.error is not None
        assert found.error.reason == "UNREADABLE_JOB"
        await nothing_left(place)
