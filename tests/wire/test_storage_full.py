"""Storage that runs full: doors refuse in time, what was accepted has the reserve, and nothing is left stranded."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.core.errors import StorageFull
from laneway.core.job import JobRecord
from laneway.core.lanes import LANES, PARKING_LANES, JobState, Lane
from laneway.core.subjects import ParkSubject
from laneway.runtime.bus import OutOfStorage
from laneway.runtime.lanes import ReleaseOutcome
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.settings import NatsSettings, SchedulerSettings, Settings
from laneway.v1 import admission_pb2 as pb
from tests.support.admission import (
    CLOCK,
    Gate,
    PuppetWorker,
    admission_settings,
    error_of_call,
    gate,
    generate,
    opening,
    rest,
    spec,
    text_of,
)
from tests.support.nats import REGION, TENANT, eventually, nats_settings
from tests.support.scheduling import park_job, parked_jobs, running_scheduler

MIB = 1024**2
ACCOUNT_BYTES = 48 * MIB
FILLER = "FILLER"


def small_settings(server: LocalNats, storage_poll_s: float) -> Settings:
    sizes = {name: 2 * MIB for name in NatsSettings.__struct_fields__ if name.endswith("_bytes_max")}
    settings = admission_settings(server, storage_poll_s=storage_poll_s)
    return replace(
        settings,
        nats=nats_settings(server, **sizes),
        scheduler=SchedulerSettings(listen="127.0.0.1:0", plan_interval_s=0.05, leader_ttl_s=0.6, sweep_s=0.2),
    )


@asynccontextmanager
async def small_region(folder: Path, storage_poll_s: float = 0.1) -> AsyncIterator[Gate]:
    """A scheduler and a door on a NATS of little storage, without a worker."""
    async with LocalNats(folder / "nats", storage_bytes=ACCOUNT_BYTES) as server:
        settings = small_settings(server, storage_poll_s)
        async with running_scheduler(server, settings), gate(server, folder, settings) as door:
            await door.quotes("HELD_FOR_WORKERS", lane=Lane.BATCH)
            await door.bus.api(f"STREAM.CREATE.{FILLER}", {"name": FILLER, "subjects": ["filler"], "storage": "file"})
            yield door


async def fill(door: Gate, share: float) -> None:
    """Until so much of the account's storage is used; to the last byte for 1."""
    for size in (500_000, 50_000, 5_000, 50, 1):
        with contextlib.suppress(OutOfStorage):
            while share == 1.0 or await door.lanes.storage_used() + size / ACCOUNT_BYTES < share:
                await door.bus.store("filler", b"x" * size)


async def free(door: Gate) -> None:
    await door.bus.api(f"STREAM.PURGE.{FILLER}", {})


async def refusals(door: Gate) -> list[Any]:
    """What callers of each lane and way in are told."""
    calls = [door.stub.Submit(pb.SubmitRequest(spec=spec(lane=lane))) for lane in LANES]
    return [await error_of_call(call) for call in (*calls, door.stub.Generate(generate()))]


async def all_refused(door: Gate) -> bool:
    quote = await door.stub.Quote(pb.QuoteRequest(spec=spec()))
    return bool(quote.verdict.reason == "STORAGE_FULL")


async def test_above_the_share_nothing_is_accepted_and_what_was_accepted_has_the_rest(tmp_path: Path):
    async with small_region(tmp_path) as door:
        jobs = [await park_job(door.bus, lane=Lane.BATCH, fire_in_s=400.0) for _ in range(20)]
        await fill(door, 0.79)
        await door.quotes("HELD_FOR_WORKERS", lane=Lane.BATCH)
        await fill(door, 0.82)
        await eventually(lambda: all_refused(door))
        before = await door.bus.api("STREAM.INFO.JOBS_local", {})
        for error in await refusals(door):
            assert isinstance(error, StorageFull)
            assert error.retry_after_s is not None
        after = await door.bus.api("STREAM.INFO.JOBS_local", {})
        assert before["state"]["last_seq"] == after["state"]["last_seq"], "a refusal stores nothing"
        # The scheduler releases into the reserve, a worker claims and ends its jobs there, and gives one up.
        async with PuppetWorker(door.bus).alive() as worker:
            records = await run_all(door, worker, jobs)
        assert {record.state for record in records} == {JobState.SUCCEEDED}
        await door.bus.store(f"dead.{REGION}.batch.POISON.{jobs[0][0].job_id}", b"x" * 100_000)
        await free(door)
        await eventually(lambda: not_refused(door))


