"""Two workers and the home slots of their pool, on a real nats-server: whose jobs are whose, and when they are not."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.fleet import HomePlan, Plan, PoolPlan
from laneway.core.job import JobRecord
from laneway.core.lanes import LANES, JobState, Lane
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.plans import PlanPublisher
from laneway.runtime.provision import provision
from laneway.runtime.settings import LaneDefaults
from tests.support.nats import POOL, REGION, eventually, small_catalogue
from tests.support.worker import RunningWorker, Yard, yard

pytestmark = pytest.mark.wire

PATIENT = {"policy__priority": LaneDefaults(ttft_target_s=600.0, tpot_target_s=1.0, deadline_s=600.0)}


class Planner:
    """Publishes who serves which slot."""

    def __init__(self, place: Yard) -> None:
        self._publisher = PlanPublisher(place.bus, REGION)
        self._version = 0

    async def serve(self, valid_s: float = 600.0, **homes: RunningWorker | None) -> None:
        self._version += 1
        for worker in homes.values():
            if worker is not None:  # a cached prefix is worth more than any wait: only the TTFT target counts
                worker.worker.rates.saved.tokens = 1e12
        plans = tuple(HomePlan(home, worker.id if worker is not None else "") for home, worker in homes.items())
        pool = PoolPlan(POOL, workers=len(homes), homes=plans)
        plan = Plan(REGION, 1, self._version, made_s=0.0, valid_until_s=valid_s, pools=(pool,))
        await self._publisher.publish(plan)
        for home, worker in homes.items():
            if worker is not None and not worker.task.done():
                await eventually(partial(serves, worker, home))


def serves(worker: RunningWorker, home: str) -> bool:
    return worker.worker.snapshot().home == home


async def put(place: Yard, home: str, lane: Lane = Lane.BATCH, **changes: Any) -> str:
    return (await place.submit(lane=lane, home=home, **changes)).record.job_id


def ran(record: JobRecord) -> tuple[str, str]:
    """Who ran it, and why."""
    (attempt,) = record.lineage
    assert record.state is JobState.SUCCEEDED
    assert record.starts == 1
    return attempt.owner, attempt.reason


async def test_each_worker_runs_the_jobs_of_its_home_and_shows_it_in_its_lease(nats_server: LocalNats):
    async with yard(nats_server, workers=2, model__home_slots=2, **PATIENT) as place:
        one, two = place.workers
        await Planner(place).serve(h0=one, h1=two)
        for lane in LANES:
            jobs = {home: [await put(place, home, lane) for _ in range(3)] for home in ("h0", "h1")}
            for home, worker in (("h0", one), ("h1", two)):
                assert {ran(record) for record in await place.ended(*jobs[home])} == {(worker.id, "LANE")}
        assert (one.worker.snapshot().home, two.worker.snapshot().home) == ("h0", "h1")
        await eventually(place.lanes_empty)


async def test_an_idle_worker_holds_priority_pulls_of_its_home_and_of_any(nats_server: LocalNats):
    async with yard(nats_server, workers=2, model__home_slots=2) as place:
        one, two = place.workers
        await Planner(place).serve(h0=one, h1=two)
        for home, waiting in (("any", 2), ("h0", 1), ("h1", 1)):
            name = f"{subjects.lane_stream(REGION, Lane.PRIORITY)}.{subjects.consumer(Lane.PRIORITY, POOL, home)}"

            async def waits(name: str = name, waiting: int = waiting) -> bool:
                return (await place.bus.api(f"CONSUMER.INFO.{name}", {}))["num_waiting"] == waiting

            await eventually(waits)


async def test_a_dead_workers_home_is_anyones_as_soon_as_its_lease_has_expired(nats_server: LocalNats):
    async with yard(nats_server, workers=2, model__home_slots=2, **PATIENT) as place:
        one, two = place.workers
        planner = Planner(place)
        await planner.serve(h0=one, h1=two)
        await two.die()
        before = await put(place, "h1")  # the plan still says that it is served: 900 s would be left to it
        (record,) = await place.ended(before)
        assert ran(record) == (one.id, "STEAL_ORPHAN")
        await planner.serve(h0=one, h1=None)
        jobs = [await put(place, "h1", lane) for lane in LANES]
        assert {ran(record) for record in await place.ended(*jobs)} == {(one.id, "STEAL_ORPHAN")}


async def test_a_slow_workers_jobs_are_left_to_it_for_a_while_and_then_taken(nats_server: LocalNats):
    changes = {"model__home_slots": 2, "model__slots": 2, "policy__priority_reserved_slots": 0}
    async with yard(nats_server, workers=2, engine__pace_s=0.02, **changes) as place:
        one, two = place.workers
        await Planner(place).serve(h0=one, h1=two)
        busy = [await put(place, "h1", Lane.PRIORITY, max_tokens=200) for _ in range(2)]
        await eventually(lambda: two.worker.snapshot().running == 2)
        asked_s = asyncio.get_running_loop().time()
        job = await put(place, "h1", Lane.PRIORITY)

        async def claimed() -> bool:
            return bool((await place.record(job)).lineage)

        await eventually(claimed)
        # A quarter of the TTFT target of a second, from when the slot's last bell but the busy ones' rang.
        assert asyncio.get_running_loop().time() - asked_s >= 0.15
        assert ran((await place.ended(job))[0]) == (one.id, "STEAL_WAITED")
        assert {ran(record)[0] for record in await place.ended(*busy)} == {two.id}


async def test_without_a_plan_every_home_is_anyones(nats_server: LocalNats):
    async with yard(nats_server, workers=1, model__home_slots=2) as place:
        (one,) = place.workers
        jobs = [await put(place, home, lane) for home in ("h0", "h1") for lane in LANES]
        assert {ran(record) for record in await place.ended(*jobs)} == {(one.id, "STEAL_NO_PLAN")}


async def test_nothing_is_lost_or_run_twice_while_homes_change_hands(nats_server: LocalNats):
    async with yard(nats_server, workers=2, model__home_slots=2, model__slots=8) as place:
        one, two = place.workers
        planner = Planner(place)
        jobs: list[str] = []

        async def ask() -> None:
            for number in range(90):
                home = ("h0", "h1", "")[number % 3]
                jobs.append(await put(place, home, LANES[number % 3], max_tokens=4))

        asking = asyncio.create_task(ask())
        for swap in range(1_000_000):
            await planner.serve(h0=(one, two)[swap % 2], h1=(two, one)[swap % 2])
            if asking.done():
                break
        await asking
        records = await place.ended(*jobs)
        owners = Counter(ran(record)[0] for record in records)
        assert set(owners) == {one.id, two.id}
        await eventually(place.lanes_empty)
        await eventually(lambda: one.idle() and two.idle())


async def test_jobs_in_a_home_slot_that_the_settings_have_no_longer_are_run(nats_server: LocalNats):
    async with yard(nats_server, model__home_slots=2) as place:
        catalogue = catalogue_of(place.settings)
        more = replace(catalogue, pools=tuple(replace(pool, home_slots=4) for pool in catalogue.pools))
        nats = place.settings.nats
        await provision(place.bus, REGION, more, nats, ack_wait_s=nats.ack_wait_s)
        before = [await put(place, "h3", lane) for lane in LANES]
        assert await provision(place.bus, REGION, catalogue, nats, ack_wait_s=nats.ack_wait_s) == []
        one = await place.start_worker("one")
        await Planner(place).serve(h0=one, h1=None)
        after = [await put(place, "h2", lane) for lane in LANES]
        reasons = {ran(record)[1] for record in await place.ended(*before, *after)}
        assert reasons <= {"STEAL_ORPHAN", "STEAL_NO_PLAN"}


async def test_a_region_of_an_older_release_gets_its_home_slots_with_jobs_in_the_lane(nats_server: LocalNats):
    async with yard(nats_server, model__home_slots=0) as place:
        before = await put(place, "")
        catalogue = catalogue_of(place.settings)
        wanted = replace(catalogue, pools=tuple(replace(pool, home_slots=2) for pool in small_catalogue().pools))
        nats = place.settings.nats
        changed = await provision(place.bus, REGION, wanted, nats, ack_wait_s=nats.ack_wait_s)
        assert {f"created consumer batch_{POOL}_{home} of BATCH_{REGION}" for home in ("h0", "h1")} <= set(changed)
        await place.start_worker("one")
        assert ran((await place.ended(before))[0])[1] == "LANE"
