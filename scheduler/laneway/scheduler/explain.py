"""Why a job is where it is: what its record tells, with what the scheduler decided about it, oldest first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from laneway.core.job import JobRecord
from laneway.core.lanes import JobState, VerdictKind
from laneway.scheduler.decisions import Step


class Explanation(Struct, frozen=True):
    at_s: float  # Unix seconds
    actor: str
    action: str
    reason: str
    facts: Mapping[str, str] = field(default_factory=dict)


def explain(record: JobRecord, decided: Iterable[Step], *, now: Step | None = None) -> list[Explanation]:
    """`now` is why the job waits at this moment, if it does."""
    steps = [Explanation(s.at_s, "scheduler", s.action, s.reason, s.facts) for s in decided]
    if now is not None and not record.state.terminal:
        # The last word, not another line for the same: a job held for one reason all the time is told so once.
        steps = [s for s in steps if (s.action, s.reason) != (now.action, now.reason)]
        steps.append(Explanation(now.at_s, "scheduler", now.action, now.reason, now.facts))
    steps += _attempts(record)
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
    facts = {"lane": verdict.lane.value, "pool": verdict.pool or record.pool, "message": verdict.message}
    if verdict.completion_eta_s is not None:
        facts["completion_eta_s"] = f"{verdict.completion_eta_s:.3f}"
    if verdict.hold_until_s is not None:
        facts["hold_until_ms"] = str(round(verdict.hold_until_s * 1000))
    return Explanation(record.timings.created_s, "admission", _ACTIONS[verdict.kind], verdict.reason, _given(facts))


def _attempts(record: JobRecord) -> Iterable[Explanation]:
    yielded = False  # the attempt before
    for each in record.lineage:
        reason = "FIRST_CLAIM" if each.attempt == 1 else "RESUMED" if yielded else "TAKEN_OVER_OR_RETRIED"
        facts = {"attempt": str(each.attempt), "worker": each.owner}
        if each.start_index:
            facts["start_index"] = str(each.start_index)
        if record.checkpoint_index and each is record.lineage[-1]:
            facts["checkpoint_index"] = str(record.checkpoint_index)
        yield Explanation(each.claimed_s, "worker", "claimed", reason, facts)
        yielded = each.yielded_s > 0.0
        if yielded:
            facts = {"attempt": str(each.attempt), "worker": each.owner}
            yield Explanation(each.yielded_s, "worker", "preempted", "YIELDED_TO_PRIORITY", facts)
    if record.timings.first_token_s:
        yield Explanation(
            record.timings.first_token_s, "worker", "started", "FIRST_TOKEN", {"attempt": str(record.attempt)}
        )


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
