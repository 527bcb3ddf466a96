"""The admission process: connects, builds what the others only receive, serves, drains.

On stop no new call is taken; live streams get the drain time to end by themselves, then they end UNAVAILABLE, and what
their contracts say of a lost caller applies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

from msgspec import Struct

from laneway.admission.accept import Acceptor
from laneway.admission.application import Admission
from laneway.admission.chores import Chores
from laneway.admission.dead_letter_watch import DeadLetterWatch
from laneway.admission.dead_letters import DeadLetters
from laneway.admission.defaults import door_limits
from laneway.admission.door import Door
from laneway.admission.ending import Ender
from laneway.admission.homes import Homes
from laneway.admission.ingest import Ingest
from laneway.admission.judging import Judge
from laneway.admission.late_records import LateRecords
from laneway.admission.ledger import Ledger
from laneway.admission.preparing import Preparer
from laneway.admission.results import JobBook
from laneway.admission.service import SERVICE, AdmissionService
from laneway.admission.storage import StorageWatch
from laneway.admission.tenants import TenantStreams
from laneway.core import subjects
from laneway.core.catalogue import Catalogue
from laneway.core.clock import Clock
from laneway.core.errors import Unavailable
from laneway.core.fleet import Plan
from laneway.policy.lengths import LengthBook
from laneway.runtime import metrics
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.clock import SYSTEM_RANDOM, SystemClock
from laneway.runtime.dead_letters import DeadLetterStore
from laneway.runtime.draining import Draining
from laneway.runtime.grpc_server import GrpcServer
from laneway.runtime.lanes import LaneStore
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.lifecycle import announce_ready
from laneway.runtime.live_policy import LivePolicy
from laneway.runtime.logging import get_logger
from laneway.runtime.nats_clock import NatsClock
from laneway.runtime.objects import ObjectStore
from laneway.runtime.params import admit_params
from laneway.runtime.plans import PlanView
from laneway.runtime.records import RecordStore
from laneway.runtime.references import References
from laneway.runtime.settings import Settings
from laneway.runtime.tokenizer import Tokenizer, load_tokenizer
from laneway.v1 import admission_pb2_grpc

REGION_POLL_S = 0.5
CHORES_S_MAX = 5.0  # for clean-up after the last call

log = get_logger("laneway.admission.server")

DRAINING = "this door is shutting down; the job goes on or ends by its contract"


async def serve(settings: Settings, stop: asyncio.Event, *, clock: Clock | None = None) -> None:
    """Serves until `stop` is set, then drains and returns."""
    clock = clock or SystemClock()
    catalogue = catalogue_of(settings)
    async with AsyncExitStack() as stack:
        tokenizers = await _load_tokenizers(catalogue)
        metrics_address = stack.enter_context(metrics.metrics_listener(settings.process.metrics_listen))
        bus = await Bus.connect(settings.nats, name="admission")
        stack.push_async_callback(bus.close)
        if not await _region_exists(bus, settings.region.name, stop):
            return
        house = await stack.enter_async_context(open_house(settings, catalogue, bus, tokenizers, clock))
        server = GrpcServer(settings)
        service = AdmissionService(
            house.admission, house.dead_letters, catalogue, house.policy, house.clock, house.chores, stop
        )
        server.add(SERVICE, lambda grpc: admission_pb2_grpc.add_AdmissionServiceServicer_to_server(service, grpc))
        async with asyncio.TaskGroup() as group:
            keeping = [group.create_task(part) for part in house.keeping()]
            taking = [group.create_task(house.ingest.run())] if settings.admission.ingest else []
            try:
                address = await server.start(settings.admission.listen)
                announce_ready(settings, "admission", address, metrics=metrics_address)
                await stop.wait()
                for task in taking:
                    task.cancel()
                await _drain(server, house, settings.process.drain_s)
            finally:
                await server.drain(0.0)
                house.late_records.close()
                await house.chores.close(CHORES_S_MAX)
                for task in (*taking, *keeping):
                    task.cancel()


async def _region_exists(bus: Bus, region: str, stop: asyncio.Event) -> bool:
    """Waits until somebody has provisioned the region; False when told to stop before."""
    last_made = f"KV_{subjects.plan_bucket(region)}"
    waiting = False
    while not stop.is_set():
        try:
            await bus.api(f"STREAM.INFO.{last_made}", {})
            return True
        except BusError as error:
            if not waiting:
                log.warning("region_awaited", region=region, error=error.message)
            waiting = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REGION_POLL_S):
                await stop.wait()
    return False


async def _drain(server: GrpcServer, house: House, drain_s: float) -> None:
    async with asyncio.TaskGroup() as group:

        async def end_streams() -> None:
            await asyncio.sleep(drain_s)
            house.door.fail_all(Unavailable(DRAINING, reason="DRAINING", retry_after_s=1.0))

        ending = group.create_task(end_streams())
        await server.drain(drain_s + CHORES_S_MAX)
        ending.cancel()


class House(Struct, frozen=True):
    """What a running door consists of."""

    clock: Clock
    policy: LivePolicy
    admission: Admission
    door: Door
    late_records: LateRecords
    storage: StorageWatch
    draining: Draining
    ingest: Ingest
    dead_letters: DeadLetters
    dead_letter_watch: DeadLetterWatch
    chores: Chores

    def keeping(self) -> tuple[Coroutine[object, object, None], ...]:
        """What runs as long as the door is open."""
        return self.door.run(), self.storage.run(), self.draining.keep_fresh(), self.dead_letter_watch.run()


@asynccontextmanager
async def open_house(
    settings: Settings,
    catalogue: Catalogue,
    bus: Bus,
    tokenizers: dict[str, Tokenizer],
    system: Clock,
    random: Random = SYSTEM_RANDOM,
) -> AsyncIterator[House]:
    """Builds a door and opens it; whoever opened it runs what keeps it (`keeping`)."""
    region, wanted = settings.region.name, settings.admission
    clock = NatsClock(bus, system)
    door_id = f"door-{random.randbytes(6).hex()}"
    chores, ledger, lengths = Chores(), Ledger(clock), LengthBook()
    records = RecordStore(bus, retention_s=settings.nats.retention_s, clock=clock, random=random)
    lanes, leases = LaneStore(bus, region), LeaseWatcher(bus, region, clock)
    policy = LivePolicy(settings.policy)

    def plan_arrived(plan: Plan) -> None:
        policy.take(plan)
        ledger.plan_arrived(plan)

    plans = PlanView(bus, region, clock, plan_arrived)
    objects = ObjectStore(bus, region, clock=clock, random=random)
    references = References(objects, retention_s=settings.nats.retention_s)
    storage = StorageWatch(lanes, objects, clock, wanted.storage_poll_s)
    draining = Draining(bus, region, lambda: None)
    ender = Ender(bus, records, lanes, leases, chores, clock)
    late_records = LateRecords(records, chores, clock)
    door = Door(door_id, bus, region, records, references, ender, leases, ledger, lengths, clock, door_limits(wanted))
    params = policy.derive(lambda values: admit_params(values, wanted))
    judge = Judge(region, plans, leases, ledger, storage, draining, params, clock, random)
    async with AsyncExitStack() as stack:
        threads = ThreadPoolExecutor(wanted.tokenizer_threads, thread_name_prefix="tokenizer")
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        await stack.enter_async_context(clock.kept())
        for part in (leases, plans, door):
            await part.start()
            stack.push_async_callback(part.close)
        await stack.enter_async_context(draining.watch())
        await storage.poll()
        stack.enter_context(policy.gauge())
        stack.enter_context(
            metrics.live_gauge("laneway_door_streams", "Live streams.", ("lane",), lambda: _stream_samples(door))
        )
        text = "Use of the queue's storage, 0 to 1; no sample while it is unknown."
        stack.enter_context(metrics.live_gauge("laneway_storage_used_ratio", text, (), lambda: _sample(storage.used())))
        text = "Use of the object store, 0 to 1; no sample while it is unknown."
        stack.enter_context(
            metrics.live_gauge("laneway_objects_used_ratio", text, (), lambda: _sample(storage.objects_used()))
        )
        admission = Admission(
            region,
            door,
            Preparer(tokenizers, lengths, threads),
            judge,
            Acceptor(
                records,
                lanes,
                clock,
                references,
                objects_full=lambda: (storage.objects_used() or 0.0) > wanted.storage_fraction_max,
            ),
            ender,
            late_records,
            JobBook(bus, region, records, references, lanes, ender, clock, settings.grpc.response_bytes_max),
            chores,
            clock,
            random.randbytes,
            wanted.publish_s_max,
            lambda: bus.connected,
            TenantStreams(wanted.tenant_streams_max),
            Homes(plans, ledger.homes),
        )
        dead = DeadLetterStore(bus, region)
        watch = DeadLetterWatch(dead)
        stack.enter_context(watch.gauges())
        letters = DeadLetters(region, dead, admission, references, catalogue, policy, chores, clock)
        ingest = Ingest(bus, region, records, admission, catalogue, policy, clock, wanted.ingest_inflight)
        yield House(clock, policy, admission, door, late_records, storage, draining, ingest, letters, watch, chores)


async def _load_tokenizers(catalogue: Catalogue) -> dict[str, Tokenizer]:
    """Reading a vocabulary takes up to a second: in a thread, before anything is promised."""
    names = dict.fromkeys(pool.tokenizer for pool in catalogue.pools)
    return {name: await asyncio.to_thread(load_tokenizer, name) for name in names}


def _sample(value: float | None) -> list[metrics.Sample]:
    return [] if value is None else [({}, value)]


def _stream_samples(door: Door) -> Iterable[metrics.Sample]:
    lanes: Counter[str] = Counter()
    with contextlib.suppress(RuntimeError):  # the scrape's thread may look while the loop changes the dictionary
        lanes = Counter(stream.record.contract.lane.value for stream in door.streams())
    return [({"lane": lane}, float(count)) for lane, count in lanes.items()]
