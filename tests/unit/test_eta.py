"""Estimates: more work ahead never shortens a wait, and no work is negative."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.fleet import Demand, LanePlan, Plan, PoolPlan, StepTimes
from laneway.core.lanes import PARKING_LANES, Lane
from laneway.policy import eta as etas
from laneway.policy.eta import Load, PoolView, due_by, parking_eta, prefill_rate, priority_eta, rates, work_ahead_s
from laneway.policy.inflow import Flow, Inflow
from laneway.policy.turns import REVERSION_S, Supply, turns_s
from tests.unit.test_admit import IDLE, POOL

BUSY = replace(IDLE, free_slots=0, service_s=4.0)
CURVE = tuple(Demand(100.0 * (n + 1), 10.0 * (n + 1)) for n in range(5))


def test_the_work_due_by_a_time_is_read_from_the_curve():
    lane = LanePlan(Lane.BATCH, parked=9, parked_device_s=50.0, demand=CURVE)
    assert [due_by(lane, at) for at in (100.0, 150.0, 200.0, 500.0, 900.0)] == [10.0, 15.0, 20.0, 50.0, 50.0]
    assert due_by(lane, 1.0) == 10.0, "of the first there is no more to know"
    assert due_by(lane, None) == due_by(replace(lane, demand=()), 100.0) == 50.0


def test_only_what_is_due_no_later_is_ahead():
    lanes = (LanePlan(Lane.BATCH, parked=9, parked_device_s=50.0, demand=CURVE),)
    view = PoolView(replace(BUSY, lanes=lanes))
    soon, late = (parking_eta(POOL, view, Lane.BATCH, 100, 50, floor=0.1, due_s=due) for due in (100.0, 500.0))
    assert soon.wait_s < late.wait_s
    assert soon.ahead_device_s == pytest.approx(10.0)
    assert parking_eta(POOL, view, Lane.DEFERRABLE, 100, 50, floor=0.1, due_s=500.0).ahead_device_s == 0.0


def test_priority_demand_takes_its_share_and_the_floor_stays():
    lanes = (LanePlan(Lane.BATCH, parked=9, parked_device_s=40.0),)
    plan = replace(BUSY, lanes=lanes)

    def capacity(per_s: float) -> float:
        view = PoolView(replace(plan, priority_per_s=per_s))
        return parking_eta(POOL, view, Lane.BATCH, 100, 50, floor=0.1).capacity

    assert capacity(0.5) == pytest.approx(2 - 0.5 * 4.0 / POOL.slots)
    assert capacity(100.0) == pytest.approx(2 * 0.1)
    assert capacity(1e-9) == pytest.approx(2.0)


def test_the_interference_budget_bounds_what_lower_lanes_prefill():
    lanes = (LanePlan(Lane.BATCH, parked=9, parked_device_s=40.0),)
    plan = replace(BUSY, lanes=lanes)
    free, tight = (
        parking_eta(POOL, PoolView(replace(plan, lower_tokens_per_s=rate)), Lane.BATCH, 1000, 50, floor=0.1)
        for rate in (1e9, 20.0)
    )
    assert tight.wait_s > 10 * free.wait_s
    assert tight.wait_s >= tight.ahead_tokens / 20.0
    assert tight.ttft_s - tight.wait_s > free.ttft_s - free.wait_s, "its own prompt comes by that rate too"


def test_step_times_say_what_a_token_costs_at_the_present_batch():
    times = StepTimes(base_s=0.01, sequence_s=0.001, prefill_token_s=0.0001, chunk_tokens=100)
    slow = replace(POOL, prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0)
    alone = rates(slow, replace(IDLE, step_times=times))
    assert alone.decode_tokens_per_s == pytest.approx(1 / 0.011)
    full = rates(slow, replace(BUSY, step_times=times))
    assert full.decode_tokens_per_s == pytest.approx(1 / 0.014), "four run on each worker, and no fifth fits"
    assert full.prefill_tokens_per_s == pytest.approx(1 / (0.0001 + 0.014 / 96)), "they take their tokens of the step"
    assert rates(slow, BUSY).decode_tokens_per_s == 1.0


def test_a_queue_of_prompts_is_emptied_beside_what_runs_with_the_contexts_that_it_has():
    """Not as an idle pool would: else a pool at its limit looks as if it had no queue."""
    times = StepTimes(base_s=0.01, sequence_s=0.001, context_token_s=1e-6, prefill_token_s=0.0001, chunk_tokens=100)
    loaded = replace(BUSY, step_times=times, kv_tokens=20_000, free_kv_tokens=4_000)
    running = BUSY.slots - BUSY.free_slots
    each = running // BUSY.workers
    step_s = times.decode_s(each, each * (16_000 // running))
    assert prefill_rate(POOL, loaded) == pytest.approx(BUSY.workers / (0.0001 + step_s / (100 - each)), rel=0.05)
    assert prefill_rate(POOL, replace(loaded, free_kv_tokens=20_000)) > prefill_rate(POOL, loaded)


def test_the_floor_takes_places_from_priority_only_while_lower_work_waits():
    waits = replace(BUSY, lanes=(LanePlan(Lane.BATCH, parked=1),))
    plain = priority_eta(POOL, PoolView(BUSY), 100, 50, floor=0.1)
    assert priority_eta(POOL, PoolView(waits), 100, 50, floor=0.1).wait_s == pytest.approx(plain.wait_s / 0.9)


def test_batch_waits_for_its_turns_and_for_what_comes_in_above_it():
    lanes = (LanePlan(Lane.BATCH, parked=9, parked_device_s=20.0),)
    view = PoolView(replace(BUSY, lanes=lanes))

    def wait_s(inflow: float, deferrable: float = 0.0) -> float:
        above = LanePlan(Lane.DEFERRABLE, parked=1 if deferrable else 0, parked_device_s=deferrable)
        more = replace(
            view, plan=replace(view.plan, lanes=(*lanes, above)), inflow={Lane.DEFERRABLE: Flow(inflow, 0.0, inflow)}
        )
        return parking_eta(POOL, more, Lane.BATCH, 100, 50, floor=0.1, share=0.2).wait_s

    assert wait_s(1.0) > wait_s(0.0)
    assert wait_s(99.0) == pytest.approx(wait_s(0.0) + 20.0 / (0.2 * 2.0) - 20.0 / 2.0), "its share it gets"
    assert wait_s(0.0) < wait_s(0.0, 30.0) <= wait_s(99.0, 30.0)


def test_a_long_answer_and_a_long_wait_add_in_squares():
    eta = etas.Eta(1.0, 3.0, 2.0, 5.0, longer_s=4.0)
    assert eta.bounds_s(1.0) == (5.0, 10.0)


amounts = st.floats(0, 1e4)


@given(
    lane=st.sampled_from(PARKING_LANES),
    parked=amounts,
    more=amounts,
    above=amounts,
    inflow=st.floats(0, 5),
    spread=st.floats(0, 5),
    mean=st.floats(0, 5),
    due=st.none() | st.floats(0, 1000),
    lower=st.sampled_from([0.0, 10.0, 1e5]),
    free=st.integers(0, 8),
    workers=st.integers(0, 3),
    since=st.floats(0, 100),
)
def test_more_work_ahead_never_shortens_a_wait(
    lane, parked, more, above, inflow, spread, mean, due, lower, free, workers, since
):
    def eta(device_s: float, above_s: float, since_s: float) -> etas.Eta:
        own = LanePlan(lane, parked=1, parked_device_s=device_s, demand=(Demand(500.0, device_s),))
        other = LanePlan(Lane.DEFERRABLE, parked=1, parked_device_s=above_s)
        plan = PoolPlan(
            "chat-small", workers=workers, slots=4 * workers, free_slots=min(free, 4 * workers), service_s=2.0,
            lanes=(own, other) if lane is Lane.BATCH else (own,), lower_tokens_per_s=lower,
        )  # fmt: skip
        flows = {Lane.PRIORITY: Flow(0.3, spread, 0.2), Lane.DEFERRABLE: Flow(inflow, spread, mean)}
        view = PoolView(plan, since=Load(0, 0, since_s), inflow=flows)
        return parking_eta(POOL, view, lane, 100, 50, floor=0.1, due_s=due, share=0.2 if lane is Lane.BATCH else 1.0)

    less, most = eta(parked, above, since), eta(parked + more, above, since)
    for one in (less, most, eta(parked, above + more, since), eta(parked, above, since + more)):
        assert one.wait_s >= less.wait_s - 1e-6
        assert one.completion_s >= less.completion_s - 1e-6
        assert min(one.wait_s, one.wait_sigma_s, one.ahead_jobs, one.ahead_tokens, one.ahead_device_s) >= 0.0
        assert all(math.isfinite(bound) for bound in one.bounds_s(1.28))


@given(ready=st.integers(0, 50), more=st.integers(0, 50), since=st.integers(-20, 50), tokens=st.integers(0, 10**6))
def test_more_priority_work_ahead_never_shortens_a_wait(ready, more, since, tokens):
    def eta(waiting: int, jobs: int, prompts: int) -> etas.Eta:
        plan = replace(BUSY, free_slots=3, lanes=(LanePlan(Lane.PRIORITY, ready=waiting),))
        return priority_eta(POOL, PoolView(plan, since=Load(jobs, prompts)), 100, 50, long_tokens=90)

    less = eta(ready, since, 0)
    for one in (eta(ready + more, since, 0), eta(ready, since + more, 0), eta(ready, since, tokens)):
        assert one.wait_s >= less.wait_s
        assert one.ttft_s >= less.ttft_s
    assert less.wait_s >= 0.0
    assert less.longer_s > 0.0


@given(first=amounts, second=amounts)
def test_work_that_was_taken_away_leaves_no_negative_work(first: float, second: float):
    left = Load(0, 0, first) - Load(0, 0, second)
    assert left.device_s >= 0.0
    assert work_ahead_s(POOL, PoolView(IDLE, since=left), Lane.BATCH, service_s=1.0) >= 0.0


def plan_of(running: int, parked_s: float, now_s: float) -> Plan:
    lanes = (LanePlan(Lane.DEFERRABLE, running=running, parked_device_s=parked_s),)
    return Plan("r", made_s=now_s, pools=(replace(IDLE, lanes=lanes),))


def test_inflow_is_what_is_served_and_what_piles_up():
    inflow = Inflow()
    for second in range(1200):
        inflow.observe(plan_of(4, 0.5 * second, second), float(second))
    flow = inflow.of("chat-small")[Lane.DEFERRABLE]
    assert flow.rate == pytest.approx(2 * 4 / 8 + 0.5)
    assert flow.spread == pytest.approx(0.0, abs=0.2)
    assert inflow.of("other") == {}


def test_jobs_that_come_at_once_into_a_pool_at_rest_are_no_load_that_goes_on():
    inflow = Inflow()
    for second in range(4):
        inflow.observe(plan_of(0, 50.0 if second > 1 else 0.0, second), float(second))
    flow = inflow.of("chat-small")[Lane.DEFERRABLE]
    assert flow.rate < 1.2, "of two workers' time"
    assert flow.spread < 1.2


def test_inflow_knows_how_the_load_swings_and_is_never_negative():
    inflow = Inflow()
    for second in range(600):
        inflow.observe(plan_of(8 if second // 60 % 2 else 0, 0.0, second), float(second))
    assert inflow.of("chat-small")[Lane.DEFERRABLE].spread > 0.5
    for second in range(600, 640):
        inflow.observe(plan_of(0, 1e4 - second, second), float(second))
    assert inflow.of("chat-small")[Lane.DEFERRABLE].rate >= 0.0


def test_a_long_silence_of_plans_is_no_flow():
    inflow = Inflow()
    inflow.observe(plan_of(0, 0.0, 0.0), 0.0)
    inflow.observe(plan_of(0, 1e6, 100.0), 100.0)
    assert inflow.of("chat-small")[Lane.DEFERRABLE].rate == 0.0


def test_a_peak_is_not_taken_to_last_for_a_long_wait():
    peak = Supply(0.2, 1.0)
    assert turns_s(0.1, 0.0, peak) == pytest.approx(0.1 / 0.2, rel=0.1)
    assert turns_s(300.0, 0.0, peak) < 300.0 + 2 * REVERSION_S
    assert turns_s(300.0, 0.0, Supply(1.0, 0.2)) > 1000.0
    assert turns_s(5000.0, 0.0, Supply(1.0, 1.0)) == pytest.approx(5000.0)


@given(amounts, amounts, amounts, st.floats(0.01, 5), st.floats(0.01, 5), st.floats(0, 5), st.floats(0, 5))
def test_turns_take_longer_with_more_work_of_either_lane(own, above, more, now, later, inflow, mean):
    supply = Supply(now, later, inflow, mean, 0.2)
    least = turns_s(own, above, supply)
    assert least >= 0.0
    assert turns_s(own + more, above, supply) >= least - 1e-6
    assert turns_s(own, above + more, supply) >= least - 1e-6
    assert turns_s(own, above, supply.less(0.5, 0.01)) >= least - 1e-6
