"""Why a job is where it is: the steps of its record and of the scheduler, oldest first."""

from collections.abc import Sequence

from msgspec.structs import replace

from laneway.core.errors import Code
from laneway.core.job import (
    Contract,
    JobError,
    JobRecord,
    Result,
    Timings,
    Usage,
    Verdict,
    cancel,
    claim,
    expire,
    give_way,
    hand_back,
    requeue,
    set_start_index,
    succeed,
)
from laneway.core.lanes import FinishReason, Lane, VerdictKind
from laneway.policy.release import HoldReason, ReleaseReason
from laneway.policy.stealing import StealReason
from laneway.scheduler.decisions import DecisionLog, Step
from laneway.scheduler.explain import Explanation, explain
from laneway.scheduler.reasons import WORDS

RECORD = JobRecord(
    job_id="local-1",
    tenant="acme",
    region="local",
    model="chat",
    tier="small",
    pool="chat-small",
    contract=Contract(Lane.BATCH, 1.0, 0.1, 500.0),
    verdict=Verdict(VerdictKind.HELD, "HELD_FOR_CAPACITY", "held", Lane.BATCH, hold_until_s=400.0),
    prompt_tokens=3,
    max_tokens=16,
    timings=Timings(created_s=100.0),
)


def said(steps: Sequence[Explanation]) -> list[tuple[str, str, str]]:
    return [(step.actor, step.action, step.reason) for step in steps]


def test_a_parked_job_tells_the_verdict_and_why_it_is_held_now() -> None:
    now = Step(130.0, "held", "POOL_BUSY", {"parked": "7"})
    steps = explain(RECORD, [Step(101.0, "held", "POOL_BUSY")], now=now)
    assert said(steps) == [("admission", "held", "HELD_FOR_CAPACITY"), ("scheduler", "held", "POOL_BUSY")]
    assert steps[0].facts["hold_until_ms"] == "400000"
    assert steps[1].facts == {"parked": "7", "message": WORDS["POOL_BUSY"]}


def test_a_job_that_ran_twice_tells_both_claims_and_its_end() -> None:
    record = claim(claim(RECORD, "w1", 140.0), "w2", 150.0, owner_is_dead=True, start_index=5)
    result = Result("hi", (1, 2), (1, 1), FinishReason.STOP, Usage(3, 0, 2))
    timings = replace(record.timings, first_token_s=151.0, ended_s=152.0)
    steps = explain(succeed(record, "w2", 2, result, timings), [Step(120.0, "released", "IDLE_CAPACITY")])
    assert said(steps) == [
        ("admission", "held", "HELD_FOR_CAPACITY"),
        ("scheduler", "released", "IDLE_CAPACITY"),
        ("worker", "claimed", "FIRST_CLAIM"),
        ("worker", "claimed", "TAKEN_OVER_OR_RETRIED"),
        ("worker", "started", "FIRST_TOKEN"),
        ("worker", "succeeded", "STOP"),
    ]
    assert steps[3].facts == {"attempt": "2", "worker": "w2", "start_index": "5"}
    assert steps[-1].facts == {"completion_tokens": "2"}


def test_the_last_attempt_tells_how_much_of_the_job_was_kept_and_from_where_it_goes_on() -> None:
    back = hand_back(claim(RECORD, "w1", 140.0), "w1", 1, checkpoint_index=96)
    record = set_start_index(claim(back, "w2", 150.0), "w2", 2, 96)
    first, second = (step.facts for step in explain(record, []) if step.action == "claimed")
    assert first == {"attempt": "1", "worker": "w1"}
    assert second == {"attempt": "2", "worker": "w2", "start_index": "96", "checkpoint_index": "96"}


def test_a_job_that_yielded_to_priority_says_so_and_goes_on_as_resumed() -> None:
    yielded = give_way(claim(RECORD, "w1", 140.0), "w1", 1, 145.0)
    decided = [Step(120.0, "released", "IDLE_CAPACITY"), Step(145.1, "held", "POOL_BUSY")]
    steps = explain(claim(yielded, "w2", 150.0), decided)
    assert said(steps)[2:] == [
        ("worker", "claimed", "FIRST_CLAIM"),
        ("worker", "preempted", "YIELDED_TO_PRIORITY"),
        ("scheduler", "held", "POOL_BUSY"),
        ("worker", "claimed", "RESUMED"),
    ]
    assert steps[3].at_s == 145.0
    assert steps[3].facts == {"attempt": "1", "worker": "w1"}


