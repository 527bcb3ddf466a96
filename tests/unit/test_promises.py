"""Promised places: whoever comes at its time finds it, nobody holds more than its share, and nothing is left over."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from laneway.core.lanes import Lane
from laneway.policy import promises as module
from laneway.policy.eta import Load
from laneway.policy.promises import GRACE_S, HABIT_PRIOR, HABITS_MAX, NEAR_MAX, PLACES_MAX, Promises

P, B = Lane.PRIORITY, Lane.BATCH
JOB = Load(1, 100, 0.5)
FAR = 1e9


def near(promises: Promises, tenant: str, until_s: float = FAR, own: Load = JOB) -> Load:
    return promises.ahead("p", P, tenant, own, until_s).near


def test_a_place_is_redeemed_at_its_time_and_not_before_or_after_its_grace():
    promises = Promises()
    promises.promise("p", P, "t", JOB, 100.0, 10.0)
    assert promises.redeem("p", P, "t", 109.0) is None
    assert promises.redeem("p", P, "t", 110.0) is not None
    assert promises.redeem("p", P, "t", 112.0) is not None
    assert promises.redeem("p", P, "t", 112.1) is None
    assert promises.redeem("p", B, "t", 110.0) is None
    assert promises.redeem("q", P, "t", 110.0) is None
    assert promises.redeem("p", P, "u", 110.0) is None, "another tenant's"
    promises.promise("p", P, "soon", JOB, 100.0, 1.0)
    assert promises.redeem("p", P, "soon", 101.0 + GRACE_S) is not None, "the grace is a second at least"


def test_a_place_serves_once():
    promises = Promises()
    promises.promise("p", P, "t", JOB, 0.0, 1.0)
    place = promises.redeem("p", P, "t", 1.0)
    assert place is not None
    promises.done(place)
    promises.done(place)
    assert promises.redeem("p", P, "t", 1.0) is None
    assert len(promises) == 0


def test_the_oldest_place_is_redeemed_first_whatever_the_order_of_promises():
    promises = Promises()
    for in_s in (3.0, 2.2, 2.5):
        promises.promise("p", P, "t", JOB, 0.0, in_s)
    due = []
    for _ in range(3):
        place = promises.redeem("p", P, "t", 3.0)
        assert place is not None
        due.append(place.due_s)
        promises.done(place)
    assert due == [2.2, 2.5, 3.0]


def test_places_that_nobody_comes_for_are_gone_and_the_next_weigh_less():
    promises = Promises()
    promises.promise("p", P, "t", JOB, 0.0, 1.0)
    assert [place.tenant for place in promises.expire(1.9)] == []
    assert [place.tenant for place in promises.expire(2.1)] == ["t"]
    assert len(promises) == 0
    assert promises.habit("t") < HABIT_PRIOR
    for _ in range(40):
        promises.promise("p", P, "t", JOB, 0.0, 1.0)
        promises.expire(10.0)
    for _ in range(20):
        promises.promise("p", P, "t", JOB, 0.0, 1.0)
    assert near(promises, "u", own=Load(100)).jobs <= 1, "who never comes holds up nobody"


def test_a_newcomer_sees_what_falls_due_while_it_would_run_and_the_rest_only_after():
    promises = Promises()
    for in_s in (1.0, 2.0, 50.0, 60.0):
        promises.promise("p", P, "t", JOB, 0.0, in_s)
    seen = promises.ahead("p", P, "t", JOB, 10.0)
    assert (seen.near.jobs, seen.later.jobs) == (
        round(2 * HABIT_PRIOR),
        round(4 * HABIT_PRIOR) - round(2 * HABIT_PRIOR),
    )
    assert promises.ahead("p", P, "t", JOB, 0.5).near.jobs == 0
    assert promises.ahead("p", B, "t", JOB, 10.0) == module.NOTHING


def test_of_prompts_a_newcomer_sees_only_those_that_fall_due_before_its_own_first_token():
    """Else each refusal would make the next one likelier, and a door that had refused some would stay shut."""
    promises = Promises()
    for in_s in (0.2, 2.0, 3.0):
        promises.promise("p", P, "t", JOB, 0.0, in_s)
    seen = promises.ahead("p", P, "t", JOB, 4.0, 0.5)
    weight = HABIT_PRIOR
    assert (seen.near.jobs, seen.near.prompt_tokens) == (round(3 * weight), round(100 * weight))
    assert (seen.later.jobs, seen.later.prompt_tokens) == (0, round(200 * weight)), "the rest stands before its retry"


def test_a_flood_of_one_tenant_puts_off_another_by_one_of_its_jobs():
    promises = Promises()
    for n in range(200):
        promises.promise("p", P, "loud", JOB, 0.0, 1.0 + n / 10)
    assert near(promises, "quiet").jobs == 1
    promises.promise("p", P, "quiet", JOB, 0.0, 2.0)
    assert near(promises, "quiet").jobs <= 3, "one of its own, and as many turns of the other as it takes itself"
    assert near(promises, "loud").jobs >= 100


def test_so_many_places_are_promised_and_no_more():
    promises = Promises()
    assert all(promises.promise("p", P, "one", JOB, 0.0, 5.0) for _ in range(PLACES_MAX))
    assert not promises.promise("p", P, "one", JOB, 0.0, 5.0)
    assert len(promises) == PLACES_MAX


def test_no_tenant_may_hold_more_than_its_share_of_the_places():
    promises = Promises()
    assert promises.promise("p", P, "two", JOB, 0.0, 5.0)
    held = sum(promises.promise("p", P, "one", JOB, 0.0, 5.0) for _ in range(PLACES_MAX))
    assert held == PLACES_MAX // 2
    assert sum(promises.promise("p", P, "two", JOB, 0.0, 5.0) for _ in range(PLACES_MAX)) == PLACES_MAX // 2 - 1
    promises.expire(100.0)
    assert promises.promise("p", P, "one", JOB, 100.0, 5.0)


def test_so_many_near_places_are_looked_at():
    promises = Promises()
    for _ in range(NEAR_MAX + 50):
        promises.promise("p", P, "t", Load(1), 0.0, 1.0)
    assert near(promises, "t").jobs == round(NEAR_MAX * HABIT_PRIOR)


def test_who_comes_later_gets_its_share_from_a_tenant_that_had_all_places():
    promises = Promises()
    for n in range(PLACES_MAX):
        promises.promise("p", (P, B)[n % 2], "flood", JOB, 0.0, 5.0 + n / 100)
    assert promises.promise("p", P, "small", JOB, 0.0, 5.0)
    assert len(promises) == PLACES_MAX
    assert promises.habit("flood") == HABIT_PRIOR, "it did not stay away"
    held = 1 + sum(promises.promise("p", P, "small", JOB, 0.0, 5.0) for _ in range(PLACES_MAX))
    assert held == PLACES_MAX // 2
    assert promises.redeem("p", P, "flood", 5.0) is not None, "the last ones go, not the first"


def test_places_that_were_come_for_hide_no_others():
    """A place that was told long before has a long grace, and others come and go behind it meanwhile."""
    promises = Promises()
    promises.promise("p", P, "early", JOB, 0.0, 300.0)
    for n in range(2 * NEAR_MAX):
        promises.promise("p", P, "busy", JOB, 300.0, 1.0 + n / 1000)
    for _ in range(2 * NEAR_MAX):
        place = promises.redeem("p", P, "busy", 301.8)
        assert place is not None
        promises.done(place)
    promises.promise("p", P, "next", JOB, 302.0, 2.0)
    assert near(promises, "u", own=Load(100, 10_000, 50.0)).jobs == round(2 * HABIT_PRIOR)


def test_places_that_are_over_leave_nothing_behind():
    promises = Promises()
    promises.promise("p", P, "early", JOB, 0.0, 300.0)
    for n in range(3 * PLACES_MAX):
        promises.promise("p", P, "busy", JOB, 300.0 + n / 1000, 0.01)
        place = promises.redeem("p", P, "busy", 300.01 + n / 1000)
        assert place is not None
        promises.done(place)
    assert len(promises._ends) <= 2 * PLACES_MAX + 1
    assert len(promises._lines["p", P].by_due) == len(promises) == 1


def test_the_habits_of_so_many_tenants_are_remembered():
    promises = Promises()
    for n in range(HABITS_MAX + 1):
        promises.promise("p", P, f"t{n}", JOB, float(n), 1.0)
        promises.expire(n + 10.0)
    assert promises.habit("t0") == HABIT_PRIOR
    assert promises.habit("t1") < HABIT_PRIOR


class PlacesMachine(RuleBasedStateMachine):
    """Whatever comes, the sums are those of the open places, and none is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.promises, self.now_s = Promises(), 0.0

    @rule(tenant=st.sampled_from("abc"), lane=st.sampled_from([P, B]), in_s=st.floats(0.1, 60), jobs=st.integers(0, 3))
    def promise(self, tenant: str, lane: Lane, in_s: float, jobs: int) -> None:
        self.promises.promise("p", lane, tenant, Load(jobs, 10 * jobs, 0.3 * jobs), self.now_s, in_s)

    @rule(tenant=st.sampled_from("abc"), lane=st.sampled_from([P, B]))
    def come(self, tenant: str, lane: Lane) -> None:
        place = self.promises.redeem("p", lane, tenant, self.now_s)
        if place is not None:
            assert place.tenant == tenant
            assert place.due_s - module.EARLY_S <= self.now_s <= place.until_s
            self.promises.done(place)

    @rule(by_s=st.floats(0.0, 20.0))
    def wait(self, by_s: float) -> None:
        self.now_s += by_s
        self.promises.expire(self.now_s)

    @invariant()
    def sums_are_those_of_the_open_places(self) -> None:
        count = 0
        for line in self.promises._lines.values():
            places = [place for place in line.by_due if place.open]
            count += len(places)
            assert places == sorted(places, key=lambda place: place.due_s)
            assert abs(line.total.jobs - sum(p.weight * p.load.jobs for p in places)) < 1e-6
            assert sorted(map(id, places)) == sorted(id(p) for own in line.by_tenant.values() for p in own)
        assert count == len(self.promises)
        for lane in (P, B):
            seen = self.promises.ahead("p", lane, "a", JOB, self.now_s + 10)
            assert min(seen.near.jobs, seen.later.jobs, seen.near.device_s, seen.later.device_s) >= 0


TestPlaces = PlacesMachine.TestCase
TestPlaces.settings = hypothesis_settings(max_examples=60, stateful_step_count=40)
