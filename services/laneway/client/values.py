"""What the client takes and gives: frozen values, no protobuf. Spans are float seconds, wall times Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from laneway.core.job import Contract, JobError, Result, Timings, TokenLogprob, Usage, Verdict
from laneway.core.lanes import FinishReason, JobState, Lane
from laneway.core.selectors import Selector


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model called."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str  # system, user, assistant, tool
    text: str = ""
    name: str = ""
    tool_call_id: str = ""  # role tool: the call that it answers
    tool_calls: tuple[ToolCall, ...] = ()  # role assistant
    images: tuple[bytes | str, ...] = ()  # bytes or URLs, after the text


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call."""

    name: str
    description: str = ""
    parameters_json_schema: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer: tokens of one or more engine steps, in order."""

    first_index: int  # of its first token; the next chunk begins at first_index + len(token_ids)
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    output: int = 0  # which of n answers


@dataclass(frozen=True, slots=True)
class Finished:
    """How an answer ended, and what it took."""

    job_id: str
    state: JobState
    finish_reason: FinishReason
    usage: Usage
    timings: Timings  # the services' own
    attempt: int
    # On this process's monotonic clock, from the call to generate(), refused attempts and waits included:
    ttft_s: float | None  # None: no token came
    tpot_s: float | None  # (last - first) / (n - 1); None below two tokens
    stall_s: float  # longest gap between two chunks
    total_s: float


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that was accepted, to be collected later."""

    job_id: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The state in which a cancellation left the job: it may have ended before."""

    job_id: str
    state: JobState
    ended_s: float  # Unix seconds; 0: not ended


@dataclass(frozen=True, slots=True)
class Quote:
    """What would happen to a request."""

    verdict: Verdict
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it stands."""

    job_id: str
    tenant: str
    model: str
    state: JobState
    contract: Contract
    verdict: Verdict | None
    attempt: int
    timings: Timings
    usage: Usage
    prompt_tokens: int
    max_tokens: int
    result: Result | None = None  # SUCCEEDED; get_job() only
    error: JobError | None = None  # any other end
    preemptions: int = 0  # times it yielded to priority work
    requeued_from: str = ""  # the job that was given up, where this one runs it again


@dataclass(frozen=True, slots=True)
class DeadAttempt:
    """One of the attempts after which a job was given up."""

    attempt: int  # from 1
    worker_id: str
    claimed_s: float  # Unix seconds


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that was given up through no doing of its caller."""

    job_id: str
    tenant: str
    model: str
    lane: Lane
    reason: str  # POISON, UNREADABLE_JOB, TASK_LOST
    message: str
    died_s: float  # Unix seconds
    attempts: tuple[DeadAttempt, ...]  # oldest first
    requeueable: bool  # False where the stored job could not be read, or its prompt was lost
    prompt_tokens: int
    max_tokens: int
    labels: Mapping[str, str]
    requeued_from: str  # the job that was given up before, where this one was its requeue


# --- operators -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worker:
    worker_id: str
    name: str
    pool: str
    engine: str
    state: str  # READY, DRAINING, STARTING, BROKEN
    detail: str
    slots: int
    running: int
    kv_tokens: int
    kv_tokens_used: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    started_s: float
    seen_s: float
    jobs_done: int
    tokens_done: int
    capabilities: tuple[str, ...]
    busy_s: float
    process_id: int
    home: str = ""  # home slot that it serves; empty: none
    lower_tokens_per_s: float = 0.0  # prompt tokens a second that its interference budget leaves to the lower lanes
    priority_tpot_p95_s: float = 0.0  # of priority work in the last minute; 0: none
    theta: float = 0.0  # share of the TPOT target that it fills
    load_progress: float = 0.0  # of its engine's start, 0 .. 1, by how long that takes; 0: none is under way
    engine_deaths: int = 0  # how often its engine died, or did not start, in the last ten minutes


@dataclass(frozen=True, slots=True)
class LaneStatus:
    lane: Lane
    pool: str
    paused: bool
    ready: int
    running: int
    parked: int
    limit: int  # most ready and running; 0: no limit
    next_due_s: float  # earliest latest start among the parked; 0: none
    released: int


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    tier: str
    pool: str
    engine: str
    context_length: int
    vocabulary_size: int
    capabilities: tuple[str, ...]
    workers: int
    price_per_million_prompt_tokens: float
    price_per_million_completion_tokens: float
    price_per_device_s: float = 0.0  # of a second of one worker
    weights: str = ""  # what is served; empty: not told
    precision: str = ""
    selector: Selector = field(default_factory=Selector)  # which jobs of its tier it takes
    planned_workers: int = 0


@dataclass(frozen=True, slots=True)
class ExplainedStep:
    at_s: float
    actor: str
    action: str
    reason: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Explanation:
    job_id: str
    state: JobState
    steps: tuple[ExplainedStep, ...]  # oldest first


@dataclass(frozen=True, slots=True)
class RegionModel:
    model: str
    tier: str
    workers: int
    free_slots: int
    ttft_eta_s: float | None
    batch_eta_s: float | None


@dataclass(frozen=True, slots=True)
class Region:
    region: str
    made_s: float
    draining: bool
    healthy: bool
    zones: tuple[str, ...]
    models: tuple[RegionModel, ...]
    price_factor: float
    round_trip_s: float | None


@dataclass(frozen=True, slots=True)
class RegionScore:
    region: str
    score_s: float
    excluded: str


@dataclass(frozen=True, slots=True)
class Route:
    region: str
    reason: str
    scores: tuple[RegionScore, ...]  # best first
