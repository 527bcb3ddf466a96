"""A job that yielded fires by the rule of admission, and its new message says what its record says now."""

from __future__ import annotations

from typing import Any, cast

import pytest

from laneway.core.clock import ManualClock
from laneway.core.fleet import HomePlan, LanePlan, Plan, PoolPlan
from laneway.core.ids import is_token
from laneway.core.job import GenerateTask, JobRecord, LaneJob, Sampling, claim, give_way
from laneway.core.lanes import Lane
from laneway.policy.affinity import choose_home
from laneway.runtime.bus import NotConnected, PayloadTooLarge, PublishUnknown
from laneway.runtime.lanes import LaneStore
from laneway.runtime.puller import Delivery
from laneway.runtime.records import StoredRecord
from laneway.runtime.wire.records import decode_lane_job
from laneway.workers.reparking import PARK_TRIES, Reparking
from tests.support.nats import POOL, make_record, small_catalogue

TASK = GenerateTask((72, 105), Sampling(max_tokens=8))
NOW_S = 1_800_000_000.0


class Lanes:
    """Keeps what is parked, or fails as told."""

    def __init__(self, *faults: Exception) -> None:
        self.parked: list[tuple[LaneJob, int, bytes, float, str]] = []
        self._faults = list(faults)

    async def park(self, job: LaneJob, sequence: int, data: bytes, *, fire_at_s: float, group: str) -> None:
        if self._faults:
            raise self._faults.pop(0)
        self.parked.append((job, sequence, data, fire_at_s, group))


class Pulled:
    def __init__(self, job: LaneJob) -> None:
        self.job = job


def reparking(lanes: Lanes, plan: Plan | None = None, floor: float = 0.5) -> Reparking:
    clock = ManualClock(wall_s=NOW_S)
    pool = small_catalogue(slots=4, workers=2).pools[0]
    return Reparking(cast(LaneStore, lanes), pool, lambda: plan, clock, lambda: floor)


def yielded(**changes: Any) -> JobRecord:
    record = make_record(lane=Lane.BATCH, latest_start_s=NOW_S + 100.0, device_ms=500, **changes)
    return give_way(claim(record, "w", NOW_S - 5.0), "w", 1, NOW_S)


def plan(parked_device_s: float, workers: int = 2) -> Plan:
    lanes = (LanePlan(Lane.DEFERRABLE), LanePlan(Lane.BATCH, parked=3, parked_device_s=parked_device_s))
    return Plan("local", pools=(PoolPlan(POOL, workers=workers, lanes=lanes),))


def test_it_fires_at_its_latest_start_where_nothing_is_due_before_it():
    assert reparking(Lanes()).fire_at_s(yielded()) == NOW_S + 100.0
    assert reparking(Lanes(), plan(0.0)).fire_at_s(yielded()) == NOW_S + 100.0


def test_with_work_ahead_it_fires_so_much_earlier():
    assert reparking(Lanes(), plan(30.0)).fire_at_s(yielded()) == NOW_S + 70.0  # 30 device-s at 2 workers x 0.5
    assert reparking(Lanes(), plan(500.0)).fire_at_s(yielded()) == NOW_S


def test_it_fires_at_once_when_its_latest_start_has_passed():
    record = give_way(claim(make_record(lane=Lane.BATCH, latest_start_s=NOW_S - 1.0), "w", NOW_S - 5.0), "w", 1, NOW_S)
    assert reparking(Lanes()).fire_at_s(record) == NOW_S


async def test_the_message_carries_the_record_as_it_is_now():
    lanes, record = Lanes(), yielded()
    pulled = cast(Delivery, Pulled(LaneJob(make_record(record.job_id, Lane.BATCH), TASK)))
    assert await reparking(lanes).park(StoredRecord(record, 17), TASK, pulled)
    ((job, sequence, data, fire_at_s, group),) = lanes.parked
    assert job == decode_lane_job(data) == LaneJob(record, TASK)
    assert (sequence, fire_at_s) == (17, NOW_S + 100.0)
    assert is_token(group)


@pytest.mark.parametrize(
    ("faults", "parked"),
    [
        ([PublishUnknown("?")] * (PARK_TRIES - 1), True),
        ([PublishUnknown("?")] * PARK_TRIES, False),
        ([NotConnected("away")], False),
        ([PayloadTooLarge(1_001, 1_000)], False),
    ],
)
async def test_what_is_not_known_to_be_stored_is_not_acknowledged(faults: list[Exception], parked: bool):
    lanes, record = Lanes(*faults), yielded()
    pulled = cast(Delivery, Pulled(LaneJob(record, TASK)))
    assert await reparking(lanes).park(StoredRecord(record, 1), TASK, pulled) is parked
    assert len(lanes.parked) == parked


@pytest.mark.parametrize(
    ("key", "served_by", "home"),
    [("", "w", ""), ("abcdefgh", "w", "h1"), ("abcdefgh", "another", choose_home("abcdefgh", {"h0": 0, "h1": 0}))],
)
async def test_it_goes_to_the_home_of_the_worker_that_ran_it_or_is_given_one_anew(key: str, served_by: str, home: str):
    homes = (HomePlan("h0", "w0"), HomePlan("h1", served_by))
    lanes, record = Lanes(), yielded(affinity_key=key, home="h5")
    pulled = cast(Delivery, Pulled(LaneJob(record, TASK)))
    place = reparking(lanes, Plan("local", pools=(PoolPlan(POOL, homes=homes),)))
    assert await place.park(StoredRecord(record, 1), TASK, pulled)
    assert decode_lane_job(lanes.parked[0][2]).record.home == lanes.parked[0][0].record.home == home


async def test_without_a_plan_it_may_go_to_anyone():
    lanes, record = Lanes(), yielded(affinity_key="abcdefgh", home="h5")
    assert await reparking(lanes).park(StoredRecord(record, 1), TASK, cast(Delivery, Pulled(LaneJob(record, TASK))))
    assert lanes.parked[0][0].record.home == ""
