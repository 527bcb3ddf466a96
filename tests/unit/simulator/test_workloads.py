"""The scenarios by name: what each promises, whence it comes, and that loads and seeds change what they should."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from laneway.core.errors import ConfigError
from laneway.core.lanes import LANES, Lane
from laneway.simulator import made_up
from laneway.simulator.columns import begin_s, later_turns
from laneway.simulator.prefix_cache import PrefixCache
from laneway.simulator.processes import Lengths
from laneway.simulator.setup import BLOCK_TOKENS
from laneway.simulator.trace import Trace
from laneway.simulator.workload import job_list
from laneway.simulator.workloads import WORKLOADS, found, workload

LANES_OF = {
    "chat": {Lane.PRIORITY},
    "code-burst": {Lane.PRIORITY},
    "long-chat": {Lane.DEFERRABLE},
    "agents": {Lane.DEFERRABLE},
    "tenants-and-backfill": {Lane.PRIORITY, Lane.BATCH},
    "mixed-day": set(LANES),
    "batch-gateway": {Lane.PRIORITY, Lane.BATCH},
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_scenario_runs_without_recorded_traces_and_says_so(name: str):
    scenario = workload(name, smoke=True)
    trace = scenario.trace(1)
    assert trace.name == name
    assert {lane for lane in LANES if np.any(trace.of_lane(lane))} == LANES_OF[name]
    assert any("made up" in note for note in trace.notes)
    assert 0 < len(trace) < 10_000
    if trace.prefixes is not None:
        assert trace.prefixes.block_tokens == BLOCK_TOKENS
        assert np.all(np.diff(trace.prefixes.starts) * BLOCK_TOKENS <= trace.prompt_tokens)
    for lane in (Lane.PRIORITY, Lane.DEFERRABLE):
        assert np.all(trace.ttft_s[trace.of_lane(lane)] < math.inf)
    assert np.all(trace.deadline_s[trace.of_lane(Lane.BATCH)] < math.inf)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_one_trace_whoever_asks(name: str):
    scenario = workload(name, smoke=True)
    one, same, other = scenario.trace(1), workload(name, smoke=True).trace(1), scenario.trace(2)
    assert np.array_equal(one.arrival_s, same.arrival_s)
    assert np.array_equal(one.leaves_after, same.leaves_after)
    assert np.array_equal(one.prompt_tokens, same.prompt_tokens)
    assert not np.array_equal(one.arrival_s, other.arrival_s)


@pytest.mark.parametrize("name", ["chat", "code-burst", "long-chat"])
def test_load_compresses_time_and_asks_the_same(name: str):
    scenario = workload(name, smoke=True)
    low, high = scenario.trace(3), scenario.trace(3, load=4.0)
    assert np.array_equal(low.prompt_tokens, high.prompt_tokens)
    assert np.array_equal(low.patience_s, high.patience_s)
    assert low.arrival_s == pytest.approx(4.0 * high.arrival_s)


@pytest.mark.parametrize("name", ["chat", "tenants-and-backfill", "mixed-day", "batch-gateway"])
def test_load_over_a_given_span_brings_more_requests_and_the_same_jobs(name: str):
    scenario = workload(name, smoke=True)
    low, high = scenario.trace(3, span_s=scenario.span_s), scenario.trace(3, load=3.0, span_s=scenario.span_s)
    counts = [[int(trace.of_lane(lane).sum()) for lane in (Lane.PRIORITY, Lane.BATCH)] for trace in (low, high)]
    assert counts[1][0] == pytest.approx(3 * counts[0][0], rel=0.35)
    assert counts[1][1] == counts[0][1]
    assert high.span_s <= scenario.span_s


def test_load_and_span_are_positive():
    scenario = workload("chat", smoke=True)
    for load, span_s in [(0.0, None), (-1.0, None), (1.0, 0.0), (math.nan, None)]:
        with pytest.raises(ValueError, match="must be above 0"):
            scenario.trace(1, load=load, span_s=span_s)


def test_the_same_requests_come_smoothly_when_asked_to():
    scenario = workload("code-burst", smoke=True)
    bursty, smooth = scenario.trace(1), scenario.trace(1, poisson=True)
    assert np.array_equal(bursty.prompt_tokens, smooth.prompt_tokens)
    cv = [np.diff(trace.arrival_s).std() / np.diff(trace.arrival_s).mean() for trace in (bursty, smooth)]
    assert cv[0] > 5.0
    assert cv[1] == pytest.approx(1.0, abs=0.1)


def test_agents_are_twelve_sessions_for_each_engine_in_a_closed_loop():
    scenario = workload("agents")
    trace = scenario.trace(1)
    assert len(np.unique(trace.session)) == 48
    assert len(np.unique(scenario.trace(1, load=2.0).session)) == 96
    assert trace.think_s.max() <= 60.0
    assert trace.prompt_tokens.max() <= 131_072
    assert np.count_nonzero(~later_turns(trace)) == 48
    assert np.all(np.diff(begin_s(trace)) >= 0.0)
    assert trace.prefixes is not None
    for session in (0, 20):
        rows = np.flatnonzero(trace.session == session)
        first, second = (trace.prefixes.of(row) for row in rows[:2])
        assert np.array_equal(second[: len(first)], first)


def test_sessions_that_are_drawn_twice_share_nothing():
    source = workload("agents", smoke=True).trace(1, load=60.0)
    assert source.prefixes is not None
    owner: dict[int, int] = {}
    for row, session in enumerate(source.session.tolist()):
        ids = source.prefixes.of(row)
        assert all(owner.setdefault(block, session) == session for block in (int(ids[0]), int(ids[-1])))


def test_the_mixed_day_has_its_shares():
    trace = workload("mixed-day").trace(2)
    shares = [int(trace.of_lane(lane).sum()) / len(trace) for lane in LANES]
    assert shares == pytest.approx([0.6, 0.2, 0.2], abs=0.06)


def test_the_batch_gateway_has_three_windows():
    trace = workload("batch-gateway").trace(1)
    batch = trace.of_lane(Lane.BATCH)
    assert sorted(set(trace.deadline_s[batch].tolist())) == [1800.0, 7200.0, 86_400.0]
    assert {trace.tenants[tenant] for tenant in trace.tenant[batch]} == {"batch-30min", "batch-2h", "batch-24h"}
    gaps = np.diff(trace.arrival_s[trace.of_lane(Lane.PRIORITY)])
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.15)


def test_a_pools_day_has_its_peak_and_its_top_tenant():
    trace = workload("tenants-and-backfill").trace(1)
    people = trace.of_lane(Lane.PRIORITY)
    assert int(people.sum()) == pytest.approx(28_800, rel=0.1)
    counts = np.sort(np.bincount(trace.tenant[people]))[::-1]
    assert counts[0] / people.sum() == pytest.approx(0.16, abs=0.06)
    by_minute = np.bincount((trace.arrival_s[people] // 60.0).astype(int), minlength=24)
    assert by_minute.max() / by_minute.mean() > 2.0


def test_a_job_list_is_the_same_for_every_seed_and_goes_over_again_where_it_is_short():
    stream = job_list(made_up.jobs(100), 250, at_s=5.0, deadline_s=60.0)
    assert isinstance(stream.source, Trace)
    assert np.array_equal(stream.source.prompt_tokens[:50], stream.source.prompt_tokens[200:])
    assert set(stream.source.arrival_s.tolist()) == {5.0}
    scenario = workload("batch-gateway", smoke=True)
    one, other = (trace.prompt_tokens[trace.of_lane(Lane.BATCH)] for trace in (scenario.trace(1), scenario.trace(2)))
    assert np.array_equal(one, other)


def test_unknown_names_and_folders_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no workload; there are chat, code-burst"):
        workload("chats")
    with pytest.raises(ConfigError, match="no folder of traces"):
        workload("chat", tmp_path / "none")


def test_a_folders_own_file_is_taken_whatever_it_is_called_there(tmp_path: Path):
    rows = "\n".join(f"2023-11-16 18:{row // 60:02}:{row % 60:02}.5,{100 + row},7" for row in range(600))
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    assert found(tmp_path, ("azure-2023-conv", "AzureLLMInferenceTrace_conv")) is not None
    trace = workload("chat", tmp_path, smoke=True).trace(1)
    assert set(trace.output_tokens.tolist()) == {7}
    assert not any("made up" in note for note in trace.notes)
    assert any("made up" in note for note in workload("code-burst", tmp_path, smoke=True).trace(1).notes)


@pytest.mark.parametrize(
    ("trace", "per_s", "cv", "p50", "p95"),
    [
        (made_up.chat(), 5.53, 1.09, (1020, 129), (4083, 451)),
        (made_up.code(), 2.57, 13.2, (1469, 13), (7303, 90)),
        (made_up.long_chat(), 3.40, 1.0, (6909, 350), (39_550, 698)),
    ],
    ids=["chat", "code", "long-chat"],
)
def test_stand_ins_have_the_published_statistics(
    trace: Trace, per_s: float, cv: float, p50: tuple[int, int], p95: tuple[int, int]
):
    gaps = np.diff(trace.arrival_s)
    assert len(trace) / trace.span_s == pytest.approx(per_s, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.2)
    for column, half, most in zip((trace.prompt_tokens, trace.output_tokens), p50, p95, strict=True):
        assert np.percentile(column, [50, 95]) == pytest.approx([half, most], rel=0.08)


def reused(trace: Trace, blocks: int) -> float:
    assert trace.prefixes is not None
    cache, hits = PrefixCache(blocks), 0
    for row in range(len(trace)):
        ids = trace.prefixes.of(row).tolist()
        hits += cache.found(ids, len(ids))
        cache.keep(ids, len(ids))
    return hits / len(trace.prefixes.ids)


def test_made_up_long_chats_reuse_as_much_as_recorded_ones():
    trace = made_up.long_chat()
    assert reused(trace, 10**9) == pytest.approx(0.37, abs=0.04)
    assert reused(trace, 10_000) == pytest.approx(0.21, abs=0.06)
    assert reused(trace, 1_000) == pytest.approx(0.04, abs=0.02)


def test_ten_million_requests_take_little_memory():
    trace = workload("chat").trace(1, load=100.0, span_s=600.0, block_tokens=None)
    bytes_each = sum(column.nbytes for column in held(trace)) / len(trace)
    assert len(trace) > 900_000
    assert bytes_each <= 8 * 8  # arrival, tenant, lengths, what is allowed, patience, leaving; else one number for all


def held(trace: Trace) -> list[np.ndarray]:
    columns = [getattr(trace, name) for name in Trace.__slots__]
    return [column for column in columns if isinstance(column, np.ndarray) and column.strides != (0,)]


def test_lengths_above_the_bound_are_cut():
    assert Lengths(100, 1000, 150).draw(np.random.default_rng(1), 1000).max() == 150
