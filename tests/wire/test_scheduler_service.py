"""SchedulerService as callers see it: plans, lists, pages, pauses, drains, explanations, and who may do what."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
import pytest

from laneway.core import subjects
from laneway.core.errors import InvalidRequest, JobNotFound, LanewayError, NotFound, PermissionDenied, Unavailable
from laneway.core.fleet import WorkerState
from laneway.core.ids import new_job_id
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus
from laneway.runtime.clock import SystemClock
from laneway.runtime.grpc_errors import from_rpc_error
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.puller import Delivery, LanePuller
from laneway.runtime.records import RecordStore, StoredRecord
from laneway.scheduler.server import serve
from laneway.v1 import bus_pb2, common_pb2
from laneway.v1 import scheduler_pb2 as pb
from laneway.v1.scheduler_pb2_grpc import SchedulerServiceStub
from laneway.workers.claims import Claims
from laneway.workers.deliveries import delivered_of
from tests.support.nats import POOL, REGION, eventually
from tests.support.scheduling import FakeWorker, park_job, provision_for, scheduler_settings
from tests.support.services import ACME, OPERATOR, OTHER, bearer, served, with_tokens

if TYPE_CHECKING:
    from laneway.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

pytestmark = pytest.mark.wire


@pytest.fixture
async def stub(nats_server: LocalNats, tmp_path: Path) -> AsyncIterator[SchedulerServiceAsyncStub]:
    settings = with_tokens(scheduler_settings(nats_server), tmp_path)
    async with served(serve, settings, tmp_path / "scheduler.json") as channel:
        yield SchedulerServiceStub(channel)


async def refused(call) -> LanewayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_plan_lanes_models_and_workers(stub: SchedulerServiceAsyncStub, bus: Bus) -> None:
    async with FakeWorker(bus, "w1").alive(), FakeWorker(bus, "w2", running=1).alive():
        await park_job(bus, lane=Lane.BATCH)

        async def with_workers():
            plan = (await stub.GetPlan(pb.GetPlanRequest(), metadata=bearer(ACME))).plan
            return plan if plan.pools[0].workers == 2 else None

        plan = await eventually(with_workers)
        assert (plan.pools[0].slots, plan.pools[0].free_slots) == (8, 8)
        workers = (await stub.ListWorkers(pb.ListWorkersRequest(page_size=1), metadata=bearer(ACME))).workers
        assert [w.name for w in workers] == ["w1"]
        rest = await stub.ListWorkers(pb.ListWorkersRequest(pool=POOL), metadata=bearer(ACME))
        assert [(w.name, w.state, w.running) for w in rest.workers] == [("w1", "READY", 0), ("w2", "READY", 1)]
        assert not (await stub.ListWorkers(pb.ListWorkersRequest(pool="none"), metadata=bearer(ACME))).workers
        models = (await stub.ListModels(pb.ListModelsRequest(), metadata=bearer(ACME))).models
        assert [(m.name, m.tier, m.pool, m.workers) for m in models] == [("chat", "small", POOL, 2)]

        async def after_release():
            lanes = (await stub.ListLanes(pb.ListLanesRequest(), metadata=bearer(ACME))).lanes
            return lanes if lanes[2].released else None

        lanes = await eventually(after_release)
        assert [lane.lane for lane in lanes] == [1, 2, 3]
        assert lanes[0].limit == 4 + 8
    assert isinstance(await refused(stub.GetPlan(pb.GetPlanRequest())), LanewayError)


async def test_lists_page_and_refuse_foreign_tokens(stub: SchedulerServiceAsyncStub) -> None:
    await stub.GetPlan(pb.GetPlanRequest(), metadata=bearer(ACME))
    first = await stub.ListLanes(pb.ListLanesRequest(page_size=2), metadata=bearer(ACME))
    assert len(first.lanes) == 2
    token = first.next_page_token
    second = await stub.ListLanes(pb.ListLanesRequest(page_size=2, page_token=token), metadata=bearer(ACME))
    assert [lane.lane for lane in second.lanes] == [3]
    assert second.next_page_token == ""
    error = await refused(stub.ListModels(pb.ListModelsRequest(page_token=token), metadata=bearer(ACME)))
    assert isinstance(error, InvalidRequest)
    assert error.field == "page_token"
    error = await refused(stub.ListWorkers(pb.ListWorkersRequest(pool="a.b"), metadata=bearer(ACME)))
    assert error.field == "pool"


async def test_parameters_are_shown_to_operators_and_to_tenants_only_their_version(
    stub: SchedulerServiceAsyncStub,
) -> None:
    """They name tenants and their weights."""

    async def seen(token: str) -> pb.PolicyVersion:
        return (await stub.GetPlan(pb.GetPlanRequest(), metadata=bearer(token))).plan.policy

    assert "batch_weight" in (await seen(OPERATOR)).json
    assert (await seen(ACME)).json == ""
    assert (await seen(ACME)).version == (await seen(OPERATOR)).version == 1
    async for response in stub.WatchPlan(pb.WatchPlanRequest(), metadata=bearer(ACME)):
        assert response.plan.policy.json == ""
        break


async def test_watching_plans_gives_the_present_one_and_the_next(stub: SchedulerServiceAsyncStub, bus: Bus) -> None:
    call = stub.WatchPlan(pb.WatchPlanRequest(), metadata=bearer(ACME))
    first = cast("pb.WatchPlanResponse", await call.read())
    assert first.plan.region == "local"
    async with FakeWorker(bus).alive():
        workers = 0
        while not workers:
            update = cast("pb.WatchPlanResponse", await call.read())
            assert update.plan.version > first.plan.version
            workers = update.plan.pools[0].workers
    call.cancel()


async def test_watchers_are_let_go_when_the_scheduler_stops(nats_server: LocalNats, tmp_path: Path) -> None:
    async with served(serve, scheduler_settings(nats_server), tmp_path / "ready.json") as channel:
        call = SchedulerServiceStub(channel).WatchPlan(pb.WatchPlanRequest())
        await call.read()
        ended = asyncio.ensure_future(_read_all(call))
        await asyncio.sleep(0)
    assert await ended == grpc.StatusCode.OK, "the stream ended by itself, it was not cut off"


async def _read_all(call: Any) -> grpc.StatusCode:
    while await call.read() is not grpc.aio.EOF:
        pass
    code: grpc.StatusCode = await call.code()
    return code


async def test_pausing_and_resuming_is_for_operators(stub: SchedulerServiceAsyncStub) -> None:
    batch = common_pb2.LANE_BATCH
    method: Any  # of several request types
    for method, request in (
        (stub.PauseLane, pb.PauseLaneRequest(lane=batch)),
        (stub.ResumeLane, pb.ResumeLaneRequest(lane=batch)),
        (stub.DrainWorker, pb.DrainWorkerRequest(worker_id="w1")),
        (stub.UndrainWorker, pb.UndrainWorkerRequest(worker_id="w1")),
    ):
        assert isinstance(await refused(method(request, metadata=bearer(ACME))), PermissionDenied)
    await stub.PauseLane(pb.PauseLaneRequest(lane=batch), metadata=bearer(OPERATOR))

    async def paused() -> list[int]:
        return list((await stub.GetPlan(pb.GetPlanRequest(), metadata=bearer(ACME))).plan.paused)

    async def shows(wanted: list[int]) -> bool:
        return await paused() == wanted

    await eventually(lambda: shows([batch]))
    lanes = (await stub.ListLanes(pb.ListLanesRequest(), metadata=bearer(ACME))).lanes
    assert [lane.paused for lane in lanes] == [False, False, True]
    await stub.ResumeLane(pb.ResumeLaneRequest(lane=batch), metadata=bearer(OPERATOR))
    await eventually(lambda: shows([]))
    error = await refused(stub.PauseLane(pb.PauseLaneRequest(lane=9), metadata=bearer(OPERATOR)))  # type: ignore[arg-type]  # unknown
    assert error.field == "lane"


async def test_draining_a_worker_by_name_waits_until_it_shows(
    stub: SchedulerServiceAsyncStub, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laneway.scheduler.service.DRAIN_ANSWER_S", 1.0)
    worker = FakeWorker(bus)
    shown = asyncio.Queue[bool]()

    def heard(msg) -> None:
        shown.put_nowait(bus_pb2.WorkerControl.FromString(msg.data).drain.draining)

    await bus.listen(subjects.control(worker.lease.worker_id), heard)
    async with worker.alive():
        await eventually(lambda: _listed(stub))
        method: Any  # of two request types
        for method, request, draining in (
            (stub.DrainWorker, pb.DrainWorkerRequest(worker_id="w1"), True),
            (stub.UndrainWorker, pb.UndrainWorkerRequest(worker_id=worker.lease.worker_id), False),
        ):
            call = asyncio.ensure_future(method(request, metadata=bearer(OPERATOR)))
            assert await shown.get() is draining
            await worker.show(state=WorkerState.DRAINING if draining else WorkerState.READY)
            await call
            while not shown.empty():
                shown.get_nowait()
        error = await refused(stub.DrainWorker(pb.DrainWorkerRequest(worker_id="w1"), metadata=bearer(OPERATOR)))
        assert isinstance(error, Unavailable), "it hears and does nothing"
        assert error.reason == "WORKER_SILENT"
    error = await refused(stub.DrainWorker(pb.DrainWorkerRequest(worker_id="nobody"), metadata=bearer(OPERATOR)))
    assert isinstance(error, NotFound)


async def _listed(stub: SchedulerServiceAsyncStub) -> bool:
    return bool((await stub.ListWorkers(pb.ListWorkersRequest(), metadata=bearer(ACME))).workers)


async def test_a_job_is_explained_to_its_tenant_and_operators(stub: SchedulerServiceAsyncStub, bus: Bus) -> None:
    await eventually(lambda: _planned(stub))
    record, _ = await park_job(bus, job_id=new_job_id(REGION, SystemClock().now(), os.urandom(10)))
    request = pb.ExplainJobRequest(job_id=record.job_id)

    async def held():
        answer = await stub.ExplainJob(request, metadata=bearer(ACME))
        return answer if answer.state == common_pb2.JOB_STATE_PARKED else None

    answer = await eventually(held)
    assert [(s.actor, s.action, s.reason) for s in answer.steps] == [
        ("admission", "accepted", "OK"),
        ("scheduler", "held", "NO_WORKER"),
    ]
    async with FakeWorker(bus).alive():

        async def released():
            answer = await stub.ExplainJob(request, metadata=bearer(OPERATOR))
            return answer if answer.state == common_pb2.JOB_STATE_READY else None

        answer = await eventually(released)
        assert [(s.action, s.reason) for s in answer.steps][-1] == ("released", "IDLE_CAPACITY")
    assert isinstance(await refused(stub.ExplainJob(request, metadata=bearer(OTHER))), JobNotFound)
    unknown = pb.ExplainJobRequest(job_id="local-00000000-0000-7000-8000-000000000000")
    assert isinstance(await refused(stub.ExplainJob(unknown, metadata=bearer(OPERATOR))), JobNotFound)
    elsewhere = pb.ExplainJobRequest(job_id="mars-00000000-0000-7000-8000-000000000000")
    assert isinstance(await refused(stub.ExplainJob(elsewhere, metadata=bearer(OPERATOR))), JobNotFound)
    for bad in ("", "a.b", "x"):
        error = await refused(stub.ExplainJob(pb.ExplainJobRequest(job_id=bad), metadata=bearer(ACME)))
        assert error.field == "job_id"


async def _planned(stub: SchedulerServiceAsyncStub) -> bool:
    return bool((await stub.GetPlan(pb.GetPlanRequest(), metadata=bearer(ACME))).plan.epoch)


async def test_a_job_is_explained_by_a_scheduler_that_never_decided_about_it(
    nats_server: LocalNats, bus: Bus, tmp_path: Path
) -> None:
    """The claim keeps why the job was released; the leader that released it is gone, with all that it remembered."""
    settings = with_tokens(scheduler_settings(nats_server), tmp_path)
    puller = LanePuller(bus, REGION, Lane.DEFERRABLE, POOL)
    async with served(serve, settings, tmp_path / "first.json"), FakeWorker(bus).alive():
        record, _ = await park_job(bus, tenant="acme", job_id=new_job_id(REGION, SystemClock().now(), os.urandom(10)))
        await puller.start()

        async def pulled() -> Delivery | None:
            found = await puller.pull(1)
            return found[0] if found else None

        delivery = await eventually(pulled)
    await puller.close()
    claims = Claims(RecordStore(bus), "w1-1a", SystemClock(), lambda owner: True)
    claimed = await claims.claim(delivered_of(delivery, delivery.job, 3.0), cast(Any, None))
    assert isinstance(claimed, StoredRecord)
    assert claimed.record.lineage[-1].reason == "IDLE_CAPACITY"
    async with served(serve, settings, tmp_path / "second.json") as channel:
        request = pb.ExplainJobRequest(job_id=record.job_id)
        answer = await SchedulerServiceStub(channel).ExplainJob(request, metadata=bearer(ACME))
    steps = [(step.actor, step.action, step.reason) for step in answer.steps[1:]]
    assert steps == [("scheduler", "released", "IDLE_CAPACITY"), ("worker", "claimed", "FIRST_CLAIM")]
    assert answer.steps[1].facts["known_by"] == "the claim"


async def test_without_provisioning_the_region_must_exist(nats_server: LocalNats, bus: Bus, tmp_path: Path) -> None:
    settings = scheduler_settings(nats_server, provision=False)
    with pytest.raises(LanewayError):
        await asyncio.wait_for(serve(settings, asyncio.Event()), 10.0)
    await provision_for(bus, settings)
    async with served(serve, settings, tmp_path / "ready.json") as channel:
        assert (await SchedulerServiceStub(channel).GetPlan(pb.GetPlanRequest())).plan.region == "local"
