"""Jobs of home slots on NATS: where they become ready and what is counted of them; on the real server and the other."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.catalogue import Catalogue
from laneway.core.lanes import Lane
from laneway.runtime.lanes import LaneDepth, LaneStore, ReleaseOutcome
from laneway.runtime.puller import LanePuller
from tests.contract.nats_twins import Twin, Twins, twins_of
from tests.support.lanes import GROUP, pull_all
from tests.support.nats import POOL, REGION, eventually, make_job, make_record, small_catalogue

LANE = Lane.BATCH
STREAM = subjects.lane_stream(REGION, LANE)


def catalogue(slots: int = 2) -> Catalogue:
    return Catalogue(tuple(replace(pool, home_slots=slots) for pool in small_catalogue().pools))


@pytest.fixture(
    params=[pytest.param("real", marks=pytest.mark.wire), pytest.param("memory", marks=pytest.mark.looptime)]
)
def twins(request: pytest.FixtureRequest, tmp_path: Path) -> Twins:
    return twins_of(request.param, tmp_path)


async def taken(twin: Twin, home: str, lane: Lane = LANE) -> list[str]:
    return [delivery.job.record.job_id for delivery in await pull_all(twin.bus, lane, home)]


async def park(twin: Twin, home: str, in_s: float = 1000.0):
    record = make_record(lane=LANE, home=home)
    fire_at_s = twin.clock.now() + in_s
    subject = await LaneStore(twin.bus, REGION).park(make_job(record), 1, fire_at_s=fire_at_s, group=GROUP)
    return record, subject


async def test_a_job_becomes_ready_in_its_home_and_one_without_in_any(twins: Twins):
    async with twins(catalogue=catalogue()) as twin:
        lanes = LaneStore(twin.bus, REGION)
        for home in ("h1", "", "h0"):
            await lanes.put_ready(make_job(make_record(f"job-{home}", home=home)), 1)
        assert await taken(twin, "h0", Lane.PRIORITY) == ["job-h0"]
        assert await taken(twin, "h1", Lane.PRIORITY) == ["job-h1"]
        assert await taken(twin, subjects.HOME_ANY, Lane.PRIORITY) == ["job-"]


async def test_a_parked_job_fires_into_its_home(twins: Twins):
    async with twins(catalogue=catalogue()) as twin:
        record, _ = await park(twin, "h1", in_s=0.3)

        async def fired() -> bool:
            return await taken(twin, "h1") == [record.job_id]

        await eventually(fired)


async def test_a_release_and_a_new_fire_time_leave_a_job_its_home(twins: Twins):
    async with twins(catalogue=catalogue()) as twin:
        lanes = LaneStore(twin.bus, REGION)
        record, subject = await park(twin, "h1")
        now_s = twin.clock.now()
        assert await lanes.restagger(subject, now_s + 900.0, now_s=now_s) is ReleaseOutcome.RELEASED
        assert await lanes.release(subject, now_s=now_s, reason="IDLE") is ReleaseOutcome.RELEASED
        assert await taken(twin, "h1") == [record.job_id]


@pytest.mark.parametrize("home", ["", "h1"])
async def test_a_purge_finds_a_job_in_whatever_home(twins: Twins, home: str):
    async with twins(catalogue=catalogue()) as twin:
        lanes, record = LaneStore(twin.bus, REGION), make_record(lane=LANE, home=home)
        await lanes.put_ready(make_job(record), 1)
        assert await lanes.holds(record)
        assert await lanes.purge(record) == 1
        assert not await lanes.holds(record)


async def test_one_request_tells_the_depths_of_every_home(twins: Twins):
    async with twins(catalogue=catalogue()) as twin:
        lanes = LaneStore(twin.bus, REGION)
        for home in ("h1", "h1", ""):
            await lanes.put_ready(make_job(make_record(lane=LANE, home=home)), 1)
        async with LanePuller(twin.bus, REGION, LANE, POOL, "h1") as puller:
            assert len(await puller.pull(1, wait_s=5.0)) == 1

            async def counted() -> bool:
                return await lanes.all_depths(LANE) == {
                    (POOL, "any"): LaneDepth(1, 0),
                    (POOL, "h0"): LaneDepth(0, 0),
                    (POOL, "h1"): LaneDepth(1, 1),
                }

            await eventually(counted)


async def test_the_depths_of_more_homes_than_a_page_has_are_complete(twins: Twins):
    async with twins(catalogue=catalogue(slots=260)) as twin:
        depths = await LaneStore(twin.bus, REGION).all_depths(LANE)
        assert len(depths) == 261
        assert depths[POOL, "h259"] == LaneDepth(0, 0)