def test_a_claim_tells_of_its_release_when_no_scheduler_remembers_it() -> None:
    first = claim(RECORD, "w1", 140.0, reason="IDLE_CAPACITY")
    again = claim(give_way(first, "w1", 1, 145.0, reason="NO_SLOT local-9"), "w2", 160.0, reason="FIRED")
    steps = explain(again, [])
    assert said(steps)[1:] == [
        ("scheduler", "released", "IDLE_CAPACITY"),
        ("worker", "claimed", "FIRST_CLAIM"),
        ("worker", "preempted", "YIELDED_TO_PRIORITY"),
        ("nats", "released", "FIRED"),
        ("worker", "claimed", "RESUMED"),
    ]
    assert steps[1].facts == {"known_by": "the claim", "message": WORDS["IDLE_CAPACITY"]}
    remembered = explain(again, [Step(139.0, "released", "IDLE_CAPACITY")])
    assert [s.reason for s in remembered if s.action == "released"] == ["IDLE_CAPACITY", "FIRED"], "each told once"


def test_steals_and_takeovers_say_so_at_the_claim() -> None:
    stolen = claim(RECORD, "w2", 140.0, reason="STEAL_WAITED")
    taken = claim(stolen, "w3", 150.0, owner_is_dead=True, reason="TAKEOVER")
    retried = claim(requeue(taken, "w3", 2), "w1", 160.0, reason="LANE")
    claims = [step for step in explain(retried, []) if step.action == "claimed"]
    assert [step.reason for step in claims] == ["STEAL_WAITED", "TAKEOVER", "TRIED_AGAIN"]
    assert claims[1].facts["message"] == "the worker that ran it is dead"


def test_only_operators_are_told_for_which_job_another_gave_way() -> None:
    """It may be another tenant's."""
    record = give_way(claim(RECORD, "w1", 140.0), "w1", 1, 145.0, reason="NO_KV local-9")
    for operator, shown in ((True, "local-9"), (False, None)):
        (step,) = [s for s in explain(record, [], operator=operator) if s.action == "preempted"]
        assert step.facts.get("for_job") == shown
        assert step.facts["short_of"] == "NO_KV"
    outgrown = give_way(claim(RECORD, "w1", 140.0), "w1", 1, 145.0, reason="KV_OUTGROWN")
    assert said(explain(outgrown, []))[-1] == ("worker", "preempted", "KV_OUTGROWN")


def test_the_verdict_tells_its_bounds_and_the_numbers_it_rests_on() -> None:
    verdict = replace(
        RECORD.verdict, completion_eta_s=12.0, completion_bound_s=20.5, ttft_bound_s=3.0, facts=(("ahead_s", "9.5"),)
    )
    facts = explain(replace(RECORD, verdict=verdict), [])[0].facts
    assert facts["ahead_s"] == "9.5"
    assert (facts["completion_bound_s"], facts["ttft_bound_s"]) == ("20.500", "3.000")


def test_every_reason_has_words_for_people() -> None:
    reasons = [*ReleaseReason, *HoldReason, *StealReason]
    assert [reason for reason in reasons if reason not in WORDS] == []


def test_ends_name_who_ended_the_job() -> None:
    error = JobError(Code.CANCELLED, "CANCELLED", "by its caller")
    assert said(explain(cancel(RECORD, error, 160.0), []))[-1] == ("caller", "cancelled", "CANCELLED")
    late = JobError(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "late")
    assert said(explain(expire(RECORD, late, 500.0), []))[-1] == ("scheduler", "expired", "DEADLINE_EXCEEDED")
    lost = JobError(Code.UNAVAILABLE, "NOT_ACCEPTED", "lost")
    assert said(explain(cancel(RECORD, lost, 170.0), []))[-1] == ("scheduler", "cancelled", "NOT_ACCEPTED")


def test_the_decision_log_is_bounded_in_jobs_and_steps() -> None:
    log = DecisionLog(jobs_max=2, steps_max=2)
    for reason in ("A", "A", "B", "C"):
        log.add("j1", Step(1.0, "held", reason))
    assert [s.reason for s in log.of("j1")] == ["B", "C"]
    log.add("j2", Step(1.0, "held", "A"))
    log.add("j1", Step(2.0, "released", "D"))
    log.add("j3", Step(1.0, "held", "A"))
    assert log.of("j2") == [], "the one decided on longest ago goes first"
    assert [s.reason for s in log.of("j1")] == ["C", "D"]
