import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from laneway.v1 import common_pb2 as _common_pb2
from laneway.v1 import task_pb2 as _task_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("spec", "idempotency_key")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    spec: _task_pb2.JobSpec
    idempotency_key: str
    def __init__(self, spec: _Optional[_Union[_task_pb2.JobSpec, _Mapping]] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("accepted", "chunk", "finished")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    chunk: _task_pb2.Chunk
    finished: Finished
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., chunk: _Optional[_Union[_task_pb2.Chunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("job_id", "verdict")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    verdict: _common_pb2.Verdict
    def __init__(self, job_id: _Optional[str] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("job_id", "state", "finish_reason", "usage", "timings", "attempt")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    state: _common_pb2.JobState
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    timings: _common_pb2.Timings
    attempt: int
    def __init__(self, job_id: _Optional[str] = ..., state: _Optional[_Union[_common_pb2.JobState, str]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("spec", "idempotency_key")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    spec: _task_pb2.JobSpec
    idempotency_key: str
    def __init__(self, spec: _Optional[_Union[_task_pb2.JobSpec, _Mapping]] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("job_id", "verdict")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    verdict: _common_pb2.Verdict
    def __init__(self, job_id: _Optional[str] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ...) -> None: ...

class SubmitManyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[SubmitManyItem]
    def __init__(self, items: _Optional[_Iterable[_Union[SubmitManyItem, _Mapping]]] = ...) -> None: ...

class SubmitManyItem(_message.Message):
    __slots__ = ("client_ref", "spec", "idempotency_key")
    CLIENT_REF_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    client_ref: str
    spec: _task_pb2.JobSpec
    idempotency_key: str
    def __init__(self, client_ref: _Optional[str] = ..., spec: _Optional[_Union[_task_pb2.JobSpec, _Mapping]] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class SubmitManyResponse(_message.Message):
    __slots__ = ("window", "outcomes")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    window: int
    outcomes: _containers.RepeatedCompositeFieldContainer[SubmitManyOutcome]
    def __init__(self, window: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[SubmitManyOutcome, _Mapping]]] = ...) -> None: ...

class SubmitManyOutcome(_message.Message):
    __slots__ = ("client_ref", "accepted", "error")
    CLIENT_REF_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    client_ref: str
    accepted: SubmitResponse
    error: _status_pb2.Status
    def __init__(self, client_ref: _Optional[str] = ..., accepted: _Optional[_Union[SubmitResponse, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("job_id", "from_index", "delivered_ids")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_INDEX_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_IDS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    from_index: int
    delivered_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job_id: _Optional[str] = ..., from_index: _Optional[int] = ..., delivered_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("accepted", "chunk", "finished")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    chunk: _task_pb2.Chunk
    finished: Finished
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., chunk: _Optional[_Union[_task_pb2.Chunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("job_id", "tenant", "model", "state", "contract", "verdict", "attempt", "timings", "result", "error", "usage", "prompt_tokens", "max_tokens", "preemptions", "requeued_from")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    REQUEUED_FROM_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    tenant: str
    model: str
    state: _common_pb2.JobState
    contract: _common_pb2.Contract
    verdict: _common_pb2.Verdict
    attempt: int
    timings: _common_pb2.Timings
    result: _task_pb2.Result
    error: _common_pb2.JobError
    usage: _common_pb2.Usage
    prompt_tokens: int
    max_tokens: int
    preemptions: int
    requeued_from: str
    def __init__(self, job_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[_common_pb2.JobState, str]] = ..., contract: _Optional[_Union[_common_pb2.Contract, _Mapping]] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ..., attempt: _Optional[int] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., result: _Optional[_Union[_task_pb2.Result, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.JobError, _Mapping]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., requeued_from: _Optional[str] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "lane", "state", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    lane: _common_pb2.Lane
    state: _common_pb2.JobState
    labels: _containers.ScalarMap[str, str]
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., lane: _Optional[_Union[_common_pb2.Lane, str]] = ..., state: _Optional[_Union[_common_pb2.JobState, str]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs", "next_page_token")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    next_page_token: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CancelJobResponse(_message.Message):
    __slots__ = ("state", "ended_at")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    state: _common_pb2.JobState
    ended_at: _timestamp_pb2.Timestamp
    def __init__(self, state: _Optional[_Union[_common_pb2.JobState, str]] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class QuoteRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: _task_pb2.JobSpec
    def __init__(self, spec: _Optional[_Union[_task_pb2.JobSpec, _Mapping]] = ...) -> None: ...

class QuoteResponse(_message.Message):
    __slots__ = ("verdict", "prompt_tokens", "max_tokens")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    verdict: _common_pb2.Verdict
    prompt_tokens: int
    max_tokens: int
    def __init__(self, verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class DeadLetter(_message.Message):
    __slots__ = ("job_id", "tenant", "model", "lane", "reason", "message", "died_at", "attempts", "requeueable", "prompt_tokens", "max_tokens", "labels", "requeued_from")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DIED_AT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    REQUEUEABLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    REQUEUED_FROM_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    tenant: str
    model: str
    lane: _common_pb2.Lane
    reason: str
    message: str
    died_at: _timestamp_pb2.Timestamp
    attempts: _containers.RepeatedCompositeFieldContainer[DeadAttempt]
    requeueable: bool
    prompt_tokens: int
    max_tokens: int
    labels: _containers.ScalarMap[str, str]
    requeued_from: str
    def __init__(self, job_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., lane: _Optional[_Union[_common_pb2.Lane, str]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., died_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempts: _Optional[_Iterable[_Union[DeadAttempt, _Mapping]]] = ..., requeueable: _Optional[bool] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ..., requeued_from: _Optional[str] = ...) -> None: ...

class DeadAttempt(_message.Message):
    __slots__ = ("attempt", "worker_id", "claimed_at")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_AT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    worker_id: str
    claimed_at: _timestamp_pb2.Timestamp
    def __init__(self, attempt: _Optional[int] = ..., worker_id: _Optional[str] = ..., claimed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "lane", "reason", "tenant")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    lane: _common_pb2.Lane
    reason: str
    tenant: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., lane: _Optional[_Union[_common_pb2.Lane, str]] = ..., reason: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("dead_letters", "next_page_token")
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    dead_letters: _containers.RepeatedCompositeFieldContainer[DeadLetter]
    next_page_token: str
    def __init__(self, dead_letters: _Optional[_Iterable[_Union[DeadLetter, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RequeueDeadLetterRequest(_message.Message):
    __slots__ = ("job_id", "deadline")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    deadline: _timestamp_pb2.Timestamp
    def __init__(self, job_id: _Optional[str] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RequeueDeadLetterResponse(_message.Message):
    __slots__ = ("job_id", "verdict")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    verdict: _common_pb2.Verdict
    def __init__(self, job_id: _Optional[str] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ...) -> None: ...

class PurgeDeadLettersRequest(_message.Message):
    __slots__ = ("job_ids", "lane", "reason", "tenant", "before")
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    job_ids: _containers.RepeatedScalarFieldContainer[str]
    lane: _common_pb2.Lane
    reason: str
    tenant: str
    before: _timestamp_pb2.Timestamp
    def __init__(self, job_ids: _Optional[_Iterable[str]] = ..., lane: _Optional[_Union[_common_pb2.Lane, str]] = ..., reason: _Optional[str] = ..., tenant: _Optional[str] = ..., before: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class PurgeDeadLettersResponse(_message.Message):
    __slots__ = ("purged",)
    PURGED_FIELD_NUMBER: _ClassVar[int]
    purged: int
    def __init__(self, purged: _Optional[int] = ...) -> None: ...
