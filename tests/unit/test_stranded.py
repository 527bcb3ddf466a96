"""Jobs whose schedule did not fire are found at a bounded rate, and only those are released."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import pytest

from laneway.core.clock import ManualClock
from laneway.core.lanes import Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.parked import ParkIndex
from laneway.policy.release import FIRE_GUARD_S, ReleaseParams
from laneway.runtime.bus import NoAnswer
from laneway.runtime.lanes import ReleaseOutcome
from laneway.scheduler.decisions import DecisionLog
from laneway.scheduler.parking import Parking
from laneway.scheduler.releaser import Releaser
from laneway.scheduler.stranded import READS_AT_ONCE, READS_PER_S_MAX, StrandedJobs

NOW_S = 1000.0


class Lanes:
    """Fire times by job; what is missing is not parked any more."""

    def __init__(self, fires_s: dict[str, float]) -> None:
        self.fires_s = fires_s
        self.reads = self.reading = self.most = 0
        self.away = False

    async def fires_at_s(self, park: ParkSubject) -> float | None:
        self.reads += 1
        self.reading += 1
        self.most = max(self.most, self.reading)
        await asyncio.sleep(0)
        self.reading -= 1
        if self.away:
            raise NoAnswer("NATS is away")
        return self.fires_s.get(park.job)


class Rescuer:
    def __init__(self) -> None:
        self.rescued: list[str] = []

    async def rescue(self, parks: Iterable[ParkSubject]) -> None:
        self.rescued += [park.job for park in parks]


def parked(job: str) -> ParkSubject:
    return ParkSubject("local", Lane.BATCH, "p", "acme", 0, 9_000_000, 1, "g", job)


def watch(lanes: Lanes, jobs: Iterable[str], *, leads: bool = True) -> tuple[StrandedJobs, Rescuer]:
    rescuer, clock = Rescuer(), ManualClock(NOW_S)
    index = ParkIndex([parked(job) for job in jobs])
    return StrandedJobs(lanes, index, rescuer, clock, lambda: leads), rescuer  # type: ignore[arg-type]  # stand-ins


async def test_only_what_should_have_fired_is_released():
    lanes = Lanes({"over": NOW_S - FIRE_GUARD_S - 0.1, "at": NOW_S - FIRE_GUARD_S, "ahead": NOW_S + 5.0})
    jobs, rescuer = watch(lanes, ["over", "at", "ahead", "gone"])
    assert await jobs.look() == 1
    assert rescuer.rescued == ["over"]


@pytest.mark.looptime
async def test_no_more_are_read_at_once_and_in_a_second_than_the_limits():
    count = 4 * READS_AT_ONCE + 1
    lanes = Lanes({})
    jobs, _ = watch(lanes, [f"j{i}" for i in range(count)])
    began_s = asyncio.get_running_loop().time()
    await jobs.look()
    assert lanes.reads == count
    assert lanes.most == READS_AT_ONCE
    assert count / (asyncio.get_running_loop().time() - began_s) <= READS_PER_S_MAX


async def test_nothing_is_read_by_one_that_does_not_lead():
    lanes = Lanes({"over": 0.0})
    jobs, rescuer = watch(lanes, ["over"], leads=False)
    assert await jobs.look() == lanes.reads == 0
    assert rescuer.rescued == []


@pytest.mark.looptime
async def test_it_looks_once_at_first_and_again_after_trouble():
    lanes = Lanes({"over": 0.0})
    lanes.away = True
    jobs, rescuer = watch(lanes, ["over"])
    running = asyncio.ensure_future(jobs.run())
    await asyncio.sleep(10.0)
    assert lanes.reads > 1, "what could not be read is read again"
    lanes.away = False
    await asyncio.sleep(5.0)
    reads = lanes.reads
    assert rescuer.rescued == ["over"]
    await asyncio.sleep(60.0)
    assert lanes.reads == reads
    jobs.suspect()
    await asyncio.sleep(5.0)
    assert lanes.reads == reads + 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.looptime
async def test_a_look_that_was_called_off_is_made_once_the_term_is_sure_again():
    leads = [False]
    lanes, rescuer = Lanes({"over": 0.0}), Rescuer()
    index = ParkIndex([parked("over")])
    jobs = StrandedJobs(lanes, index, rescuer, ManualClock(NOW_S), lambda: leads[0])  # type: ignore[arg-type]  # stand-ins
    running = asyncio.ensure_future(jobs.run())
    await asyncio.sleep(5.0)
    assert rescuer.rescued == []
    leads[0] = True
    await asyncio.sleep(5.0)
    assert rescuer.rescued == ["over"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("leads", [True, False])
async def test_a_rescue_that_failed_is_asked_for_again(leads: bool):
    class Away:
        async def release(self, park: ParkSubject, *, now_s: float, reason: str) -> ReleaseOutcome:
            raise NoAnswer("NATS is away")

    clock, lanes = ManualClock(NOW_S), cast(Any, Away())
    parking = Parking(cast(Any, None), "local", clock, lambda: None)
    parking.index.add(parked("over"), now_ms=0)
    releaser = Releaser(lanes, parking, DecisionLog(), clock, ReleaseParams, lambda: leads, Counter())
    again: list[bool] = []
    releaser.on_stranded = lambda: again.append(True)
    await releaser.rescue([parked("over")])
    assert again == [True]
    assert parking.index.jobs() == ["over"]
