"""Hold windows: water-filled into cheap minutes, never past half of the slack, never against an idle pool."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.policy.holding import SLOTS_MAX, Hold, HoldParams, hold_now, plan_holds

PARAMS = HoldParams()
NOW_S = 6_000.0
PEAK_THEN_TROUGH = [1.6] * 30 + [0.2] * 30  # of two workers


def planned(demand: list[tuple[float, float]], forecast: list[float] = PEAK_THEN_TROUGH, workers: float = 2.0):
    return plan_holds(demand, forecast, workers=workers, now_s=NOW_S)


def test_work_with_slack_waits_for_the_trough() -> None:
    plan = planned([(NOW_S + 3_600 * 1.5, 50.0)])
    assert plan.open_device_s == 0.0
    (part,) = plan.portions
    assert part.start_s == NOW_S + 30 * 60
    assert part.price == pytest.approx(0.1)
    assert plan.planned(NOW_S + 3_600 * 1.5) == part


def test_work_is_held_for_half_of_its_slack_at_most() -> None:
    plan = planned([(NOW_S + 58 * 60, 50.0)])
    assert all(part.start_s <= NOW_S + 29 * 60 for part in plan.portions)
    assert plan.open_device_s == pytest.approx(6.0), (
        "the peak leaves 0.1 worker for a minute now, and no slot is better"
    )


def test_planning_again_does_not_begin_the_half_anew() -> None:
    due_s = NOW_S + 7_200
    later = plan_holds([(due_s, 50.0)], [1.6] * 40 + [0.2] * 60, workers=2.0, now_s=NOW_S)
    assert {part.start_s for part in later.portions} == {NOW_S + 40 * 60}
    again = plan_holds(
        [(due_s, 50.0)], [1.6] * 40 + [0.2] * 60, workers=2.0, now_s=NOW_S, limits={due_s: NOW_S + 1_200}
    )
    assert max((part.start_s for part in again.portions), default=NOW_S) <= NOW_S + 1_200
    over = plan_holds([(due_s, 50.0)], [1.6] * 40 + [0.2] * 60, workers=2.0, now_s=NOW_S, limits={due_s: NOW_S - 5})
    assert (over.open_device_s, over.portions) == (50.0, ())


def test_a_trough_takes_what_it_has_room_for_and_the_rest_goes_elsewhere() -> None:
    trough_s = 30 * (0.85 * 2 - 0.2) * 60
    plan = planned([(NOW_S + 7_300, trough_s + 100.0)])
    in_trough = sum(part.device_s for part in plan.portions if part.price < 0.5)
    assert in_trough == pytest.approx(trough_s)
    assert sum(part.device_s for part in plan.portions) + plan.open_device_s == pytest.approx(trough_s + 100.0)


def test_what_fits_nowhere_is_not_held() -> None:
    plan = planned([(NOW_S + 600, 500.0)], [3.0] * 60)
    assert plan.open_device_s == 500.0
    assert plan.portions == ()


def test_a_slots_work_is_spread_over_its_minute_and_a_moment_as_good_takes_all() -> None:
    plan = planned([(NOW_S + 7_300, 60.0)])
    at = plan.portions[0].start_s

    def held(now_s: float, *, released: float = 0.0, price: float = 0.8) -> Hold:
        return hold_now(plan, released_device_s=released, price_now=price, in_use=0.9, now_s=now_s)

    assert held(NOW_S).device_s == 0.0
    assert held(at + 30).device_s == pytest.approx(30.0)
    assert held(at + 30, released=25.0).device_s == pytest.approx(5.0)
    assert held(at + 60) == Hold(price=0.8, low=True)
    assert not held(NOW_S, price=0.14).holds, "0.05 above the trough is as good"


def test_an_idle_pool_holds_nothing() -> None:
    plan = planned([(NOW_S + 7_300, 60.0)])
    assert hold_now(plan, released_device_s=0.0, price_now=0.8, in_use=0.59, now_s=NOW_S).device_s == math.inf


def test_a_day_is_planned_and_no_more() -> None:
    far_s = NOW_S + 20 * 86_400
    plan = plan_holds([(far_s, 1.0)], [1.0] * SLOTS_MAX + [0.1], workers=2.0, now_s=NOW_S)
    assert all(part.start_s < NOW_S + SLOTS_MAX * 60 for part in plan.portions)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 20_000), st.floats(0.1, 400)), max_size=30).map(sorted),
    st.lists(st.floats(0, 3), min_size=1, max_size=200),
    st.floats(0.5, 5),
)
def test_no_work_is_lost_no_slot_overfilled_and_no_slack_overspent(
    due: list[tuple[float, float]], forecast: list[float], workers: float
) -> None:
    demand = [(NOW_S + away, device_s) for away, device_s in due]
    plan = planned(demand, forecast, workers)
    total = sum(device_s for _, device_s in demand)
    assert plan.open_device_s + sum(part.device_s for part in plan.portions) == pytest.approx(total)
    filled: dict[float, float] = {}
    for part in plan.portions:
        filled[part.start_s] = filled.get(part.start_s, 0.0) + part.device_s
        assert part.start_s - NOW_S <= 0.5 * (part.due_s - NOW_S) + 1e-6
    for start_s, device_s in filled.items():
        u = forecast[round((start_s - NOW_S) / 60)]
        assert device_s <= max(0.0, 0.85 * workers - u) * 60 + 1e-6
    late = hold_now(plan, released_device_s=0.0, price_now=9.0, in_use=1.0, now_s=NOW_S + 1e6)
    assert late.device_s == math.inf, "in the end everything may go"
