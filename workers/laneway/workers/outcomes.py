"""How a run may end, and what that makes of the job's record. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from laneway.core import job as jobs
from laneway.core.errors import Code
from laneway.core.job import JobError, JobRecord, Result
from laneway.core.lanes import FinishReason, Phase


class Kind(StrEnum):
    FINISHED = "finished"
    ENGINE_FAILED = "engine_failed"  # on this request
    ENGINE_LOST = "engine_lost"  # with everything in it
    EXPIRED = "expired"
    CALLER_GONE = "caller_gone"
    NOT_RESUMABLE = "not_resumable"
    STOPPED = "stopped"  # somebody said that the record is terminal
    HANDED_BACK = "handed_back"
    PREEMPTED = "preempted"  # it gave way to priority work
    LOST = "lost"  # the job is another worker's now

    @property
    def gives_back(self) -> bool:
        """Whether others are to go on with the job from where this run was."""
        return self in (Kind.HANDED_BACK, Kind.PREEMPTED, Kind.ENGINE_LOST)


class Outcome(Struct, frozen=True):
    kind: Kind
    finish: FinishReason | None = None  # FINISHED
    message: str = ""


@dataclass(slots=True)
class Spans:
    """When things happened in a run: monotonic seconds, but for the wall time of the first token. 0: not yet."""

    submitted_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    first_wall_s: float = 0.0

    @property
    def prefill_s(self) -> float:
        return self.first_s - self.submitted_s if self.first_s else 0.0

    @property
    def decode_s(self) -> float:
        return self.last_s - self.first_s if self.first_s else 0.0

    @property
    def phase(self) -> Phase:
        return Phase.DECODE if self.first_s else Phase.PREFILL


def ended(
    record: JobRecord,
    outcome: Outcome,
    me: str,
    spans: Spans,
    now_s: float,
    result: Result | None,
    kept: int | None = None,
) -> JobRecord:
    """The record that we own after this outcome. Raises IllegalTransition when we do not own it.

    `kept`: tokens that checkpoints hold of a job that is given back; None: as the record has it.
    """
    attempt = record.attempt
    match outcome.kind:
        case Kind.FINISHED:
            assert result is not None, "a finished run has a result"
            timings = replace(
                record.timings,
                first_token_s=spans.first_wall_s,
                ended_s=now_s,
                prefill_span_s=spans.prefill_s,
                decode_span_s=spans.decode_s,
            )
            return jobs.succeed(record, me, attempt, result, timings)
        case Kind.EXPIRED:
            message = f"the deadline passed during {spans.phase.value}"
            error = JobError(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", message, spans.phase)
            return jobs.expire(record, error, now_s)
        case Kind.CALLER_GONE:
            message = "the caller went away and the contract says to cancel"
            return jobs.cancel(record, JobError(Code.CANCELLED, "CALLER_GONE", message, spans.phase), now_s)
        case Kind.ENGINE_FAILED:
            error = JobError(Code.INTERNAL, "ENGINE_FAILED", outcome.message, spans.phase)
            return jobs.fail(record, me, attempt, error, now_s)
        case Kind.NOT_RESUMABLE:
            return jobs.fail(record, me, attempt, JobError(Code.ABORTED, "NOT_RESUMABLE", outcome.message), now_s)
        case Kind.HANDED_BACK | Kind.STOPPED:
            return jobs.hand_back(record, me, attempt, kept)
        case Kind.PREEMPTED:
            return jobs.give_way(record, me, attempt, now_s, kept, reason=outcome.message)
        case Kind.ENGINE_LOST | Kind.LOST:
            return jobs.requeue(record, me, attempt, kept)
