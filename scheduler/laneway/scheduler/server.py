"""The scheduler process: connects, provisions its region, serves SchedulerService, and leads or stands by."""

from __future__ import annotations

import asyncio
import signal

from laneway.core.clock import Clock
from laneway.runtime import metrics
from laneway.runtime.bus import Bus
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.clock import SystemClock
from laneway.runtime.grpc_server import GrpcServer
from laneway.runtime.lifecycle import announce_ready
from laneway.runtime.provision import provision
from laneway.runtime.settings import Settings
from laneway.runtime.settings_source import SettingsSource
from laneway.scheduler.loop import Scheduler
from laneway.scheduler.service import NAME, SchedulerService
from laneway.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server

DRAIN_S_MAX = 2.0  # calls are short, and streams of plans end with the scheduler


async def serve(
    settings: Settings, stop: asyncio.Event, *, clock: Clock | None = None, source: SettingsSource | None = None
) -> None:
    """Until stop is set. Raises ConfigError or Unavailable where it cannot start. `source`: where the settings are read
    from again, when that changes and on SIGHUP."""
    catalogue = catalogue_of(settings)
    if source is not None:  # not the end of this process, also before it reads its settings again
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)
    bus = await Bus.connect(settings.nats, name="scheduler")
    try:
        if settings.scheduler.provision:
            await provision(bus, settings.region.name, catalogue, settings.nats, ack_wait_s=settings.nats.ack_wait_s)
        scheduler = Scheduler(bus, settings, catalogue, clock or SystemClock(), source=source)
        if scheduler.reload is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, scheduler.reload.ask)
        server = GrpcServer(settings)
        service = SchedulerService(scheduler)
        server.add(NAME, lambda s: add_SchedulerServiceServicer_to_server(service, s))
        async with scheduler.watching():
            with metrics.metrics_listener(settings.process.metrics_listen) as metrics_address:
                address = await server.start(settings.scheduler.listen)
                try:
                    announce_ready(settings, "scheduler", address, metrics=metrics_address)
                    await scheduler.run(stop)
                finally:
                    await server.drain(min(settings.process.drain_s, DRAIN_S_MAX))
    finally:
        await bus.close()
