"""Workers that die, go deaf or are told to go: every job goes on elsewhere, and no token is sent twice or lost."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.core.errors import Code
from laneway.core.fleet import WorkerState
from laneway.core.job import JobRecord, Sampling, claim
from laneway.core.lanes import JobState
from laneway.runtime.bus import NotConnected
from laneway.runtime.catalogue import ENGINE_CAPABILITIES
from laneway.runtime.clock import SystemClock
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.records import StoredRecord
from laneway.v1 import bus_pb2
from tests.support.nats import REGION, eventually
from tests.support.worker import ByteDoor, Yard, ids_of, yard
from tests.support.worker_process import worker_process


async def streaming(place: Yard, door: ByteDoor, count: int, **changes: Any) -> list[str]:
    stored = [await place.submit(caller_at=door, prompt=f"{i}?".encode(), **changes) for i in range(count)]
    ids = ids_of(stored)
    return ids


async def delivered(door: ByteDoor, job_id: str, tokens: int) -> None:
    await eventually(lambda: len(door.ids(job_id)) == tokens)


async def each_index_once(place: Yard, door: ByteDoor, ids: list[str], tokens: int) -> None:
    """What the door forwards equals the result: nothing lost, nothing doubled, no splice."""
    for job_id in ids:
        record = await place.record(job_id)
        assert record.result is not None
        await delivered(door, job_id, tokens)
        assert tuple(door.ids(job_id)) == record.result.token_ids


@pytest.mark.timeout(90)
async def test_kill_9_of_a_worker_with_attached_callers_loses_no_token(nats_server: LocalNats, tmp_path: Path):
    async with (
        yard(nats_server, engine__pace_s=0.02, nats__ack_wait_priority_s=1.0) as place,
        ByteDoor(place.bus) as door,
    ):
        async with worker_process(place.settings, tmp_path / "ready.json") as apart:
            ids = await streaming(place, door, 3, max_tokens=250)
            await eventually(lambda: all(len(door.ids(job_id)) > 10 for job_id in ids))
            os.kill(apart.process.pid, signal.SIGKILL)
            taker = await place.start_worker("taker")
            records = await place.ended(*ids, timeout_s=60)
        for record in records:
            assert record.state is JobState.SUCCEEDED
            assert [a.owner for a in record.lineage] == [apart.id, taker.id]
            assert record.lineage[1].start_index > 10
        await each_index_once(place, door, ids, 250)
        assert await eventually(place.lanes_empty)


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_a_stopped_worker_that_wakes_up_later_says_nothing_more(nats_server: LocalNats, tmp_path: Path):
    async with (
        yard(nats_server, engine__pace_s=0.02, nats__ack_wait_priority_s=1.0) as place,
        ByteDoor(place.bus) as door,
        worker_process(place.settings, tmp_path / "ready.json") as apart,
    ):
        ids = await streaming(place, door, 3, max_tokens=400)
        await eventually(lambda: all(len(door.ids(job_id)) > 10 for job_id in ids))
        os.kill(apart.process.pid, signal.SIGSTOP)
        taker = await place.start_worker("taker")
        await eventually(lambda: all(len(door.events[job_id]) > 1 for job_id in ids), 30)
        os.kill(apart.process.pid, signal.SIGCONT)
        records = await place.ended(*ids, timeout_s=60)
        assert {record.lineage[-1].owner for record in records} == {taker.id}
        assert all(record.attempt == 2 for record in records)
        await each_index_once(place, door, ids, 400)
        later = await place.submit(max_tokens=4)
        await place.ended(later.record.job_id)


@pytest.mark.timeout(90)
async def test_what_becomes_of_each_kind_of_job_when_its_worker_stops_renewing(nats_server: LocalNats):
    changes = {"ack_wait_priority_s": 1.0, "ack_wait_batch_s": 1.0}
    async with (
        yard(nats_server, workers=1, engine__pace_s=0.01, **{f"nats__{k}": v for k, v in changes.items()}) as place,
        ByteDoor(place.bus) as door,
    ):
        (plain,) = await streaming(place, door, 1, max_tokens=300)
        (seeded,) = await streaming(place, door, 1, sampling=Sampling(max_tokens=300, temperature=1.0, seed=5))
        penalised = Sampling(max_tokens=300, temperature=0.0, repetition_penalty=1.2)
        (greedy,) = await streaming(place, door, 1, sampling=penalised)
        await eventually(lambda: all(len(door.ids(job_id)) > 10 for job_id in (plain, seeded, greedy)))
        detached = (await place.submit(max_tokens=300)).record.job_id
        await eventually(lambda: _running(place, detached))
        await place.workers[0].die()
        await place.start_worker("taker")
        resumed, unsound, rerun, again = await place.ended(plain, seeded, greedy, detached, timeout_s=60)
        assert resumed.state is JobState.SUCCEEDED
        assert resumed.lineage[1].start_index > 10
        assert unsound.state is JobState.FAILED
        assert unsound.error is not None
        assert (unsound.error.code, unsound.error.reason) == (Code.ABORTED, "NOT_RESUMABLE")
        # The engine is exact and the sampling greedy: computed again, and sent from where the door was.
        assert rerun.state is JobState.SUCCEEDED
        assert rerun.lineage[1].start_index > 10
        assert again.state is JobState.SUCCEEDED
        assert [a.start_index for a in again.lineage] == [0, 0]
        assert {record.starts - record.clean for record in (resumed, rerun, again)} == {2}
        await each_index_once(place, door, [plain, greedy], 300)


async def test_a_seeded_run_goes_on_where_the_engine_finds_its_draws_in_the_ids(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    """As the simulated engine does, which does not say so."""
    able = replace(ENGINE_CAPABILITIES["simulated"], resumable_sampling=True)
    monkeypatch.setitem(ENGINE_CAPABILITIES, "simulated", able)
    sampling = Sampling(max_tokens=120, temperature=1.0, seed=5, min_tokens=100)
    async with (
        yard(nats_server, workers=1, engine__pace_s=0.01, nats__ack_wait_priority_s=1.0) as place,
        ByteDoor(place.bus) as door,
    ):
        (job_id,) = await streaming(place, door, 1, sampling=sampling)
        await eventually(lambda: len(door.ids(job_id)) > 10)
        engine = place.workers[0].worker.engine._engine
        assert engine is not None
        os.kill(engine.process_id, signal.SIGKILL)  # type: ignore[attr-defined] # a ProcessEngine
        (record,) = await place.ended(job_id)
        assert record.state is JobState.SUCCEEDED
        assert record.lineage[-1].start_index > 10
        (whole,) = await place.ended((await place.submit(prompt=b"0?", sampling=sampling)).record.job_id)
        assert record.result is not None
        assert whole.result is not None
        assert record.result.token_ids == whole.result.token_ids
        await each_index_once(place, door, [job_id], 120)


async def _running(place: Yard, job_id: str) -> bool:
    return (await place.record(job_id)).state is JobState.RUNNING


async def test_a_redelivery_alone_takes_nothing_from_a_living_owner(nats_server: LocalNats):
    """A consumer's leader change redelivers jobs of healthy owners."""
    async with yard(nats_server, workers=2, nats__ack_wait_priority_s=1.0) as place:
        stored = await place.submit(max_tokens=1500)
        await eventually(lambda: _running(place, stored.record.job_id))
        owner = (await place.record(stored.record.job_id)).owner
        run = next(
            found
            for running in place.workers
            if (found := running.worker.runs.running(stored.record.job_id))  # type: ignore[union-attr] # started
        )
        await run.delivery.nak()  # as if the server had forgotten it
        (record,) = await place.ended(stored.record.job_id)
        assert (record.state, record.attempt, record.lineage[0].owner) == (JobState.SUCCEEDED, 1, owner)
        assert await eventually(place.lanes_empty)


