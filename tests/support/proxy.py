"""A connection that can be cut without either end noticing: what was on its way arrives when it is healed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Proxy:
    """Between clients and one TCP server."""

    def __init__(self, url: str) -> None:
        self.url = ""
        self._host, _, port = url.removeprefix("nats://").rpartition(":")
        self._port = int(port)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._pumps: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._flowing.clear()

    def heal(self) -> None:
        self._flowing.set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
        except OSError:  # nobody is there: whoever called is told by the close
            writer.close()
            return
        for source, target in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, target))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._flowing.wait()
                target.write(data)
                await target.drain()
        except OSError:
            pass  # the other end went; its peer is told by the close
        finally:
            target.close()

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(url)
    server = await asyncio.start_server(proxy.connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy.url = f"nats://{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
