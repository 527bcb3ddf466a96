"""Schedulers in this process, and workers that are only leases: for tests against a real nats-server."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.fleet import WorkerLease, WorkerState
from laneway.core.job import JobRecord
from laneway.core.lanes import Lane
from laneway.core.subjects import ParkSubject
from laneway.runtime.bus import Bus
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.clock import SystemClock
from laneway.runtime.lanes import LaneStore
from laneway.runtime.leases import LeaseKeeper
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.provision import provision
from laneway.runtime.reading import subject_list
from laneway.runtime.records import RecordStore
from laneway.runtime.settings import ModelSettings, SchedulerSettings, Settings
from laneway.runtime.settings_source import SettingsSource
from laneway.scheduler.loop import Scheduler
from tests.support.nats import POOL, REGION, connected, make_job, make_record, nats_settings

SLOTS = 4


def scheduler_settings(server: LocalNats, **scheduler: Any) -> Settings:
    own: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "plan_interval_s": 0.05,
        "leader_ttl_s": 0.6,
        "sweep_s": 0.05,
        **scheduler,
    }
    return Settings(
        nats=nats_settings(server),
        scheduler=SchedulerSettings(**(own | scheduler)),
        models=(ModelSettings(name="chat", engine="simulated", slots=SLOTS, workers=1, queue_length=8),),
    )


async def provision_for(bus: Bus, settings: Settings) -> None:
    catalogue = catalogue_of(settings)
    await provision(bus, REGION, catalogue, settings.nats, ack_wait_s=settings.nats.ack_wait_s)


@asynccontextmanager
async def running_scheduler(
    server: LocalNats,
    settings: Settings,
    name: str = "scheduler",
    *,
    clock: Clock | None = None,
    source: SettingsSource | None = None,
) -> AsyncIterator[Scheduler]:
    """A scheduler on a connection of its own; it ends orderly. `clock`: its host's. `source`: of its settings."""
    async with connected(server, name) as bus:
        await provision_for(bus, settings)
        scheduler = Scheduler(bus, settings, catalogue_of(settings), clock or SystemClock(), source=source)
        stop = asyncio.Event()
        async with scheduler.watching():
            task = asyncio.ensure_future(scheduler.run(stop))
            try:
                yield scheduler
            finally:
                stop.set()
                await task


class FakeWorker:
    """A lease that says what the test wants, and obeys drain hints if asked to."""

    def __init__(self, bus: Bus, name: str = "w1", *, running: int = 0, slots: int = SLOTS) -> None:
        self.lease = WorkerLease(
            f"{name}-1a", name, POOL, "simulated", WorkerState.READY, slots=slots, running=running, kv_tokens=1000
        )
        self._bus = bus
        self.keeper = LeaseKeeper(bus, REGION, lambda: self.lease, SystemClock())

    async def show(self, **changes: Any) -> None:
        self.lease = replace(self.lease, **changes)
        await self.keeper.renew()

    @asynccontextmanager
    async def alive(self) -> AsyncIterator["FakeWorker"]:
        await self.keeper.renew()
        task = asyncio.ensure_future(self.keeper.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def park_job(
    bus: Bus, *, lane: Lane = Lane.DEFERRABLE, fire_in_s: float = 400.0, due_in_s: float = 500.0, **changes: Any
) -> tuple[JobRecord, ParkSubject]:
    """Accepts a parked job as a door would."""
    now_s = SystemClock().now()
    record = make_record(lane=lane, latest_start_s=round(now_s + due_in_s, 3), **changes)
    sequence = await RecordStore(bus).create(record)
    park = await LaneStore(bus, REGION).park(
        make_job(record), sequence, fire_at_s=now_s + fire_in_s, group="0123456789"
    )
    return record, park


async def ready_jobs(bus: Bus, lane: Lane = Lane.DEFERRABLE) -> Mapping[str, int]:
    """How many ready messages each job has."""
    stream = subjects.lane_stream(REGION, lane)
    answer = await bus.api(f"STREAM.INFO.{stream}", {"subjects_filter": f"lane.{REGION}.>"})
    found = answer["state"].get("subjects") or {}
    return {subject.rsplit(".", 1)[1]: int(count) for subject, count in found.items()}


async def parked_jobs(bus: Bus, lane: Lane = Lane.DEFERRABLE) -> set[str]:
    stream = subjects.lane_stream(REGION, lane)
    return {s.rsplit(".", 1)[1] for s in await subject_list(bus, stream, subjects.park_filter(REGION, lane))}
