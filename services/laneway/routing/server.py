"""The routing process: connects, waits until its region exists, exchanges digests and serves RoutingService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from laneway.core.clock import Clock
from laneway.routing.exchange import Exchange
from laneway.routing.service import NAME, RoutingService
from laneway.runtime import metrics
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.clock import SystemClock
from laneway.runtime.grpc_server import GrpcServer
from laneway.runtime.lifecycle import announce_ready
from laneway.runtime.settings import Settings
from laneway.v1.routing_pb2_grpc import add_RoutingServiceServicer_to_server

REGION_WAIT_S = 30.0  # for the scheduler, or `laneway provision`, to make the region's buckets
RETRY_S = 0.25
DRAIN_S_MAX = 2.0  # calls are short, and streams of digests end with the exchange

_log = structlog.get_logger(__name__)


async def serve(settings: Settings, stop: asyncio.Event, *, clock: Clock | None = None) -> None:
    """Until stop is set. Raises ConfigError or Unavailable where it cannot start."""
    clock = clock or SystemClock()
    bus = await Bus.connect(settings.nats, name="routing")
    try:
        exchange = Exchange(bus, settings, catalogue_of(settings), clock)
        service = RoutingService(exchange)
        server = GrpcServer(settings)
        server.add(NAME, lambda s: add_RoutingServiceServicer_to_server(service, s))
        async with _in_region(exchange, stop, clock):
            with metrics.metrics_listener(settings.process.metrics_listen) as metrics_address:
                address = await server.start(settings.routing.listen)
                try:
                    announce_ready(settings, "routing", address, metrics=metrics_address)
                    await _until(stop, exchange)
                finally:
                    await server.drain(min(settings.process.drain_s, DRAIN_S_MAX))
    finally:
        await bus.close()


@asynccontextmanager
async def _in_region(exchange: Exchange, stop: asyncio.Event, clock: Clock) -> AsyncIterator[None]:
    """Starts watching, as soon as the region has what is to be watched."""
    give_up_s = clock.monotonic() + REGION_WAIT_S
    async with AsyncExitStack() as stack:
        while not stop.is_set():
            try:
                await stack.enter_async_context(exchange.watching())
                break
            except BusError as error:
                if clock.monotonic() > give_up_s:
                    raise
                _log.info("region_awaited", error=error.message)
                await asyncio.sleep(RETRY_S)
        yield


async def _until(stop: asyncio.Event, exchange: Exchange) -> None:
    async with asyncio.TaskGroup() as group:
        telling = group.create_task(exchange.run())
        await stop.wait()
        telling.cancel()
    exchange.stop()
