"""Load is changed by time alone; columns are chosen from and joined without losing who shares what with whom."""

from __future__ import annotations

import math

import numpy as np
import pytest

from laneway.core.lanes import LANES, Lane
from laneway.simulator import made_up
from laneway.simulator.clients import Client, Quantiles, trace_of_clients
from laneway.simulator.columns import Contract, begin_s, joined, select, trace_of, with_blocks_of, with_contract
from laneway.simulator.processes import (
    Lengths,
    diurnal,
    drawn_tenants,
    gamma_arrivals,
    poisson_arrivals,
    shares_like,
    varying,
)
from laneway.simulator.scaling import compressed, excerpt, spread_ticks, superposed, tick_of
from laneway.simulator.trace import NO_SESSION, Prefixes, Trace


def cv_of(arrival_s: np.ndarray) -> float:
    gaps = np.diff(arrival_s)
    return float(gaps.std() / gaps.mean())


def sessions() -> Trace:
    """Two sessions of three and two turns, and one request alone, with blocks of 64."""
    ids = np.array([1, 2, 1, 2, 3, 1, 2, 3, 9, 9, 10, 5])
    starts = np.array([0, 2, 5, 8, 9, 11, 12])
    return trace_of(
        "sessions",
        np.array([1.0, 0.0, 0.0, 4.0, 0.0, 6.0]),
        np.array([130, 200, 200, 64, 128, 70]),
        np.array([5, 6, 7, 8, 9, 10]),
        session=np.array([0, 0, 0, 1, 1, NO_SESSION]),
        think_s=np.array([0.0, 2.0, 3.0, 0.0, 4.0, 0.0]),
        prefixes=Prefixes(64, ids, starts),
    )


@pytest.mark.parametrize("factor", [0.5, 3.0, 48.0])
def test_compressing_time_keeps_burstiness_and_who_asks_what(factor: float):
    trace = made_up.code(3000)
    faster = compressed(trace, factor)
    assert cv_of(faster.arrival_s) == pytest.approx(cv_of(trace.arrival_s), rel=1e-9)
    assert faster.span_s == pytest.approx(trace.span_s / factor)
    assert np.array_equal(faster.prompt_tokens, trace.prompt_tokens)
    assert faster.notes[-1] == f"time compressed by {factor:g}"


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan])
def test_time_is_compressed_by_a_positive_factor_alone(factor: float):
    with pytest.raises(ValueError, match="cannot be compressed"):
        compressed(made_up.chat(10), factor)


def test_think_times_are_compressed_as_arrivals_are():
    faster = compressed(sessions(), 2.0)
    assert faster.think_s.tolist() == [0.0, 1.0, 1.5, 0.0, 2.0, 0.0]
    assert faster.arrival_s.tolist() == [0.5, 0.0, 0.0, 2.0, 0.0, 3.0]


def test_superposed_copies_have_tenants_of_their_own_and_smooth_bursts():
    trace = made_up.code(4000)
    four = superposed(trace, [0.0, 300.0, 700.0, 1100.0])
    assert len(four) == 4 * len(trace)
    assert four.tenants == ("default.1", "default.2", "default.3", "default.4")
    assert np.bincount(four.tenant).tolist() == [4000] * 4
    assert np.all(np.diff(four.arrival_s) >= 0.0)
    assert cv_of(four.arrival_s) < 0.8 * cv_of(trace.arrival_s)
    assert sorted(four.prompt_tokens[four.tenant == 2].tolist()) == sorted(trace.prompt_tokens.tolist())


def test_copies_of_sessions_keep_their_turns_and_share_no_prefix():
    two = superposed(sessions(), [0.0, 3.0])
    assert len(np.unique(two.session[two.session >= 0])) == 4
    assert two.prefixes is not None
    mine = [
        set(np.concatenate([two.prefixes.of(row) for row in np.flatnonzero(two.tenant == copy).tolist()]))
        for copy in (0, 1)
    ]
    assert not mine[0] & mine[1]
    for session in range(4):
        rows = np.flatnonzero(two.session == session)
        assert two.think_s[rows[0]] == 0.0
        assert np.all(two.think_s[rows[1:]] > 0.0)
        assert np.all(np.diff(two.output_tokens[rows]) == 1)


