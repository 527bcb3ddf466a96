"""Routing over a real nats-server: digests between two regions, routes, drains that last, and who may drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc.aio
import msgspec
import pytest

from laneway.core.errors import InvalidRequest, LanewayError, NotFound, PermissionDenied, RegionNotAllowed, Unavailable
from laneway.core.fleet import LanePlan, Plan, PoolPlan
from laneway.core.lanes import Lane
from laneway.routing.server import serve
from laneway.runtime.bus import Bus
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.clock import SystemClock
from laneway.runtime.grpc_errors import from_rpc_error
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.plans import PlanPublisher
from laneway.runtime.provision import provision
from laneway.runtime.settings import RegionSettings, RoutingSettings, Settings
from laneway.v1 import common_pb2
from laneway.v1 import routing_pb2 as pb
from laneway.v1.routing_pb2_grpc import RoutingServiceStub
from tests.support.nats import POOL, eventually
from tests.support.scheduling import scheduler_settings
from tests.support.services import ACME, OPERATOR, bearer, served, with_tokens

if TYPE_CHECKING:
    from laneway.v1.routing_pb2_grpc import RoutingServiceAsyncStub

pytestmark = pytest.mark.wire

AS_ACME, AS_OPERATOR = bearer(ACME), bearer(OPERATOR)


def routing_settings(server: LocalNats, folder: Path, region: str) -> Settings:
    settings = with_tokens(scheduler_settings(server), folder)
    return msgspec.structs.replace(
        settings,
        region=RegionSettings(name=region, zones=(f"{region}-a",)),
        routing=RoutingSettings(listen="127.0.0.1:0", digest_interval_s=0.05, digest_valid_s=0.5),
    )


@asynccontextmanager
async def routing(server: LocalNats, bus: Bus, folder: Path, region: str) -> AsyncIterator[RoutingServiceAsyncStub]:
    settings = routing_settings(server, folder, region)
    await provision(bus, region, catalogue_of(settings), settings.nats, ack_wait_s=settings.nats.ack_wait_s)
    async with served(serve, settings, folder / f"{region}.json") as channel:
        yield RoutingServiceStub(channel)


async def publish_plan(bus: Bus, region: str, *, free: int = 4, batch_s: float = 0.0, version: int = 1) -> None:
    now_s = SystemClock().now()
    lanes = (LanePlan(Lane.PRIORITY), LanePlan(Lane.BATCH, parked=9, parked_device_s=batch_s))
    pool = PoolPlan(POOL, workers=1, slots=4, free_slots=free, service_s=2.0, lanes=lanes)
    await PlanPublisher(bus, region).publish(Plan(region, 1, version, now_s, now_s + 60.0, (pool,)))


async def refused(call) -> LanewayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_one_region_routes_to_itself_once_it_has_a_plan(nats_server: LocalNats, bus: Bus, tmp_path: Path) -> None:
    async with routing(nats_server, bus, tmp_path, "eu") as stub:
        request = pb.RouteRequest(model="chat")
        error = await refused(stub.Route(request, metadata=AS_ACME))
        assert isinstance(error, Unavailable)
        assert error.reason == "UNHEALTHY"
        assert error.retry_after_s is not None
        await publish_plan(bus, "eu")

        async def routed():
            try:
                return await stub.Route(request, metadata=AS_ACME)
            except grpc.aio.AioRpcError:
                return None

        answer = await eventually(routed)
        assert (answer.region, answer.reason) == ("eu", "ONLY_REGION")
        (region,) = (await stub.ListRegions(pb.ListRegionsRequest(), metadata=AS_ACME)).regions
        assert (region.region, list(region.zones), region.healthy) == ("eu", ["eu-a"], True)
        assert [(m.model, m.tier, m.workers, m.free_slots) for m in region.models] == [("chat", "small", 1, 4)]
        not_allowed = await refused(stub.Route(pb.RouteRequest(model="chat", regions=["us"]), metadata=AS_ACME))
        assert isinstance(not_allowed, RegionNotAllowed)
        for bad, field in (
            (pb.RouteRequest(), "model"),
            (pb.RouteRequest(model="other"), "model"),
            (pb.RouteRequest(model="chat", lane=7), "lane"),  # type: ignore[arg-type]  # no such lane
            (pb.RouteRequest(model="chat", regions=["eu", "a b"]), "regions[1]"),
            (pb.RouteRequest(model="chat", regions=["eu"] * 17), "regions"),
        ):
            error = await refused(stub.Route(bad, metadata=AS_ACME))
            assert isinstance(error, InvalidRequest)
            assert error.field == field
        assert isinstance(await refused(stub.Route(request)), LanewayError), "callers authenticate"


async def test_two_regions_hear_each_other_and_send_work_to_the_better_one(
    nats_server: LocalNats, bus: Bus, tmp_path: Path
) -> None:
    async with routing(nats_server, bus, tmp_path, "eu") as eu, routing(nats_server, bus, tmp_path, "us") as us:
        await publish_plan(bus, "eu", free=0, batch_s=900.0)
        await publish_plan(bus, "us")

        async def regions(stub: RoutingServiceAsyncStub):
            return (await stub.ListRegions(pb.ListRegionsRequest(), metadata=AS_ACME)).regions

        async def both(stub: RoutingServiceAsyncStub) -> bool:
            return [r.region for r in await regions(stub) if r.healthy] == ["eu", "us"]

        await eventually(lambda: both(eu))
        await eventually(lambda: both(us))
        batch = pb.RouteRequest(model="chat", lane=common_pb2.LANE_BATCH)
        answer = await eu.Route(batch, metadata=AS_ACME)
        assert (answer.region, answer.reason) == ("us", "LOWER_SCORE")
        assert [score.region for score in answer.scores] == ["us", "eu"]
        home = await us.Route(batch, metadata=AS_ACME)
        assert (home.region, home.reason) == ("us", "HOME_IS_BEST")

        async def measured() -> bool:
            return any(r.round_trip.nanos for r in await regions(eu) if r.region == "us")

        await eventually(measured)
        page = await eu.ListRegions(pb.ListRegionsRequest(page_size=1), metadata=AS_ACME)
        rest = await eu.ListRegions(pb.ListRegionsRequest(page_token=page.next_page_token), metadata=AS_ACME)
        assert [r.region for r in (*page.regions, *rest.regions)] == ["eu", "us"]

        # Drained from the other side; the work goes home however long it waits there.
        assert isinstance(
            await refused(eu.DrainRegion(pb.DrainRegionRequest(region="us"), metadata=AS_ACME)), PermissionDenied
        )
        await eu.DrainRegion(pb.DrainRegionRequest(region="us"), metadata=AS_OPERATOR)

        async def drained() -> bool:
            return (await eu.Route(batch, metadata=AS_ACME)).region == "eu"

        await eventually(drained)
        unknown = await refused(eu.DrainRegion(pb.DrainRegionRequest(region="mars"), metadata=AS_OPERATOR))
        assert isinstance(unknown, NotFound)


async def test_a_region_that_fell_silent_is_not_routed_to(nats_server: LocalNats, bus: Bus, tmp_path: Path) -> None:
    async with routing(nats_server, bus, tmp_path, "eu") as eu:
        await publish_plan(bus, "eu")
        us_only = pb.RouteRequest(model="chat", regions=["us"])
        watch = eu.WatchRegions(pb.WatchRegionsRequest(), metadata=AS_ACME)

        async def until(wanted: set[tuple[str, bool]]) -> None:
            async with asyncio.timeout(10.0):
                while {(r.region, r.healthy) for r in cast("pb.WatchRegionsResponse", await watch.read()).regions} != (
                    wanted
                ):
                    pass

        async with routing(nats_server, bus, tmp_path, "us"):
            await publish_plan(bus, "us")
            await until({("eu", True), ("us", True)})
            assert (await eu.Route(us_only, metadata=AS_ACME)).region == "us"
        await until({("eu", True), ("us", False)})
        error = await refused(eu.Route(us_only, metadata=AS_ACME))
        assert isinstance(error, Unavailable)
        assert error.reason == "NOT_HEARD_OF"
        watch.cancel()


async def test_a_drain_outlives_the_routing_service(nats_server: LocalNats, bus: Bus, tmp_path: Path) -> None:
    async with routing(nats_server, bus, tmp_path, "eu") as stub:
        await publish_plan(bus, "eu")
        await stub.DrainRegion(pb.DrainRegionRequest(region="eu"), metadata=AS_OPERATOR)
    async with routing(nats_server, bus, tmp_path, "eu") as stub:
        error = await refused(stub.Route(pb.RouteRequest(model="chat"), metadata=AS_ACME))
        assert isinstance(error, Unavailable)
        assert error.reason == "DRAINING"
        await stub.UndrainRegion(pb.UndrainRegionRequest(region="eu"), metadata=AS_OPERATOR)
        assert (await stub.Route(pb.RouteRequest(model="chat"), metadata=AS_ACME)).region == "eu"


async def test_routing_waits_for_its_region_to_be_made(nats_server: LocalNats, bus: Bus, tmp_path: Path) -> None:
    settings = routing_settings(nats_server, tmp_path, "eu")
    stop = asyncio.Event()
    ready = tmp_path / "eu.json"
    settings = msgspec.structs.replace(
        settings, process=msgspec.structs.replace(settings.process, ready_file=str(ready))
    )
    task = asyncio.ensure_future(serve(settings, stop))
    await bus.server_time_s()
    assert not ready.exists()
    await provision(bus, "eu", catalogue_of(settings), settings.nats, ack_wait_s=settings.nats.ack_wait_s)
    await eventually(ready.exists)
    stop.set()
    await task
