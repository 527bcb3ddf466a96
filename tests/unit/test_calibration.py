"""What was said is held against what came of it: honestly counted, and learned so that nine of ten are covered."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from laneway.core.fleet import EtaFit, LanePlan, Plan, PoolPlan
from laneway.core.job import Estimate, JobRecord, Timings
from laneway.core.lanes import JobState, Lane
from laneway.policy import calibration
from laneway.policy.calibration import (
    FACTOR_MAX,
    HALF_LIFE,
    Calibrator,
    Factor,
    Outcome,
    Span,
    outcome_of,
    stated,
    with_fits,
)
from tests.support.nats import make_record

CREATED_S = 1_800_000_000.0
ESTIMATE = Estimate(1.0, 2.0, 4.0, 6.0)


def record(state: JobState, took_s: float, first_s: float = 0.5, **more) -> JobRecord:
    made = make_record()
    verdict = replace(
        made.verdict, ttft_eta_s=1.1, ttft_bound_s=2.2, completion_eta_s=4.4, completion_bound_s=6.6, estimate=ESTIMATE
    )
    timings = Timings(
        created_s=CREATED_S, ended_s=CREATED_S + took_s, first_token_s=CREATED_S + first_s if first_s else 0.0
    )
    return replace(made, verdict=verdict, timings=timings, **({"state": state, "attempt": 1} | more))


def test_an_answer_counts_with_its_time_however_often_it_yielded():
    once = outcome_of(record(JobState.SUCCEEDED, 5.0))
    assert once is not None
    assert once.completion is not None
    assert (once.completion.real_s, once.completion.bound_s, once.completion.missed) == (5.0, 6.6, False)
    assert once.ttft is not None
    assert once.ttft.real_s == 0.5
    again = outcome_of(record(JobState.SUCCEEDED, 9.0, attempt=3, preemptions=2))
    assert again is not None
    assert again.completion is not None
    assert again.completion.missed
    assert again.ttft is None, "a record keeps the first token of its last attempt alone"


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.FAILED])
def test_who_left_or_failed_says_nothing_of_the_answer(state: JobState):
    outcome = outcome_of(record(state, 50.0))
    assert outcome is not None
    assert outcome.completion is None
    assert outcome.ttft is not None
    assert outcome_of(record(state, 50.0, first_s=0.0)) is None


def test_an_expired_job_is_missed_where_its_bound_had_passed_and_says_nothing_else():
    late = outcome_of(record(JobState.EXPIRED, 7.0))
    assert late is not None
    assert late.completion is not None
    assert late.completion.missed
    assert late.completion.over
    early = outcome_of(record(JobState.EXPIRED, 6.0))
    assert early is not None
    assert early.completion is None
    never = outcome_of(record(JobState.EXPIRED, 7.0, first_s=0.0, attempt=0))
    assert never is not None
    assert never.ttft is not None
    assert never.ttft.missed


@pytest.mark.parametrize(
    "other",
    [
        record(JobState.REFUSED, 5.0),
        record(JobState.RUNNING, 5.0),
        record(JobState.WAITING, 5.0),
        replace(
            record(JobState.SUCCEEDED, 5.0), verdict=replace(record(JobState.SUCCEEDED, 5.0).verdict, estimate=None)
        ),
    ],
)
def test_what_has_not_run_to_an_end_or_has_no_estimate_counts_nowhere(other: JobRecord):
    assert outcome_of(other) is None


def test_a_job_with_a_not_before_counts_nowhere():
    held = record(JobState.SUCCEEDED, 500.0)
    held = replace(held, contract=replace(held.contract, not_before_s=CREATED_S + 400.0))
    assert outcome_of(held) is None


def covered(ratios: list[float], factor: Factor, *, delay: int = 0) -> float:
    """Share covered, where what is stated at a job is what was known `delay` jobs before its end."""
    hits, open_spans = 0, []
    for ratio in ratios:
        fit = factor.fit()
        open_spans.append(Span(1.0, 2.0, max(fit.p50, 2.0 * fit.p90), ratio))
        if len(open_spans) > delay:
            span = open_spans.pop(0)
            hits += not span.missed
            factor.add(span)
    return hits / len(ratios)


@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("delay", [0, 60])
def test_nine_of_ten_are_covered_whatever_the_model_was_wrong_by(scale: float, delay: int):
    random = Random(7)
    ratios = [scale * random.lognormvariate(0.0, 0.6) for _ in range(3000)]
    assert 0.86 <= covered(ratios, Factor(), delay=delay) <= 0.94


def test_a_load_that_swings_is_covered_as_well():
    random = Random(11)
    ratios = [(3.0 if n // 250 % 2 else 1.0) * random.lognormvariate(0.0, 0.5) for n in range(4000)]
    assert 0.85 <= covered(ratios, Factor(), delay=40) <= 0.95


def test_a_few_odd_jobs_move_little_and_no_factor_is_believed_beyond_its_limits():
    factor = Factor()
    for _ in range(2):
        factor.add(Span(1.0, 2.0, 2.0, 50.0))
    assert factor.fit().p90 < 3.0
    for _ in range(3 * HALF_LIFE):
        factor.add(Span(1.0, 2.0, 2.0, 1e6))
    assert factor.fit().p90 <= FACTOR_MAX
    assert calibration.LEVEL_MIN <= factor.level <= calibration.LEVEL_MAX


def test_the_next_leader_goes_on_from_what_the_plan_said():
    old, new = Calibrator(), Calibrator()
    for _ in range(300):
        old.add(Outcome("p", Lane.BATCH, None, Span(1.0, 1.5, 1.5, 3.0)))
    ttft, completion = old.fits("p", Lane.BATCH)
    new.resume("p", Lane.BATCH, ttft, completion)
    assert new.fits("p", Lane.BATCH)[1].p50 == pytest.approx(completion.p50, rel=0.5)
    assert new.fits("p", Lane.BATCH)[1].p50 > 1.5
    assert new.fits("p", Lane.PRIORITY) == (EtaFit(), EtaFit())


def test_a_plan_shows_what_was_learned_to_three_digits():
    plan = Plan("r", pools=(PoolPlan("p", lanes=(LanePlan(Lane.BATCH), LanePlan(Lane.PRIORITY))),))
    shown = with_fits(plan, {("p", Lane.BATCH): (EtaFit(), EtaFit(1.23456, 2.34567, 1234))})
    assert shown.pool("p").lane(Lane.BATCH).completion_fit == EtaFit(1.23, 2.35, 1200)
    assert shown.pool("p").lane(Lane.PRIORITY) == LanePlan(Lane.PRIORITY)


def test_corrected_times_keep_their_order_and_a_fixed_delay_is_not_corrected():
    said = stated(ESTIMATE, EtaFit(2.0, 0.5, 10), EtaFit(0.5, 3.0, 10))
    assert (said.ttft_s, said.ttft_bound_s) == (2.0, 2.0), "no bound is below its ETA"
    assert (said.completion_s, said.completion_bound_s) == (2.0, 18.0)
    held = stated(Estimate(101.0, 102.0, 104.0, 106.0), EtaFit(2.0, 2.0, 9), EtaFit(2.0, 2.0, 9), delay_s=100.0)
    assert (held.ttft_s, held.completion_bound_s) == (102.0, 112.0)