def test_an_excerpt_has_what_begins_in_its_time_with_all_its_turns():
    part = excerpt(sessions(), 3.0, 6.0)
    assert part.output_tokens.tolist() == [8, 9]
    assert part.arrival_s.tolist() == [1.0, 0.0]
    assert part.notes[-1] == "seconds 3 to 6 of it"


def test_ticks_are_found_where_most_arrivals_share_one_and_nowhere_else():
    ticks = np.repeat(np.arange(0.0, 300.0, 3.0), 5)
    assert tick_of(ticks) == 3.0
    assert tick_of(ticks + np.repeat(np.arange(100) % 2, 5) * 0.001) == pytest.approx(3.0, abs=0.002)
    assert tick_of(np.repeat(np.linspace(0.0, 0.099, 100), 5)) is None  # a clock of milliseconds
    assert tick_of(np.arange(0.0, 300.0, 3.0)) is None  # one at each: a steady caller, no tick
    assert tick_of(np.zeros(50)) is None  # a list of jobs
    assert tick_of(np.zeros(0)) is None
    assert tick_of(made_up.code(2000).arrival_s) is None


def test_ticks_are_spread_evenly_without_a_generator():
    assert spread_ticks(np.array([0.0, 0.0, 3.0]), 3.0, None).tolist() == [0.75, 2.25, 4.5]


def test_a_trace_of_sessions_is_in_order_of_their_begins():
    trace = sessions()
    shuffled = select(trace, np.array([5, 3, 4, 0, 1, 2]))
    again = trace_of(
        "again", shuffled.arrival_s, shuffled.prompt_tokens, shuffled.output_tokens,
        session=shuffled.session, think_s=shuffled.think_s, prefixes=shuffled.prefixes,
    )  # fmt: skip
    assert again.output_tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert begin_s(again).tolist() == [1.0, 1.0, 1.0, 4.0, 4.0, 6.0]
    assert again.prefixes is not None
    assert again.prefixes.of(2).tolist() == [1, 2, 3]
    assert again.span_s == 6.0


def test_joined_traces_keep_their_contracts_and_stay_apart():
    chats = with_contract(made_up.chat(50), Contract(Lane.PRIORITY, ttft_s=0.5, max_tokens=300))
    both = joined("both", [chats, with_contract(sessions(), Contract(Lane.DEFERRABLE)), sessions()])
    assert len(both) == 62
    assert [int(both.of_lane(lane).sum()) for lane in LANES] == [56, 6, 0]
    assert np.all(both.ttft_s[both.of_lane(Lane.DEFERRABLE)] == math.inf)
    assert both.max_tokens[both.ttft_s == 0.5].min() == 300
    assert len(np.unique(both.session)) == 5
    assert both.prefixes is not None
    assert len(both.prefixes.ids) == 24
    assert len(np.unique(both.prefixes.ids)) == 12


def test_prefixes_in_blocks_of_two_sizes_are_not_joined():
    with pytest.raises(ValueError, match=r"blocks of \[32, 64\]"):
        joined("both", [sessions(), with_blocks_of(sessions(), 32)])


def test_smaller_blocks_say_the_same_of_what_is_shared():
    trace = made_up.long_chat(300)
    small = with_blocks_of(trace, 32)
    assert trace.prefixes is not None
    assert small.prefixes is not None
    assert small.prefixes.block_tokens == 32
    for one, other in [(0, 1), (5, 9), (100, 101)] + [(row, row) for row in range(0, 300, 50)]:
        shared = shared_blocks(trace.prefixes, one, other)
        assert shared_blocks(small.prefixes, one, other) == 16 * shared
    again = with_blocks_of(small, 512)
    assert again.prefixes is not None
    assert np.array_equal(again.prefixes.starts, trace.prefixes.starts)
    with pytest.raises(ValueError, match="do not split"):
        with_blocks_of(trace, 96)


