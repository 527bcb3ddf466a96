import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from laneway.v1 import common_pb2 as _common_pb2
from laneway.v1 import scheduler_pb2 as _scheduler_pb2
from laneway.v1 import task_pb2 as _task_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobRecord(_message.Message):
    __slots__ = ("schema", "job_id", "tenant", "region", "model", "tier", "pool", "state", "attempt", "lineage", "starts", "clean", "owner", "door", "publish_by", "body_digest", "contract", "verdict", "checkpoint_index", "result", "error", "timings", "attached", "prompt_tokens", "max_tokens", "latest_start", "device_ms", "idempotency_key", "origin", "preemptions", "requeued_from", "result_object", "retries", "route", "affinity_key", "home")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    CLEAN_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DOOR_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_BY_FIELD_NUMBER: _ClassVar[int]
    BODY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_INDEX_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LATEST_START_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MS_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    REQUEUED_FROM_FIELD_NUMBER: _ClassVar[int]
    RESULT_OBJECT_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_KEY_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    schema: int
    job_id: str
    tenant: str
    region: str
    model: str
    tier: str
    pool: str
    state: _common_pb2.JobState
    attempt: int
    lineage: _containers.RepeatedCompositeFieldContainer[Attempt]
    starts: int
    clean: int
    owner: str
    door: str
    publish_by: _timestamp_pb2.Timestamp
    body_digest: bytes
    contract: _common_pb2.Contract
    verdict: _common_pb2.Verdict
    checkpoint_index: int
    result: _task_pb2.Result
    error: _common_pb2.JobError
    timings: _common_pb2.Timings
    attached: bool
    prompt_tokens: int
    max_tokens: int
    latest_start: _timestamp_pb2.Timestamp
    device_ms: int
    idempotency_key: str
    origin: str
    preemptions: int
    requeued_from: str
    result_object: ObjectRef
    retries: int
    route: str
    affinity_key: str
    home: str
    def __init__(self, schema: _Optional[int] = ..., job_id: _Optional[str] = ..., tenant: _Optional[str] = ..., region: _Optional[str] = ..., model: _Optional[str] = ..., tier: _Optional[str] = ..., pool: _Optional[str] = ..., state: _Optional[_Union[_common_pb2.JobState, str]] = ..., attempt: _Optional[int] = ..., lineage: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., starts: _Optional[int] = ..., clean: _Optional[int] = ..., owner: _Optional[str] = ..., door: _Optional[str] = ..., publish_by: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., body_digest: _Optional[bytes] = ..., contract: _Optional[_Union[_common_pb2.Contract, _Mapping]] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ..., checkpoint_index: _Optional[int] = ..., result: _Optional[_Union[_task_pb2.Result, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.JobError, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., attached: _Optional[bool] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., latest_start: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., device_ms: _Optional[int] = ..., idempotency_key: _Optional[str] = ..., origin: _Optional[str] = ..., preemptions: _Optional[int] = ..., requeued_from: _Optional[str] = ..., result_object: _Optional[_Union[ObjectRef, _Mapping]] = ..., retries: _Optional[int] = ..., route: _Optional[str] = ..., affinity_key: _Optional[str] = ..., home: _Optional[str] = ...) -> None: ...

class ObjectRef(_message.Message):
    __slots__ = ("name", "size_bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    sha256: bytes
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("attempt", "start_index", "owner", "claimed_at", "begun", "yielded_at", "reason", "yield_reason")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    START_INDEX_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_AT_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    YIELDED_AT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    YIELD_REASON_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    start_index: int
    owner: str
    claimed_at: _timestamp_pb2.Timestamp
    begun: bool
    yielded_at: _timestamp_pb2.Timestamp
    reason: str
    yield_reason: str
    def __init__(self, attempt: _Optional[int] = ..., start_index: _Optional[int] = ..., owner: _Optional[str] = ..., claimed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., begun: _Optional[bool] = ..., yielded_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., reason: _Optional[str] = ..., yield_reason: _Optional[str] = ...) -> None: ...

class LaneMessage(_message.Message):
    __slots__ = ("schema", "record", "task", "task_object")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TASK_OBJECT_FIELD_NUMBER: _ClassVar[int]
    schema: int
    record: JobRecord
    task: _task_pb2.GenerateTask
    task_object: ObjectRef
    def __init__(self, schema: _Optional[int] = ..., record: _Optional[_Union[JobRecord, _Mapping]] = ..., task: _Optional[_Union[_task_pb2.GenerateTask, _Mapping]] = ..., task_object: _Optional[_Union[ObjectRef, _Mapping]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("schema", "owner_check", "token_ids", "logprobs")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    OWNER_CHECK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    schema: int
    owner_check: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_task_pb2.TokenLogprob]
    def __init__(self, schema: _Optional[int] = ..., owner_check: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_task_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class StoredDeadLetter(_message.Message):
    __slots__ = ("schema", "record", "message", "died_at")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DIED_AT_FIELD_NUMBER: _ClassVar[int]
    schema: int
    record: JobRecord
    message: LaneMessage
    died_at: _timestamp_pb2.Timestamp
    def __init__(self, schema: _Optional[int] = ..., record: _Optional[_Union[JobRecord, _Mapping]] = ..., message: _Optional[_Union[LaneMessage, _Mapping]] = ..., died_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("worker_id", "deltas")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    deltas: _containers.RepeatedCompositeFieldContainer[SequenceDelta]
    def __init__(self, worker_id: _Optional[str] = ..., deltas: _Optional[_Iterable[_Union[SequenceDelta, _Mapping]]] = ...) -> None: ...

class SequenceDelta(_message.Message):
    __slots__ = ("job_id", "attempt", "first_index", "count", "response")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    attempt: int
    first_index: int
    count: int
    response: bytes
    def __init__(self, job_id: _Optional[str] = ..., attempt: _Optional[int] = ..., first_index: _Optional[int] = ..., count: _Optional[int] = ..., response: _Optional[bytes] = ...) -> None: ...

class WorkerControl(_message.Message):
    __slots__ = ("cancel", "beat", "drain")
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    cancel: CancelHint
    beat: DoorBeat
    drain: DrainHint
    def __init__(self, cancel: _Optional[_Union[CancelHint, _Mapping]] = ..., beat: _Optional[_Union[DoorBeat, _Mapping]] = ..., drain: _Optional[_Union[DrainHint, _Mapping]] = ...) -> None: ...

class CancelHint(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class DoorBeat(_message.Message):
    __slots__ = ("door", "attachments")
    DOOR_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    door: str
    attachments: _containers.RepeatedCompositeFieldContainer[Attachment]
    def __init__(self, door: _Optional[str] = ..., attachments: _Optional[_Iterable[_Union[Attachment, _Mapping]]] = ...) -> None: ...

class Attachment(_message.Message):
    __slots__ = ("job_id", "attempt", "next_index", "delivered_ids", "replay")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_IDS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    attempt: int
    next_index: int
    delivered_ids: _containers.RepeatedScalarFieldContainer[int]
    replay: bool
    def __init__(self, job_id: _Optional[str] = ..., attempt: _Optional[int] = ..., next_index: _Optional[int] = ..., delivered_ids: _Optional[_Iterable[int]] = ..., replay: _Optional[bool] = ...) -> None: ...

class DrainHint(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: _Optional[bool] = ...) -> None: ...

class JobEvent(_message.Message):
    __slots__ = ("job_id", "state", "attempt", "worker_id", "record", "answer")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    state: _common_pb2.JobState
    attempt: int
    worker_id: str
    record: bytes
    answer: AnswerLength
    def __init__(self, job_id: _Optional[str] = ..., state: _Optional[_Union[_common_pb2.JobState, str]] = ..., attempt: _Optional[int] = ..., worker_id: _Optional[str] = ..., record: _Optional[bytes] = ..., answer: _Optional[_Union[AnswerLength, _Mapping]] = ...) -> None: ...

class AnswerLength(_message.Message):
    __slots__ = ("tenant", "model", "route", "tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    route: str
    tokens: int
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., route: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class WorkerLease(_message.Message):
    __slots__ = ("schema", "worker_id", "name", "pool", "engine", "state", "detail", "slots", "running", "kv_tokens", "kv_tokens_used", "prefill_tokens_per_s", "decode_tokens_per_s", "service_s", "started_at", "renewed_at", "jobs_done", "tokens_done", "busy_s", "capabilities", "running_by_lane", "process_id", "home", "step_times", "lower_tokens_per_s", "priority_tpot_p95_s", "theta", "hot_prefixes", "block_tokens", "lower_places", "load_progress", "engine_deaths")
    class RunningByLaneEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_USED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SERVICE_S_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    RENEWED_AT_FIELD_NUMBER: _ClassVar[int]
    JOBS_DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DONE_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_BY_LANE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    LOWER_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_TPOT_P95_S_FIELD_NUMBER: _ClassVar[int]
    THETA_FIELD_NUMBER: _ClassVar[int]
    HOT_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOWER_PLACES_FIELD_NUMBER: _ClassVar[int]
    LOAD_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_DEATHS_FIELD_NUMBER: _ClassVar[int]
    schema: int
    worker_id: str
    name: str
    pool: str
    engine: str
    state: str
    detail: str
    slots: int
    running: int
    kv_tokens: int
    kv_tokens_used: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    service_s: float
    started_at: _timestamp_pb2.Timestamp
    renewed_at: _timestamp_pb2.Timestamp
    jobs_done: int
    tokens_done: int
    busy_s: float
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    running_by_lane: _containers.ScalarMap[int, int]
    process_id: int
    home: str
    step_times: _scheduler_pb2.StepTimes
    lower_tokens_per_s: float
    priority_tpot_p95_s: float
    theta: float
    hot_prefixes: _containers.RepeatedScalarFieldContainer[int]
    block_tokens: int
    lower_places: int
    load_progress: float
    engine_deaths: int
    def __init__(self, schema: _Optional[int] = ..., worker_id: _Optional[str] = ..., name: _Optional[str] = ..., pool: _Optional[str] = ..., engine: _Optional[str] = ..., state: _Optional[str] = ..., detail: _Optional[str] = ..., slots: _Optional[int] = ..., running: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., kv_tokens_used: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ..., service_s: _Optional[float] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., renewed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., jobs_done: _Optional[int] = ..., tokens_done: _Optional[int] = ..., busy_s: _Optional[float] = ..., capabilities: _Optional[_Iterable[str]] = ..., running_by_lane: _Optional[_Mapping[int, int]] = ..., process_id: _Optional[int] = ..., home: _Optional[str] = ..., step_times: _Optional[_Union[_scheduler_pb2.StepTimes, _Mapping]] = ..., lower_tokens_per_s: _Optional[float] = ..., priority_tpot_p95_s: _Optional[float] = ..., theta: _Optional[float] = ..., hot_prefixes: _Optional[_Iterable[int]] = ..., block_tokens: _Optional[int] = ..., lower_places: _Optional[int] = ..., load_progress: _Optional[float] = ..., engine_deaths: _Optional[int] = ...) -> None: ...

class IngestVerdict(_message.Message):
    __slots__ = ("schema", "job_id", "key", "verdict", "error")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    schema: int
    job_id: str
    key: str
    verdict: _common_pb2.Verdict
    error: _common_pb2.JobError
    def __init__(self, schema: _Optional[int] = ..., job_id: _Optional[str] = ..., key: _Optional[str] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.JobError, _Mapping]] = ...) -> None: ...

class ProviderQuota(_message.Message):
    __slots__ = ("schema", "grants", "queue", "windows", "rest_until", "failures", "openings", "open_until", "probing", "counts")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    REST_UNTIL_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    OPENINGS_FIELD_NUMBER: _ClassVar[int]
    OPEN_UNTIL_FIELD_NUMBER: _ClassVar[int]
    PROBING_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    schema: int
    grants: _containers.RepeatedCompositeFieldContainer[QuotaGrant]
    queue: _containers.RepeatedCompositeFieldContainer[QuotaPlace]
    windows: _containers.RepeatedCompositeFieldContainer[QuotaWindow]
    rest_until: _timestamp_pb2.Timestamp
    failures: int
    openings: int
    open_until: _timestamp_pb2.Timestamp
    probing: bool
    counts: _containers.RepeatedCompositeFieldContainer[ProviderCount]
    def __init__(self, schema: _Optional[int] = ..., grants: _Optional[_Iterable[_Union[QuotaGrant, _Mapping]]] = ..., queue: _Optional[_Iterable[_Union[QuotaPlace, _Mapping]]] = ..., windows: _Optional[_Iterable[_Union[QuotaWindow, _Mapping]]] = ..., rest_until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., failures: _Optional[int] = ..., openings: _Optional[int] = ..., open_until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., probing: _Optional[bool] = ..., counts: _Optional[_Iterable[_Union[ProviderCount, _Mapping]]] = ...) -> None: ...

class QuotaAmount(_message.Message):
    __slots__ = ("requests", "tokens", "spend")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPEND_FIELD_NUMBER: _ClassVar[int]
    requests: int
    tokens: int
    spend: float
    def __init__(self, requests: _Optional[int] = ..., tokens: _Optional[int] = ..., spend: _Optional[float] = ...) -> None: ...

class QuotaGrant(_message.Message):
    __slots__ = ("holder", "number", "granted_at", "until", "amount", "probe")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GRANTED_AT_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    holder: str
    number: int
    granted_at: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    amount: QuotaAmount
    probe: bool
    def __init__(self, holder: _Optional[str] = ..., number: _Optional[int] = ..., granted_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., amount: _Optional[_Union[QuotaAmount, _Mapping]] = ..., probe: _Optional[bool] = ...) -> None: ...

class QuotaPlace(_message.Message):
    __slots__ = ("holder", "until", "amount")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    holder: str
    until: _timestamp_pb2.Timestamp
    amount: QuotaAmount
    def __init__(self, holder: _Optional[str] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., amount: _Optional[_Union[QuotaAmount, _Mapping]] = ...) -> None: ...

class QuotaWindow(_message.Message):
    __slots__ = ("window_s", "slices")
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    slices: _containers.RepeatedCompositeFieldContainer[QuotaSlice]
    def __init__(self, window_s: _Optional[float] = ..., slices: _Optional[_Iterable[_Union[QuotaSlice, _Mapping]]] = ...) -> None: ...

class QuotaSlice(_message.Message):
    __slots__ = ("number", "spent")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    number: int
    spent: QuotaAmount
    def __init__(self, number: _Optional[int] = ..., spent: _Optional[_Union[QuotaAmount, _Mapping]] = ...) -> None: ...

class ProviderCount(_message.Message):
    __slots__ = ("kind", "limit", "remaining", "heard_at", "full_at")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    HEARD_AT_FIELD_NUMBER: _ClassVar[int]
    FULL_AT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    limit: float
    remaining: float
    heard_at: _timestamp_pb2.Timestamp
    full_at: _timestamp_pb2.Timestamp
    def __init__(self, kind: _Optional[str] = ..., limit: _Optional[float] = ..., remaining: _Optional[float] = ..., heard_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., full_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
