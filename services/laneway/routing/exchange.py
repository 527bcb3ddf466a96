"""The exchange of digests between regions: tells its own each second, remembers the others', measures the way to them.

Core NATS only: a digest that gets lost is followed by the next. What is heard on `digest.<region>` counts for that
region alone, whatever it says. Each region's routing service answers on `ctl.routing.<region>`: an empty request is a
probe of the round trip, a drain hint is an operator's word for that region.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog
from google.protobuf.message import DecodeError
from msgspec.structs import replace
from nats.aio.msg import Msg

from laneway.core import subjects
from laneway.core.catalogue import Catalogue
from laneway.core.clock import Clock
from laneway.core.errors import NotFound, Unavailable
from laneway.policy.route import RegionDigest, Sighting, digest_of
from laneway.routing.wire import UnreadableDigest, decode_digest, digest_to_proto
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.draining import Draining
from laneway.runtime.nats_clock import NatsClock
from laneway.runtime.plans import PlanView
from laneway.runtime.settings import Settings
from laneway.v1 import bus_pb2

REGIONS_MAX = 256
PROBE_TIMEOUT_S = 1.0
PROBE_WEIGHT = 0.25  # of a new measurement in the mean
REFRESH_EVERY = 15  # digests between looks at what a watch may have missed
_DONE = b"done"

_log = structlog.get_logger(__name__)


class Exchange:
    """One region's part. `watching` first, then `run`; `sightings` may be asked at any time."""

    def __init__(self, bus: Bus, settings: Settings, catalogue: Catalogue, system: Clock) -> None:
        self.region = settings.region.name
        self.draining = Draining(bus, self.region, self._changed)
        self._bus = bus
        self._zones = settings.region.zones
        self._interval_s = settings.routing.digest_interval_s
        self._valid_s = settings.routing.digest_valid_s
        self._catalogue = catalogue
        self._clock = NatsClock(bus, system)
        self._plans = PlanView(bus, self.region, self._clock)
        self._heard: dict[str, tuple[RegionDigest, float]] = {}  # by region, with the monotonic time it came
        self._round_trip_s: dict[str, float] = {}
        self._watchers: set[asyncio.Event] = set()
        self._stopped = False

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Raises a BusError, in particular where the region is not provisioned yet."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._plans.close)
            await stack.enter_async_context(self._clock.kept())
            await self._plans.start()
            await stack.enter_async_context(self.draining.watch())
            digests = await self._bus.listen(subjects.digest("*"), self._hear)
            stack.push_async_callback(self._bus.unsubscribe, digests)
            control = await self._bus.subscribe(subjects.region_control(self.region), self._answer, queue="routing")
            stack.push_async_callback(self._bus.unsubscribe, control)
            yield

    async def run(self) -> None:
        """Tells and probes until cancelled."""
        told = 0
        while True:
            try:
                await self._bus.emit(subjects.digest(self.region), digest_to_proto(self.own()).SerializeToString())
                await self._probe()
                told += 1
                if told % REFRESH_EVERY == 0:
                    await self.draining.refresh()
            except BusError as error:
                _log.warning("digest_not_told", error=error.message)
            self._changed()
            await asyncio.sleep(self._interval_s)

    def stop(self) -> None:
        """Ends the streams of changes."""
        self._stopped = True
        self._changed()

    def own(self) -> RegionDigest:
        return digest_of(
            self._plans.plan,
            self._catalogue,
            fresh=self._plans.fresh(),
            region=self.region,
            zones=self._zones,
            draining=self.draining.on,
            now_s=self._clock.now(),
        )

    def sightings(self) -> list[Sighting]:
        """Every region that was ever heard of, by name; the own one first-hand."""
        now_s = self._clock.monotonic()
        seen = [Sighting(self.own())]
        for region, (digest, heard_s) in self._heard.items():
            age_s = now_s - heard_s
            round_trip_s = self._round_trip_s.get(region, 0.0)
            seen.append(Sighting(replace(digest, round_trip_s=round_trip_s), age_s, age_s > self._valid_s))
        return sorted(seen, key=lambda sighting: sighting.digest.region)

    async def drain(self, region: str, draining: bool) -> None:
        """Passes an operator's word to the region it is about. Raises NotFound, Unavailable, BusError."""
        if region == self.region:
            return await self.draining.set(draining)
        if region not in self._heard:
            raise NotFound("there is no such region", reason="REGION_NOT_FOUND", facts={"region": region})
        hint = bus_pb2.WorkerControl(drain=bus_pb2.DrainHint(draining=draining))
        answer = await self._bus.request(subjects.region_control(region), hint.SerializeToString(), timeout_s=5.0)
        if answer.data != _DONE:
            raise Unavailable("the region could not be told", reason="REGION_SILENT", retry_after_s=1.0)

    async def changes(self) -> AsyncGenerator[list[Sighting], None]:
        """What is known now, then after each change of it, until the service stops."""
        news = asyncio.Event()
        self._watchers.add(news)
        try:
            shown: list[RegionDigest] | None = None
            while not self._stopped:
                news.clear()
                sightings = self.sightings()
                essence = [_essence(sighting) for sighting in sightings]
                if essence != shown:
                    shown = essence
                    yield sightings
                await news.wait()
        finally:
            self._watchers.discard(news)

    def _changed(self) -> None:
        for news in self._watchers:
            news.set()

    def _hear(self, msg: Msg) -> None:
        region = msg.subject.rsplit(".", 1)[1]
        if region == self.region or (region not in self._heard and len(self._heard) >= REGIONS_MAX):
            return
        try:
            digest = decode_digest(msg.data)
        except UnreadableDigest as error:
            _log.warning("digest_unreadable", region=region, error=str(error))
            return
        self._heard[region] = replace(digest, region=region), self._clock.monotonic()
        self._changed()

    async def _probe(self) -> None:
        """Measures the round trips to the regions that are heard of."""
        now_s = self._clock.monotonic()
        live = [region for region, (_, heard_s) in self._heard.items() if now_s - heard_s <= self._valid_s]
        await asyncio.gather(*(self._probe_one(region) for region in live))

    async def _probe_one(self, region: str) -> None:
        began_s = self._clock.monotonic()
        try:
            await self._bus.request(subjects.region_control(region), b"", timeout_s=PROBE_TIMEOUT_S)
        except BusError:
            return  # its digest, or the lack of one, says what is to be said
        took_s = self._clock.monotonic() - began_s
        before_s = self._round_trip_s.get(region, took_s)
        self._round_trip_s[region] = before_s + PROBE_WEIGHT * (took_s - before_s)

    async def _answer(self, msg: Msg) -> None:
        if not msg.data:
            await self._bus.emit(msg.reply, b"")
            return
        try:
            control = bus_pb2.WorkerControl.FromString(msg.data)
            if control.WhichOneof("control") == "drain":
                await self.draining.set(control.drain.draining)
                await self._bus.emit(msg.reply, _DONE)
        except (BusError, DecodeError) as error:
            _log.warning("region_control_failed", error=str(error))


def _essence(sighting: Sighting) -> RegionDigest:
    """What makes news: not when it was told, nor what is hot just now."""
    digest = sighting.digest
    models = tuple(replace(model, hot_prefixes=()) for model in digest.models)
    return replace(digest, made_s=0.0, healthy=digest.healthy and not sighting.lost, models=models)
