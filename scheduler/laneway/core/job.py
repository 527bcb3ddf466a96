"""A job as values: the task, its contract, verdict, result, and the record with its legal transitions.

The record is the one authority on a job. Each function below takes a record and returns the next one or raises
IllegalTransition; the store makes it true by a compare-and-set on the record's subject. Terminal records never
change. While RUNNING only the owner of the present attempt may write, except that anyone entitled may end it
(cancel, expire) and a taker may claim it once the owner's lease has expired.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from laneway.core.errors import Code
from laneway.core.lanes import FinishReason, Isolation, JobState, Lane, OnDisconnect, Phase, VerdictKind
from laneway.core.objects import ObjectRef

SCHEMA = 1
TAKEOVER = "TAKEOVER"  # why a job is claimed whose owner is dead
NOT_ACCEPTED = "NOT_ACCEPTED"  # what the scheduler ends a record with whose job never was in its lane
# Of messages that refer to an object: who does not know of objects would take the rest for the whole.
SCHEMA_BY_REFERENCE = 2


class Sampling(Struct, frozen=True):
    """How tokens are chosen. None means unset; ranges are those of laneway.v1.Sampling."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    min_tokens: int | None = None
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class GenerateTask(Struct, frozen=True):
    """A generate task whose prompt is already token ids."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    json_object: bool = False
    json_schema: str = ""
    regex: str = ""
    grammar: str = ""
    adapter: str = ""
    cache_salt: str = ""
    session_id: str = ""

    @property
    def constrained(self) -> bool:
        return bool(self.json_object or self.json_schema or self.regex or self.grammar)


class Contract(Struct, frozen=True):
    """What a request was promised, with the lane's defaults filled in."""

    lane: Lane
    ttft_target_s: float
    tpot_target_s: float
    deadline_s: float  # Unix seconds
    not_before_s: float = 0.0  # Unix seconds; 0: none
    isolation: Isolation = Isolation.SLO
    least_tier: str = ""
    cost_max: float | None = None
    regions: tuple[str, ...] = ()
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    labels: Mapping[str, str] = field(default_factory=dict)


class Estimate(Struct, frozen=True):
    """Times of a verdict before they were corrected by what earlier ones came to; 0: not estimated."""

    ttft_s: float = 0.0
    ttft_bound_s: float = 0.0
    completion_s: float = 0.0
    completion_bound_s: float = 0.0


class Verdict(Struct, frozen=True):
    kind: VerdictKind
    reason: str
    message: str
    lane: Lane
    tier: str = ""
    region: str = ""
    pool: str = ""
    ttft_eta_s: float | None = None
    completion_eta_s: float | None = None
    hold_until_s: float | None = None  # Unix seconds
    retry_after_s: float | None = None
    cost: float = 0.0
    ttft_bound_s: float | None = None  # nine of ten such requests get their first token within this
    completion_bound_s: float | None = None
    facts: tuple[tuple[str, str], ...] = ()  # the numbers it rests on, for people, by name
    estimate: Estimate | None = None


class Usage(Struct, frozen=True):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0


class TokenLogprob(Struct, frozen=True):
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Result(Struct, frozen=True):
    text: str
    token_ids: tuple[int, ...]
    text_lengths: tuple[int, ...]  # characters that became final with each token
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()


class JobError(Struct, frozen=True):
    code: Code
    reason: str
    message: str
    phase: Phase | None = None
    field: str = ""


class Timings(Struct, frozen=True):
    """Wall times in Unix seconds (0: not yet), spans in seconds."""

    created_s: float = 0.0
    claimed_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    prefill_span_s: float = 0.0
    decode_span_s: float = 0.0


class Attempt(Struct, frozen=True):
    attempt: int
    start_index: int  # the first token that it emits itself, once it has begun
    owner: str
    claimed_s: float
    begun: bool = False  # has_begun reads it
    yielded_s: float = 0.0  # when it gave way to priority work, Unix seconds; 0: it did not
    reason: str = ""  # how it came to run: LANE, TAKEOVER, a steal's reason, or why its job was released
    yield_reason: str = ""  # why it gave way, and for which job: NO_SLOT <job>