async def test_a_replay_is_sent_from_any_index(nats_server: LocalNats):
    async with yard(nats_server, workers=1, engine__pace_s=0.005) as place, ByteDoor(place.bus) as door:
        (job_id,) = await streaming(place, door, 1, max_tokens=200)
        await eventually(lambda: len(door.ids(job_id)) > 50)
        before = len(door.deltas[job_id])
        await door.beat(job_id, replay_from=17)
        again = await eventually(lambda: next((d for d in door.deltas[job_id][before:] if d.first_index == 17), None))
        assert again.count > 30
        await place.ended(job_id)
        await each_index_once(place, door, [job_id], 200)


async def test_a_second_door_follows_a_running_job_from_the_start(nats_server: LocalNats):
    async with (
        yard(nats_server, workers=1, engine__pace_s=0.005) as place,
        ByteDoor(place.bus) as door,
        ByteDoor(place.bus, "door-b") as watcher,
    ):
        (job_id,) = await streaming(place, door, 1, max_tokens=150)
        await eventually(lambda: len(door.ids(job_id)) > 20)
        watcher.following[job_id], watcher.owner[job_id] = 1, place.workers[0].id
        await watcher.beat(job_id, replay_from=0)
        await place.ended(job_id)
        await each_index_once(place, door, [job_id], 150)
        await each_index_once(place, watcher, [job_id], 150)


