"""What one tenant may have open at a time, at a real door with a real scheduler: N + 1 is refused, not stored."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from msgspec.structs import replace

from laneway.admission import ingest as ingest_module
from laneway.admission.ingest import Ingest
from laneway.core import subjects
from laneway.core.errors import TenantLimit
from laneway.core.job import JobRecord
from laneway.core.lanes import JobState, Lane
from laneway.runtime.grpc_errors import DETAILS_KEY, from_rpc_error
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.settings import SchedulerSettings, Settings, TenantJobsMax
from laneway.v1 import admission_pb2 as pb
from tests.support.admission import (
    Gate,
    admission_settings,
    error_of_call,
    gate,
    generate,
    open_gate,
    opening,
    rest,
    spec,
    text_of,
)
from tests.support.nats import REGION, eventually
from tests.support.scheduling import running_scheduler

LIMIT = 5


def settings_of(server: LocalNats, **jobs_max: int) -> Settings:
    settings = admission_settings(server, tenant_jobs_max=TenantJobsMax(**jobs_max))
    own = SchedulerSettings(listen="127.0.0.1:0", plan_interval_s=0.05, leader_ttl_s=0.6)
    return replace(settings, scheduler=own)


@asynccontextmanager
async def planned_gate(
    server: LocalNats, folder: Path, settings: Settings, says: str = "HELD_FOR_WORKERS"
) -> AsyncIterator[Gate]:
    """A door that hears the plans of a real scheduler, and what it says at first. There are no workers, so everything
    is held."""
    async with running_scheduler(server, settings), gate(server, folder, settings) as door:
        await door.quotes(says, lane=Lane.BATCH)
        yield door


async def submit(door: Gate, key: str = "", lane: Lane = Lane.BATCH) -> str:
    response = await door.stub.Submit(pb.SubmitRequest(spec=spec(lane=lane), idempotency_key=key))
    return str(response.job_id)


async def refused(door: Gate, lane: Lane = Lane.BATCH) -> grpc.aio.AioRpcError | None:
    """The refusal of a job; None if it was accepted."""
    try:
        await submit(door, lane=lane)
    except grpc.aio.AioRpcError as error:
        return error
    return None


def details(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.RetryInfo, error_details_pb2.QuotaFailure]:
    status = status_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status.FromString(value)
    retry, quota = error_details_pb2.RetryInfo(), error_details_pb2.QuotaFailure()
    for detail in status.details:
        detail.Unpack(retry)
        detail.Unpack(quota)
    return retry, quota


async def test_one_job_more_than_a_tenant_may_have_open_is_refused_and_nothing_is_stored(
    nats_server: LocalNats, tmp_path: Path
):
    async with planned_gate(nats_server, tmp_path, settings_of(nats_server, batch=LIMIT)) as door:
        jobs = [await submit(door, key=f"k{i}") for i in range(LIMIT)]
        error = await refused(door)
        assert error is not None
        assert (error.code(), from_rpc_error(error).reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_LIMIT")
        retry, quota = details(error)
        assert retry.retry_delay.ToMilliseconds() > 0
        assert [violation.subject for violation in quota.violations] == ["tenant_jobs_max"]
        assert sorted(await door.job_ids()) == sorted(jobs)
        assert await door.messages() == LIMIT
        assert await submit(door, lane=Lane.DEFERRABLE), "another lane has a limit of its own"
        assert await submit(door, key="k0") == jobs[0], "what was accepted stays accepted"


@pytest.mark.slow
async def test_a_crowd_at_once_gets_as_many_places_as_there_are(nats_server: LocalNats, tmp_path: Path):
    async with planned_gate(nats_server, tmp_path, settings_of(nats_server, batch=LIMIT)) as door:
        refusals = await asyncio.gather(*(refused(door) for _ in range(3 * LIMIT)))
        assert 1 <= refusals.count(None) <= LIMIT
        # One that was counted twice for a moment, by its door and by a plan, has left a place.
        while not await refused(door):
            pass
        assert await door.messages() == len(await door.job_ids()) == LIMIT


@pytest.mark.slow
async def test_the_end_of_a_job_makes_room_for_one_and_no_more(nats_server: LocalNats, tmp_path: Path):
    async with planned_gate(nats_server, tmp_path, settings_of(nats_server, batch=LIMIT)) as door:
        jobs = [await submit(door) for _ in range(LIMIT)]
        for job_id in jobs[:2]:
            assert await refused(door) is not None
            await door.stub.CancelJob(pb.CancelJobRequest(job_id=job_id))
            await eventually(lambda: accepted(door))
            assert await refused(door) is not None
        assert await door.messages() == LIMIT


async def accepted(door: Gate) -> bool:
    return await refused(door) is None


@pytest.mark.slow
async def test_another_scheduler_and_another_door_know_what_a_tenant_has_open(nats_server: LocalNats, tmp_path: Path):
    settings = settings_of(nats_server, batch=LIMIT)
    async with planned_gate(nats_server, tmp_path, settings) as door:
        for _ in range(LIMIT):
            await submit(door)
    (tmp_path / "later").mkdir()
    async with planned_gate(nats_server, tmp_path / "later", settings, says="TENANT_LIMIT") as door:
        seen = (await door.stub.Quote(pb.QuoteRequest(spec=spec(lane=Lane.BATCH)))).verdict
        assert f"has {LIMIT} open jobs" in seen.message
        for _ in range(20):  # with plans of the new scheduler, before and after it has read the records
            error = await refused(door)
            assert error is not None
            assert from_rpc_error(error).reason == "TENANT_LIMIT"
            await asyncio.sleep(0.02)


async def test_a_producers_message_beyond_the_limit_gets_its_verdict_and_holds_up_nobody(
    nats_server: LocalNats, tmp_path: Path
):
    async with planned_gate(nats_server, tmp_path, settings_of(nats_server, batch=LIMIT)) as door:
        request = pb.SubmitRequest(spec=spec(lane=Lane.BATCH)).SerializeToString()
        for tenant in (*["greedy"] * (LIMIT + 3), "modest"):
            await door.bus.store(subjects.ingest(REGION, Lane.BATCH, tenant), request)
        await eventually(lambda: nothing_waits(door))
        states = Counter((record.tenant, record.state) for record in [await read(door, s) for s in await stored(door)])
        assert states == {
            ("greedy", JobState.WAITING): LIMIT,
            ("greedy", JobState.REFUSED): 3,
            ("modest", JobState.WAITING): 1,
        }
        reasons = {r.error.reason for r in [await read(door, s) for s in await stored(door)] if r.error}
        assert reasons == {"TENANT_LIMIT"}


@pytest.mark.slow
@pytest.mark.parametrize("key", ["", "k"])
async def test_a_producer_who_was_told_of_the_limit_does_not_see_its_job_run_all_the_same(
    nats_server: LocalNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
):
    """Its message comes again after the verdict, as after a crash before the acknowledgement, and there is room now."""
    tell, told = Ingest._tell, []

    async def tell_and_fail(ingest: Ingest, record: JobRecord, of_key: str) -> None:
        await tell(ingest, record, of_key)
        told.append((record.job_id, record.state))
        if len(told) == 1:
            raise RuntimeError("the process dies here")

    monkeypatch.setattr(Ingest, "_tell", tell_and_fail)
    monkeypatch.setattr(ingest_module, "PUT_OFF_S_MIN", 1.5)  # time to make room in
    async with planned_gate(nats_server, tmp_path, settings_of(nats_server, batch=1)) as door:
        first = await submit(door)
        request = pb.SubmitRequest(spec=spec(lane=Lane.BATCH), idempotency_key=key).SerializeToString()
        await door.bus.store(subjects.ingest(REGION, Lane.BATCH, "default"), request)
        await eventually(lambda: bool(told))
        await door.stub.CancelJob(pb.CancelJobRequest(job_id=first))
        await door.quotes("HELD_FOR_WORKERS", lane=Lane.BATCH)
        assert len(told) == 1, "there was room before the message came again"
        await eventually(lambda: nothing_waits(door))
        assert told == [(told[0][0], JobState.REFUSED)] * 2, told
        assert await door.messages() == 0


async def nothing_waits(door: Gate) -> bool:
    return not await door.messages(subjects.ingest_stream(REGION))


async def stored(door: Gate) -> list[str]:
    answer = await door.bus.api(f"STREAM.INFO.{subjects.jobs_stream(REGION)}", {"subjects_filter": "job.>"})
    return list(answer["state"]["subjects"])


async def read(door: Gate, subject: str) -> Any:
    _, tenant, job_id = subjects.record_parts(subject)
    return await door.record(job_id, tenant)


# --- live streams ----------------------------------------------------------------------------------


async def test_watching_takes_a_place_too(nats_server: LocalNats, tmp_path: Path):
    settings = admission_settings(nats_server, tenant_streams_max=2)
    async with open_gate(nats_server, tmp_path, settings) as (door, worker):
        call = door.stub.Generate(generate())
        job_id = (await opening(call)).job_id
        watching = door.stub.Watch(pb.WatchRequest(job_id=job_id))
        await opening(watching)
        for more in (door.stub.Watch(pb.WatchRequest(job_id=job_id)), door.stub.Generate(generate())):
            error = await error_of_call(more)
            assert isinstance(error, TenantLimit)
            assert error.facts["quota"] == "tenant_streams_max"
        await worker.finish(await worker.take(), "ok")
        assert [text_of(await rest(each)) for each in (call, watching)] == ["ok", "ok"]
        assert text_of(await rest(door.stub.Watch(pb.WatchRequest(job_id=job_id)))) == "ok"
