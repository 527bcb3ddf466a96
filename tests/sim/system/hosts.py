"""Where a service runs: one process at a time, its connections and its clock; started again whenever it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from laneway.core.errors import LanewayError
from laneway.runtime.exception_groups import leaf_errors
from tests.sim.memory_nats import LoopClock, MemoryBus, MemoryNats
from tests.sim.system.loop import Process, SimLoop, until

RESTART_S = 1.0  # until a supervisor starts what ended
CONNECT_RETRY_S = 0.5
START_S = 1_800_000_000.0  # wall time at which every run begins


class HostClock(LoopClock):
    """A host's own clock, which may be set."""

    def __init__(self) -> None:
        super().__init__(START_S)
        self.set_by_s = 0.0

    def now(self) -> float:
        return super().now() + self.set_by_s


class Incarnation:
    """What a service gets for one life: a name of its own, chance, time, connections, and the wish that it ends."""

    def __init__(self, host: Host, number: int) -> None:
        self.name = f"{host.name}.{number}"
        self.clock = host.clock
        self.random = Random(f"{host.seed} {self.name}")
        self.stop = asyncio.Event()
        self.process = Process(self.name, host.loop)
        self.buses: list[MemoryBus] = []
        self._host = host

    async def connect(self, name: str) -> MemoryBus:
        """As long as the server cannot be reached, a supervisor would start us again and again."""
        host = self._host
        await until(lambda: host.server.running and not host.server.paused and not host.is_cut, CONNECT_RETRY_S)
        bus = await MemoryBus.to(host.server, self.clock, name=name, request_timeout_s=host.request_timeout_s)
        self.buses.append(bus)
        host.shape(bus)
        return bus


Main = Callable[[Incarnation], Awaitable[None]]


class Host:
    def __init__(
        self, name: str, seed: int, loop: SimLoop, server: MemoryNats, request_timeout_s: float, main: Main
    ) -> None:
        self.name = name
        self.seed = seed
        self.loop = loop
        self.server = server
        self.request_timeout_s = request_timeout_s
        self.clock = HostClock()
        self.part: Any = None  # what the service consists of, once it serves
        self.is_cut = False
        self.shape: Callable[[MemoryBus], None] = lambda bus: None  # puts the wire's present faults on a connection
        self.dead: list[Incarnation] = []
        self.failures: list[str] = []  # ends that no service may come to
        self.on_end: Callable[[Any], None] = lambda part: None
        self._main = main
        self._number = 0
        self._restart: asyncio.TimerHandle | None = None
        self.life: Incarnation | None = None

    @property
    def serves(self) -> bool:
        return self.life is not None and self.part is not None and self.life.process.runs

    def boot(self) -> None:
        self._restart = None
        if self.life is not None:
            return
        self._number += 1
        life = self.life = Incarnation(self, self._number)
        task = life.process.start(self._live(life))
        task.add_done_callback(lambda task: self._ended(life, task))

    async def _live(self, life: Incarnation) -> None:
        try:
            await self._main(life)
        finally:
            for bus in life.buses:
                await bus.close()

    def _ended(self, life: Incarnation, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        for leaf in leaf_errors(error) if error is not None else ():
            if not isinstance(leaf, LanewayError):  # what a supervisor expects names its reason
                self.failures.append(f"{life.name} ended with {leaf!r}")
        if self.life is life:
            self._over(life)

    def _over(self, life: Incarnation, down_s: float = RESTART_S) -> None:
        part, self.life, self.part = self.part, None, None
        self.dead.append(life)
        self.on_end(part)
        self._restart = self.loop.call_later(down_s, self.boot)

    # --- faults --------------------------------------------------------------------------------------

    def kill(self, *, unsent: bool, down_s: float = RESTART_S) -> None:
        """As kill -9. `unsent`: what it sent last does not arrive. It is started again after `down_s`."""
        life = self.life
        if life is None:
            return
        life.process.kill()
        for bus in life.buses:
            bus.nc.vanish(unsent=unsent)
        self._over(life, down_s)

    def drain(self) -> None:
        """As SIGTERM."""
        if self.life is not None:
            self.life.process.call_soon(self.life.stop.set)

    def stop(self) -> None:
        if self.life is not None:
            self.life.process.stop()

    def go_on(self) -> None:
        if self.life is not None:
            self.life.process.go_on()

    def each_bus(self, act: Callable[[MemoryBus], object]) -> None:
        for bus in self.life.buses if self.life is not None else ():
            if not bus.nc.is_closed:
                act(bus)

    def cut(self) -> None:
        self.is_cut = True
        self.in_life(lambda: self.each_bus(lambda bus: bus.nc.cut()))

    def mend(self) -> None:
        self.is_cut = False
        self.in_life(lambda: self.each_bus(lambda bus: bus.nc.mend()))

    def in_life(self, act: Callable[[], object]) -> None:
        """In the context of the process, to which all belongs that comes of it."""
        if self.life is not None:
            self.life.process.context.copy().run(act)

    async def close(self) -> None:
        """Ends what lives, in good order, and lets the dead rest."""
        if self._restart is not None:
            self._restart.cancel()
        if self.life is not None:
            self.kill(unsent=False)
            if self._restart is not None:
                self._restart.cancel()
        for life in self.dead:
            await life.process.bury()
