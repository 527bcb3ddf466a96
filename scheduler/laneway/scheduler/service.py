"""SchedulerService over gRPC. Any scheduler of a region answers; the one that leads knows more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc.aio
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.errors import InvalidRequest, JobNotFound, NotFound, Unavailable
from laneway.core.fleet import Plan, PolicyVersion, WorkerLease, WorkerState
from laneway.core.ids import check_token, job_region
from laneway.core.lanes import LANES, JobState, Lane
from laneway.runtime.auth import current_caller, require_operator
from laneway.runtime.paging import paginate
from laneway.runtime.records import StoredRecord
from laneway.runtime.wire.enums import JOB_STATE_TO_WIRE, LANE_FROM_WIRE
from laneway.runtime.wire.plans import plan_to_proto
from laneway.scheduler.decisions import Step
from laneway.scheduler.explain import explain
from laneway.scheduler.loop import Scheduler
from laneway.scheduler.wire import explanation_to_proto, lane_status_to_proto, model_to_proto, worker_to_proto
from laneway.v1 import bus_pb2
from laneway.v1 import scheduler_pb2 as pb
from laneway.v1.scheduler_pb2_grpc import SchedulerServiceServicer

NAME = "laneway.v1.SchedulerService"
PLAN_RETRY_S = 1.0
FIRST_PLAN_S = 2.0
DRAIN_ANSWER_S = 3.0  # a worker shows in its lease that it drains within this, or the call fails
DRAIN_REPEAT_S = 0.5

# grpc.aio's contexts are generic over messages that no handler looks into.
Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


class SchedulerService(SchedulerServiceServicer):
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    # --- the plan ------------------------------------------------------------------------------------

    async def GetPlan(self, request: pb.GetPlanRequest, context: Context) -> pb.GetPlanResponse:
        return pb.GetPlanResponse(plan=plan_to_proto(_shown(await self._plan())))

    async def WatchPlan(self, request: pb.WatchPlanRequest, context: Context) -> AsyncIterator[pb.WatchPlanResponse]:
        async with contextlib.aclosing(self._scheduler.plan_news()) as plans:
            async for plan in plans:
                yield pb.WatchPlanResponse(plan=plan_to_proto(_shown(plan)))

    async def _plan(self) -> Plan:
        """The present plan; right after a region's first start the first one is waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PLAN_S), contextlib.aclosing(self._scheduler.plan_news()) as plans:
                async for plan in plans:
                    return plan
        raise Unavailable("no scheduler has made a plan yet", reason="NO_PLAN", retry_after_s=PLAN_RETRY_S)

    # --- lists ---------------------------------------------------------------------------------------

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersResponse:
        if request.pool:
            check_token(request.pool, "pool")
        leases = [w for w in self._scheduler.leases.live() if request.pool in ("", w.pool)]
        page, token = paginate(
            sorted(leases, key=_worker_key),
            request.page_size,
            request.page_token,
            filter_key=f"workers:{request.pool}",
            key=_worker_key,
        )
        return pb.ListWorkersResponse(workers=map(worker_to_proto, page), next_page_token=token)

    async def ListLanes(self, request: pb.ListLanesRequest, context: Context) -> pb.ListLanesResponse:
        """`next_due` and `released` are known to the scheduler that leads alone."""
        plan, lead = await self._plan(), self._scheduler.lead
        keys = sorted((f"{pool.pool}/{i}", pool, lane) for pool in plan.pools for i, lane in enumerate(LANES))
        page, token = paginate(
            keys, request.page_size, request.page_token, filter_key="lanes", key=lambda each: each[0]
        )
        lanes = [
            lane_status_to_proto(
                lane,
                pool,
                paused=lane in self._scheduler.pauses.lanes,
                next_due_ms=lead.parking.index.next_due_ms(pool.pool, lane) if lead else None,
                released=self._scheduler.released[pool.pool, lane],
            )
            for _, pool, lane in page
        ]
        return pb.ListLanesResponse(lanes=lanes, next_page_token=token)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        # Keys keep the catalogue's order: a model's later tier is the better one.
        pools = [(f"{i:06}", pool) for i, pool in enumerate(self._scheduler.catalogue.pools)]
        page, token = paginate(
            pools, request.page_size, request.page_token, filter_key="models", key=lambda each: each[0]
        )
        live = self._scheduler.leases.live()
        ready = [w.pool for w in live if w.state is WorkerState.READY]
        models = [model_to_proto(pool, ready.count(pool.name)) for _, pool in page]
        return pb.ListModelsResponse(models=models, next_page_token=token)

    # --- operators -----------------------------------------------------------------------------------

    async def PauseLane(self, request: pb.PauseLaneRequest, context: Context) -> pb.PauseLaneResponse:
        require_operator()
        await self._scheduler.pauses.set(_lane(request.lane), True)
        return pb.PauseLaneResponse()

    async def ResumeLane(self, request: pb.ResumeLaneRequest, context: Context) -> pb.ResumeLaneResponse:
        require_operator()
        await self._scheduler.pauses.set(_lane(request.lane), False)
        return pb.ResumeLaneResponse()

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        require_operator()
        await self._drain(request.worker_id, draining=True)
        return pb.DrainWorkerResponse()

    async def UndrainWorker(self, request: pb.UndrainWorkerRequest, context: Context) -> pb.UndrainWorkerResponse:
        require_operator()
        await self._drain(request.worker_id, draining=False)
        return pb.UndrainWorkerResponse()

    async def _drain(self, worker: str, *, draining: bool) -> None:
        """Tells the worker until its lease shows that it heard."""
        check_token(worker, "worker_id")
        found = self._workers(worker)
        if not found:
            raise NotFound("there is no such worker", reason="WORKER_NOT_FOUND", facts={"worker_id": worker})
        hint = bus_pb2.WorkerControl(drain=bus_pb2.DrainHint(draining=draining)).SerializeToString()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_ANSWER_S):
                while deaf := [w for w in self._workers(worker) if (w.state is WorkerState.DRAINING) != draining]:
                    for each in deaf:
                        await self._scheduler.bus.emit(subjects.control(each.worker_id), hint)
                    await self._shown(deaf, DRAIN_REPEAT_S)
                return
        raise Unavailable(
            "the worker did not answer", reason="WORKER_SILENT", retry_after_s=1.0, facts={"worker_id": worker}
        )

    def _workers(self, worker: str) -> list[WorkerLease]:
        return [w for w in self._scheduler.leases.live() if worker in (w.worker_id, w.name)]

    async def _shown(self, workers: list[WorkerLease], timeout_s: float) -> None:
        """Waits until one of the leases says something else, at most the time."""
        before = {w.worker_id: w.state for w in workers}
        for _ in range(10):
            await asyncio.sleep(timeout_s / 10)
            now = {w.worker_id: w.state for w in self._scheduler.leases.live() if w.worker_id in before}
            if now != before:
                return

    # --- explain -------------------------------------------------------------------------------------

    async def ExplainJob(self, request: pb.ExplainJobRequest, context: Context) -> pb.ExplainJobResponse:
        """The scheduler's own steps are kept in memory by the one that made them."""
        stored = await self._record(request.job_id)
        record, scheduler = stored.record, self._scheduler
        state, now = record.state, None
        if state is JobState.WAITING:
            where, now = self._where(record.job_id)
            # A job that was handed back waits for its message to be delivered again, if it is not parked.
            state = where if where is JobState.PARKED or not record.attempt else state
        operator = current_caller().role == "operator"
        steps = explain(record, scheduler.decisions.of(record.job_id), now=now, operator=operator)
        return pb.ExplainJobResponse(
            job_id=record.job_id, state=JOB_STATE_TO_WIRE[state], steps=map(explanation_to_proto, steps)
        )

    def _where(self, job_id: str) -> tuple[JobState, Step | None]:
        """Parked or ready, as far as this scheduler can tell."""
        lead = self._scheduler.lead
        if lead is None or lead.plan is None:
            return JobState.WAITING, None
        park = lead.parking.index.get(job_id)
        if park is None:
            return (JobState.PARKED if job_id in lead.releaser.acting else JobState.READY), None
        return JobState.PARKED, lead.releaser.held_because(park, lead.plan)

    async def _record(self, job_id: str) -> StoredRecord:
        """The caller's own job; operators see all."""
        caller, scheduler = current_caller(), self._scheduler
        if job_region(check_token(job_id, "job_id")) != scheduler.region:
            raise JobNotFound("there is no such job in this region", job_id=job_id)
        tenant: str | None = caller.tenant
        if caller.role == "operator":
            tenant = await scheduler.records.find_tenant(scheduler.region, job_id)
        stored = await scheduler.records.get(scheduler.region, tenant, job_id) if tenant else None
        if stored is None:
            raise JobNotFound("there is no such job", job_id=job_id)
        return stored


def _shown(plan: Plan) -> Plan:
    """What the caller may see of it: other tenants, and parameters that may name them, are for operators."""
    if current_caller().role == "operator":
        return plan
    return replace(plan, tenants=(), policy=PolicyVersion(plan.policy.version, "", plan.policy.loaded_s))


def _worker_key(lease: WorkerLease) -> str:
    return f"{lease.name}/{lease.worker_id}"


def _lane(number: int) -> Lane:
    lane = LANE_FROM_WIRE.get(number)
    if lane is None:
        raise InvalidRequest("lane must be one of PRIORITY, DEFERRABLE, BATCH", field="lane")
    return lane
