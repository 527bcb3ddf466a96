"""Who yields to a priority job without room: the cheapest single victim that can bear it, or nobody."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.fleet import LanePlan, PoolPlan
from laneway.core.lanes import LANES, Lane
from laneway.policy.preempt import PreemptParams, Speeds, Standing, choose_victim, may_yield, places_elsewhere, wait_s

PARAMS = PreemptParams()
SPEEDS = Speeds(prefill=1000.0, decode=50.0)
NOW_S = 1000.0
RUN = Standing(
    "j", Lane.BATCH, began_s=0.0, kv_tokens=600, prompt_tokens=100, generated=50, predicted=500, deadline_s=1e6
)


def chosen(*runs: Standing, need: int = 100, free: int = 0, params: PreemptParams = PARAMS) -> str:
    victim = choose_victim(runs, need_kv_tokens=need, free_kv_tokens=free, speeds=SPEEDS, now_s=NOW_S, params=params)
    return victim.job_id if victim is not None else ""


def test_batch_yields_before_deferrable_whatever_it_costs():
    dear = replace(RUN, job_id="dear", generated=390)
    cheap = replace(RUN, job_id="cheap", lane=Lane.DEFERRABLE, generated=0)
    assert chosen(cheap, dear) == "dear"
    assert chosen(cheap) == "cheap"


def test_the_least_work_lost_for_the_room_that_it_frees():
    small = replace(RUN, job_id="small", prompt_tokens=90, generated=10, kv_tokens=200)  # 0.5
    large = replace(RUN, job_id="large", prompt_tokens=200, generated=100, kv_tokens=1000)  # 0.3
    assert chosen(small, large) == "large"


def test_the_newest_of_equals():
    assert chosen(replace(RUN, job_id="old", began_s=5.0), replace(RUN, job_id="new", began_s=6.0)) == "new"


def test_one_that_frees_too_little_is_passed_over_and_two_are_never_taken():
    small = replace(RUN, job_id="small", kv_tokens=300, prompt_tokens=0, generated=1)
    assert chosen(small, RUN, need=600) == "j"
    assert chosen(small, RUN, need=601) == ""
    assert chosen(small, need=600, free=300) == "small"


@pytest.mark.parametrize(
    ("change", "yields"),
    [
        ({"generated": 400}, True),
        ({"generated": 401}, False),  # more than 80 % done
        ({"preemptions": 1}, True),
        ({"preemptions": 2}, False),  # pinned
        ({"resumable": False, "generated": 0}, True),
        ({"resumable": False, "generated": 1}, False),
        ({"kept": True}, False),
        ({"ending": True}, False),
        ({"lane": Lane.PRIORITY}, False),
        # 450 tokens to go are 9 s, and 150 to prefill again 0.15 s.
        ({"deadline_s": NOW_S + 29.16}, True),
        ({"deadline_s": NOW_S + 29.14}, False),
        ({"lane": Lane.DEFERRABLE, "deadline_s": NOW_S + 29.16}, True),
        ({"lane": Lane.DEFERRABLE, "deadline_s": NOW_S + 29.14}, False),
    ],
)
def test_who_may_yield(change: dict[str, object], yields: bool):
    assert may_yield(replace(RUN, **change), SPEEDS, NOW_S, PARAMS) is yields


def test_at_zero_preemptions_nobody_yields():
    assert chosen(RUN, params=PreemptParams(preemptions_max=0)) == ""


def test_waiting_priority_jobs_take_the_places_elsewhere_first():
    pool = PoolPlan("p", free_slots=3, lanes=(LanePlan(Lane.PRIORITY, ready=1),))
    assert places_elsewhere(pool, own_free=0) == 2
    assert places_elsewhere(pool, own_free=2) == 0
    assert places_elsewhere(replace(pool, free_slots=0), own_free=0) == 0


def test_the_wait_is_longer_while_there_may_be_room_elsewhere():
    assert wait_s(elsewhere=False, params=PARAMS) == PARAMS.delay_s
    assert wait_s(elsewhere=True, params=PARAMS) == PARAMS.delay_elsewhere_s
    assert wait_s(elsewhere=True, params=PreemptParams(delay_s=3.0)) == 3.0


@pytest.mark.parametrize(
    "bad",
    [
        {"preemptions_max": -1},
        {"done_max": -0.01},
        {"done_max": 1.01},
        {"done_max": float("nan")},
        {"slack_s_min": -1.0},
        {"delay_s": float("nan")},
        {"delay_elsewhere_s": -1.0},
    ],
)
def test_params_out_of_range_are_refused(bad: dict[str, float]):
    with pytest.raises(ValueError, match="must be"):
        PreemptParams(**bad)  # type: ignore[arg-type] # one of each type


standings = st.builds(
    Standing,
    job_id=st.text("abcdef", min_size=1, max_size=4),
    lane=st.sampled_from(LANES),
    began_s=st.floats(0.0, NOW_S),
    kv_tokens=st.integers(1, 4096),
    prompt_tokens=st.integers(0, 2000),
    generated=st.integers(0, 2000),
    predicted=st.integers(1, 2000),
    deadline_s=st.floats(NOW_S - 10.0, NOW_S + 1000.0),
    resumable=st.booleans(),
    preemptions=st.integers(0, 4),
    kept=st.booleans(),
    ending=st.booleans(),
)
crowds = st.lists(standings, max_size=12, unique_by=lambda run: run.job_id)


@given(crowds, st.integers(0, 6000), st.integers(0, 4096), st.randoms(use_true_random=False))
def test_a_victim_is_of_a_lower_lane_may_yield_and_suffices_whatever_the_order(
    runs: list[Standing], need: int, free: int, dice: random.Random
):
    victim = chosen(*runs, need=need, free=free)
    shuffled = list(runs)
    dice.shuffle(shuffled)
    assert chosen(*shuffled, need=need, free=free) == victim
    able = [run for run in runs if may_yield(run, SPEEDS, NOW_S, PARAMS) and free + run.kv_tokens >= need]
    assert bool(victim) is bool(able)
    for run in able:
        assert run.lane is not Lane.PRIORITY
        assert run.preemptions < PARAMS.preemptions_max
        assert not run.generated or run.resumable
        if run.job_id == victim:
            batch = [other for other in able if other.lane is Lane.BATCH]
            assert run.lane is Lane.BATCH or not batch


@given(crowds, st.lists(st.integers(0, 3000), max_size=60))
def test_nobody_yields_more_than_twice_however_often_priority_comes(runs: list[Standing], needs: list[int]):
    live = {run.job_id: replace(run, preemptions=0, ending=False) for run in runs}
    yielded: Counter[str] = Counter()
    for need in needs:
        victim = chosen(*live.values(), need=need)
        if victim:
            yielded[victim] += 1
            # It comes back as if it had been started again at once.
            live[victim] = replace(live[victim], preemptions=live[victim].preemptions + 1)
    assert all(count <= PARAMS.preemptions_max for count in yielded.values())
    assert all(live[job_id].lane is not Lane.PRIORITY for job_id in yielded)
