"""Hold windows under virtual time: priority work with a day's shape, batch work with slack, the real forecast, plan of
holds and choice. The first day has no season and is its own control."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest

from laneway.core.fleet import LanePlan, PoolPlan
from laneway.core.lanes import Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.fairness import Ledger
from laneway.policy.forecast import PoolForecast
from laneway.policy.holds import Holds
from laneway.policy.parked import ParkIndex
from laneway.policy.release import ReleaseParams, ReleaseReason, choose, room_of

DAY_S = 86_400.0
STEP_S = 60.0
SLOTS, WORKERS = 8, 2
SERVICE_S = 60.0
COST_MS = int(SERVICE_S * 1000 / (SLOTS / WORKERS))
PARAMS = ReleaseParams()


def by_day(now_s: float) -> int:
    """Priority jobs in the pool: one at midnight, seven at noon."""
    return round(4.0 - 3.0 * math.cos(2 * math.pi * now_s / DAY_S))


class World:
    """Places are taken by priority first; a released job starts when there is one."""

    def __init__(self, priority: Callable[[float], int] = by_day) -> None:
        self.now_s = 20_000 * DAY_S
        self.index = ParkIndex()
        self.ledger = Ledger()
        self.forecast = PoolForecast(self.now_s)
        self.holds = Holds({"p": self.forecast})
        self.priority = priority
        self.ready: list[ParkSubject] = []
        self.running: list[float] = []  # when each ends
        self.started: dict[str, tuple[float, float]] = {}  # job: when, and the share of places that priority had
        self.due_s: dict[str, float] = {}
        self.reasons: defaultdict[str, set[ReleaseReason]] = defaultdict(set)
        self.idle_and_held = 0

    def park(self, count: int, name: str, due_in_s: float) -> None:
        for i in range(count):
            due_ms = int((self.now_s + due_in_s) * 1000)
            job = ParkSubject("local", Lane.BATCH, "p", "acme", 0, due_ms, COST_MS, f"g{i}", f"{name}{i:05}")
            self.due_s[job.job] = due_ms / 1000
            self.index.add(job, now_ms=int(self.now_s * 1000))

    def step(self) -> None:
        priority = self.priority(self.now_s)
        self.forecast.observe(priority, self.now_s)
        self.running = [ends for ends in self.running if ends > self.now_s]
        places = max(0, SLOTS - priority - len(self.running))
        while self.ready and places:
            job = self.ready.pop(0)
            self.running.append(self.now_s + SERVICE_S)
            self.started[job.job] = self.now_s, priority / SLOTS
            places -= 1
        pool = PoolPlan(
            "p", workers=WORKERS, slots=SLOTS, free_slots=places, service_s=SERVICE_S,
            lanes=(LanePlan(Lane.PRIORITY, running=min(SLOTS, priority), ready=max(0, priority - SLOTS)),
                   LanePlan(Lane.BATCH, ready=len(self.ready), running=len(self.running))),
        )  # fmt: skip
        hold = self.holds.look(pool, self.index, self.now_s, PARAMS.hold)
        room = room_of(pool, PARAMS)
        for release in choose(self.index, room, self.ledger, now_s=self.now_s, params=PARAMS, hold=hold):
            self.index.discard(release.park.job)
            self.ledger.charge(release.park, release.charge)
            self.holds.released(release.park)
            self.reasons[release.park.job.rstrip("0123456789")].add(release.reason)
            self.ready.append(release.park)
            room = room.__class__("p", room.idle - 1, 0)
        if room.idle > 0 and len(self.index) and 1 - places / SLOTS < PARAMS.hold.busy:
            self.idle_and_held += 1
        self.now_s += STEP_S

    def until(self, day: float) -> None:
        while self.now_s < (20_000 + day) * DAY_S:
            self.step()

    def mean_price(self, name: str) -> float:
        prices = [price for job, (_, price) in self.started.items() if job.startswith(name)]
        return sum(prices) / len(prices)


def test_batch_with_slack_waits_for_the_evening_and_an_idle_pool_never_waits() -> None:
    world = World()
    world.until(9 / 24)
    world.park(300, "first", 23 * 3_600.0)
    world.until(1 + 9 / 24)
    world.park(300, "second", 23 * 3_600.0)
    world.until(2.2)
    assert len(world.started) == 600
    late = [job for job, (at_s, _) in world.started.items() if at_s > world.due_s[job]]
    assert late == []
    assert not world.reasons["first"] & {ReleaseReason.PRICE_LOW}, "without a season nothing is held"
    assert world.mean_price("first") > 0.7
    assert world.mean_price("second") < 0.75 * world.mean_price("first")
    held_s = [at_s - (20_001 + 9 / 24) * DAY_S for job, (at_s, _) in world.started.items() if job.startswith("second")]
    assert max(held_s) <= 11.5 * 3_600 + 600, "half of the slack, and what its slot takes"
    assert world.idle_and_held == 0


def test_a_held_job_is_told_what_it_waits_for_and_holds_can_be_turned_off() -> None:
    world = World()
    world.until(1 + 9 / 24)
    world.park(30, "held", 23 * 3_600.0)
    world.until(1 + 9.1 / 24)
    job = next(world.index.by_due("p", [Lane.BATCH]))
    facts = world.holds.facts(job)
    assert 8 * 3_600 <= int(facts["planned_release_ms"]) / 1000 - world.now_s <= 12 * 3_600
    assert float(facts["planned_price"]) < 0.5 < float(facts["price_now"])
    assert len(world.started) == 0
    off = replace(PARAMS.hold, on=False)
    pool = PoolPlan("p", workers=WORKERS, slots=SLOTS, lanes=(LanePlan(Lane.PRIORITY, running=7),))
    assert not world.holds.look(pool, world.index, world.now_s, off).holds
    assert world.holds.facts(job) == {}


def test_what_has_little_slack_is_not_held() -> None:
    world = World()
    world.until(1 + 10 / 24)
    world.park(4, "tight", 330.0)
    world.until(1 + 10 / 24 + 460 / DAY_S)
    assert len(world.started) == 4
    assert all(at_s <= world.due_s[job] for job, (at_s, _) in world.started.items())


@pytest.mark.parametrize("wrong", [0.6, 1.6])
def test_a_wrong_forecast_costs_no_deadline(wrong: float) -> None:
    """The second day is not as the first: less, or so much more that the forecast breaks."""
    world = World(lambda now_s: min(SLOTS - 1, round(by_day(now_s) * (wrong if now_s > 20_001 * DAY_S else 1.0))))
    world.until(1 + 9 / 24)
    world.park(200, "held", 12 * 3_600.0)
    world.until(2)
    assert len(world.started) == 200
    assert [job for job, (at_s, _) in world.started.items() if at_s > world.due_s[job]] == []


def test_a_broken_forecast_holds_nothing() -> None:
    world = World(lambda now_s: by_day(now_s) if now_s < (20_001 + 1 / 24) * DAY_S else 7)
    world.until(1 + 1 / 24 + 10 / 1_440)
    assert world.forecast.broken
    world.park(20, "now", 20 * 3_600.0)
    world.until(1 + 1.7 / 24)
    assert len(world.started) == 20, "one place was free, and nobody waited for better times"