class JobRecord(Struct, frozen=True):
    job_id: str
    tenant: str
    region: str
    model: str
    tier: str
    pool: str
    contract: Contract
    verdict: Verdict
    prompt_tokens: int
    max_tokens: int
    state: JobState = JobState.WAITING
    attempt: int = 0
    lineage: tuple[Attempt, ...] = ()
    starts: int = 0
    clean: int = 0
    retries: int = 0  # claims that followed a failed start, each paid from a retry budget
    preemptions: int = 0  # of `clean`, those in which it gave way to priority work
    owner: str = ""
    door: str = ""
    attached: bool = False
    publish_by_s: float = 0.0
    body_digest: bytes = b""
    checkpoint_index: int = 0  # tokens that checkpoints held when it was given back
    latest_start_s: float = 0.0
    device_ms: int = 0
    result: Result | None = None
    error: JobError | None = None
    timings: Timings = Timings()
    idempotency_key: str = ""
    origin: str = "GRPC"
    requeued_from: str = ""  # the job that was given up, where this one runs it again
    result_object: ObjectRef | None = None  # holds the result; `result` has its finish reason and usage only
    route: str = ""  # the caller's name for this kind of request
    affinity_key: str = ""  # equal for jobs that gain from one worker's caches; empty: none does
    home: str = ""  # home slot it was sent to; empty: any


class IllegalTransition(Exception):
    """The record does not allow this change; `record` is what was found."""

    def __init__(self, message: str, record: JobRecord) -> None:
        super().__init__(message)
        self.record = record


def claim(
    record: JobRecord, owner: str, now_s: float, *, owner_is_dead: bool = False, start_index: int = 0, reason: str = ""
) -> JobRecord:
    """The record after `owner` claimed it: RUNNING at attempt + 1.

    A WAITING record may always be claimed; a RUNNING one only when its owner's lease has expired.
    """
    takeover = record.state is JobState.RUNNING and owner_is_dead
    if record.state is not JobState.WAITING and not takeover:
        raise IllegalTransition(f"cannot claim a job that is {record.state}", record)
    attempt = record.attempt + 1
    return replace(
        record,
        state=JobState.RUNNING,
        attempt=attempt,
        owner=owner,
        starts=record.starts + 1,
        retries=max(record.retries, strikes(record)),
        lineage=(*record.lineage, Attempt(attempt, start_index, owner, now_s, begun=attempt == 1, reason=reason)),
        timings=replace(record.timings, claimed_s=now_s, first_token_s=0.0),
    )


def strikes(record: JobRecord) -> int:
    """Starts that ended neither in a result nor on purpose."""
    return record.starts - record.clean


def is_retry(record: JobRecord) -> bool:
    """Whether the next claim follows a failed start, and no claim has followed that one yet."""
    return strikes(record) > record.retries


def by_reference(record: JobRecord, stored: ObjectRef) -> JobRecord:
    """The record of a job that has a result, once that is in the object store."""
    return replace(without_answer(record), result_object=stored)


def without_answer(record: JobRecord) -> JobRecord:
    """The record of a job that has a result, with no more of that than how it ended and what was used."""
    assert record.result is not None, "there is no result"
    return replace(record, result=Result("", (), (), record.result.finish_reason, record.result.usage))


def answer_tokens(record: JobRecord) -> int:
    """How many tokens the answer has, wherever they are; 0 without a result."""
    if record.result is None:
        return 0
    return record.result.usage.completion_tokens if record.result_object else len(record.result.token_ids)


def _owned(record: JobRecord, owner: str, attempt: int) -> None:
    if record.state is not JobState.RUNNING or record.owner != owner or record.attempt != attempt:
        raise IllegalTransition(f"attempt {attempt} of {owner} no longer owns this job", record)


def set_start_index(record: JobRecord, owner: str, attempt: int, start_index: int) -> JobRecord:
    """The record after its owner learned from which token index this attempt goes on: it has begun."""
    _owned(record, owner, attempt)
    last = replace(record.lineage[-1], start_index=start_index, begun=True)
    checkpoint_index = min(record.checkpoint_index, start_index)  # what was kept beyond it does not count any more
    return replace(record, lineage=(*record.lineage[:-1], last), checkpoint_index=checkpoint_index)


def has_begun(attempt: Attempt) -> bool:
    """Whether the start index of an attempt stands. Before that it emits nothing, and what came before it counts.

    A first attempt begins at 0 with its claim. Older releases do not say of others, but where they went on they wrote
    the index.
    """
    return attempt.begun or attempt.attempt == 1 or attempt.start_index > 0


def succeed(record: JobRecord, owner: str, attempt: int, result: Result, timings: Timings) -> JobRecord:
    _owned(record, owner, attempt)
    return replace(record, state=JobState.SUCCEEDED, result=result, timings=timings, owner="")


def fail(record: JobRecord, owner: str, attempt: int, error: JobError, now_s: float) -> JobRecord:
    _owned(record, owner, attempt)
    return _end(record, JobState.FAILED, error, now_s)