async def test_a_worker_whose_lease_lapsed_says_nothing_and_goes_on_when_it_is_back(nats_server: LocalNats):
    async with yard(nats_server, workers=1, engine__pace_s=0.005) as place, ByteDoor(place.bus) as door:
        (job_id,) = await streaming(place, door, 1, max_tokens=600)
        await eventually(lambda: len(door.ids(job_id)) > 20)
        lease = place.workers[0].worker.lease
        held, renewed_s = lease.held, lease._renewed_s
        assert held()
        lease._renewed_s = renewed_s - 10.0  # type: ignore[operator] # it was renewed
        silent_from = len(door.ids(job_id))
        await asyncio.sleep(0.1)
        assert len(door.ids(job_id)) <= silent_from + 2  # what was on its way
        (record,) = await place.ended(job_id)
        assert record.attempt == 1
        await each_index_once(place, door, [job_id], 600)


async def test_a_worker_whose_lease_is_back_says_nothing_before_it_knows_that_the_job_is_still_its_own(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    async with yard(nats_server, workers=1, engine__pace_s=0.005) as place, ByteDoor(place.bus) as door:
        (job_id,) = await streaming(place, door, 1, max_tokens=3000)
        await eventually(lambda: len(door.ids(job_id)) > 20)
        worker = place.workers[0].worker
        endings, lease = worker._bench.endings, worker.lease
        read, answered = endings.read, asyncio.Event()

        async def slowly(record: JobRecord) -> StoredRecord | None:
            await answered.wait()
            return await read(record)

        monkeypatch.setattr(endings, "read", slowly)
        lease._renewed_s = lease._renewed_s - 10.0  # type: ignore[operator] # it was renewed
        await eventually(lambda: not worker.emitter.may_emit)
        record = await place.record(job_id)
        taken = claim(record, "another-worker", 1.0, owner_is_dead=True)
        await place.records.change(record.region, record.tenant, job_id, lambda found: taken)
        await eventually(lambda: worker.emitter.may_emit)
        spoken, steps = door.batches, worker.sequences.stats().steps
        await eventually(lambda: worker.sequences.stats().steps > steps + 20)
        assert door.batches == spoken, "nothing leaves while the record is being read"
        answered.set()
        await eventually(place.workers[0].idle)
        assert door.batches == spoken
        assert (await place.record(job_id)).owner == "another-worker"


async def test_a_hung_engine_keeps_no_worker_from_stopping(nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("laneway.workers.service.HAND_BACK_S", 0.5)
    async with yard(nats_server, workers=1, engine__fault_hang_step=5, process__drain_s=0.3) as place:
        stored = await place.submit(max_tokens=100)
        running = place.workers[0]

        async def runs() -> bool:
            return (await place.record(stored.record.job_id)).state is JobState.RUNNING

        await eventually(runs)
        running.stop.set()
        async with asyncio.timeout(20):
            await running.task
        record = await place.record(stored.record.job_id)
        assert (record.state, record.clean) == (JobState.WAITING, 1)


async def test_an_undrain_does_not_keep_a_worker_that_stops_from_stopping(nats_server: LocalNats):
    async with yard(nats_server, workers=1, engine__pace_s=0.01) as place:
        long = await place.submit(max_tokens=100)
        running = place.workers[0]
        await eventually(lambda: not running.idle())
        running.stop.set()
        await eventually(lambda: running.worker.snapshot().state is WorkerState.DRAINING)
        await place.tell(running.id, drain=bus_pb2.DrainHint(draining=False))
        later = await place.submit(max_tokens=4)
        await running.task
        assert (await place.record(long.record.job_id)).state is JobState.SUCCEEDED
        assert (await place.record(later.record.job_id)).state is JobState.WAITING


async def test_a_claim_that_nats_left_open_is_no_failure_of_the_job(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    async with yard(nats_server, workers=1, nats__ack_wait_priority_s=1.0) as place:
        records = place.workers[0].worker._bench.claims._records
        update = records.update
        lost: list[str] = []

        async def unanswered_once(record: JobRecord, expected_sequence: int) -> int:
            sequence = await update(record, expected_sequence)
            if not lost:
                lost.append(record.job_id)
                raise NotConnected
            return sequence

        monkeypatch.setattr(records, "update", unanswered_once)
        stored = await place.submit()
        (record,) = await place.ended(stored.record.job_id)
        assert lost
        assert (record.state, record.starts, record.clean) == (JobState.SUCCEEDED, 2, 1)


async def test_drain_finishes_what_runs_and_gives_back_what_does_not(nats_server: LocalNats):
    async with (
        yard(nats_server, workers=1, engine__pace_s=0.01, process__drain_s=1.0) as place,
        ByteDoor(place.bus) as door,
    ):
        short, long = await streaming(place, door, 1, max_tokens=60), await streaming(place, door, 2, max_tokens=400)
        await eventually(lambda: all(door.ids(job_id) for job_id in (*short, *long)))
        first = place.workers[0]
        draining = asyncio.create_task(first.drain())
        await eventually(lambda: first.worker.snapshot().state is WorkerState.DRAINING)
        later = await place.submit(max_tokens=4)
        await draining
        assert (await place.record(short[0])).state is JobState.SUCCEEDED
        assert (await place.record(later.record.job_id)).state is JobState.WAITING
        for job_id in long:
            record = await place.record(job_id)
            assert (record.state, record.starts, record.clean) == (JobState.WAITING, 1, 1)
        second = await place.start_worker("second")
        records = await place.ended(*long, later.record.job_id)
        assert {record.state for record in records} == {JobState.SUCCEEDED}
        assert all(record.lineage[-1].owner == second.id for record in records)
        await each_index_once(place, door, long, 400)
        assert await eventually(place.lanes_empty)


async def test_a_drained_worker_takes_nothing_until_it_is_undrained(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place:
        running = place.workers[0]
        await place.tell(running.id, drain=bus_pb2.DrainHint(draining=True))
        await eventually(lambda: running.worker.snapshot().state is WorkerState.DRAINING)
        stored = await place.submit()
        await asyncio.sleep(0.6)
        assert (await place.record(stored.record.job_id)).state is JobState.WAITING
        await place.tell(running.id, drain=bus_pb2.DrainHint(draining=False))
        await place.ended(stored.record.job_id)


@pytest.mark.timeout(60)
async def test_sigterm_ends_a_worker_process_with_0_and_its_lease(nats_server: LocalNats, tmp_path: Path):
    async with yard(nats_server, process__drain_s=0.2, engine__pace_s=0.01) as place:
        watcher = LeaseWatcher(place.bus, REGION, SystemClock())
        await watcher.start()
        async with worker_process(place.settings, tmp_path / "ready.json") as apart:
            assert [lease.worker_id for lease in watcher.live()] == [apart.id]
            stored = await place.submit(max_tokens=1000)
            await eventually(lambda: _running(place, stored.record.job_id))
            apart.process.terminate()
            assert await apart.process.wait() == 0
            record = await place.record(stored.record.job_id)
            assert (record.state, record.clean) == (JobState.WAITING, 1)
        await eventually(lambda: not watcher.live())
        await watcher.close()


@pytest.mark.timeout(90)
async def test_a_nats_restart_in_mid_stream_loses_nothing(nats_server: LocalNats):
    async with (
        yard(nats_server, workers=2, engine__pace_s=0.01, nats__ack_wait_priority_s=1.0) as place,
        ByteDoor(place.bus) as door,
    ):
        ids = await streaming(place, door, 4, max_tokens=300)
        await eventually(lambda: all(len(door.ids(job_id)) > 10 for job_id in ids))
        await nats_server.kill()
        await asyncio.sleep(1.0)
        await nats_server.start()
        records = await place.ended(*ids, timeout_s=60)
        assert {record.state for record in records} == {JobState.SUCCEEDED}
        for record in records:  # the door may have missed messages while it was cut off, and reads the record then
            assert record.result is not None
            assert len(record.result.token_ids) == 300
        assert await eventually(place.lanes_empty)
        for running in place.workers:
            await eventually(running.idle)
