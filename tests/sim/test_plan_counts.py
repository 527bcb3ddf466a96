"""What a plan says of tenants, on the NATS in memory: it counts every write that the scheduler has seen."""

import asyncio
from typing import Any, cast

import pytest
from msgspec.structs import replace

from laneway.core.lanes import JobState, Lane
from laneway.runtime.lanes import LaneStore
from laneway.runtime.records import RecordStore
from laneway.scheduler.sweeps import Sweeper
from tests.sim.memory_nats import LoopClock, MemoryBus, MemoryNats
from tests.support.nats import REGION, make_record, provision_region, small_catalogue


@pytest.mark.looptime
async def test_a_plan_counts_up_to_the_last_write_also_where_that_ended_a_job():
    """Else a door would take the jobs of a tenant for open for as long as nobody else is accepted."""
    clock = LoopClock()
    server = MemoryNats(clock)
    driver = server.drive()
    bus = await MemoryBus.to(server, clock)
    await provision_region(bus, small_catalogue())
    records = RecordStore(bus, clock=clock)
    sweeper = Sweeper(
        bus,
        REGION,
        records,
        LaneStore(bus, REGION),
        cast(Any, None),
        clock,
        parked=lambda job_id: None,
        ended=lambda job_id: None,
        may_act=lambda: False,
        interval_s=60.0,
    )
    ended = make_record(lane=Lane.BATCH)
    first = await records.create(ended)
    following = asyncio.ensure_future(sweeper.follow())
    await asyncio.sleep(1.0)
    assert sweeper.near_limit({Lane.BATCH: 10})[1] == first + 1
    last = await records.update(replace(ended, state=JobState.CANCELLED), first)
    await asyncio.sleep(1.0)
    assert sweeper.near_limit({Lane.BATCH: 10}) == ((), last + 1)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    again = asyncio.ensure_future(sweeper.follow())  # as a new leader reads them
    await asyncio.sleep(1.0)
    assert sweeper.near_limit({Lane.BATCH: 10}) == ((), last + 1)
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)
    await bus.close()
    driver.close()