def hand_back(record: JobRecord, owner: str, attempt: int, checkpoint_index: int | None = None) -> JobRecord:
    """The record after its owner gave it back on purpose (drain, preemption): it does not count as a failure.

    `checkpoint_index`: tokens that its checkpoints are known to hold; None: as the record has it.
    """
    return replace(requeue(record, owner, attempt, checkpoint_index), clean=record.clean + 1)


def give_way(
    record: JobRecord, owner: str, attempt: int, now_s: float, checkpoint_index: int | None = None, reason: str = ""
) -> JobRecord:
    """The record after its owner let it yield to priority work: handed back, and counted, since nobody yields often."""
    back = hand_back(record, owner, attempt, checkpoint_index)
    last = replace(record.lineage[-1], yielded_s=now_s, yield_reason=reason)
    return replace(back, preemptions=record.preemptions + 1, lineage=(*record.lineage[:-1], last))


def requeue(record: JobRecord, owner: str, attempt: int, checkpoint_index: int | None = None) -> JobRecord:
    """The record after its owner lost the run without meaning to (its engine died): WAITING, and a failed start."""
    _owned(record, owner, attempt)
    kept = record.checkpoint_index if checkpoint_index is None else checkpoint_index
    return replace(record, state=JobState.WAITING, owner="", checkpoint_index=kept)


def reject(record: JobRecord, error: JobError, now_s: float) -> JobRecord:
    """The record after a worker found that it must not be run (poison, can never fit); the claim rules are its own."""
    return _end(record, JobState.FAILED, error, now_s)


def cancel(record: JobRecord, error: JobError, now_s: float) -> JobRecord:
    return _end(record, JobState.CANCELLED, error, now_s)


def expire(record: JobRecord, error: JobError, now_s: float) -> JobRecord:
    return _end(record, JobState.EXPIRED, error, now_s)


def refuse(record: JobRecord, error: JobError, now_s: float) -> JobRecord:
    return _end(record, JobState.REFUSED, error, now_s)


def _end(record: JobRecord, state: JobState, error: JobError, now_s: float) -> JobRecord:
    if record.state.terminal:
        raise IllegalTransition(f"job is already {record.state}", record)
    return replace(record, state=state, error=error, owner="", timings=replace(record.timings, ended_s=now_s))


def never_accepted(record: JobRecord) -> bool:
    """Whether the job ended without having been accepted: nothing ran, and the same request may be tried again."""
    if record.state is JobState.REFUSED:
        return True
    given_up = record.error is not None and record.error.reason == NOT_ACCEPTED
    return record.state is JobState.CANCELLED and given_up and not record.attempt


def stage(record: JobRecord) -> Phase:
    """Where a job is that has not ended, as far as its record knows: a first token is in it only once the job was given
    back, went on elsewhere, or ended."""
    if record.state is not JobState.RUNNING:
        return Phase.QUEUE
    goes_on = record.lineage and record.lineage[-1].start_index
    return Phase.DECODE if goes_on or record.checkpoint_index or record.timings.first_token_s else Phase.PREFILL


def stored_late(record: JobRecord) -> bool:
    """Whether nobody need have stored this record yet, though its job is in its lane.

    The first claim of an attached job without a key stores it, or its end, or its door a moment later. Of every other
    job the record is there first, as of one that was claimed before.
    """
    unclaimed = record.state is JobState.WAITING and not record.attempt
    return unclaimed and record.attached and not record.idempotency_key and not record.contract.lane.may_park


def resumable(task: GenerateTask, *, sampling: bool = False) -> bool:
    """Whether a run may go on from given token ids without becoming a splice of two runs.

    Several or constrained outputs make it unsound, and sampling state that ids do not carry (a seed's position,
    penalties' counts, min_tokens), unless the engine finds that in the ids (`sampling`: its resumable_sampling).
    """
    s = task.sampling
    if s.n > 1 or task.constrained:
        return False
    penalised = any(p is not None for p in (s.repetition_penalty, s.presence_penalty, s.frequency_penalty))
    return sampling or not ((s.seed is not None and not s.greedy) or penalised or s.min_tokens)


class LaneJob(Struct, frozen=True):
    """A job on its way to a worker: its record as accepted, and the task."""

    record: JobRecord
    task: GenerateTask


class ReferredJob(Struct, frozen=True):
    """A job on its way to a worker whose task is too large for its message: it is in the object store."""

    record: JobRecord
    task_object: ObjectRef


QueuedJob = LaneJob | ReferredJob
