"""Fleet mode: nothing is lost, it agrees with steps counted by hand, with the simulated engine and the exact mode."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from laneway.core.fleet import StepTimes
from laneway.core.lanes import LANES, Lane
from laneway.policy.desired import DesiredParams
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.engine_profile import load_profile
from laneway.runtime.settings import PolicySettings
from laneway.runtime.step_price import LinearPrice
from laneway.simulator.fleet import Fleet, FleetRules
from laneway.simulator.fleet_load import Classes, FleetLoad, dispersion_within, diurnal, equal_requests, joined, load_of
from laneway.simulator.fleet_result import FleetResult, compare
from laneway.simulator.fleet_scale import Loss
from laneway.simulator.ours.discipline import Laneway
from laneway.simulator.ours.params import OurParams
from laneway.simulator.outcomes import End
from laneway.simulator.setup import EngineSize, Setup
from laneway.simulator.trace import NO_SESSION, Trace
from laneway.simulator.world import FleetParams, World
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest
from laneway.workers.engines.simulated import SimulatedCore

PRIORITY, DEFERRABLE, BATCH = range(len(LANES))
TIMES = StepTimes(0.005, 1e-4, 2e-8, 1.6e-5, 512)
H100 = Setup(load_profile("h100-8b-fp8"), EngineSize(slots=32), 10)


def pool(workers: int = 10, *, slots: int = 32, times: StepTimes = TIMES, load_s: float = 60.0):
    return with_fields(H100.pool(), workers=workers, slots=slots, step_times=times, load_s=load_s)


def steady(classes: Classes, per_s: list[float], span_s: int = 120, regions: int = 1) -> FleetLoad:
    counts = np.broadcast_to(np.array(per_s, dtype=np.float32), (span_s, regions, len(classes)))
    return FleetLoad(classes, np.array(counts))


def chat(prompt: float = 400.0, output: float = 80.0, *, ttft_s: float = 0.5, tpot_s: float = 0.03) -> Classes:
    return equal_requests(PRIORITY, prompt, output, TIMES, ttft_s=ttft_s, tpot_s=tpot_s)


def job(prompt: float = 2000.0, output: float = 64.0, lane: int = BATCH, deadline_s: float = math.inf) -> Classes:
    return equal_requests(lane, prompt, output, TIMES, deadline_s=deadline_s)


def run(load: FleetLoad, workers: int = 10, *, slots: int = 32, load_s: float = 60.0, **rules: Any) -> FleetResult:
    return Fleet(pool(workers, slots=slots, load_s=load_s), load, FleetRules(**rules)).run()


def test_requests_are_done_or_wait_or_run_or_were_refused_or_dropped_whatever_happens():
    classes = joined([chat(), chat(3000.0, 200.0), job(lane=DEFERRABLE, deadline_s=20.0), job()])
    load = steady(classes, [300.0, 60.0, 10.0, 50.0], regions=3)
    result = run(
        load, losses=[Loss(30, 0, workers=4), Loss(50, 1, until_s=70)], rtt_s=[[0.0, 0.05, 0.1]] * 3,
    )  # fmt: skip
    arrived = float(result.arrived.sum())
    assert abs(result.unaccounted) < 1e-5 * arrived
    for table in (result.refused, result.dropped, result.waiting, result.done):
        assert table.sum() > 0.0
        assert table.min() >= -1e-3
    assert np.all(result.kept.sum(axis=0) <= result.judged.sum(axis=0) + 1e-3)


def test_a_full_worker_decodes_as_many_tokens_as_its_steps_make():
    """8 places, prompts of next to nothing: 8 tokens each base + 8 x (sequence + context) seconds."""
    result = run(steady(job(1.0, 1001.0), [10.0], span_s=400), workers=1, slots=8)
    step_s = 0.005 + 8 * (1e-4 + 2e-8 * 501.5)
    assert result.running[-1, 0, BATCH] == pytest.approx(8.0, rel=0.02)
    assert result.done[200:, 0, BATCH].mean() * 1000.0 == pytest.approx(8.0 / step_s, rel=0.03)
    assert result.busy[-1, 0] > 0.99


def test_prompts_alone_are_computed_a_chunk_a_step():
    result = run(steady(job(20_000.0, 1.0), [10.0], span_s=200), workers=1)
    assert result.done[100:, 0, BATCH].mean() * 20_000.0 == pytest.approx(512 / (0.005 + 512 * 1.6e-5), rel=0.03)


def core_busy_share(per_s: float, prompt: int, output: int, span_s: float, seed: int) -> float:
    """Of one simulated engine, step by step, with Poisson arrivals."""
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1.0 / per_s, size=int(per_s * span_s)))
    capacity = EngineCapacity(64, 10**6, 10**6, 260, 32, TIMES.chunk_tokens, False)
    core = SimulatedCore(
        capacity, LinearPrice(TIMES), EngineOptions(prefix_cache=False), frozenset(), TIMES.chunk_tokens
    )  # fmt: skip
    now_s, number, ids = 0.0, 0, tuple(range(1, 2)) * prompt
    while number < len(times) or core.busy():
        if not core.busy():
            now_s = max(now_s, times[number])
        while number < len(times) and times[number] <= now_s:
            core.add(EngineRequest(number, ids, output))
            number += 1
        now_s = core.step(now_s).ends_s
    return core.stats().busy_s / now_s


@pytest.mark.parametrize("per_s", [1.0, 4.0])
def test_a_worker_is_as_busy_as_the_simulated_engine(per_s):
    exact = np.mean([core_busy_share(per_s, 200, 40, 100.0, seed) for seed in range(2)])
    result = run(steady(chat(200.0, 40.0), [per_s], span_s=60), workers=1, slots=64)
    assert result.busy[30:, 0].mean() == pytest.approx(exact, abs=0.05)


def test_below_its_limits_a_fleet_keeps_all_promises_and_workers_are_as_busy_as_littles_law_says():
    result = run(steady(chat(), [10.0]))
    assert result.attainment(Lane.PRIORITY) == pytest.approx(1.0, abs=2e-2)
    running = result.running[60:, 0, PRIORITY].mean()
    assert running == pytest.approx(10.0 * 79.0 * result.tpot_s[60:, 0].mean(), rel=0.01)


def test_in_an_overload_what_is_let_in_keeps_its_promise_and_the_rest_is_refused():
    result = run(steady(chat(), [2000.0]), lower=False)
    refused = result.refused.sum() / result.arrived.sum()
    assert 0.1 < refused < 0.9
    assert result.attainment(Lane.PRIORITY) > 0.9 * (1.0 - refused)
    everything = run(steady(chat(), [2000.0]), lower=False, refuse=False)
    assert everything.attainment(Lane.PRIORITY) < 0.1


def test_batch_gets_less_where_priority_is_promised_faster_tokens_and_priority_keeps_its_promise():
    harvests = []
    for tpot_s in (0.05, 0.012):
        load = steady(joined([chat(tpot_s=tpot_s), job()]), [100.0, 300.0])
        result = run(load)
        assert result.attainment(Lane.PRIORITY) > 0.9
        harvests.append(result.harvest_s)
    assert harvests[1] < 0.8 * harvests[0]


def test_another_region_serves_the_callers_of_one_that_is_lost_if_it_is_near_enough():
    load = steady(chat(), [100.0], regions=2)
    lost = [Loss(40, 0, until_s=80)]
    alone = run(load, losses=lost).attainment(Lane.PRIORITY)
    near, far = (
        run(load, losses=lost, rtt_s=[[0.0, rtt_s], [rtt_s, 0.0]]).attainment(Lane.PRIORITY) for rtt_s in (0.05, 2.0)
    )
    assert alone == pytest.approx(1.0 - 40 / 240, abs=0.02)
    assert far == pytest.approx(alone, abs=0.02)
    assert near > 0.98


def test_workers_are_added_for_what_comes_and_given_back_after():
    counts = np.full((1800, 1, 1), 20.0, dtype=np.float32)
    counts[300:900] = 400.0
    scaled = run(FleetLoad(chat(), counts), 4, load_s=60.0, autoscale=DesiredParams(), refuse=False)
    paid = scaled.workers[:, 0]
    assert paid[310:400].max() > 4
    assert paid[1790] < paid[300:900].max()
    assert scaled.busy[890, 0] <= 1.0
    assert scaled.reversals <= 2


def test_regions_have_their_days_one_after_the_other_and_batch_has_none():
    classes = joined([chat(), job()])
    load = diurnal(classes, np.array([10.0, 5.0]), regions=3, span_s=86_400)
    tops = load.arrivals[:, :, 0].argmax(axis=0)
    assert sorted((tops - tops[0]) % 86_400) == pytest.approx([0, 28_800, 57_600], abs=2)
    assert np.ptp(load.arrivals[:, :, 1]) == 0.0
    assert load.arrivals[:, :, 0].mean() == pytest.approx(10.0, rel=1e-3)


def trace(seed: int, span_s: float, per_s: float, batch: int) -> Trace:
    random = np.random.default_rng(seed)
    chats = np.cumsum(random.exponential(1.0 / per_s, size=int(per_s * span_s)))
    chats = chats[chats < span_s]
    at = np.concatenate([np.full(batch, 0.5), chats])
    order = np.argsort(at, kind="stable")
    lane = np.where(np.arange(len(at)) < batch, BATCH, PRIORITY)[order]
    first = lane == PRIORITY
    size = len(at)
    prompt = np.where(first, 1 + np.minimum(8000, random.lognormal(6.5, 0.8, size)), 2000.0).astype(np.int64)
    output = np.where(first, 2 + np.minimum(800, random.lognormal(4.5, 0.7, size)), 64.0).astype(np.int64)
    return Trace(
        name="made-up", arrival_s=at[order], lane=lane, tenant=np.zeros(size, dtype=np.int64), prompt_tokens=prompt,
        output_tokens=output, max_tokens=np.maximum(output, 1000), ttft_s=np.where(first, 0.5, math.inf),
        tpot_s=np.where(first, 0.03, math.inf), deadline_s=np.where(first, math.inf, 3600.0),
        patience_s=np.full(size, math.inf), leaves_after=np.zeros(size, dtype=np.int64),
        session=np.full(size, NO_SESSION), think_s=np.zeros(size),
    ).check()  # fmt: skip


def test_a_trace_becomes_classes_without_losing_requests_or_tokens():
    made = trace(1, 50.0, 40.0, 300)
    load = load_of(made, H100.times, buckets=4, regions=2, after_s=10)
    per_class = load.arrivals.sum(axis=(0, 1), dtype=np.float64)
    assert load.arrivals.shape[0] == int(made.arrival_s[-1]) + 1 + 10
    assert per_class.sum() == pytest.approx(len(made))
    assert len(load.classes) == 4 + 1
    assert (per_class * load.classes.prompt_tokens).sum() == pytest.approx(made.prompt_tokens.sum(), rel=1e-6)
    assert (per_class * load.classes.output_tokens).sum() == pytest.approx(made.output_tokens.sum(), rel=1e-6)
    with pytest.raises(ValueError, match="sessions"):
        load_of(replace(made, think_s=np.ones(len(made))), H100.times)


def test_the_dispersion_within_seconds_tells_clumps_from_single_arrivals():
    random = np.random.default_rng(5)
    single = np.sort(random.uniform(0.0, 200.0, size=8000))
    assert dispersion_within(single) == pytest.approx(1.0, abs=0.1)
    assert dispersion_within(np.repeat(np.sort(random.uniform(0.0, 200.0, size=1600)), 5)) == pytest.approx(
        5.0, rel=0.15
    )


@pytest.mark.slow
@pytest.mark.parametrize("per_s", [60.0, 120.0])
def test_ten_workers_agree_with_the_exact_mode(per_s):
    """While batch fills what priority leaves: attainment within 3 points, harvest within 5 %."""
    span_s = 60.0
    made = trace(7, span_s, per_s, 8000)
    ours = OurParams.of(PolicySettings(), slots=32, look_s=0.25)
    exact = World(
        made, Laneway(H100.pool(), H100.times, ours), FleetParams(workers=10), H100.engine, H100.times
    ).run()  # fmt: skip
    chats = made.of_lane(Lane.PRIORITY)
    got = exact.outcomes
    kept = (got.end == End.DONE) & (got.ttft_s <= made.ttft_s) & (got.tpot_s <= made.tpot_s)
    fleet = Fleet(H100.pool(), load_of(made, H100.times), FleetRules()).run()
    harvest_s = float(exact.usage.device_s[: int(span_s / exact.usage.every_s), 1:].sum())
    seen = compare(fleet, {Lane.PRIORITY: float(kept[chats].mean())}, harvest_s)
    assert seen.within(3.0, 0.05), seen
