"""Headroom: as much room as priority may need before a place can be freed for it, and no more for long."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.policy.headroom import Arrivals, HeadroomParams, dispersion, expected_jobs, headroom

PARAMS = HeadroomParams(slots_min=1)


def fed(times: list[float], stay_s: float = 0.0, tokens: int = 500) -> Arrivals:
    arrivals = Arrivals(2.0)
    for time_s in times:
        arrivals.arrived(time_s)
        if stay_s:
            arrivals.left(tokens, stay_s)
    return arrivals


def poisson(rate: float, span_s: float, seed: int = 1) -> list[float]:
    random, now_s, times = Random(seed), 0.0, []
    while (now_s := now_s + random.expovariate(rate)) < span_s:
        times.append(now_s)
    return times


def test_poisson_arrivals_ask_for_the_mean_and_some_spread():
    arrivals = fed(poisson(2.0, 300.0))
    counts = arrivals.counts(300.0)
    assert dispersion(counts) == pytest.approx(1.0, abs=0.4)
    jobs = expected_jobs(counts, 0.0, 0, 2.0, 2.33)
    assert jobs == pytest.approx(4.0 + 2.33 * math.sqrt(4.0), rel=0.25)


def test_bursts_ask_for_more_than_the_same_rate_evenly():
    bursts = [20.0 * n + k * 0.01 for n in range(15) for k in range(40)]
    even = [0.5 * n for n in range(600)]
    kept = [headroom(fed(t), 300.0, here=0, slots=64, kv_tokens=10**6, params=PARAMS).slots for t in (bursts, even)]
    assert kept[0] >= 30, "a burst of forty comes within one window"
    assert kept[1] <= 10


def test_jobs_that_are_gone_at_once_keep_one_place_after_the_other():
    """Thirteen a second that stay for 0.3 s use four places, not twenty-six."""
    times = poisson(13.0, 300.0)
    brief = headroom(fed(times, stay_s=0.3), 300.0, here=4, slots=64, kv_tokens=10**6, params=PARAMS)
    long = headroom(fed(times, stay_s=60.0), 300.0, here=4, slots=64, kv_tokens=10**6, params=PARAMS)
    assert brief.slots <= 8
    assert long.slots >= 26


def test_it_fades_to_the_floor_when_nobody_comes_any_more():
    arrivals = fed(poisson(5.0, 300.0), stay_s=30.0)
    kept = [headroom(arrivals, now_s, here=0, slots=64, kv_tokens=10**6, params=PARAMS).slots for now_s in
            (300.0, 450.0, 601.0)]  # fmt: skip
    assert kept[0] > kept[1] >= kept[2] == 1


def test_memory_is_kept_for_large_ones_among_what_comes():
    arrivals = fed(poisson(1.0, 300.0), stay_s=30.0, tokens=2000)
    kept = headroom(arrivals, 300.0, here=0, slots=64, kv_tokens=10**6, params=PARAMS)
    assert kept.kv_tokens == kept.slots * 2000


def test_arrivals_divide_among_workers_that_share_them():
    times = poisson(10.0, 300.0)
    alone = headroom(fed(times), 300.0, here=0, slots=100, kv_tokens=0, params=PARAMS).slots
    shared = headroom(fed(times), 300.0, here=0, slots=100, kv_tokens=0, params=PARAMS, workers=4).slots
    assert shared == math.ceil(alone / 4) or abs(shared - alone / 4) <= 1


def test_with_z_of_none_the_floor_alone_holds():
    arrivals = fed(poisson(10.0, 300.0))
    params = HeadroomParams(z=0.0, slots_min=2)
    assert headroom(arrivals, 300.0, here=0, slots=64, kv_tokens=10**6, params=params).slots == 2


@given(
    st.lists(st.floats(0.0, 1000.0), max_size=80).map(sorted),
    st.floats(0.0, 100.0), st.integers(0, 100), st.integers(0, 256), st.integers(0, 10**6),
)  # fmt: skip
def test_never_more_than_half_a_worker_nor_less_than_the_floor(times, stay_s, here, slots, kv_tokens):
    kept = headroom(fed(times, stay_s), 1000.0, here=here, slots=slots, kv_tokens=kv_tokens, params=PARAMS)
    assert PARAMS.slots_min <= kept.slots <= max(PARAMS.slots_min, slots // 2)
    assert 0 <= kept.kv_tokens <= kv_tokens // 2
    assert 1.0 <= dispersion(fed(times).counts(1000.0)) <= 50.0