async def not_refused(door: Gate) -> bool:
    return not await all_refused(door)


async def run_all(door: Gate, worker: PuppetWorker, jobs: Sequence[tuple[JobRecord, ParkSubject]]) -> list[JobRecord]:
    """Pulls until each of the jobs has ended; their records."""
    for _ in jobs:
        await worker.finish(await worker.take(Lane.BATCH), "ok")
    return [await door.record(record.job_id, TENANT) for record, _ in jobs]


async def test_a_door_that_does_not_know_yet_that_storage_is_full_refuses_all_the_same(tmp_path: Path):
    async with small_region(tmp_path, storage_poll_s=60.0) as door:
        await fill(door, 1.0)
        for lane in PARKING_LANES:
            error = await error_of_call(door.stub.Submit(pb.SubmitRequest(spec=spec(lane=lane))))
            assert isinstance(error, StorageFull)
            assert error.reason == "STORAGE_FULL"
            assert error.retry_after_s is not None
        await free(door)
        assert await door.job_ids() == []
        assert await door.messages() == 0


@pytest.mark.slow
async def test_storage_full_across_a_firing_time_and_freed_later_strands_nothing(tmp_path: Path):
    async with small_region(tmp_path) as door:
        now_s = CLOCK.now()
        due = [await park_job(door.bus, lane=Lane.BATCH, fire_in_s=12.0, due_in_s=12.0) for _ in range(10)]
        early = [await park_job(door.bus, lane=Lane.BATCH, fire_in_s=9.0, due_in_s=500.0) for _ in range(10)]
        moved = [await park_job(door.bus, lane=Lane.BATCH, fire_in_s=400.0, due_in_s=500.0) for _ in range(10)]
        for _, park in moved:
            outcome = await door.lanes.restagger(park, now_s + 9.0, now_s=CLOCK.now())
            assert outcome is ReleaseOutcome.RELEASED
        jobs = [*due, *early, *moved]
        await fill(door, 1.0)
        await eventually(lambda: all_refused(door))
        assert CLOCK.now() < now_s + 6.0, "full before the scheduler releases what is due soon"
        while CLOCK.now() < now_s + 13.5:
            for error in await refusals(door):
                assert isinstance(error, StorageFull)
                assert error.retry_after_s is not None
            await asyncio.sleep(0.5)
        assert len(await parked_jobs(door.bus, Lane.BATCH)) == len(jobs), "NATS has fired none, and never will"
        await free(door)
        await eventually(lambda: nothing_stranded(door, due), timeout_s=30)
        async with PuppetWorker(door.bus).alive() as worker:
            records = await run_all(door, worker, jobs)
            assert Counter(record.state for record in records) == {JobState.SUCCEEDED: len(jobs)}
            assert {record.attempt for record in records} == {1}
            assert await door.messages() == 0, "no copy of any is left"
            await door.quotes("LANE_OPEN")
            call = door.stub.Generate(generate())
            await opening(call)
            await worker.finish(await worker.take(), "ok")
            assert text_of(await rest(call)) == "ok"


async def nothing_stranded(door: Gate, due: Sequence[tuple[JobRecord, ParkSubject]]) -> bool:
    """Whether each job that is still parked has a schedule that will fire, and none is past its latest start."""
    parked = await door.lanes.parked(Lane.BATCH)
    fires_s = [await door.lanes.fires_at_s(park) for park in parked]
    late = {park.job for park in parked} & {record.job_id for record, _ in due}
    return not late and all(at_s is None or at_s > CLOCK.now() for at_s in fires_s)
