"""A provisioned region on a nats-server that knows users: one for each role, and producers of three tenants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from laneway.cli.secrets import make_nkeys
from laneway.runtime.bus import Bus
from laneway.runtime.local_nats import LocalNats, LocalUsers
from laneway.runtime.rights import SERVICES, Role
from laneway.runtime.settings import NatsSettings
from tests.support.nats import REGION, connected, nats_settings, provision_region, small_catalogue

TENANTS = ("default", "acme", "other")
USERS = (*(role.value for role in (*SERVICES, Role.OPERATOR)), "producer", "producer-acme", "producer-other")


@dataclass(frozen=True)
class Guarded:
    server: LocalNats
    nkeys: Path

    @asynccontextmanager
    async def bus(self, user: str) -> AsyncIterator[Bus]:
        async with connected(self.server, user, nkey_file=str(self.nkeys / f"{user}.seed")) as bus:
            yield bus

    def settings(self, user: str) -> NatsSettings:
        return nats_settings(self.server, nkey_file=str(self.nkeys / f"{user}.seed"))


@asynccontextmanager
async def guarded_region(folder: Path, *, extra_config: str = "") -> AsyncIterator[Guarded]:
    """Nobody gets in without a key; the operator has provisioned."""
    users = LocalUsers(make_nkeys(folder / "nkeys", REGION, TENANTS))
    async with LocalNats(folder / "nats", users=users, extra_config=extra_config) as server:
        made = Guarded(server, folder / "nkeys")
        async with made.bus("operator") as bus:
            await provision_region(bus, small_catalogue())
        yield made
