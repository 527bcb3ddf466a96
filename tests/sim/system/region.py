"""The region under test: doors, schedulers and workers as the product builds them, on one NATS in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from laneway.admission.server import House, open_house
from laneway.admission.service import AdmissionService
from laneway.core import subjects
from laneway.core.errors import Unavailable
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.provision import provision
from laneway.runtime.settings import (
    AdmissionSettings,
    ModelSettings,
    NatsSettings,
    PolicySettings,
    ProcessSettings,
    SchedulerSettings,
    Settings,
    TenantJobsMax,
    WorkerSettings,
)
from laneway.runtime.tokenizer import load_tokenizer
from laneway.scheduler.loop import Scheduler
from laneway.workers.engines.registry import EngineSpec, spec_of
from laneway.workers.engines.simulated import make_core
from laneway.workers.engines.simulated_inline import InlineEngine
from laneway.workers.server import options_of
from laneway.workers.service import Worker
from tests.sim.memory_nats import LoopClock, MemoryBus, MemoryNats
from tests.sim.system.engines import EngineBook, WatchedEngine
from tests.sim.system.history import History
from tests.sim.system.hosts import START_S, Host, Incarnation
from tests.sim.system.loop import SimLoop, until

REGION = "local"
ERROR_ID, CRASH_ID = 1, 2  # token ids: a prompt with one makes the engine fail on it, or die of it
STREAM_BYTES = 1024  # of a slow reader, at the door
DRAIN_S = 3.0
CHORES_S = 2.0


class Shape(Struct, frozen=True):
    """How large the region is, how fast its engines are, and how little may be in one message or be one tenant's."""

    doors: int = 2
    schedulers: int = 2
    workers: int = 3
    slots: int = 4
    pace_s: float = 0.05
    inline_bytes_max: int = 100_000  # of a task in a lane message
    tenant_jobs_max: int = 1000
    tenant_streams_max: int = 1000
    home_slots: int | None = 2  # None: as many as workers


def draw_shape(seed: int) -> Shape:
    random = Random(f"{seed} shape")
    return Shape(
        doors=random.choice((1, 2, 2, 3)),
        schedulers=random.choice((1, 2, 2)),
        workers=random.choice((1, 2, 3, 3, 4)),
        slots=random.choice((2, 4, 4)),
        pace_s=random.choice((0.03, 0.05, 0.1)),
        inline_bytes_max=random.choice((100_000, 100_000, 100)),
        tenant_jobs_max=random.choice((1000, 1000, 6)),
        tenant_streams_max=random.choice((1000, 1000, 4)),
        home_slots=Random(f"{seed} homes").choice((None, 2, 2, 2, 4, 0)),
    )


def settings_of(shape: Shape) -> Settings:
    """Waits are shorter than by default, so that a run sees many of them; looks are rarer, since they cost."""
    return Settings(
        nats=NatsSettings(
            request_timeout_s=1.0, ack_wait_priority_s=2.0, ack_wait_deferrable_s=4.0, ack_wait_batch_s=6.0
        ),
        process=ProcessSettings(drain_s=DRAIN_S),
        admission=AdmissionSettings(
            publish_s_max=4.0,
            stream_buffer_bytes=STREAM_BYTES,
            storage_poll_s=2.0,
            tenant_jobs_max=_jobs_max(shape),
            tenant_streams_max=shape.tenant_streams_max,
        ),
        scheduler=SchedulerSettings(plan_interval_s=0.5, sweep_s=2.0),
        worker=WorkerSettings(pull_fallback_s=0.5, step_timeout_s=4.0),
        policy=PolicySettings(ready_ahead_s=1.0),
        models=(
            ModelSettings(
                name="chat",
                engine="simulated",
                tokenizer="bytes",
                context_length=512,
                slots=shape.slots,
                workers=shape.workers,
                home_slots=shape.home_slots,
                kv_tokens=1600,
                queue_length=8,
                max_tokens_default=16,
                load_s=1.0,
                decode_tokens_per_s=1.0 / shape.pace_s,
                engine_options=EngineOptions(
                    pace_s=shape.pace_s,
                    prefill_chunk_tokens=64,
                    eos_mean_tokens=40.0,
                    fault_error_token_id=ERROR_ID,
                    fault_crash_token_id=CRASH_ID,
                ),
            ),
        ),
    )


def _jobs_max(shape: Shape) -> TenantJobsMax:
    most = shape.tenant_jobs_max
    return TenantJobsMax(priority=most, deferrable=most, batch=most)


@dataclass
class Gate:
    """A door that serves."""

    house: House
    service: AdmissionService
    life: Incarnation
    calls: dict[asyncio.Task[None], Callable[[], None]] = field(default_factory=dict)  # and who tells their callers
    draining: bool = False


