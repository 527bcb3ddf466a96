"""Clients of SchedulerService and RoutingService: what operators look at and do."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import grpc.aio

from laneway.client import decode
from laneway.client.channel import ServiceConnection, failure_of
from laneway.client.values import Explanation, LaneStatus, Model, Region, Route, Worker
from laneway.core.fleet import Plan
from laneway.core.lanes import Lane
from laneway.runtime.wire import enums
from laneway.runtime.wire.plans import plan_from_proto
from laneway.v1 import routing_pb2, routing_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

PAGE_SIZE = 100


class SchedulerClient(ServiceConnection):
    """Workers, lanes, models, the plan, and why a job is where it is."""

    @functools.cached_property
    def _stub(self) -> scheduler_pb2_grpc.SchedulerServiceAsyncStub:
        return scheduler_pb2_grpc.SchedulerServiceStub(self._channel)

    async def get_plan(self, *, timeout_s: float | None = None) -> Plan:
        message = scheduler_pb2.GetPlanRequest()
        response = await self._call(self._stub.GetPlan, lambda _: message, timeout_s=timeout_s)
        return plan_from_proto(response.plan)

    async def watch_plan(self, *, timeout_s: float | None = None) -> AsyncGenerator[Plan, None]:
        """The current plan, then each new one. Close the iterator (contextlib.aclosing) to end the call."""
        call = self._stub.WatchPlan(scheduler_pb2.WatchPlanRequest(), timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield plan_from_proto(response.plan)
        except grpc.aio.AioRpcError as error:
            raise failure_of(error, self.address) from error
        finally:
            call.cancel()

    def list_workers(self, *, pool: str = "", timeout_s: float | None = None) -> AsyncIterator[Worker]:
        async def page(token: str) -> tuple[list[Worker], str]:
            message = scheduler_pb2.ListWorkersRequest(page_size=PAGE_SIZE, page_token=token, pool=pool)
            response = await self._call(self._stub.ListWorkers, lambda _: message, timeout_s=timeout_s)
            return [decode.worker_of(worker) for worker in response.workers], response.next_page_token

        return self._pages(page)

    def list_lanes(self, *, timeout_s: float | None = None) -> AsyncIterator[LaneStatus]:
        async def page(token: str) -> tuple[list[LaneStatus], str]:
            message = scheduler_pb2.ListLanesRequest(page_size=PAGE_SIZE, page_token=token)
            response = await self._call(self._stub.ListLanes, lambda _: message, timeout_s=timeout_s)
            return [decode.lane_status_of(lane) for lane in response.lanes], response.next_page_token

        return self._pages(page)

    def list_models(self, *, timeout_s: float | None = None) -> AsyncIterator[Model]:
        async def page(token: str) -> tuple[list[Model], str]:
            message = scheduler_pb2.ListModelsRequest(page_size=PAGE_SIZE, page_token=token)
            response = await self._call(self._stub.ListModels, lambda _: message, timeout_s=timeout_s)
            return [decode.model_of(model) for model in response.models], response.next_page_token

        return self._pages(page)

    async def explain_job(self, job_id: str, *, timeout_s: float | None = None) -> Explanation:
        message = scheduler_pb2.ExplainJobRequest(job_id=job_id)
        response = await self._call(self._stub.ExplainJob, lambda _: message, timeout_s=timeout_s)
        return decode.explanation_of(response)

    async def pause_lane(self, lane: Lane, *, timeout_s: float | None = None) -> None:
        """Stops releases and pulls of a lane; admission goes on to hold."""
        message = scheduler_pb2.PauseLaneRequest(lane=enums.LANE_TO_WIRE[lane])
        await self._call(self._stub.PauseLane, lambda _: message, timeout_s=timeout_s)

    async def resume_lane(self, lane: Lane, *, timeout_s: float | None = None) -> None:
        message = scheduler_pb2.ResumeLaneRequest(lane=enums.LANE_TO_WIRE[lane])
        await self._call(self._stub.ResumeLane, lambda _: message, timeout_s=timeout_s)

    async def drain_worker(self, worker_id: str, *, timeout_s: float | None = None) -> None:
        """Lets a worker (incarnation or name) finish what it runs and take nothing new."""
        message = scheduler_pb2.DrainWorkerRequest(worker_id=worker_id)
        await self._call(self._stub.DrainWorker, lambda _: message, timeout_s=timeout_s)

    async def undrain_worker(self, worker_id: str, *, timeout_s: float | None = None) -> None:
        message = scheduler_pb2.UndrainWorkerRequest(worker_id=worker_id)
        await self._call(self._stub.UndrainWorker, lambda _: message, timeout_s=timeout_s)


class RoutingClient(ServiceConnection):
    """Regions: what they look like, which one a request should run in, and draining them."""

    @functools.cached_property
    def _stub(self) -> routing_pb2_grpc.RoutingServiceAsyncStub:
        return routing_pb2_grpc.RoutingServiceStub(self._channel)

    async def route(
        self,
        model: str,
        *,
        lane: Lane = Lane.PRIORITY,
        regions: Sequence[str] = (),
        prompt_tokens: int = 0,
        max_tokens: int = 0,
        timeout_s: float | None = None,
    ) -> Route:
        message = routing_pb2.RouteRequest(
            model=model,
            lane=enums.LANE_TO_WIRE[lane],
            regions=regions,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
        )
        response = await self._call(self._stub.Route, lambda _: message, timeout_s=timeout_s)
        return decode.route_of(response)

    def list_regions(self, *, timeout_s: float | None = None) -> AsyncIterator[Region]:
        async def page(token: str) -> tuple[list[Region], str]:
            message = routing_pb2.ListRegionsRequest(page_size=PAGE_SIZE, page_token=token)
            response = await self._call(self._stub.ListRegions, lambda _: message, timeout_s=timeout_s)
            return [decode.region_of(region) for region in response.regions], response.next_page_token

        return self._pages(page)

    async def watch_regions(self, *, timeout_s: float | None = None) -> AsyncGenerator[tuple[Region, ...], None]:
        """The current digests, then each change. Close the iterator (contextlib.aclosing) to end the call."""
        call = self._stub.WatchRegions(routing_pb2.WatchRegionsRequest(), timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield tuple(decode.region_of(region) for region in response.regions)
        except grpc.aio.AioRpcError as error:
            raise failure_of(error, self.address) from error
        finally:
            call.cancel()

    async def drain_region(self, region: str, *, timeout_s: float | None = None) -> None:
        """Keeps new work out of a region; what it accepted goes on."""
        message = routing_pb2.DrainRegionRequest(region=region)
        await self._call(self._stub.DrainRegion, lambda _: message, timeout_s=timeout_s)

    async def undrain_region(self, region: str, *, timeout_s: float | None = None) -> None:
        message = routing_pb2.UndrainRegionRequest(region=region)
        await self._call(self._stub.UndrainRegion, lambda _: message, timeout_s=timeout_s)
