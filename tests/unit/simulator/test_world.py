"""The simulated pool: nothing is lost or doubled whatever callers and workers do, and one seed gives one run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from laneway.core.lanes import LANES, Lane
from laneway.runtime.engine_profile import load_profile
from laneway.runtime.settings import PolicySettings
from laneway.simulator.ours.discipline import Laneway
from laneway.simulator.ours.params import OurParams
from laneway.simulator.outcomes import End, Run
from laneway.simulator.setup import EngineSize, Setup
from laneway.simulator.trace import NO_SESSION, Trace
from laneway.simulator.world import FleetParams, World

PRIORITY, DEFERRABLE, BATCH = range(len(LANES))


def traffic(
    seed: int = 1, *, span_s: float = 40.0, priority_per_s: float = 10.0, deferrable_per_s: float = 1.0, batch: int = 40
) -> Trace:
    """Bursty chats (CV 2.5), deferrable work with two minutes, and batch jobs of 2,000 tokens all at once."""
    random = np.random.default_rng(seed)

    def arrivals(per_s: float) -> np.ndarray:
        shape = 1.0 / 2.5**2
        gaps = random.gamma(shape, 1.0 / (shape * per_s), size=int(3 * per_s * span_s) + 10)
        times = np.cumsum(gaps)
        return times[times < span_s]

    rows: list[tuple[float, int, int, int, float, float, float]] = []
    for at_s in arrivals(priority_per_s):
        prompt, output = 1 + random.lognormal(6.5, 0.8), 1 + random.lognormal(4.5, 0.7)
        rows.append((at_s, PRIORITY, int(min(prompt, 8000)), int(min(output, 800)), 0.5, 0.03, 60.0))
    rows += [
        (at_s, DEFERRABLE, 1500, int(1 + random.integers(300)), math.inf, math.inf, 120.0)
        for at_s in arrivals(deferrable_per_s)
    ]
    rows += [(1.0, BATCH, 2000, 64, math.inf, math.inf, 3600.0)] * batch
    return trace_of(rows)


def trace_of(rows: list[tuple[float, int, int, int, float, float, float]], **columns: Any) -> Trace:
    """Rows: arrival, lane, prompt, output, TTFT, TPOT, deadline."""
    rows = sorted(rows, key=lambda row: row[0])
    at, lane, prompt, output, ttft, tpot, deadline = (np.array(column) for column in zip(*rows, strict=True))
    size = len(rows)
    values: dict[str, Any] = {
        "name": "made-up", "arrival_s": at.astype(float), "lane": lane, "tenant": np.zeros(size, dtype=np.int64),
        "prompt_tokens": prompt, "output_tokens": output, "max_tokens": np.maximum(output, 1000),
        "ttft_s": ttft.astype(float), "tpot_s": tpot.astype(float), "deadline_s": deadline.astype(float),
        "patience_s": np.full(size, math.inf), "leaves_after": np.zeros(size, dtype=np.int64),
        "session": np.full(size, NO_SESSION), "think_s": np.zeros(size),
    }  # fmt: skip
    return Trace(**(values | columns)).check()


def play(
    trace: Trace,
    workers: int = 2,
    *,
    slots: int = 32,
    seed: int = 0,
    deaths: Iterable[tuple[float, int]] = (),
    **params: Any,
) -> Run:
    setup = Setup(load_profile("h100-8b-fp8"), EngineSize(slots=slots), workers)
    ours = replace(OurParams.of(PolicySettings(), slots=slots, look_s=0.25), **params)
    fleet = FleetParams(workers=workers, boot_s=20.0)
    discipline = Laneway(setup.pool(), setup.times, ours)
    return World(trace, discipline, fleet, setup.engine, setup.times, seed=seed, deaths=deaths).run()


def ends(run: Run, lane: int | None = None) -> dict[End, int]:
    rows = run.outcomes.end if lane is None else run.outcomes.end[run.trace.lane == lane]
    return {End(value): int(count) for value, count in zip(*np.unique(rows, return_counts=True), strict=True)}


def test_everything_ends_once_with_all_its_tokens_where_there_is_room():
    trace = traffic()
    run = play(trace)
    assert ends(run) == {End.DONE: len(trace)}
    assert np.array_equal(run.outcomes.tokens, trace.output_tokens)
    assert np.all(run.outcomes.first_s >= trace.arrival_s)
    assert np.all(run.outcomes.end_s >= run.outcomes.first_s)
    assert run.usage.tokens.sum() == trace.output_tokens.sum()


def test_the_same_seed_gives_the_same_run():
    first, again = play(traffic(3)), play(traffic(3))
    assert np.array_equal(first.outcomes.end_s, again.outcomes.end_s)
    assert first.counts == again.counts


def test_priority_keeps_its_promise_beside_batch_that_fills_the_rest():
    run = play(traffic(2, batch=200))
    outcomes, trace = run.outcomes, run.trace
    chats = trace.of_lane(Lane.PRIORITY)
    kept = (outcomes.ttft_s <= trace.ttft_s) & (outcomes.tpot_s <= trace.tpot_s)
    assert kept[chats].mean() >= 0.95
    assert ends(run, BATCH) == {End.DONE: 200}


def test_a_door_that_refused_some_in_a_burst_costs_hardly_any_of_what_the_pool_can_do():
    """At a load that the pool serves, bursts included, the door must not keep away more than it protects."""
    trace = traffic(8, priority_per_s=94.0, span_s=60.0, deferrable_per_s=0.0001, batch=0)
    served, judged = play(trace, 4, slots=64, refuse=False), play(trace, 4, slots=64)
    assert kept(served) > 0.98, "the load is one that the pool can do"
    assert kept(judged) >= kept(served) - 0.02


def kept(run: Run) -> float:
    outcomes, trace = run.outcomes, run.trace
    in_time = (outcomes.ttft_s <= trace.ttft_s) & (outcomes.tpot_s <= trace.tpot_s)
    return float((in_time & (outcomes.end == End.DONE)).mean())


def test_callers_who_leave_at_the_very_moment_of_their_answer_end_once():
    rows = [(0.0, PRIORITY, 300, 1, 0.5, 0.03, 60.0)]
    first_s = float(play(trace_of(rows), 1).outcomes.first_s[0])
    run = play(replace(trace_of(rows), patience_s=np.array([first_s])), 1)
    assert ends(run) in ({End.DONE: 1}, {End.LEFT: 1})


def test_in_an_overload_doors_refuse_and_say_when_to_come_and_what_is_taken_is_served():
    run = play(traffic(4, priority_per_s=90.0, span_s=30.0, batch=0))
    counts = ends(run, PRIORITY)
    assert run.outcomes.retries.sum() > 100
    assert set(counts) <= {End.DONE, End.REFUSED}
    taken = (run.outcomes.end == End.DONE) & run.trace.of_lane(Lane.PRIORITY)
    waited = (run.outcomes.first_s - run.outcomes.accepted_s)[taken]
    assert np.mean(waited > 0.5) < 0.2, "of those that were let in, few wait long"


def test_callers_without_patience_leave_and_leave_nothing_behind():
    trace = traffic(5, priority_per_s=80.0, span_s=20.0)
    impatient = np.where(trace.lane == PRIORITY, 0.2, math.inf)
    gone_after = np.where(np.arange(len(trace)) % 7 == 0, 3, 0)
    run = play(replace(trace, patience_s=impatient, leaves_after=gone_after).check(), refuse=False)
    left = run.outcomes.end == End.LEFT
    assert left.sum() > 100
    assert End.OPEN not in ends(run)
    assert np.all(run.outcomes.tokens[(gone_after > 0) & left & ~np.isnan(run.outcomes.first_s)] == 3)


def test_what_ran_on_a_worker_that_dies_goes_on_elsewhere():
    trace = traffic(6)
    run = play(trace, 3, deaths=[(5.0, 0), (12.0, 1)])
    assert ends(run) == {End.DONE: len(trace)}
    assert np.array_equal(run.outcomes.tokens, trace.output_tokens)
    assert run.outcomes.recomputed_tokens.sum() > 0
    assert run.counts["deaths"] == 2


def test_a_turn_comes_its_think_time_after_the_turn_before():
    rows = [(1.0, PRIORITY, 500, 50, 0.5, 0.03, 60.0), *[(1.0, PRIORITY, 700, 40, 0.5, 0.03, 60.0)] * 3]
    trace = trace_of(rows, session=np.zeros(4, dtype=np.int64), think_s=np.array([0.0, 2.0, 2.0, 5.0]))
    run = play(trace, 1)
    assert ends(run) == {End.DONE: 4}
    gaps = run.outcomes.asked_s[1:] - run.outcomes.end_s[:-1]
    assert gaps == pytest.approx([2.0, 2.0, 5.0])


def test_batch_that_yields_is_computed_again_and_loses_no_token():
    rows = [(0.0, BATCH, 300, 3000, math.inf, math.inf, 3600.0)] * 64
    rows += [(5.0 + 0.001 * n, PRIORITY, 300, 100, 0.5, 0.03, 60.0) for n in range(40)]
    run = play(trace_of(rows), 2)
    assert ends(run) == {End.DONE: len(rows)}
    assert run.counts.get("preemptions", 0) > 0
    assert np.array_equal(run.outcomes.tokens, run.trace.output_tokens)


def test_a_fleet_that_scales_pays_for_workers_from_the_time_they_were_asked_for():
    run = play(traffic(7, priority_per_s=40.0, span_s=90.0, batch=0), 1, autoscale=True, refuse=False)
    assert run.usage.workers.max() > 1.0
    assert ends(run) == {End.DONE: len(run.trace)}


def test_a_trace_that_cannot_be_played_names_the_column():
    trace = traffic()
    with pytest.raises(ValueError, match="prompt_tokens"):
        replace(trace, prompt_tokens=np.zeros(len(trace), dtype=np.int64)).check()
    with pytest.raises(ValueError, match="arrival_s"):
        replace(trace, arrival_s=trace.arrival_s[::-1].copy()).check()
    with pytest.raises(ValueError, match="max_tokens"):
        replace(trace, max_tokens=trace.output_tokens - 1).check()
