"""Recorded traces, converted: what is read has the statistics that were measured on the originals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laneway.core.lanes import LANES, Lane
from laneway.simulator.bootstrap import bootstrapped
from laneway.simulator.readers import read_trace
from laneway.simulator.scaling import superposed
from laneway.simulator.trace import Trace
from laneway.simulator.workloads import WORKLOADS, workload

pytestmark = pytest.mark.skipif(
    not os.environ.get("LANEWAY_DATA_DIR"), reason="LANEWAY_DATA_DIR names no folder with recorded traces"
)
TRACES = Path(os.environ.get("LANEWAY_DATA_DIR", "")) / "traces"


def cv_of(arrival_s: np.ndarray) -> float:
    gaps = np.diff(arrival_s)
    return float(gaps.std() / gaps.mean())


def read(name: str, **options: Any) -> Trace:
    return read_trace(TRACES / name, **options)


def known_share(trace: Trace) -> float:
    """Of prompt blocks, those that an unlimited cache knows."""
    assert trace.prefixes is not None
    seen: set[int] = set()
    known = 0
    for row in range(len(trace)):
        ids = trace.prefixes.of(row).tolist()
        known += next((at for at, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids)
    return known / len(trace.prefixes.ids)


@pytest.mark.parametrize(
    ("name", "rows", "span_s", "per_s", "cv", "prompts", "answers"),
    [
        ("azure-2023-conv.csv.gz", 19_366, 3502, 5.53, 1.09, (1020, 4083, 4142, 14_050), (129, 451, 601, 1000)),
        ("azure-2023-code.csv.gz", 8_819, 3436, 2.57, 13.2, (1469, 7303, 7436, 7437), (13, 90, 251, 1899)),
        ("mooncake-conversation.csv.gz", 12_031, 3537, 3.40, 3.03, (6909, 39_550, 85_400, 126_195), (350, 698, 1119, 2000)),  # noqa: E501
        ("mooncake-synthetic.csv.gz", 3_993, 1022, 3.91, 1.01, (11_587, 48_905, 66_456, 191_378), (69, 519, 768, 893)),
    ],
)  # fmt: skip
def test_requests_have_the_measured_statistics(
    name: str, rows: int, span_s: float, per_s: float, cv: float, prompts: tuple[int, ...], answers: tuple[int, ...]
):
    trace = read(name, spread=False)
    assert len(trace) == rows
    assert trace.span_s == pytest.approx(span_s, abs=0.6)
    assert len(trace) / trace.span_s == pytest.approx(per_s, abs=0.01)
    assert cv_of(trace.arrival_s) == pytest.approx(cv, rel=0.01)
    assert np.percentile(trace.prompt_tokens, [50, 95, 99, 100]) == pytest.approx(prompts, abs=1.0)
    assert np.percentile(trace.output_tokens, [50, 95, 99, 100]) == pytest.approx(answers, abs=1.0)


def test_ticks_of_three_seconds_are_found_and_spread():
    clumped, spread = read("mooncake-conversation.csv.gz", spread=False), read("mooncake-conversation.csv.gz")
    assert np.count_nonzero(np.diff(clumped.arrival_s) == 0.0) / len(clumped) == pytest.approx(0.9, abs=0.01)
    assert cv_of(spread.arrival_s) == pytest.approx(1.0, abs=0.1)
    assert "recorded in ticks of 3 s" in " ".join(spread.notes)
    assert np.array_equal(clumped.output_tokens, spread.output_tokens)


def test_shared_prefixes_are_those_that_were_measured():
    assert known_share(read("mooncake-conversation.csv.gz")) == pytest.approx(0.37, abs=0.02)
    assert known_share(read("mooncake-synthetic.csv.gz")) == pytest.approx(0.64, abs=0.02)


def test_copies_smooth_bursts_as_far_as_was_measured():
    trace = read("azure-2023-code.csv.gz")
    quarter = trace.span_s / 4.0
    assert 6.5 < cv_of(superposed(trace, [0.0, quarter, 2 * quarter, 3 * quarter]).arrival_s) < 10.5  # 7.7 measured


def test_job_lengths_have_the_measured_statistics():
    jobs = read("arxiv-summarization-lengths.csv.gz")
    assert len(jobs) == 28_257
    assert np.percentile(jobs.prompt_tokens, [50, 95, 99, 100]) == pytest.approx((2730, 3813, 3933, 4054), abs=1.0)
    assert np.percentile(jobs.output_tokens, [50, 95, 99, 100]) == pytest.approx((167, 736, 3271, 4056), abs=1.0)


@pytest.mark.slow
def test_sessions_have_the_measured_statistics():
    trace = read("agent-sessions.csv.gz")
    turns = np.bincount(trace.session)
    assert (len(trace), len(turns), turns.min(), turns.max()) == (49_334, 710, 3, 561)
    assert np.median(turns) == pytest.approx(45, abs=1)
    assert np.percentile(trace.prompt_tokens, [50, 95, 99, 100]) == pytest.approx(
        (103_659, 300_666, 498_519, 894_371), abs=1.0
    )
    assert np.percentile(trace.output_tokens, [50, 95]) == pytest.approx((216, 1554), abs=1.0)
    later = trace.think_s[trace.think_s > 0.0]
    assert np.percentile(later, [50, 95]) == pytest.approx((10.0, 445.0), rel=0.05)
    assert known_share(trace) == pytest.approx(0.963, abs=0.01)


def test_the_sessions_that_fit_are_those_that_were_counted():
    trace = read("agent-sessions.csv.gz", prompt_tokens_most=131_072, think_s_most=60.0)
    assert len(np.unique(trace.session)) == 251
    assert trace.prompt_tokens.mean() == pytest.approx(65_600, rel=0.01)
    assert trace.think_s[trace.think_s > 0.0].mean() == pytest.approx(20.0, rel=0.1)


def test_a_pool_comes_at_its_published_rate_with_its_top_client():
    trace = read("servegen-windows.csv.gz", per_s=2.0)
    assert len(trace) / 86_400.0 == pytest.approx(2.0, rel=0.05)
    # Of the day whose windows are published here; over the pool's fourteen days it is another client, with 16 %.
    counts = np.bincount(trace.tenant)
    assert trace.tenants[int(counts.argmax())] == "c142"
    assert counts.max() / len(trace) == pytest.approx(0.289, abs=0.02)
    windows = np.bincount((trace.arrival_s // 600.0).astype(int), minlength=144)
    assert windows.max() / windows.mean() == pytest.approx(2.14, rel=0.1)


def test_seeds_of_bursty_traffic_keep_rate_and_burstiness():
    trace = read("azure-2023-code.csv.gz")
    drawn = [bootstrapped(trace, seed) for seed in range(30)]
    assert np.mean([len(each) for each in drawn]) == pytest.approx(8_819, rel=0.1)
    assert np.median([cv_of(each.arrival_s) for each in drawn]) == pytest.approx(13.2, rel=0.2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_scenario_takes_the_recorded_traces(name: str):
    trace = workload(name, TRACES, smoke=True).trace(1)
    allowed = ["arrivals made up"] if name == "batch-gateway" else []
    assert [note for note in trace.notes if "made up" in note and not note.startswith(tuple(allowed) or "-")] == []
    assert len(trace) > 50
    if name == "chat":
        assert trace.of_lane(Lane.PRIORITY).all()
    assert set(trace.lane.tolist()) <= set(range(len(LANES)))
