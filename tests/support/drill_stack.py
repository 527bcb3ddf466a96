"""A local stack to break: several doors and schedulers, one NATS server or three, storage of any size, and a user who
may look at everything. Its NATS processes are children like all others: they can be killed, frozen and started again.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from laneway.cli.child import Child
from laneway.cli.stack import LOOPBACK, LocalStack, StackOptions
from laneway.runtime.bus import Bus
from laneway.runtime.local_nats import STORAGE_BYTES, LocalUsers, find_nats_server, nats_arguments
from laneway.runtime.nats_users import NatsUser, new_seed, public_key
from laneway.runtime.rights import Rights
from laneway.runtime.settings import NatsSettings
from tests.support.nats import eventually

OBSERVER = "observer"
CLUSTER_SIZE = 3


class DrillStack(LocalStack):
    """`servers`: 1 or 3 nats-servers; replicas are a setting. `doors`, `schedulers`: processes of each."""

    def __init__(
        self,
        options: StackOptions,
        *,
        doors: int = 1,
        schedulers: int = 1,
        servers: int = 1,
        storage_bytes: int = STORAGE_BYTES,
    ) -> None:
        super().__init__(options)
        self.doors: list[str] = []  # addresses
        self.servers: list[Child] = []  # of NATS
        self._more = {"admission": doors - 1, "scheduler": schedulers - 1}
        self._size = servers
        self._storage_bytes = storage_bytes

    async def start(self) -> None:
        await super().start()
        self.doors.append(self.addresses.admission)
        for service, count in self._more.items():
            for number in range(2, count + 2):
                address = await self.add(service, f"{service}-{number}")
                self.doors += [address] if service == "admission" else []

    async def add(self, service: str, name: str) -> str:
        """One more process of a service; its address, which a restart keeps."""
        variable = f"LANEWAY_{service.upper()}__LISTEN"
        child = self.services[name] = self._child(name, service, {variable: LOOPBACK}, {})
        note = await self._bring_up(child)
        child.environment[variable] = note.address
        return note.address

    def of(self, service: str) -> list[Child]:
        """Every process of a service."""
        if service == "worker":
            return list(self.workers)
        if service == "nats":
            return list(self.servers)
        return [child for name, child in self.services.items() if name.split("-")[0] == service]

    async def restart(self, name: str) -> Child:
        server = next((each for each in self.servers if each.name == name), None)
        if server is None or self._size == 1:
            return await super().restart(name)
        if server.alive:
            await server.stop(self.options.stop_s_max)
        await server.start()
        await self._nats_url(server)
        return server

    async def stop(self) -> None:
        await self._stop_all([child for name, child in self.services.items() if "-" in name])
        await super().stop()
        await self._stop_all(self.servers[1:], 5.0)
        for server in self.servers:
            server.kill_group()

    @asynccontextmanager
    async def observed(self) -> AsyncIterator[Bus]:
        """A connection that may do everything."""
        settings = self.nats_settings(OBSERVER)

        async def connect() -> Bus | None:
            try:
                return await Bus.connect(settings, name=OBSERVER)
            except Exception:  # noqa: BLE001 - no leader yet
                return None

        bus: Bus = await eventually(connect, 30.0)
        try:
            yield bus
        finally:
            await bus.close()

    def nats_settings(self, user: str) -> NatsSettings:
        return NatsSettings(url=self.addresses.nats, nkey_file=str(self.nkeys / f"{user}.seed"), connect_timeout_s=20.0)

    # --- NATS ----------------------------------------------------------------------------------------

    async def _start_nats(self) -> None:
        seed = new_seed()
        (self.nkeys / f"{OBSERVER}.seed").write_text(seed)
        everything = Rights(publish=(">",), subscribe=(">",))
        observer = NatsUser(OBSERVER, public_key(seed), everything)
        self._users = LocalUsers([*self._users.users, observer], self._users.anonymous)
        ports = _free_ports(2 * self._size) if self._size > 1 else [0]
        self.servers = [self._server(i, ports) for i in range(self._size)]
        self.nats = self.servers[0]
        for server in self.servers:
            await server.start()
        urls = [await self._nats_url(server) for server in self.servers]
        self.addresses = replace(self.addresses, nats=",".join(urls))
        if self._size == 1:  # a restart must find the same port
            self.servers[0].arguments[1:] = self._server_arguments(0, [int(urls[0].rsplit(":", 1)[1])])

    def _server(self, number: int, ports: list[int]) -> Child:
        name = "nats" if number == 0 else f"nats-{number + 1}"
        arguments = [str(find_nats_server()), *self._server_arguments(number, ports)]
        return Child(name, arguments, environment=os.environ, log=self.logs / f"{name}.log", ready_file=None)

    def _server_arguments(self, number: int, ports: list[int]) -> list[str]:
        extra = self.options.nats_config
        if self._size > 1:
            routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports[self._size :])
            own = ports[self._size + number]
            extra += f"cluster {{ name: drill, listen: 127.0.0.1:{own}, routes: [{routes}], no_advertise: true }}\n"
        return nats_arguments(
            self.directory / f"store-{number}",
            port=ports[number],
            ports_file_dir=self.directory / "ready",
            server_name=f"n{number}",
            storage_bytes=self._storage_bytes,
            users=self._users,
            extra=extra,
        )

    async def _provision(self) -> None:
        if self._size == 1:
            return await super()._provision()
        async with self.observed() as bus:  # a cluster answers once its servers have chosen

            async def all_there() -> bool:
                answer = await bus.request("$JS.API.INFO", b"")
                return b'"error"' not in answer.data

            await eventually(all_there, 30.0)
        for _ in range(4):  # the first streams are refused while a server is not heard of yet
            try:
                return await super()._provision()
            except Exception:  # noqa: BLE001 - tried again, then for good
                await asyncio.sleep(2.0)
        return await super()._provision()

    async def leader_of(self, bus: Bus, stream: str) -> Child:
        """The server that leads a stream."""
        info = await bus.api(f"STREAM.INFO.{stream}", {})
        return self.servers[int(info["cluster"]["leader"].removeprefix("n"))]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
