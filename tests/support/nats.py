"""Fixtures and helpers for tests against a real nats-server. Import the fixtures in the conftest.py of your folder:

from tests.support.nats import bus, catalogue, nats_server, provisioned_bus
"""

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.core.catalogue import Capabilities, Catalogue, Pool
from laneway.core.job import Contract, GenerateTask, JobRecord, LaneJob, Sampling, Timings, Verdict
from laneway.core.lanes import Lane, VerdictKind
from laneway.runtime.bus import Bus
from laneway.runtime.clock import SystemClock
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.provision import provision
from laneway.runtime.settings import NatsSettings

REGION = "local"
POOL = "chat-small"
TENANT = "acme"


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[LocalNats]:
    """A nats-server of its own on a free port with an empty store."""
    async with LocalNats(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def bus(nats_server: LocalNats) -> AsyncIterator[Bus]:
    async with connected(nats_server) as bus:
        yield bus


@pytest.fixture
def catalogue() -> Catalogue:
    return small_catalogue()


@pytest.fixture
async def provisioned_bus(bus: Bus, catalogue: Catalogue) -> Bus:
    """A bus whose server has all streams of region `local`."""
    await provision_region(bus, catalogue)
    return bus


def small_catalogue(*, slots: int = 4, workers: int = 2, queue_length: int = 8, pools: tuple[str, ...] = (POOL,)):
    """Pools of simulated workers; the priority lane holds slots * workers + queue_length messages of each."""
    return Catalogue(
        tuple(
            Pool(
                name=name,
                model="chat",
                tier="small",
                engine="simulated",
                context_length=4096,
                vocabulary_size=256,
                slots=slots,
                workers=workers,
                kv_tokens=16384,
                tokenizer="bytes",
                capabilities=Capabilities(),
                queue_length=queue_length,
            )
            for name in pools
        )
    )


@asynccontextmanager
async def connected(server: LocalNats, name: str = "test", **settings: Any) -> AsyncIterator[Bus]:
    """One more connection to the server."""
    bus = await Bus.connect(nats_settings(server, **settings), name=name)
    try:
        yield bus
    finally:
        await bus.close()


def nats_settings(server: LocalNats, **settings: Any) -> NatsSettings:
    values: dict[str, Any] = {"url": server.url, "reconnect_wait_s": 0.02, **settings}
    return NatsSettings(**values)


async def provision_region(bus: Bus, catalogue: Catalogue, region: str = REGION, **settings: Any) -> list[str]:
    nats = NatsSettings(**settings)
    return await provision(bus, region, catalogue, nats, ack_wait_s=nats.ack_wait_s)


def make_record(job_id: str = "", lane: Lane = Lane.PRIORITY, **changes: Any) -> JobRecord:
    """A WAITING record as a door would make it, due in ten minutes."""
    now_s = SystemClock().now()
    contract = Contract(lane=lane, ttft_target_s=1.0, tpot_target_s=0.1, deadline_s=round(now_s + 600.0, 3))
    record = JobRecord(
        job_id=job_id or f"{REGION}-job{next(_numbers)}",
        tenant=TENANT,
        region=REGION,
        model="chat",
        tier="small",
        pool=POOL,
        contract=contract,
        verdict=Verdict(VerdictKind.ACCEPTED, "OK", "", lane, tier="small", region=REGION, pool=POOL),
        prompt_tokens=3,
        max_tokens=16,
        latest_start_s=round(now_s + 500.0, 3),
        device_ms=120,
        timings=Timings(created_s=round(now_s, 3)),
    )
    return replace(record, **changes)


def make_job(record: JobRecord) -> LaneJob:
    return LaneJob(record, GenerateTask((72, 105, 33), Sampling(max_tokens=record.max_tokens)))


_numbers = itertools.count(1)


async def eventually(predicate: Callable[[], object | Awaitable[object]], timeout_s: float = 10.0) -> Any:
    """Polls until the predicate gives something true, and returns it. The limit is for hangs only."""
    async with asyncio.timeout(timeout_s):
        while True:
            result = predicate()
            if inspect.isawaitable(result):
                result = await result
            if result:
                return result
            await asyncio.sleep(0.01)
