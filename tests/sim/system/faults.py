"""Faults of one run, drawn from its seed: which kinds, when, on whom, for how long; and the end of all of them."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from random import Random
from typing import Any

from msgspec import Struct

from laneway.core.lanes import LANES, Lane
from laneway.runtime.bus import BusError
from laneway.scheduler.loop import Scheduler
from laneway.workers.service import Worker
from tests.sim.memory_nats import MemoryBus
from tests.sim.system.engines import WatchedEngine
from tests.sim.system.hosts import Host
from tests.sim.system.region import Region

KINDS = (
    "kill",
    "brains_dead",
    "stop",
    "drain",
    "cut",
    "silence",
    "loss",
    "copies",
    "delay",
    "clock",
    "engine_crash",
    "engine_hang",
    "pause_lane",
    "storage",
    "nats_kill",
    "nats_stop",
    "redelivery",
)
# What leaves NATS and every connection to it that lives as they were.
PLAIN = ("kill", "brains_dead", "drain", "clock", "pause_lane", "engine_crash")
CORE = ("tok.", "ctl.", "ev.", "bell.", "$KV.", "digest.")
NO_ROOM_BYTES = 2000  # what is left of a storage that is full


class Fault(Struct, frozen=True):
    at_s: float
    kind: str
    hosts: tuple[str, ...]  # of the region's
    lasts_s: float
    share: float  # of messages, or of seconds: what the kind makes of it


def draw_faults(seed: int, hosts: list[str], count: int, span_s: float) -> list[Fault]:
    """Each run has some kinds and not the others: what always happens hides what happens now and then."""
    random = Random(f"{seed} faults")
    kinds = random.sample(KINDS, random.randint(2, 7))
    workers = [name for name in hosts if name.startswith("worker")]
    faults: list[Fault] = []
    for _ in range(count):
        kind = random.choice(kinds)
        among = workers if kind.startswith("engine") else hosts
        number = random.choice((1, 1, 1, 2, 3)) if kind in ("cut", "silence", "kill", "stop") else 1
        faults.append(
            Fault(
                at_s=random.uniform(0.5, span_s),
                kind=kind,
                hosts=tuple(random.sample(among, min(number, len(among)))),
                lasts_s=random.choice((random.uniform(0.1, 2.0), random.uniform(1.0, 8.0))),
                share=random.random(),
            )
        )
    return sorted(faults, key=lambda fault: fault.at_s)


class Faults:
    """Applies them. `over` ends whatever still lasts."""

    def __init__(self, region: Region, faults: list[Fault]) -> None:
        self.faults = faults
        self.applied: list[str] = []
        self._region = region
        self._random = Random(f"{region.seed} wire")
        self._hosts = {host.name: host for host in region.hosts}
        self._tasks: list[asyncio.Task[None]] = []
        self._wanted: dict[Lane, bool] = {}  # pauses that are not in effect yet
        self._operators: list[asyncio.Future[None]] = []

    async def run(self) -> None:
        began_s = self._region.loop.time()
        async with asyncio.TaskGroup() as group:
            for fault in self.faults:
                await asyncio.sleep(max(0.0, began_s + fault.at_s - self._region.loop.time()))
                self.applied.append(
                    f"{self._region.loop.time():.3f} {fault.kind} {' '.join(fault.hosts)} {fault.lasts_s:.2f} s"
                )
                self._tasks.append(group.create_task(self._apply(fault)))

    async def _apply(self, fault: Fault) -> None:
        hosts = [self._hosts[name] for name in fault.hosts]
        begin, end = getattr(self, f"_{fault.kind}")(fault, hosts)
        begin()
        if fault.kind not in PLAIN:
            now_s = self._region.loop.time()
            self._region.troubled.append((now_s, now_s + fault.lasts_s))
        await asyncio.sleep(fault.lasts_s)
        end()

    def over(self) -> None:
        """Everything works again; what hangs is started anew."""
        region = self._region
        region.calm_since_s = region.loop.time()
        for host in region.hosts:
            host.go_on()
            self._shape(host, _calm)
            host.each_bus(_free)
            host.mend()
        for lane in LANES:
            self._set_pause(lane, False)
        region.server.storage_bytes_max = math.inf
        if not region.server.running:
            region.server.start()
        region.server.resume()
        for host in region.hosts:  # storage that was full leaves schedules stranded until then
            host.mend()

    # --- each kind: how it begins, and how it ends ---------------------------------------------------

    def _kill(self, fault: Fault, hosts: list[Host]) -> _Acts:
        return _each(hosts, lambda host: host.kill(unsent=fault.share < 0.5)), _nothing

    def _brains_dead(self, fault: Fault, hosts: list[Host]) -> _Acts:
        """Every scheduler, for a while: the lanes fire what is parked."""
        schedulers = self._region.schedulers
        return _each(schedulers, lambda host: host.kill(unsent=False, down_s=fault.lasts_s + 4.0)), _nothing

    def _stop(self, fault: Fault, hosts: list[Host]) -> _Acts:
        return _each(hosts, lambda host: host.stop()), _each(hosts, lambda host: host.go_on())

    def _drain(self, fault: Fault, hosts: list[Host]) -> _Acts:
        return _each(hosts, lambda host: host.drain()), _nothing

    def _cut(self, fault: Fault, hosts: list[Host]) -> _Acts:
        return _each(hosts, lambda host: host.cut()), _each(hosts, lambda host: host.mend())

    def _silence(self, fault: Fault, hosts: list[Host]) -> _Acts:
        """Nothing arrives, and nobody knows; then it all does, or the connections break."""

        def end() -> None:
            for host in hosts:
                if fault.share < 0.3:
                    host.cut()
                host.each_bus(_free)
                host.mend()

        return _each(hosts, lambda host: host.each_bus(_hold)), end

    def _loss(self, fault: Fault, hosts: list[Host]) -> _Acts:
        share = 0.5 * fault.share
        return self._shaped(hosts, lambda pipe: _set(pipe, copies=lambda *frame: self._lost(share, frame)))

    def _copies(self, fault: Fault, hosts: list[Host]) -> _Acts:
        share = 0.5 * fault.share
        return self._shaped(hosts, lambda pipe: _set(pipe, copies=lambda *frame: self._doubled(share, frame)))

    def _delay(self, fault: Fault, hosts: list[Host]) -> _Acts:
        most_s = 0.02 + fault.share * self._random.choice((0.1, 1.5))
        return self._shaped(hosts, lambda pipe: _set(pipe, delay_s=lambda: self._random.uniform(0.0, most_s)))

    def _clock(self, fault: Fault, hosts: list[Host]) -> _Acts:
        def begin() -> None:
            for host in hosts:
                host.clock.set_by_s = (fault.share - 0.5) * 60.0

        return begin, _nothing

    def _engine_crash(self, fault: Fault, hosts: list[Host]) -> _Acts:
        return _each(hosts, lambda host: self._on_engine(host, lambda engine: engine.crash("killed"))), _nothing

    def _engine_hang(self, fault: Fault, hosts: list[Host]) -> _Acts:
        return _each(hosts, lambda host: self._on_engine(host, lambda engine: engine.hang())), _nothing

    def _on_engine(self, host: Host, act: Callable[[WatchedEngine], None]) -> None:
        if host.serves and isinstance(host.part, Worker) and host.life is not None:
            engine = host.part.engine._engine
            if isinstance(engine, WatchedEngine):
                host.life.process.call_soon(act, engine)

    def _pause_lane(self, fault: Fault, hosts: list[Host]) -> _Acts:
        lane = LANES[int(fault.share * len(LANES))]
        return lambda: self._set_pause(lane, True), lambda: self._set_pause(lane, False)

    def _set_pause(self, lane: Lane, paused: bool) -> None:
        """Through whichever scheduler serves; the operator tries again until it is so, or somebody resumes."""
        self._wanted[lane] = paused

        async def ask(scheduler: Scheduler) -> None:
            with contextlib.suppress(BusError):
                await scheduler.pauses.set(lane, paused)
                if self._wanted.get(lane) is paused:
                    self._wanted.pop(lane)

        async def until_so() -> None:
            while self._wanted.get(lane) is paused:
                for host in self._region.schedulers:
                    if host.serves and isinstance(host.part, Scheduler) and host.life is not None:
                        host.life.process.start(ask(host.part))
                        break
                await asyncio.sleep(1.0)

        self._operators.append(asyncio.ensure_future(until_so()))

    def _storage(self, fault: Fault, hosts: list[Host]) -> _Acts:
        """Full, then freed: the server is started again, as its operator would, where schedules were stranded."""
        server = self._region.server

        def begin() -> None:
            server.storage_bytes_max = server.storage_used() + NO_ROOM_BYTES

        def end() -> None:
            server.storage_bytes_max = math.inf
            if any(stream.stranded for stream in server.streams.values()):
                self._nats_back()

        return begin, end

    def _nats_back(self) -> None:
        server = self._region.server
        if server.running:
            server.kill()
        server.start()

    def _nats_kill(self, fault: Fault, hosts: list[Host]) -> _Acts:
        server = self._region.server

        def begin() -> None:
            if server.running:
                server.kill(unsaved_s=0.3 * fault.share)

        def end() -> None:
            if not server.running:
                server.start()
                self._recut()

        return begin, end

    def _nats_stop(self, fault: Fault, hosts: list[Host]) -> _Acts:
        server = self._region.server
        return server.pause, server.resume

    def _redelivery(self, fault: Fault, hosts: list[Host]) -> _Acts:
        return self._region.server.change_leaders, _nothing

    # --- wires ---------------------------------------------------------------------------------------

    def _recut(self) -> None:
        """Who is cut off stays cut off, also where the server came back."""
        for host in self._region.hosts:
            if host.is_cut:
                host.cut()

    def _shaped(self, hosts: list[Host], shape: Callable[[Any], None]) -> _Acts:
        return _each(hosts, lambda host: self._shape(host, shape)), _each(hosts, lambda host: self._shape(host, _calm))

    def _shape(self, host: Host, shape: Callable[[Any], None]) -> None:
        def both(bus: MemoryBus) -> None:
            shape(bus.nc.to_client)
            shape(bus.nc.to_server)

        host.shape = both
        host.each_bus(both)

    def _lost(self, share: float, frame: tuple[Any, ...]) -> int:
        return 0 if _may_be_lost(frame) and self._random.random() < share else 1

    def _doubled(self, share: float, frame: tuple[Any, ...]) -> int:
        return 2 if _may_be_lost(frame) and self._random.random() < share else 1


_Acts = tuple[Callable[[], object], Callable[[], object]]


def _each(hosts: list[Host], act: Callable[[Host], None]) -> Callable[[], None]:
    def acts() -> None:
        for host in hosts:
            act(host)

    return acts


def _nothing() -> None:
    """Its end is in the nature of it."""


def _may_be_lost(frame: tuple[Any, ...]) -> bool:
    """Core messages, which nobody confirms: acknowledgements of deliveries among them."""
    command, *rest = frame
    subject = str(rest[0]) if rest else ""
    return subject.startswith(CORE) if command != "PUB" else subject.startswith((*CORE[:3], "$JS.ACK."))


def _set(pipe: Any, **faults: Any) -> None:
    for name, value in faults.items():
        setattr(pipe, name, value)


def _calm(pipe: Any) -> None:
    pipe.copies = _once
    pipe.delay_s = _at_once


def _once(*frame: Any) -> int:
    return 1


def _at_once() -> float:
    return 0.0


def _hold(bus: MemoryBus) -> None:
    bus.nc.to_client.hold()
    bus.nc.to_server.hold()


def _free(bus: MemoryBus) -> None:
    bus.nc.to_client.free()
    bus.nc.to_server.free()
