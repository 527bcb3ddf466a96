"""Where a door sends jobs: by what the plan shows, what it sent since, and what it parked before."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest
from msgspec.structs import replace

from laneway.admission import homes as module
from laneway.admission.homes import COUNTED_WITHIN_S, LONGEST_LAG_S, HomeLedger, Homes
from laneway.admission.ledger import Ledger
from laneway.core.catalogue import Capabilities, Pool
from laneway.core.clock import ManualClock
from laneway.core.fleet import HomePlan, Plan, PoolPlan
from laneway.core.job import GenerateTask, Sampling
from laneway.policy.affinity import affinity_key
from laneway.runtime.plans import PlanView
from tests.support.nats import POOL, TENANT, small_catalogue

BOTH = (HomePlan("h0", "w0"), HomePlan("h1", "w1"))


class Plans:
    def __init__(self, *homes: HomePlan) -> None:
        self.is_fresh = True
        self.show(*homes)

    def show(self, *homes: HomePlan, made_s: float = 0.0) -> None:
        self.plan = Plan("local", made_s=made_s, pools=(PoolPlan(POOL, homes=homes),))

    def fresh(self) -> bool:
        return self.is_fresh


class Door:
    """Homes as a door has them."""

    def __init__(self, *homes: HomePlan, prefix_cache: bool = True) -> None:
        self.clock = ManualClock()
        self.plans = Plans(*homes)
        self.ledger = Ledger(self.clock)
        self.homes = Homes(cast(PlanView, self.plans), self.ledger.homes)
        able = Capabilities(prefix_cache=prefix_cache)
        self.pool: Pool = replace(small_catalogue().pools[0], home_slots=max(2, len(homes)), capabilities=able)
        self.count = 0

    def send(self, session: str, *, parked: bool = False) -> str:
        self.count += 1
        return self.homes.choose(f"job-{self.count}", self.pool, TENANT, task(session), parked=parked)[1]

    def loads(self) -> tuple[int, int]:
        return self.ledger.homes.load(POOL, "h0"), self.ledger.homes.load(POOL, "h1")

    def plan(self, *homes: HomePlan) -> None:
        self.plans.show(*homes, made_s=self.clock.now())
        self.ledger.plan_arrived(self.plans.plan)


def task(session: str) -> GenerateTask:
    return GenerateTask((1, 2, 3), Sampling(max_tokens=4), session_id=session)


def test_a_job_has_its_key_also_where_it_has_no_home() -> None:
    door = Door()
    key = affinity_key(POOL, TENANT, task("s"))
    assert door.homes.choose("a", door.pool, TENANT, task("s"), parked=False) == (key, "")
    assert door.homes.choose("b", door.pool, TENANT, task(""), parked=False) == ("", "")


def test_without_a_prefix_cache_nobody_is_helped() -> None:
    door = Door(*BOTH, prefix_cache=False)
    assert door.homes.choose("a", door.pool, TENANT, task("s"), parked=False) == ("", "")


def test_a_stale_plan_gives_no_home() -> None:
    door = Door(*BOTH)
    door.plans.is_fresh = False
    assert (door.send("s"), door.send("s", parked=True)) == ("", "")


def test_a_job_of_now_goes_only_where_somebody_serves_and_a_parked_one_wherever() -> None:
    door = Door(HomePlan("h0"), HomePlan("h1", "w1"))
    assert {door.send(f"s{i}") for i in range(50)} == {"h1"}
    door = Door(HomePlan("h0"), HomePlan("h1"))
    assert {door.send(f"s{i}") for i in range(50)} == {""}
    assert {door.send(f"s{i}", parked=True) for i in range(50)} == {"h0", "h1"}


def test_what_was_sent_counts_until_it_ends() -> None:
    door = Door(*BOTH)
    home = door.send("hot")
    other = "h1" if home == "h0" else "h0"
    assert [door.send("hot") for _ in range(5)] == [home, home, home, other, other], "a few may meet, then they part"
    for number in range(1, 7):
        door.ledger.ended(f"job-{number}")
        door.ledger.ended(f"job-{number}")
    assert door.loads() == (0, 0)


def test_a_plan_adds_what_other_doors_sent_and_nothing_of_ours_a_second_time() -> None:
    door = Door(*BOTH)
    home = door.send("s")
    door.clock.advance(5.0)
    door.plan(*(replace(each, running=1 if each.home == home else 9) for each in BOTH))
    assert sorted(door.loads()) == [1, 9]
    assert door.send("t") == home
    door.ledger.ended("job-1")
    door.ledger.ended("job-2")
    assert sorted(door.loads()) == [0, 9]


def test_a_plan_that_counted_while_ours_came_and_went_adds_nothing() -> None:
    door = Door(HomePlan("h0", "w0"), HomePlan("h1"))
    door.send("s")
    door.clock.advance(5.0)
    door.send("t")
    door.ledger.ended("job-1")
    for counted in (1, 2):
        door.plan(HomePlan("h0", "w0", running=counted), HomePlan("h1"))
        assert door.loads() == (1, 0)


def test_an_end_that_was_not_heard_is_told_by_the_plan() -> None:
    door = Door(HomePlan("h0", "w0"), HomePlan("h1"))
    door.send("s")
    door.clock.advance(5.0)
    door.plan(HomePlan("h0", "w0"), HomePlan("h1"))
    assert door.loads() == (0, 0)
    door.send("t")
    assert door.loads() == (1, 0)


def test_a_clock_that_is_wrong_changes_no_more_than_a_moment() -> None:
    door = Door(HomePlan("h0", "w0"), HomePlan("h1"))
    door.send("s")
    door.clock.advance(LONGEST_LAG_S + COUNTED_WITHIN_S + 1.0)
    plan = Plan("local", made_s=door.clock.now() - 3600.0, pools=(PoolPlan(POOL, homes=(HomePlan("h0", "w0"),)),))
    door.ledger.plan_arrived(plan)
    assert door.loads() == (0, 0)


def test_a_session_stays_where_it_went_when_its_first_home_comes_back() -> None:
    door = Door(*BOTH)
    sessions = [f"s{i}" for i in range(8)]
    door.plan(BOTH[0], HomePlan("h1"))
    assert {door.send(session) for session in sessions} == {"h0"}
    for number in range(1, 9):
        door.ledger.ended(f"job-{number}")
    door.plan(*BOTH)
    for session in sessions:
        assert door.send(session) == "h0"
        door.ledger.ended(f"job-{door.count}")


def test_parked_jobs_are_shared_out_evenly_whatever_is_at_the_homes_now() -> None:
    door = Door(HomePlan("h0", "w0", running=50), HomePlan("h1", "w1"))
    door.plan(*door.plans.plan.pools[0].homes)
    counts = Counter(door.send("hot", parked=True) for _ in range(1000))
    assert max(counts.values()) <= 1.5 * 500
    assert door.loads() == (50, 0), "they are not at their homes yet"


def test_nothing_is_parked_for_a_home_that_was_taken_away() -> None:
    """It is in the plan while jobs are left there, and would be for good if it got new ones."""
    door = Door(*BOTH)
    door.plan(*BOTH, HomePlan("h2", ready=3), HomePlan("a-stray-consumer", ready=1))
    assert {door.send(f"s{i}", parked=True) for i in range(100)} == {"h0", "h1"}
    assert {door.send(f"s{i}") for i in range(100)} == {"h0", "h1"}


def test_workers_that_serve_no_home_get_nothing_through_one() -> None:
    """They are of a release before homes. A pool without workers is to have newer ones."""
    door = Door(HomePlan("h0"), HomePlan("h1"))
    assert door.send("s", parked=True)
    [pool] = door.plans.plan.pools
    door.plans.plan = replace(door.plans.plan, pools=(replace(pool, workers=2),))
    assert (door.send("s", parked=True), door.send("s")) == ("", "")


def test_a_key_that_comes_again_counts_once() -> None:
    ledger = HomeLedger(ManualClock())
    for _ in range(3):
        ledger.sent("the same", POOL, "h0")
    assert ledger.load(POOL, "h0") == 1
    ledger.ended("the same")
    assert ledger.load(POOL, "h0") == 0


def test_so_many_keys_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_HOMES_MAX", 3)
    door = Door(BOTH[0], HomePlan("h1"))
    sessions = [f"s{i}" for i in range(40)]
    for session in sessions:
        assert door.send(session) == "h0"
        door.ledger.ended(f"job-{door.count}")
    door.plans.show(*BOTH)
    kept = []
    for session in sessions[::-1]:
        kept.append(door.send(session))
        door.ledger.ended(f"job-{door.count}")
    assert kept[:3] == ["h0"] * 3
    assert "h1" in kept[3:], "a forgotten one begins anew"


def test_the_end_of_so_many_jobs_is_awaited_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIVE_JOBS_MAX", 2)
    ledger = HomeLedger(ManualClock())
    for job in ("a", "b", "c"):
        ledger.sent(job, POOL, "h0")
    assert ledger.load(POOL, "h0") == 2
    ledger.ended("a")
    assert ledger.load(POOL, "h0") == 2
    ledger.ended("b")
    assert ledger.load(POOL, "h0") == 1
