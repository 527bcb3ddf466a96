"""RoutingService over gRPC: where a request should run, and what the regions look like."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc.aio
from msgspec.structs import replace

from laneway.core.errors import InvalidRequest, LanewayError, RegionNotAllowed, Unavailable
from laneway.core.ids import check_token
from laneway.core.lanes import Lane
from laneway.policy.route import Ask, RegionDigest, Sighting, route
from laneway.routing.exchange import Exchange
from laneway.routing.wire import digest_to_proto, route_to_proto
from laneway.runtime.auth import require_operator
from laneway.runtime.paging import paginate
from laneway.runtime.wire.enums import LANE_FROM_WIRE
from laneway.v1 import common_pb2
from laneway.v1 import routing_pb2 as pb
from laneway.v1.routing_pb2_grpc import RoutingServiceServicer

NAME = "laneway.v1.RoutingService"
REGIONS_ASKED_MAX = 16
MODEL_LENGTH_MAX = 129  # model/tier
RETRY_S = 2.0

# grpc.aio's contexts are generic over messages that no handler looks into.
Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


class RoutingService(RoutingServiceServicer):
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def Route(self, request: pb.RouteRequest, context: Context) -> pb.RouteResponse:
        ask = _ask(request)
        chosen = route(ask, self._exchange.sightings(), home=self._exchange.region)
        if not chosen.region:
            raise _nowhere(chosen.reason, ask)
        return route_to_proto(chosen)

    async def ListRegions(self, request: pb.ListRegionsRequest, context: Context) -> pb.ListRegionsResponse:
        page, token = paginate(
            self._exchange.sightings(),
            request.page_size,
            request.page_token,
            filter_key="regions",
            key=lambda sighting: sighting.digest.region,
        )
        return pb.ListRegionsResponse(regions=[digest_to_proto(_shown(s)) for s in page], next_page_token=token)

    async def WatchRegions(
        self, request: pb.WatchRegionsRequest, context: Context
    ) -> AsyncIterator[pb.WatchRegionsResponse]:
        async with contextlib.aclosing(self._exchange.changes()) as changes:
            async for sightings in changes:
                yield pb.WatchRegionsResponse(regions=[digest_to_proto(_shown(s)) for s in sightings])

    async def DrainRegion(self, request: pb.DrainRegionRequest, context: Context) -> pb.DrainRegionResponse:
        require_operator()
        await self._exchange.drain(check_token(request.region, "region"), True)
        return pb.DrainRegionResponse()

    async def UndrainRegion(self, request: pb.UndrainRegionRequest, context: Context) -> pb.UndrainRegionResponse:
        require_operator()
        await self._exchange.drain(check_token(request.region, "region"), False)
        return pb.UndrainRegionResponse()


def _shown(sighting: Sighting) -> RegionDigest:
    """A region that was not heard of for a while is not healthy, whatever it said last."""
    return replace(sighting.digest, healthy=sighting.digest.healthy and not sighting.lost)


def _ask(request: pb.RouteRequest) -> Ask:
    if not request.model or len(request.model) > MODEL_LENGTH_MAX:
        raise InvalidRequest("model must name a model, or a model/tier", field="model")
    lane = Lane.PRIORITY if request.lane == common_pb2.LANE_UNSPECIFIED else LANE_FROM_WIRE.get(request.lane)
    if lane is None:
        raise InvalidRequest("lane must be one of PRIORITY, DEFERRABLE, BATCH", field="lane")
    if len(request.regions) > REGIONS_ASKED_MAX:
        raise InvalidRequest(f"at most {REGIONS_ASKED_MAX} regions may be named", field="regions")
    regions = tuple(check_token(region, f"regions[{i}]") for i, region in enumerate(request.regions))
    return Ask(request.model, lane, regions, request.prompt_tokens, request.max_tokens)


def _nowhere(reason: str, ask: Ask) -> LanewayError:
    facts = {"model": ask.model, "regions": ",".join(ask.regions)} if ask.regions else {"model": ask.model}
    if reason == "REGION_NOT_ALLOWED":
        return RegionNotAllowed(facts=facts)
    if reason == "MODEL_NOT_FOUND":
        return InvalidRequest("no region serves such a model", field="model", reason=reason, facts=facts)
    return Unavailable("no allowed region can take the request now", reason=reason, retry_after_s=RETRY_S, facts=facts)
