"""Seeds: other days of the same traffic, the same for every policy, with rates, bursts and sessions as they were."""

from __future__ import annotations

import math

import numpy as np
import pytest

from laneway.core.lanes import LANES, Lane
from laneway.simulator import made_up
from laneway.simulator.bootstrap import Patience, bootstrapped, resample, streams, with_lanes
from laneway.simulator.columns import Contract, begin_s, later_turns, trace_of
from laneway.simulator.scaling import compressed
from laneway.simulator.trace import NO_SESSION, Prefixes, Trace

PEOPLE = Patience()


def steady(size: int = 1200, gap_s: float = 1.0) -> Trace:
    """Requests that say by their prompt when they came."""
    arrival_s = np.linspace(0.0, gap_s * (size - 1), size)
    return trace_of("steady", arrival_s, np.arange(1, size + 1), np.full(size, 100))


def test_one_seed_gives_one_trace_and_another_seed_another():
    trace = made_up.chat(3000)
    one, same, other = (bootstrapped(trace, seed, block_s=60.0, patience=PEOPLE) for seed in (1, 1, 2))
    for name in ("arrival_s", "prompt_tokens", "tenant", "patience_s", "leaves_after"):
        assert np.array_equal(getattr(one, name), getattr(same, name)), name
    assert not np.array_equal(one.arrival_s[:100], other.arrival_s[:100])


def test_rates_are_kept_on_average_and_exactly_where_they_are_steady():
    trace = steady()
    for seed in range(5):
        drawn = bootstrapped(trace, seed, block_s=100.0)
        assert len(drawn) == pytest.approx(1200, abs=13)  # a block's edge may fall between two
        assert drawn.span_s == pytest.approx(1200.0, abs=2.0)
    bursty = made_up.code(4000)
    sizes = [len(bootstrapped(bursty, seed, block_s=100.0)) for seed in range(60)]
    assert np.mean(sizes) == pytest.approx(4000, rel=0.08)


