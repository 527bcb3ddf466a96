"""How decisions, plans and parameters read in a terminal."""

import time

import pytest

from laneway.cli.facts import fact_words
from laneway.cli.job_view import verdict_sentence
from laneway.cli.plan_view import _row, policy_lines
from laneway.core.fleet import HomePlan, Plan, PolicyVersion, PoolPlan
from laneway.core.job import Verdict
from laneway.core.lanes import Lane, VerdictKind


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"ahead_s": "2.5", "message": "said elsewhere"}, "ahead 2.5 s"),
        ({"wait_s": "0", "ahead_jobs": "0", "parked": "3"}, "parked 3"),
        ({"eta_ms": "250"}, "eta 250 ms"),
        ({"completion_bound_s": "20.5"}, "nine of ten whole answers within 20.5 s"),
        ({"worker": "w1-1a", "for_job": "local-9"}, "for job local-9, worker w1-1a"),
        ({"ttft_fit": "1.0 2.3"}, "ttft fit 1.0 2.3"),
        ({"s": "nan-ish"}, "s nan-ish"),
    ],
)
def test_facts_read_as_people_say_them(facts: dict[str, str], line: str):
    assert fact_words(facts.items()) == line


def test_a_time_of_another_day_says_how_far_it_is():
    day_ms = round((time.time() + 86_400.0 * 3 + 60) * 1000)
    assert fact_words({"latest_start_ms": str(day_ms)}.items()) == "latest start in 3 days"
    assert ":" in fact_words({"latest_start_ms": str(round(time.time() * 1000))}.items())


def test_a_verdict_says_when_and_within_what_nine_of_ten_are_served():
    verdict = Verdict(
        VerdictKind.ACCEPTED, "LANE_OPEN", "the job goes to a worker", Lane.PRIORITY,
        ttft_eta_s=0.25, ttft_bound_s=0.8, completion_eta_s=4.0, completion_bound_s=7.0,
    )  # fmt: skip
    said = verdict_sentence(verdict)
    assert "first token in about 250 ms, nine of ten within 800 ms" in said
    assert "whole answer in about 4.0 s, nine of ten within 7.0 s" in said


def test_the_plan_says_who_is_wanted_and_why_and_who_serves_which_home():
    homes = (HomePlan("h0", "w1-1a"), HomePlan("h1", "", ready=2, oldest_wait_s=1.5))
    pool = PoolPlan(
        "chat", workers=1, slots=8, free_slots=3, desired_workers=2, desired_reason="DUE", reserved_slots=1,
        lower_tokens_per_s=800.0, homes=homes,
    )  # fmt: skip
    row = _row(pool)
    assert row[:5] == ("chat", 1, "2 (DUE)", "3/8", 1)
    assert row[-1] == "h0=w1-1a, h1=nobody 2 waiting for 1.5 s"


def test_parameters_that_are_not_in_force_are_said_to_be_so():
    assert policy_lines(Plan("local")) == ["parameters: each service has its own; the scheduler publishes none"]
    policy = PolicyVersion(3, "{}", time.time() - 60.0, "there is no setting policy.x", ("nats.url",))
    version, refused, restart = policy_lines(Plan("local", policy=policy))
    assert "version 3, of 60" in version
    assert refused.endswith("NOT in force: there is no setting policy.x")
    assert restart.endswith("waiting for a restart: nats.url")
