"""What tests do with lanes: park, take all that is ready, count."""

from laneway.core import subjects
from laneway.core.job import JobRecord
from laneway.core.lanes import Lane
from laneway.core.subjects import ParkSubject
from laneway.runtime.bus import Bus
from laneway.runtime.clock import SystemClock
from laneway.runtime.lanes import LaneStore
from laneway.runtime.puller import Delivery, LanePuller
from tests.support.nats import POOL, REGION, make_job

GROUP = "abcdefghij"


def now_s() -> float:
    return SystemClock().now()


async def park(lanes: LaneStore, record: JobRecord, in_s: float = 1000.0, sequence: int = 1) -> ParkSubject:
    return await lanes.park(make_job(record), sequence, fire_at_s=now_s() + in_s, group=GROUP)


async def pull_all(bus: Bus, lane: Lane) -> list[Delivery]:
    async with LanePuller(bus, REGION, lane, POOL) as puller:
        taken = await puller.pull(500)
        for delivery in taken:
            await delivery.ack()
        return taken


async def message_count(bus: Bus, lane: Lane) -> int:
    return (await bus.api(f"STREAM.INFO.{subjects.lane_stream(REGION, lane)}", {}))["state"]["messages"]
