"""Services run in this process through their own `serve`, and how to call them."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec

from laneway.runtime.settings import AdmissionSettings, ProcessSettings, Settings
from tests.support.nats import eventually

OPERATOR, ACME, OTHER = "operator-token", "acme-token", "other-token"
_CALLERS = ((OPERATOR, "ops", "operator"), (ACME, "acme", "tenant"), (OTHER, "other", "tenant"))


def with_tokens(settings: Settings, folder: Path) -> Settings:
    """The settings with a tokens file that knows an operator and two tenants."""
    lines = [
        f'[[token]]\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\ntenant = "{tenant}"\nrole = "{role}"\n'
        for token, tenant, role in _CALLERS
    ]
    path = folder / "tokens.toml"
    path.write_text("\n".join(lines))
    return msgspec.structs.replace(settings, admission=AdmissionSettings(tokens_file=str(path)))


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@asynccontextmanager
async def served(
    serve: Callable[..., Awaitable[None]], settings: Settings, ready_file: Path
) -> AsyncIterator[grpc.aio.Channel]:
    """Runs a service until the block ends, and gives a channel to it."""
    settings = msgspec.structs.replace(settings, process=ProcessSettings(ready_file=str(ready_file), drain_s=1.0))
    ready_file.unlink(missing_ok=True)
    stop = asyncio.Event()
    task = asyncio.ensure_future(serve(settings, stop))

    def ready() -> dict[str, Any] | None:
        if task.done():
            task.result()
        return json.loads(ready_file.read_text()) if ready_file.exists() else None

    try:
        address = (await eventually(ready))["address"]
        channel = grpc.aio.insecure_channel(address)
    except BaseException:
        task.cancel()
        raise
    try:
        yield channel
    finally:
        stop.set()
        await task
        await channel.close()