class Region:
    """Everything of one run. `start` makes it, `close` ends it."""

    def __init__(self, seed: int, loop: SimLoop, shape: Shape, settings: Settings | None = None) -> None:
        """`settings`: others than those of the shape."""
        self.seed = seed
        self.shape = shape
        self.settings = settings or settings_of(shape)
        self.catalogue = catalogue_of(self.settings)
        self.pool = self.catalogue.pools[0]
        self.clock = LoopClock(START_S)
        self.server = MemoryNats(self.clock)
        self.driver = self.server.drive()
        self.history = History(self.clock)
        self.server.on_stored = self.history.stored
        self.server.on_removed = self.history.removed
        self.engines = EngineBook()
        self.loop = loop
        self.nats_died = False  # for a while
        self.undisturbed = False  # there are no faults, and no prompt that an engine dies of
        self.troubled: list[tuple[float, float]] = []  # from when till when something was wrong with NATS or on the way
        self.calm_since_s: float | None = None  # the loop's time from which on there were no faults
        self.freed_s_max = 10.0  # from a deadline to the last step for its job, whatever happens

        def hosts(role: str, count: int, main: Callable[[Host, Incarnation], object]) -> list[Host]:
            return [self._host(f"{role}{n}", main) for n in range(count)]

        self.doors = hosts("door", shape.doors, self._door)
        self.schedulers = hosts("scheduler", shape.schedulers, self._scheduler)
        self.workers = hosts("worker", shape.workers, self._worker)
        self.hosts = [*self.schedulers, *self.workers, *self.doors]

    def _host(self, name: str, main: Callable[[Host, Incarnation], object]) -> Host:
        async def live(life: Incarnation) -> None:
            await main(host, life)  # type: ignore[misc]  # each is a coroutine function

        host = Host(name, self.seed, self.loop, self.server, self.settings.nats.request_timeout_s, live)
        host.on_end = self._ended
        return host

    async def start(self) -> None:
        bus = await MemoryBus.to(self.server, self.clock, name="provisioner")
        nats = self.settings.nats
        await provision(bus, REGION, self.catalogue, nats, ack_wait_s=nats.ack_wait_s)
        await bus.close()
        for host in self.hosts:
            host.boot()
        await until(lambda: all(host.serves for host in self.hosts))
        await asyncio.sleep(2.0)  # a plan is made

    async def close(self) -> None:
        for host in self.hosts:
            await host.close()
        self.driver.close()

    # --- services, as their server.py has them, without gRPC -------------------------------------------------

    async def _door(self, host: Host, life: Incarnation) -> None:
        bus = await life.connect("admission")
        tokenizers = {self.pool.tokenizer: load_tokenizer(self.pool.tokenizer)}
        async with open_house(self.settings, self.catalogue, bus, tokenizers, life.clock, life.random) as house:
            service = AdmissionService(
                house.admission,
                house.dead_letters,
                self.catalogue,
                house.policy,
                house.clock,
                house.chores,
                life.stop,
            )
            async with asyncio.TaskGroup() as group:
                keeping = [group.create_task(part) for part in house.keeping()]
                taking = group.create_task(house.ingest.run())
                host.part = gate = Gate(house, service, life)
                try:
                    await life.stop.wait()
                    gate.draining = True
                    taking.cancel()
                    await self._drain(gate)
                finally:
                    house.late_records.close()
                    await house.chores.close(CHORES_S)
                    for task in (taking, *keeping):
                        task.cancel()

    async def _drain(self, gate: Gate) -> None:
        until_s = self.loop.time() + DRAIN_S
        await until(lambda: not gate.calls or self.loop.time() >= until_s)
        gate.house.door.fail_all(Unavailable("this door is shutting down", reason="DRAINING", retry_after_s=1.0))
        await until(lambda: not gate.calls)

    async def _scheduler(self, host: Host, life: Incarnation) -> None:
        bus = await life.connect(life.name.replace(".", "-"))
        nats = self.settings.nats
        await provision(bus, REGION, self.catalogue, nats, ack_wait_s=nats.ack_wait_s)
        scheduler = Scheduler(bus, self.settings, self.catalogue, life.clock, connect=life.connect, random=life.random)
        async with scheduler.watching():
            host.part = scheduler
            await scheduler.run(life.stop)

    async def _worker(self, host: Host, life: Incarnation) -> None:
        named = replace(self.settings, worker=replace(self.settings.worker, name=host.name))
        options = options_of(named, life.random)
        spec = spec_of(self.pool, self.settings.engine_options_of(self.pool.name))

        def engine() -> InlineEngine:
            return self.engine_of(spec, options.worker_id, life)

        bus = await life.connect(options.worker_id)
        token_bytes = load_tokenizer(self.pool.tokenizer).token_bytes
        worker = Worker(bus, options, engine, token_bytes, life.clock, life.random)

        def ready() -> None:
            host.part = worker

        await worker.run(life.stop, ready)

    def engine_of(self, spec: EngineSpec, worker_id: str, life: Incarnation) -> InlineEngine:
        core = make_core(spec.capacity, frozenset(spec.eos_ids), spec.options)
        return WatchedEngine(core, spec.capabilities, worker_id, self.engines, life.random)

    # --- looking on ------------------------------------------------------------------------------------------

    def ingested(self) -> int:
        """Messages of producers that have no verdict yet."""
        return len(self.server.streams[subjects.ingest_stream(REGION)].messages)

    def _ended(self, part: object) -> None:
        """Callers of a dead door learn that their connections are gone; a dead worker's engine dies with it."""
        if isinstance(part, Gate):
            for tell in tuple(part.calls.values()):
                tell()
        elif isinstance(part, Worker) and isinstance(part.engine._engine, WatchedEngine):
            part.engine._engine.died()
