"""Three nats-servers that are one cluster."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from laneway.runtime.bus import Bus
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.settings import NatsSettings
from tests.support.nats import eventually

SIZE = 3


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[list[LocalNats]]:
    ports = _free_ports(SIZE)
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                LocalNats(
                    folder / f"n{i}",
                    extra_config=f"server_name: n{i}\n"
                    f"cluster {{ name: test, listen: 127.0.0.1:{port}, routes: [{routes}], no_advertise: true }}\n",
                )
            )
            for i, port in enumerate(ports)
        ]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


async def connected_at(servers: list[LocalNats], first: int) -> Bus:
    """A connection that begins at one of the servers and knows the others, once there is a meta leader."""
    urls = [server.url for server in servers]
    url = ",".join(urls[first:] + urls[:first])
    settings = NatsSettings(url=url, reconnect_wait_s=0.02, request_timeout_s=0.8, connect_timeout_s=20.0)

    async def connected() -> Bus | None:
        try:
            return await Bus.connect(settings, name="test")
        except Exception:  # noqa: BLE001 - no meta leader yet: JetStream answers nothing or an error
            return None

    bus: Bus = await eventually(connected, 30.0)
    return bus
