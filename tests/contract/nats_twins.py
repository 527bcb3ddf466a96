"""The real nats-server and the one in memory behind one face, for tests that hold both to the same behaviour.

The one in memory runs on the event loop's virtual time, so that whatever a test waits for takes no time there.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from laneway.core.clock import Clock
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus
from laneway.runtime.clock import SystemClock
from laneway.runtime.local_nats import STORAGE_BYTES, LocalNats
from laneway.runtime.provision import provision
from laneway.runtime.settings import NatsSettings
from tests.sim.memory_nats import LoopClock, MemoryBus, MemoryNats
from tests.support.nats import REGION, connected, small_catalogue

ACK_WAIT_S = 60.0  # longer than any test, where none is waited for


class Twin(ABC):
    """A server, and a first connection to it (`bus`) after `provisioned`. A clock step apart, its clock is ours."""

    clock: Clock
    bus: Bus

    def __init__(self) -> None:
        self._connections = AsyncExitStack()

    async def provisioned(self, *, catalogue: Any = None, ack_wait_s: float = ACK_WAIT_S, **settings: Any) -> None:
        self.bus = await self.connect()
        waits = dict.fromkeys(Lane, ack_wait_s)
        await provision(self.bus, REGION, catalogue or small_catalogue(), NatsSettings(**settings), ack_wait_s=waits)

    @abstractmethod
    async def connect(self, name: str = "test", **settings: Any) -> Bus: ...

    @abstractmethod
    def pause(self) -> None: ...

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    async def kill(self) -> None: ...

    @abstractmethod
    async def start(self) -> None: ...


class RealTwin(Twin):
    clock: Clock = SystemClock()

    def __init__(self, server: LocalNats) -> None:
        super().__init__()
        self._server = server

    async def connect(self, name: str = "test", **settings: Any) -> Bus:
        return await self._connections.enter_async_context(connected(self._server, name, **settings))

    def pause(self) -> None:
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()

    async def kill(self) -> None:
        await self._server.kill()

    async def start(self) -> None:
        await self._server.start()


class MemoryTwin(Twin):
    def __init__(self) -> None:
        super().__init__()
        # Near the real time, by which tests.support makes its records.
        self.clock: Clock = LoopClock(SystemClock().now() - asyncio.get_running_loop().time())
        self.server = MemoryNats(self.clock)
        driver = self.server.drive()
        self._connections.callback(driver.close)

    async def connect(self, name: str = "test", **settings: Any) -> Bus:
        bus = await MemoryBus.to(self.server, self.clock, name=name, **settings)
        self._connections.push_async_callback(bus.close)
        return bus

    def pause(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    async def kill(self) -> None:
        self.server.kill(unsaved_s=0.1)
        await asyncio.sleep(0.01)  # those who were connected are told, as they are while a process ends

    async def start(self) -> None:
        self.server.start()


Twins = Callable[..., AbstractAsyncContextManager[Twin]]


def twins_of(kind: str, folder: Path) -> Twins:
    """Opened inside the test, since only there the loop's time is virtual."""

    @asynccontextmanager
    async def real(*, storage_bytes: int = STORAGE_BYTES, **settings: Any) -> AsyncIterator[Twin]:
        async with LocalNats(folder / "nats", storage_bytes=storage_bytes) as server:
            twin = RealTwin(server)
            async with twin._connections:
                await twin.provisioned(**settings)
                yield twin
            await server.kill()  # there is nothing to save

    @asynccontextmanager
    async def memory(*, storage_bytes: int = STORAGE_BYTES, **settings: Any) -> AsyncIterator[Twin]:
        twin = MemoryTwin()
        twin.server.storage_bytes_max = storage_bytes
        async with twin._connections:
            await twin.provisioned(**settings)
            yield twin

    return real if kind == "real" else memory
