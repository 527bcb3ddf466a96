"""What doors state holds, in a whole region: at a smaller size than bench/eta.py, which has the bars."""

from __future__ import annotations

import pytest

from laneway.core.lanes import LANES, JobState, Lane
from laneway.policy.calibration import outcome_of
from tests.sim.replay.traffic import bursty, recorded
from tests.sim.replay.world import Replayed, replay


def replayed(per_s: float, span_s: float, seed: int = 5) -> Replayed:
    return replay(bursty(seed=seed, per_s=per_s, cv=2.5, span_s=span_s), seed=seed, workers=2, slots=8)


def test_every_accepted_job_of_a_replay_has_a_bound_and_an_end_that_is_held_against_it():
    found = replayed(6.0, 8.0)
    assert found.records
    assert {told.lane for told in found.told} == set(LANES)
    for record in found.records:
        verdict = record.verdict
        assert record.state is JobState.SUCCEEDED
        assert verdict.estimate is not None
        assert verdict.completion_eta_s is not None
        assert verdict.completion_bound_s is not None
        assert verdict.completion_bound_s >= verdict.completion_eta_s > 0.0
        assert dict(verdict.facts)["wait_s"]
        outcome = outcome_of(record)
        assert outcome is not None
        assert outcome.completion is not None
    of_all = sum(every for _, every in found.coverage().values())
    assert of_all == len(found.records)


def test_a_trace_is_read_with_its_times_and_its_lengths_made_smaller(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("t_ms,tokens_in,tokens_out\n0,800,80\n500,4000,16\n1000,8,800\n")
    wishes = recorded(path, seed=1, shrink_in=8.0, shrink_out=8.0, pace=2.0, span_s=1.2)
    assert [wish.at_s for wish in wishes] == [0.0, 0.25, 0.5, 0.5, 0.75, 1.0, 1.0]
    assert [(wish.tokens_in, wish.tokens_out) for wish in wishes[:3]] == [(100, 10), (500, 2), (4, 100)]
    assert all(wish.lane in LANES for wish in wishes)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bounds_cover_about_nine_of_ten_and_retry_times_are_kept_under_overload():
    calm = replayed(7.0, 300.0)
    for lane, (covered, of) in calm.coverage().items():
        assert 0.8 <= covered / of <= 0.97, (lane, covered, of)
    crowded = replayed(12.0, 150.0)
    accepted, of = crowded.retries()
    assert of >= 100
    assert accepted / of >= 0.8
    assert crowded.retries(Lane.PRIORITY)[1] > 0
