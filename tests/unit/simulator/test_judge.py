"""What a run came to: small runs counted by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from laneway.core.fleet import StepTimes
from laneway.core.lanes import LANES, Lane
from laneway.simulator.judge import (
    P99_REQUESTS,
    Verdict,
    harvest_device_s,
    jain,
    jain_index,
    judged,
    kept,
    quantiles,
    size_quartiles,
)
from laneway.simulator.outcomes import End, Outcomes, Run, Usage
from laneway.simulator.trace import NO_SESSION, Trace
from laneway.simulator.usage import device_s
from laneway.simulator.verdicts import Attained, counted_harvest, equal, rho99

PRIORITY, DEFERRABLE, BATCH = range(len(LANES))
# A token of a prompt is worth 1 ms, one of an answer 2 ms, whatever the context: sums are easy to do by hand.
TIMES = StepTimes(base_s=0.0, sequence_s=0.002, context_token_s=0.0, prefill_token_s=0.001, chunk_tokens=512)


def run_of(rows: list[dict[str, Any]], *, span_s: int = 60, tenants: tuple[str, ...] = ("default",)) -> Run:
    """Rows: what differs from a chat of 100 + 11 tokens that keeps its promises: TTFT 0.1 s, TPOT 10 ms."""
    size = len(rows)

    def column(name: str, default: Any, kind: type = float) -> np.ndarray:
        return np.array([row.get(name, default) for row in rows], dtype=kind)

    asked_s = column("asked_s", 0.0)
    output = column("output", 11, np.int64)
    trace = Trace(
        name="by hand", arrival_s=asked_s, lane=column("lane", PRIORITY, np.int64),
        tenant=column("tenant", 0, np.int64), prompt_tokens=column("prompt", 100, np.int64), output_tokens=output,
        max_tokens=output, ttft_s=column("ttft_s", 0.5), tpot_s=column("tpot_s", 0.03),
        deadline_s=column("deadline_s", math.inf), patience_s=np.full(size, math.inf),
        leaves_after=np.zeros(size, dtype=np.int64), session=np.full(size, NO_SESSION), think_s=np.zeros(size),
        tenants=tenants,
    )  # fmt: skip
    outcomes = Outcomes(
        end=column("end", End.DONE, np.int8), asked_s=asked_s, accepted_s=asked_s,
        first_s=np.array([row.get("first_s", row.get("asked_s", 0.0) + 0.1) for row in rows]),
        end_s=np.array([row.get("end_s", row.get("asked_s", 0.0) + 0.2) for row in rows]),
        tokens=np.array([row.get("tokens", row.get("output", 11)) for row in rows]),
        cached_tokens=column("cached", 0, np.int64), recomputed_tokens=column("again", 0, np.int64),
        retries=column("retries", 0, np.int64), worker=column("worker", 0, np.int64),
    )  # fmt: skip
    lanes = np.zeros((span_s, len(LANES)))
    usage = Usage(1.0, np.full(span_s, 4.0), np.full(span_s, 0.5), lanes, lanes + 0.5, lanes, np.full(span_s, 0.25))
    return Run("ours", 1, trace, outcomes, usage, {"chunk": 512.0}, {"preemptions": 3.0})


def lane_of(run: Run, lane: Lane = Lane.PRIORITY) -> Any:
    found = judged(run, TIMES).lane(lane)
    assert found is not None
    return found


REFUSED = {"end": End.REFUSED, "first_s": math.nan, "end_s": 1.0, "tokens": 0, "retries": 2}


def test_what_was_refused_left_expired_or_is_still_open_has_missed():
    others = [{"end": end, "tokens": 0} for end in (End.LEFT, End.EXPIRED, End.FAILED)]
    still = {"end": End.OPEN, "first_s": math.nan, "end_s": math.nan, "tokens": 0}
    found = lane_of(run_of([{}, REFUSED, still, *others]))
    assert found.offered == 6
    assert found.attainment == pytest.approx(1 / 6)
    assert found.ends == {"open": 1, "done": 1, "refused": 1, "left": 1, "expired": 1, "failed": 1}
    assert found.retries == 2


def test_a_request_that_came_to_its_first_token_in_time_and_was_slow_then_has_missed():
    late = {"first_s": 0.6, "end_s": 0.7}
    slow = {"end_s": 0.1 + 10 * 0.031}
    both = run_of([{}, late, slow])
    assert kept(both).tolist() == [True, False, False]


def test_deferrable_work_is_judged_by_its_deadline():
    promise = {"lane": DEFERRABLE, "ttft_s": math.inf, "tpot_s": math.inf, "deadline_s": 100.0}
    run = run_of([promise | {"first_s": 90.0, "end_s": 100.0}, promise | {"first_s": 90.0, "end_s": 103.0}])
    found = lane_of(run, Lane.DEFERRABLE)
    assert found.attainment == 0.5
    assert found.lateness.p50_s == pytest.approx(1.5)
    assert judged(run, TIMES).lane(Lane.PRIORITY) is None


def test_a_promise_holds_at_the_moment_itself():
    assert kept(run_of([{"first_s": 0.5, "end_s": 1.0, "tpot_s": 0.05}])).all()


def test_goodput_counts_what_kept_its_promise_over_the_whole_run():
    found = lane_of(run_of([{}, {}, {"first_s": 3.0, "end_s": 3.1}]))
    assert found.goodput_requests_per_s == pytest.approx(2 / 60)
    assert found.goodput_tokens_per_s == pytest.approx(22 / 60)


def test_goodput_is_over_the_traces_own_time_however_long_the_rest_takes():
    late = {"lane": BATCH, "ttft_s": math.inf, "tpot_s": math.inf, "end_s": 50.0}
    run = run_of([{}, {"asked_s": 20.0, "end_s": 20.0, "first_s": 20.0}, late, late | {"end_s": 8.0}])
    assert lane_of(run).goodput_requests_per_s == pytest.approx(2 / 20)
    assert lane_of(run, Lane.BATCH).goodput_requests_per_s == pytest.approx(1 / 20)
    assert lane_of(run, Lane.BATCH).attainment == 1.0


def test_a_mapping_among_the_parameters_is_told_key_by_key():
    run = run_of([{}])
    run.parameters["ttft"] = {Lane.PRIORITY: 1.0}  # type: ignore[assignment]
    assert judged(run, TIMES).parameters == {"chunk": 512.0, "ttft.priority": 1.0}


def test_work_for_those_who_left_is_wasted_less_what_was_cached_and_those_who_left_waiting_cost_none():
    left = {"end": End.LEFT, "tokens": 5, "cached": 32}
    waited = {"end": End.LEFT, "tokens": 0, "first_s": math.nan}
    assert lane_of(run_of([left, waited, {}])).wasted_tokens == 100 - 32 + 5


def test_rework_is_a_share_of_all_that_was_computed():
    assert lane_of(run_of([{"again": 111}, {}, REFUSED])).rework_share == pytest.approx(1 / 3)


def test_tenants_and_sizes_split_the_requests():
    rows = [{"tenant": number % 2, "prompt": 100 * (number + 1)} for number in range(8)]
    found = judged(run_of(rows, tenants=("a", "b")), TIMES)
    assert [(each.name, each.offered) for each in found.tenants] == [("a", 4), ("b", 4)]
    assert [each.offered for each in found.sizes] == [2, 2, 2, 2]


def test_requests_of_one_size_fall_into_four_groups_as_well():
    assert [int(mask.sum()) for mask in size_quartiles(run_of([{}] * 10), TIMES)] == [3, 3, 2, 2]


def test_the_fleet_is_paid_for_while_it_idles():
    fleet = judged(run_of([{}]), TIMES).fleet
    assert (fleet.workers, fleet.busy, fleet.kv) == (4.0, 0.5, 0.25)
    assert fleet.gpu_hours == pytest.approx(4 * 60 / 3600)
    assert fleet.useful == pytest.approx(3 * 0.5 / 4)


def test_the_harvest_is_of_batch_jobs_done_in_time_and_worth_the_same_however_they_were_made():
    job = {"lane": BATCH, "ttft_s": math.inf, "tpot_s": math.inf, "deadline_s": 50.0, "end_s": 40.0}
    late = job | {"end_s": 51.0}
    costly = job | {"again": 5000, "cached": 64}
    run = run_of([job, late, costly, {}, job | {"end": End.EXPIRED}])
    assert harvest_device_s(run, TIMES) == pytest.approx(2 * (0.1 + 0.022))
    assert harvest_device_s(run, TIMES, until_s=39.0) == 0.0
    listed = np.array([True, False, False, False, False])
    assert harvest_device_s(run, TIMES, listed) == pytest.approx(0.1 + 0.022)


def test_what_a_job_is_worth_by_hand():
    times = StepTimes(base_s=0.016, sequence_s=0.001, context_token_s=1e-6, prefill_token_s=1e-4, chunk_tokens=400)
    prefill = 1000 * (1e-4 + 0.016 / 400)
    decode = 100 * (0.016 / 32 + 0.001 + 1e-6 * 1050)
    assert device_s(1000.0, 100.0, times) == pytest.approx(prefill + decode)


def test_jains_index_by_hand():
    assert jain_index(np.array([2.0, 2.0, 2.0])) == pytest.approx(1.0)
    assert jain_index(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert jain_index(np.array([1.0, 3.0])) == pytest.approx(16 / 20)


def crowd(tenant: int, prompt: int) -> list[dict[str, Any]]:
    """One served in the middle of the first minute, one that waits through it."""
    waits = {"tenant": tenant, "first_s": 70.0, "end_s": 71.0}
    return [waits, {"tenant": tenant, "prompt": prompt, "first_s": 30.0, "end_s": 31.0, "output": 1}]


def test_fairness_is_between_tenants_that_wait_and_by_their_weights():
    run = run_of(crowd(0, 998) + crowd(1, 2998) + [{"tenant": 2}], span_s=60, tenants=("a", "b", "c"))
    everyone = np.ones(len(run.trace), dtype=np.bool_)
    found = jain(run, TIMES, everyone)
    assert found.windows == 1
    assert found.mean == pytest.approx(16 / 20)
    assert jain(run, TIMES, everyone, {"b": 3.0}).mean == pytest.approx(1.0)


def test_an_answer_counts_in_the_minutes_in_which_it_was_made():
    waits = [{"tenant": tenant, "first_s": 130.0, "end_s": 131.0} for tenant in (0, 1)]
    long = {"tenant": 0, "prompt": 1, "output": 1000, "first_s": 30.0, "end_s": 90.0}
    short = {"tenant": 1, "prompt": 1, "output": 500, "first_s": 60.0, "end_s": 90.0}
    run = run_of([*waits, long, short], span_s=120, tenants=("a", "b"))
    found = jain(run, TIMES, np.ones(4, dtype=np.bool_))
    assert found.windows == 2
    assert found.least == pytest.approx(0.5, abs=0.01), "the first minute was all the one's"
    assert found.mean == pytest.approx(0.75, abs=0.01), "and the second was shared"


def test_without_two_that_wait_there_is_no_fairness_to_speak_of():
    assert jain(run_of(crowd(0, 10)), TIMES, np.ones(2, dtype=np.bool_)).mean is None


def test_a_p99_of_too_few_is_marked():
    assert quantiles(np.ones(P99_REQUESTS - 1)).few
    assert not quantiles(np.ones(P99_REQUESTS)).few
    assert quantiles(np.full(3, np.nan)).p99_s is None


def test_a_run_with_nothing_in_it_is_judged():
    found = judged(run_of([]), TIMES)
    assert isinstance(found, Verdict)
    assert found.lanes == []
    assert found.harvest_device_s == 0.0


@pytest.mark.parametrize(
    ("ours", "same"),
    [
        (Attained(0.97, 0.90), True),
        (Attained(0.97, 0.891), True),
        (Attained(0.97, 0.88), False),
        (Attained(0.949, 0.95), False),
        (Attained(0.955, 0.95), False),
        (Attained(0.97, None), False),
    ],
)
def test_equal_is_no_worse_than_the_silo_and_within_a_point_of_priority_alone(ours: Attained, same: bool):
    silo, alone = Attained(0.95, 0.90), Attained(0.97)
    assert equal(ours, silo, alone) is same
    assert counted_harvest(5.0, ours, silo, alone) == (5.0 if same else 0.0)


def test_the_silos_own_attainment_binds_where_it_is_better_than_a_point_below_alone():
    assert not equal(Attained(0.975), Attained(0.98), Attained(0.98))


@pytest.mark.parametrize("edge", [0.03, 0.4, 1.0, 1.7, 30.0])
def test_the_load_of_one_is_the_fastest_that_held(edge: float):
    tried: dict[float, bool] = {}

    def attains(factor: float) -> float:
        tried[factor] = factor <= edge
        return 1.0 if factor <= edge else 0.9

    found = rho99(attains)
    assert tried[found]
    assert edge / 1.011 <= found <= edge


def test_a_load_that_never_or_always_holds_is_told():
    with pytest.raises(ValueError, match="add workers"):
        rho99(lambda factor: 0.5)
    with pytest.raises(ValueError, match="add requests"):
        rho99(lambda factor: 1.0)
    with pytest.raises(ValueError, match="add workers"):
        rho99(lambda factor: math.nan)
