"""Two schedulers that lead at once, on a real nats-server and with real workers: each job runs once all the same.

Leadership moves under the first one's feet: its term is emptied in KV long before it would renew it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import msgspec
import pytest
from msgspec.structs import replace
from nats.aio.msg import Msg

from laneway.core import subjects
from laneway.core.fleet import Plan
from laneway.core.job import JobRecord
from laneway.core.lanes import PARKING_LANES, JobState, Lane
from laneway.runtime.bus import Bus
from laneway.runtime.kv import Key
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.settings import SchedulerSettings, Settings
from laneway.scheduler.leader import KEY, Term
from laneway.scheduler.loop import Scheduler
from tests.support.nats import POOL, REGION, eventually
from tests.support.scheduling import park_job, parked_jobs, ready_jobs, running_scheduler
from tests.support.worker import Yard, yard

pytestmark = [pytest.mark.wire, pytest.mark.timeout(120)]

TTL_S = 600.0  # the first renewal is due after 200 s


def settings_of(place: Yard) -> Settings:
    own = SchedulerSettings(listen="127.0.0.1:0", plan_interval_s=0.05, leader_ttl_s=TTL_S, sweep_s=0.1)
    return msgspec.structs.replace(place.settings, scheduler=own)


async def vacate(bus: Bus) -> None:
    """Empties the leader's term, which it does not notice."""
    key = Key(bus, subjects.leader_bucket(REGION), KEY)
    value = await key.read()
    epoch = msgspec.json.decode(value.data, type=Term).epoch
    await key.write(msgspec.json.encode(Term("", epoch)), value.sequence)


@asynccontextmanager
async def counting(bus: Bus) -> AsyncIterator[tuple[Counter[str], Counter[str]]]:
    """Tries to store a claim, and a terminal record, by job."""
    claims, ends = Counter[str](), Counter[str]()

    def wrote(msg: Msg) -> None:
        state = JobState((msg.headers or {})[subjects.H_RECORD_STATE])
        job_id = subjects.record_parts(msg.subject)[2]
        claims[job_id] += state is JobState.RUNNING
        ends[job_id] += state.terminal

    subscription = await bus.listen(subjects.records_of(REGION), wrote)
    try:
        yield claims, ends
    finally:
        await bus.unsubscribe(subscription)


async def park_some(bus: Bus, count: int, **changes) -> list[str]:
    parked: list[tuple[JobRecord, object]] = []
    for number in range(count):
        lane = PARKING_LANES[number % len(PARKING_LANES)]
        parked.append(await park_job(bus, lane=lane, due_in_s=500.0 + number, **changes))
    return [record.job_id for record, _ in parked]


def released(scheduler: Scheduler) -> int:
    return sum(scheduler.released[POOL, lane] for lane in PARKING_LANES)


async def leads(scheduler: Scheduler) -> None:
    await eventually(lambda: scheduler.lead is not None and scheduler.lead.plan is not None)


async def make_blind(scheduler: Scheduler) -> None:
    """It leads, and goes on as if nobody else did: it hears no plan but its own, and its publishes are not refused."""
    await leads(scheduler)
    assert scheduler.lead is not None
    scheduler.leadership.heard = lambda epoch: None  # type: ignore[method-assign]

    async def published(plan: Plan, *, least_gap_s: float) -> None:
        pass

    scheduler.lead.planner.publish = published  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(3))
async def test_two_that_both_lead_run_each_job_once_and_lose_none(nats_server: LocalNats, bus: Bus, seed: int) -> None:
    async with (
        yard(nats_server, engine__pace_s=0.0) as place,
        running_scheduler(nats_server, settings_of(place), "first") as first,
    ):
        await make_blind(first)
        async with running_scheduler(nats_server, settings_of(place), "second") as second, counting(bus) as counts:
            parked = await park_some(bus, 60)
            await vacate(bus)
            await leads(second)
            assert first.leadership.held()
            assert first.lead is not None
            await eventually(lambda: first.lead and len(first.lead.parking.index) == 60)
            for _ in range(2):  # now there is room, and both see it
                await place.start_worker()
            # Some of these NATS makes ready when they would: it leaves nobody the last two seconds.
            random = Random(seed)
            fired = [
                job_id for _ in range(10) for job_id in await park_some(bus, 1, fire_in_s=random.uniform(0.5, 2.5))
            ]
            parked += fired + await park_some(bus, 20)
            records = await place.ended(*parked, timeout_s=60.0)
            assert {record.state for record in records} == {JobState.SUCCEEDED}
            assert {record.attempt for record in records} == {1}
            claims, ends = counts
            await eventually(lambda: len(ends) == len(parked))
            assert claims == ends == dict.fromkeys(parked, 1)
            assert await place.lanes_empty()
            assert first.leadership.held(), "to the end"
            assert released(first), "both acted"
            assert released(second)
            assert released(first) + released(second) >= len(parked) - len(fired)


async def test_a_leader_that_hears_of_its_successor_gives_up_before_it_acts_again(
    nats_server: LocalNats, bus: Bus
) -> None:
    async with (
        yard(nats_server) as place,
        running_scheduler(nats_server, settings_of(place), "first") as first,
        running_scheduler(nats_server, settings_of(place), "second") as second,
    ):
        await leads(first)
        (old,) = await park_some(bus, 1)
        await vacate(bus)
        await leads(second)
        await eventually(lambda: first.lead is None)
        assert not first.leadership.held()
        await place.start_worker()
        (record,) = await place.ended(old)
        assert record.attempt == 1
        assert released(first) == 0
        assert released(second) == 1


@pytest.mark.parametrize("lane", PARKING_LANES)
async def test_a_job_that_both_release_at_the_same_moment_is_ready_once(
    nats_server: LocalNats, bus: Bus, lane: Lane
) -> None:
    """And one that is being fired, cancelled or claimed is left alone: see test_lane_races."""
    async with (
        yard(nats_server) as place,
        running_scheduler(nats_server, settings_of(place), "first") as first,
    ):
        await make_blind(first)
        async with running_scheduler(nats_server, settings_of(place), "second") as second:
            parked = [(await park_job(bus, lane=lane))[0].job_id for _ in range(20)]
            await vacate(bus)
            await leads(second)
            one, two = first.lead, second.lead
            assert one is not None
            assert two is not None
            await eventually(lambda: len(one.parking.index) == len(two.parking.index) == 20)
            plan = one.plan
            assert plan is not None

            async def both_release() -> bool:
                await asyncio.gather(*(lead.releaser.release(_roomy(plan)) for lead in (one, two)))
                return released(first) + released(second) == 20

            await eventually(both_release)  # the lead's own look may have one in hand
            assert await ready_jobs(bus, lane) == dict.fromkeys(parked, 1)
            assert await parked_jobs(bus, lane) == set()


def _roomy(plan: Plan) -> Plan:
    """The same, with a place for everybody."""
    (pool,) = plan.pools
    return replace(plan, pools=(replace(pool, workers=1, slots=100, free_slots=100),))
