"""Why a job is where it is: what its record tells, with what the scheduler decided about it, oldest first. Pure.

What a scheduler decided is in its own memory alone. What came of it is in the record: the claim keeps why its job was
released, stolen or taken over, and the attempt why it gave way. So an explanation of a job that ran survives any change
of leader; of one that is parked, the present leader knows why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from laneway.core.job import TAKEOVER, Attempt, JobRecord
from laneway.core.lanes import JobState, VerdictKind
from laneway.runtime.puller import FIRED
from laneway.scheduler.decisions import Step
from laneway.scheduler.reasons import RELEASED, STOLEN, WORDS

YIELDED = "YIELDED_TO_PRIORITY"
_FOR_PRIORITY = ("", "NO_SLOT", "NO_KV")


class Explanation(Struct, frozen=True):
    at_s: float  # Unix seconds
    actor: str
    action: str
    reason: str
    facts: Mapping[str, str] = field(default_factory=dict)


def explain(
    record: JobRecord, decided: Iterable[Step], *, now: Step | None = None, operator: bool = False
) -> list[Explanation]:
    """`now` is why the job waits at this moment, if it does. `operator`: other tenants' jobs may be named."""
    steps = [_decision(step) for step in decided]
    if now is not None and not record.state.terminal:
        # The last word, not another line for the same: a job held for one reason all the time is told so once.
        steps = [s for s in steps if (s.action, s.reason) != (now.action, now.reason)]
        steps.append(_decision(now))
    steps += _attempts(record, steps, operator=operator)
    steps.sort(key=lambda step: step.at_s)
    # By other clocks, but the first and the last whatever these say.
    return [_verdict(record), *steps, *([_end(record)] if record.state.terminal else [])]


_ACTIONS = {
    VerdictKind.ACCEPTED: "accepted",
    VerdictKind.HELD: "held",
    VerdictKind.MOVED: "moved",
    VerdictKind.REFUSED: "refused",
}


def _verdict(record: JobRecord) -> Explanation:
    verdict = record.verdict
    facts = dict(verdict.facts)
    facts |= {"lane": verdict.lane.value, "pool": verdict.pool or record.pool, "message": verdict.message}
    spans = {
        "ttft_eta_s": verdict.ttft_eta_s,
        "ttft_bound_s": verdict.ttft_bound_s,
        "completion_eta_s": verdict.completion_eta_s,
        "completion_bound_s": verdict.completion_bound_s,
    }
    facts |= {name: f"{span_s:.3f}" for name, span_s in spans.items() if span_s is not None}
    if verdict.hold_until_s is not None:
        facts["hold_until_ms"] = str(round(verdict.hold_until_s * 1000))
    return Explanation(record.timings.created_s, "admission", _ACTIONS[verdict.kind], verdict.reason, _given(facts))


def _decision(step: Step) -> Explanation:
    return Explanation(step.at_s, "scheduler", step.action, step.reason, _with_words(step.reason, step.facts))


def _attempts(record: JobRecord, decided: Sequence[Explanation], *, operator: bool) -> Iterable[Explanation]:
    before: Attempt | None = None
    for each in record.lineage:
        yield from _release(each, before, decided)
        facts = {"attempt": str(each.attempt), "worker": each.owner}
        if each.start_index:
            facts["start_index"] = str(each.start_index)
        if record.checkpoint_index and each is record.lineage[-1]:
            facts["checkpoint_index"] = str(record.checkpoint_index)
        if each.reason not in RELEASED and each.reason != FIRED:
            facts = _with_words(each.reason, facts)
        yield Explanation(each.claimed_s, "worker", "claimed", _claimed_because(each, before), facts)
        if each.yielded_s:
            yield _yielded(each, operator=operator)
        before = each
    if record.timings.first_token_s:
        yield Explanation(
            record.timings.first_token_s, "worker", "started", "FIRST_TOKEN", {"attempt": str(record.attempt)}
        )


def _release(each: Attempt, before: Attempt | None, decided: Sequence[Explanation]) -> Iterable[Explanation]:
    """What the claim tells of its job's release, where no scheduler remembers it."""
    since_s = (before.yielded_s or before.claimed_s) if before is not None else 0.0
    known = any(step.action == "released" and since_s <= step.at_s <= each.claimed_s + 1.0 for step in decided)
    if (each.reason in RELEASED or each.reason == FIRED) and not known:
        actor = "nats" if each.reason == FIRED else "scheduler"
        facts = {"known_by": "the claim"} if each.reason in RELEASED else {}
        yield Explanation(each.claimed_s, actor, "released", each.reason, _with_words(each.reason, facts))


def _claimed_because(each: Attempt, before: Attempt | None) -> str:
    if each.reason == TAKEOVER or each.reason in STOLEN:
        return each.reason
    if before is None:
        return "FIRST_CLAIM"
    if before.yielded_s:
        return "RESUMED"
    return "TRIED_AGAIN" if each.reason else "TAKEN_OVER_OR_RETRIED"  # claims of older releases do not say


def _yielded(each: Attempt, *, operator: bool) -> Explanation:
    short_of, _, job_id = each.yield_reason.partition(" ")
    facts = {"attempt": str(each.attempt), "worker": each.owner}
    if short_of in _FOR_PRIORITY:
        facts |= {"short_of": short_of, "for_job": job_id if operator else ""}
    reason = YIELDED if short_of in _FOR_PRIORITY else short_of
    return Explanation(each.yielded_s, "worker", "preempted", reason, _given(_with_words(short_of, facts)))


def _with_words(reason: str, facts: Mapping[str, str]) -> dict[str, str]:
    return {**facts, "message": WORDS[reason]} if reason in WORDS else dict(facts)


def _end(record: JobRecord) -> Explanation:
    error = record.error
    actors = {JobState.SUCCEEDED: "worker", JobState.FAILED: "worker", JobState.REFUSED: "admission"}
    actor = actors.get(record.state, "caller" if record.state is JobState.CANCELLED else "scheduler")
    if error is not None and error.reason == "NOT_ACCEPTED":
        actor = "scheduler"
    facts: dict[str, str] = {}
    if error is not None:
        facts = {"code": error.code.name, "message": error.message, "phase": error.phase.value if error.phase else ""}
    if record.result is not None:
        facts = {"completion_tokens": str(record.result.usage.completion_tokens)}
    reason = error.reason if error else (record.result.finish_reason.value.upper() if record.result else "")
    return Explanation(record.timings.ended_s, actor, record.state.value, reason, _given(facts))


def _given(facts: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in facts.items() if value}
