"""What tests do with lanes: park, take all that is ready, count."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from laneway.core import subjects
from laneway.core.job import JobRecord
from laneway.core.lanes import Lane
from laneway.core.subjects import ParkSubject
from laneway.runtime.bus import Bus
from laneway.runtime.clock import SystemClock
from laneway.runtime.lanes import LaneStore
from laneway.runtime.puller import Delivery, LanePuller, Puller
from laneway.runtime.reading import subject_list
from tests.support.nats import POOL, REGION, eventually, make_job

GROUP = "abcdefghij"
HANG_S = 20.0


def now_s() -> float:
    return SystemClock().now()


async def park(lanes: LaneStore, record: JobRecord, in_s: float = 1000.0, sequence: int = 1) -> ParkSubject:
    return await lanes.park(make_job(record), sequence, fire_at_s=now_s() + in_s, group=GROUP)


@asynccontextmanager
async def seen_by(
    bus: Bus, lane: Lane, count: int, pool: str = POOL, home: str = subjects.HOME_ANY
) -> AsyncIterator[None]:
    """Waits at its end until the lane's consumer counts `count` ready jobs more than at its start.

    A server tells a publisher that a message is stored before its consumers count it, and a pull that does not wait is
    answered from that count.
    """
    lanes = LaneStore(bus, REGION)
    before = (await lanes.depths(lane, pool, home)).ready
    yield

    async def counted() -> bool:
        return (await lanes.depths(lane, pool, home)).ready == before + count

    await eventually(counted)


async def pulled(puller: Puller, count: int) -> list[Delivery]:
    """So many jobs, as soon as the consumer counts them."""
    got: list[Delivery] = []
    async with asyncio.timeout(HANG_S):
        while len(got) < count:
            got += await puller.pull(count - len(got), wait_s=1.0)
    return got


async def pull_all(bus: Bus, lane: Lane, home: str = subjects.HOME_ANY) -> list[Delivery]:
    """Takes and acknowledges jobs until the lane's stream has no ready one left."""
    ready = subjects.ready_filter(REGION, lane, POOL, home)
    taken: list[Delivery] = []
    async with LanePuller(bus, REGION, lane, POOL, home) as puller, asyncio.timeout(HANG_S):
        while await subject_list(bus, subjects.lane_stream(REGION, lane), ready):
            some = await puller.pull(500)
            for delivery in some:
                await delivery.ack()
            await bus.flush()
            taken += some
    return taken


async def message_count(bus: Bus, lane: Lane) -> int:
    return (await bus.api(f"STREAM.INFO.{subjects.lane_stream(REGION, lane)}", {}))["state"]["messages"]
