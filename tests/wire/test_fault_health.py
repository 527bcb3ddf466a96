"""What a worker says of itself: hung is not ready and says why, dead is not ready and says why, busy is ready."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from laneway.core.fleet import WorkerLease, WorkerState
from laneway.core.lanes import JobState
from laneway.runtime.clock import SystemClock
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.local_nats import LocalNats
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
