"""What a worker says of itself: hung is not ready and says why, dead is not ready and says why, busy is ready."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from laneway.core.fleet import WorkerLease, WorkerState
from laneway.core.lanes import JobState
from laneway.runtime.clock import SystemClock
from laneway.runtime.exception_groups import leaf_errors
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.local_nats import LocalNats
from laneway.workers.engines.protocol import EngineStartError
from tests.support.nats import REGION, eventually
from tests.support.worker import Yard, yard


@asynccontextmanager
async def leases_of(place: Yard) -> AsyncIterator[LeaseWatcher]:
    watcher = LeaseWatcher(place.bus, REGION, SystemClock())
    await watcher.start()
    try:
        yield watcher
    finally:
        await watcher.close()


def only(watcher: LeaseWatcher) -> WorkerLease:
    (lease,) = watcher.live()
    return lease


async def not_ready(watcher: LeaseWatcher) -> WorkerLease:
    return await eventually(lambda: lease if (lease := only(watcher)).state is not WorkerState.READY else None)


async def test_a_hung_engine_is_not_ready_and_says_so(nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("laneway.workers.engines.host.CLOSE_GRACE_S", 0.1)
    async with (
        yard(nats_server, workers=1, engine__fault_hang_step=5, worker__step_timeout_s=0.6) as place,
        leases_of(place) as watcher,
    ):
        await place.submit(max_tokens=50)
        assert "step" in (await not_ready(watcher)).detail


async def test_a_dead_engine_is_not_ready_and_says_so(nats_server: LocalNats):
    async with yard(nats_server, workers=1) as place, leases_of(place) as watcher:
        engine = place.workers[0].worker.engine._engine
        assert engine is not None
        os.kill(engine.process_id, signal.SIGKILL)  # type: ignore[attr-defined] # a ProcessEngine
        assert "SIGKILL" in (await not_ready(watcher)).detail
        await eventually(lambda: only(watcher).state is WorkerState.READY)
        await place.ended((await place.submit()).record.job_id)


async def test_an_engine_that_loads_and_cannot_compute_never_gets_ready(nats_server: LocalNats):
    async with yard(nats_server, engine__fault_crash_step=1) as place, leases_of(place) as watcher:
        states = set[WorkerState]()
        starting = asyncio.create_task(place.start_worker())
        while not starting.done():
            states.update(lease.state for lease in watcher.live())
            await asyncio.sleep(0.01)
        with pytest.raises(ExceptionGroup) as raised:
            await starting
        (error,) = leaf_errors(raised.value)
        assert isinstance(error, EngineStartError)
        assert "died on its first request" in str(error)
        assert WorkerState.READY not in states


async def test_a_worker_says_how_far_its_engine_has_loaded(nats_server: LocalNats):
    async with yard(nats_server, model__load_s=100.0) as place, leases_of(place) as watcher:
        starting = asyncio.create_task(place.start_worker())
        lease = await eventually(lambda: watcher.live()[0] if watcher.live() else None)
        assert lease.state is WorkerState.STARTING
        assert 0.0 <= lease.load_progress < 0.1
        assert re.fullmatch(r"loading, \d+ s of about 100 s", lease.detail)
        await starting
        await eventually(lambda: only(watcher).state is WorkerState.READY)
        assert (only(watcher).load_progress, only(watcher).detail) == (0.0, "")


async def test_a_crash_loop_is_unhealthy_with_a_reason_while_others_go_on_and_ends_by_itself(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
):
    """The engine's process is killed each time that it is ready, under a job whose stream goes on elsewhere."""
    monkeypatch.setattr("laneway.workers.engine_keeper.RESTARTS_MAX", 1)
    monkeypatch.setattr("laneway.workers.engine_keeper.BROKEN_RETRY_S", 1.5)
    async with (
        yard(nats_server, workers=2, model__slots=2, engine__pace_s=0.01) as place,
        leases_of(place) as watcher,
    ):
        sick, well = place.workers
        stored = [await place.submit(max_tokens=60) for _ in range(4)]
        await eventually(lambda: sick.worker.snapshot().running and well.worker.snapshot().running)
        for _ in range(2):
            engine = await eventually(
                lambda: sick.worker.engine._engine if sick.worker.engine.state is WorkerState.READY else None
            )
            os.kill(engine.process_id, signal.SIGKILL)
            await eventually(lambda: sick.worker.engine.state is not WorkerState.READY)

        def broken() -> WorkerLease | None:
            return next((lease for lease in watcher.live() if lease.state is WorkerState.BROKEN), None)

        lease = await eventually(broken)
        assert lease.worker_id == sick.id
        assert "SIGKILL; died 2 times in 10 minutes" in lease.detail
        ended = await place.ended(*[each.record.job_id for each in stored])
        assert {record.state for record in ended} == {JobState.SUCCEEDED}
        assert any([a.owner for a in r.lineage][-1] == well.id for r in ended if r.attempt > 1), "one went on elsewhere"
        await eventually(lambda: all(lease.state is WorkerState.READY for lease in watcher.live()))
        assert len(watcher.live()) == 2


async def test_a_busy_engine_stays_ready(nats_server: LocalNats):
    """Full of work, with steps that take a while."""
    async with yard(nats_server, workers=1, model__slots=2, engine__pace_s=0.2) as place, leases_of(place) as watcher:
        engine = place.workers[0].worker.engine._engine
        stored = [await place.submit(prompt=bytes(1500), max_tokens=2) for _ in range(3)]
        states = set[WorkerState]()

        async def all_ended() -> bool:
            states.add(only(watcher).state)
            records = [await place.record(each.record.job_id) for each in stored]
            return all(record.state is JobState.SUCCEEDED for record in records)

        await eventually(all_ended)
        assert states == {WorkerState.READY}
        assert place.workers[0].worker.engine._engine is engine, "it was not started again"
