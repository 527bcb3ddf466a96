"""What we rely on where a consumer gets another leader: held by a real cluster of three and by the NATS in memory."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from laneway.core import subjects
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.lanes import LaneDepth, LaneStore
from laneway.runtime.provision import provision
from laneway.runtime.puller import LanePuller
from laneway.runtime.settings import NatsSettings
from tests.sim.memory_nats import LoopClock, MemoryBus, MemoryNats
from tests.support.cluster import cluster, connected_at
from tests.support.lanes import seen_by
from tests.support.nats import POOL, REGION, TENANT, eventually, small_catalogue

LANE = Lane.BATCH
ACK_WAIT_S = 3.0
PUT_OFF_S = 6.0

Led = tuple[Bus, Callable[[], Awaitable[None]]]  # a connection, and what gives the lane's consumer another leader


@asynccontextmanager
async def in_cluster(folder: Path) -> AsyncIterator[Led]:
    async with cluster(folder) as servers:
        bus = await connected_at(servers, 0)
        waits = dict.fromkeys(Lane, ACK_WAIT_S)

        async def provisioned() -> bool:
            try:
                await provision(bus, REGION, small_catalogue(), NatsSettings(replicas=3), ack_wait_s=waits)
            except BusError:
                return False
            return True

        async def step_down() -> None:
            consumer = f"{subjects.lane_stream(REGION, LANE)}.{subjects.consumer(LANE, POOL)}"
            assert (await bus.api(f"CONSUMER.LEADER.STEPDOWN.{consumer}", {}))["success"]

        await eventually(provisioned, 30.0)
        yield bus, step_down
        await bus.close()


@asynccontextmanager
async def in_memory() -> AsyncIterator[Led]:
    clock = LoopClock()
    server = MemoryNats(clock)
    driver = server.drive()
    bus = await MemoryBus.to(server, clock)
    await provision(bus, REGION, small_catalogue(), NatsSettings(), ack_wait_s=dict.fromkeys(Lane, ACK_WAIT_S))

    async def step_down() -> None:
        server.change_leaders(given_again=False)

    yield bus, step_down
    await bus.close()
    driver.close()


@pytest.fixture(
    params=[
        pytest.param("cluster", marks=[pytest.mark.wire, pytest.mark.slow, pytest.mark.timeout(120)]),
        pytest.param("memory", marks=pytest.mark.looptime),
    ]
)
def led(request: pytest.FixtureRequest, tmp_path: Path) -> AbstractAsyncContextManager[Led]:
    return in_cluster(tmp_path) if request.param == "cluster" else in_memory()


async def test_a_new_leader_tells_who_waits_and_keeps_what_is_known_of_deliveries(
    led: AbstractAsyncContextManager[Led],
):
    async with led as (bus, step_down), LanePuller(bus, REGION, LANE, POOL) as puller:
        lanes = LaneStore(bus, REGION)
        async with seen_by(bus, LANE, 3):
            for job in ("done", "put-off", "held"):
                await bus.store(subjects.ready(REGION, LANE, POOL, TENANT, job), job.encode())
        done, put_off, held = await puller.pull(3)
        assert (done.data, put_off.data, held.data) == (b"done", b"put-off", b"held")
        await done.ack()
        await put_off.nak(PUT_OFF_S)
        waiting = asyncio.ensure_future(puller.pull(1, timeout_s=10.0, wait_s=30.0))
        await asyncio.sleep(0.3)
        await step_down()
        assert await waiting == []
        assert "Leadership Change" in puller.trouble

        # What was acknowledged, put off and asked time for before is so with the new leader.
        seen = []
        for _ in range(40):
            await held.progress()
            seen = await puller.pull(2, wait_s=0.5)
            if seen:
                break
        assert [(each.data, each.deliveries) for each in seen] == [(b"put-off", 2)]
        await seen[0].ack()
        await held.ack()

        async def empty() -> bool:
            return await lanes.depths(LANE, POOL) == LaneDepth(0, 0)

        await eventually(empty)