def test_a_block_that_a_prompt_does_not_fill_gives_only_the_smaller_ones_that_it_does():
    partly = trace_of(
        "partly",
        np.zeros(1),
        np.array([700]),
        np.array([1]),
        prefixes=Prefixes(512, np.array([4, 5]), np.array([0, 2])),
    )
    prefixes = with_blocks_of(partly, 32).prefixes
    assert prefixes is not None
    assert prefixes.of(0).tolist() == [*range(64, 80), *range(80, 85)]


def shared_blocks(prefixes: Prefixes, one: int, other: int) -> int:
    first, second = prefixes.of(one), prefixes.of(other)
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if len(differ) else size


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0, 6.0])
def test_gamma_arrivals_have_their_rate_and_burstiness(cv: float):
    arrival_s = gamma_arrivals(np.random.default_rng(1), 60_000, 4.0, cv)
    assert arrival_s[0] == 0.0
    assert len(arrival_s) / arrival_s[-1] == pytest.approx(4.0, rel=0.01)
    assert cv_of(arrival_s) == pytest.approx(cv, rel=0.05)


def test_poisson_arrivals_are_drawn_in_number_too():
    counts = [len(poisson_arrivals(np.random.default_rng(seed), 5.0, 200.0)) for seed in range(20)]
    assert np.mean(counts) == pytest.approx(1000, rel=0.03)
    assert len(set(counts)) > 10
    assert cv_of(poisson_arrivals(np.random.default_rng(1), 50.0, 200.0)) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("peak", [1.5, 2.0, 2.98])
def test_a_days_course_has_its_peak_and_keeps_the_mean(peak: float):
    rates = diurnal(144, peak)
    assert rates.mean() == pytest.approx(1.0)
    assert rates.max() == pytest.approx(peak, rel=0.06)
    assert rates.min() >= 0.0
    assert int(np.argmax(diurnal(144, peak, phase=0.25))) == pytest.approx(108, abs=1)


def test_a_varying_rate_moves_arrivals_and_loses_none_inside():
    times_s = varying(np.arange(0.5, 40.0), np.array([1.0, 0.0, 3.0]), 10.0)
    assert [int(np.count_nonzero((times_s >= low) & (times_s < low + 10))) for low in (0, 10, 20)] == [10, 0, 30]


def test_bursty_clients_come_at_their_rate_from_the_begin_on():
    # A renewal process that began when it is first watched would have (cv^2 - 1) / 2 arrivals too many.
    lengths = Quantiles(np.array([1.0]), np.array([10.0]))
    rate, cv, gamma = np.full(4, 0.5), np.full(4, 8.0), np.zeros(4, dtype=np.bool_)
    clients = [Client(str(number), rate, cv, gamma, lengths, lengths) for number in range(400)]
    trace = trace_of_clients("pool", clients, 50.0, np.random.default_rng(1))
    assert len(trace) / len(clients) == pytest.approx(100.0, rel=0.12)
    halves = np.bincount((trace.arrival_s // 100.0).astype(int))
    assert halves[0] / halves[1] == pytest.approx(1.0, abs=0.15)


def test_lengths_have_their_quantiles_and_bounds():
    drawn = Lengths(1000, 4000, 6000).draw(np.random.default_rng(3), 50_000)
    assert np.percentile(drawn, [50, 95]) == pytest.approx([1000, 4000], rel=0.03)
    assert drawn.max() == 6000
    assert drawn.min() >= 1


def test_tenants_come_by_their_shares():
    shares = shares_like(162, 0.16, 0.63)
    assert shares.sum() == pytest.approx(1.0)
    assert shares[0] == pytest.approx(0.16, abs=0.005)
    assert shares[:10].sum() == pytest.approx(0.63, abs=0.005)
    assert np.all(np.diff(shares) <= 1e-12)
    drawn = drawn_tenants(np.random.default_rng(5), 100_000, [2.0, 1.0, 1.0])
    assert np.bincount(drawn) / 100_000 == pytest.approx([0.5, 0.25, 0.25], abs=0.01)