def test_a_trace_shorter_than_a_block_is_drawn_whole():
    for seed in range(5):
        drawn = bootstrapped(steady(100), seed, span_s=1000.0)
        assert len(drawn) == pytest.approx(1000, abs=11)
        assert np.bincount((drawn.arrival_s // 100.0).astype(int)).min() >= 98


def test_inside_a_block_everything_is_as_it_was_and_blocks_go_around_the_end():
    drawn = resample(steady(), streams(3, 1)[0], 300.0)
    steps = np.diff(drawn.prompt_tokens)
    breaks = int(np.count_nonzero(~np.isin(steps, (1, 1 - 1200))))
    assert breaks <= 3
    around = [resample(steady(), streams(seed, 1)[0], 300.0) for seed in range(8)]
    assert any(np.any(np.diff(each.prompt_tokens) == 1 - 1200) for each in around)


def test_burstiness_is_kept():
    trace = made_up.code(8000)
    gaps = np.diff(bootstrapped(trace, 4).arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(13.2, rel=0.35)


def test_a_longer_run_begins_as_the_shorter_one_does():
    trace = made_up.chat(2000)
    short = bootstrapped(trace, 9, block_s=30.0)
    long = bootstrapped(trace, 9, block_s=30.0, span_s=4 * trace.span_s)
    assert len(long) == pytest.approx(8000, rel=0.1)
    begins = int(0.9 * len(short))
    assert np.array_equal(short.prompt_tokens[:begins], long.prompt_tokens[:begins])


def test_tenants_and_lanes_are_redrawn_by_their_shares():
    trace = made_up.chat(5000)
    drawn = bootstrapped(trace, 1, tenants=[0.7, 0.3])
    assert np.bincount(drawn.tenant) / len(drawn) == pytest.approx([0.7, 0.3], abs=0.03)
    split = [(Contract(Lane.PRIORITY, ttft_s=0.5, max_tokens=500), 3.0), (Contract(Lane.BATCH, deadline_s=60.0), 1.0)]
    mixed = with_lanes(trace, split, streams(1, 1)[0])
    assert [int(mixed.of_lane(lane).sum()) / 5000 for lane in LANES] == pytest.approx([0.75, 0.0, 0.25], abs=0.03)
    assert set(mixed.ttft_s[mixed.of_lane(Lane.PRIORITY)].tolist()) == {0.5}
    assert set(mixed.deadline_s[mixed.of_lane(Lane.BATCH)].tolist()) == {60.0}
    assert np.all(mixed.max_tokens >= mixed.output_tokens)


def test_patience_is_log_normal_and_three_of_a_hundred_leave_half_way():
    drawn = bootstrapped(made_up.chat(), 1, patience=PEOPLE)
    assert np.median(drawn.patience_s) == pytest.approx(10.0, rel=0.03)
    assert np.log(drawn.patience_s).std() == pytest.approx(0.7, rel=0.03)
    leaving = drawn.leaves_after > 0
    assert leaving.mean() == pytest.approx(0.03, abs=0.005)
    assert np.all(drawn.leaves_after[leaving] < drawn.output_tokens[leaving])
    assert np.mean(drawn.leaves_after[leaving] / drawn.output_tokens[leaving]) == pytest.approx(0.5, abs=0.05)
    stays = bootstrapped(made_up.chat(500), 1)
    assert np.all(stays.patience_s == math.inf)
    assert not np.any(stays.leaves_after)


def test_what_one_knob_draws_does_not_move_the_draws_of_another():
    trace = made_up.chat(3000)
    plain = bootstrapped(trace, 5, patience=PEOPLE)
    tenants = bootstrapped(trace, 5, patience=PEOPLE, tenants=[0.5, 0.5])
    waiting = bootstrapped(trace, 5, patience=Patience(median_s=100.0))
    assert np.array_equal(plain.patience_s, tenants.patience_s)
    assert np.array_equal(plain.arrival_s, tenants.arrival_s)
    assert np.array_equal(plain.leaves_after, waiting.leaves_after)
    assert waiting.patience_s == pytest.approx(10.0 * plain.patience_s)


def test_the_same_callers_come_at_every_load():
    trace = made_up.chat(3000)
    low, high = (compressed(bootstrapped(trace, 6, patience=PEOPLE), factor) for factor in (1.0, 3.0))
    assert np.array_equal(low.patience_s, high.patience_s)
    assert np.array_equal(low.output_tokens, high.output_tokens)
    assert low.arrival_s == pytest.approx(3.0 * high.arrival_s)


def test_sessions_are_drawn_whole_in_order_with_their_think_times():
    trace = made_up.agents(40, 6)
    spaced = trace_of(
        "spaced",
        np.where(later_turns(trace), 0.0, 25.0 * trace.session),
        trace.prompt_tokens,
        trace.output_tokens,
        session=trace.session,
        think_s=trace.think_s,
        prefixes=trace.prefixes,
    )
    drawn = bootstrapped(spaced, 2, block_s=200.0)
    known = {tuple(turns_of(spaced, session)) for session in np.unique(spaced.session)}
    sessions = np.unique(drawn.session)
    assert 25 < len(sessions) < 55
    for session in sessions:
        assert tuple(turns_of(drawn, session)) in known
    assert np.all(np.diff(begin_s(drawn)) >= 0.0)


def turns_of(trace: Trace, session: int) -> list[tuple[int, int, float]]:
    rows = np.flatnonzero(trace.session == session)
    columns = (trace.prompt_tokens, trace.output_tokens, trace.think_s)
    return list(zip(*(column[rows].tolist() for column in columns), strict=True))


def test_a_time_that_is_drawn_twice_does_not_find_its_own_prompts_cached():
    trace = steady(600)
    starts = np.arange(601)
    alone = trace_of(
        "alone", trace.arrival_s, trace.prompt_tokens, trace.output_tokens,
        prefixes=Prefixes(32, np.arange(600), starts),
    )  # fmt: skip
    twice = bootstrapped(alone, 1, block_s=60.0, span_s=3000.0)
    assert twice.prefixes is not None
    assert len(np.unique(twice.prompt_tokens)) < len(twice)
    assert len(np.unique(twice.prefixes.ids)) == len(twice.prefixes.ids)


def test_requests_that_stand_alone_stay_alone():
    assert set(bootstrapped(steady(), 1).session.tolist()) == {NO_SESSION}


@pytest.mark.parametrize("block_s", [0.0, -5.0, math.nan])
def test_blocks_have_a_length(block_s: float):
    with pytest.raises(ValueError, match="blocks of"):
        bootstrapped(steady(), 1, block_s=block_s)
