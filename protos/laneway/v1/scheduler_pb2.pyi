import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from laneway.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Plan(_message.Message):
    __slots__ = ("region", "epoch", "version", "made_at", "valid_until", "pools", "paused", "tenants", "counted_before", "policy")
    REGION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MADE_AT_FIELD_NUMBER: _ClassVar[int]
    VALID_UNTIL_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    region: str
    epoch: int
    version: int
    made_at: _timestamp_pb2.Timestamp
    valid_until: _timestamp_pb2.Timestamp
    pools: _containers.RepeatedCompositeFieldContainer[PoolPlan]
    paused: _containers.RepeatedScalarFieldContainer[_common_pb2.Lane]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantDepth]
    counted_before: int
    policy: PolicyVersion
    def __init__(self, region: _Optional[str] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., made_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., valid_until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[PoolPlan, _Mapping]]] = ..., paused: _Optional[_Iterable[_Union[_common_pb2.Lane, str]]] = ..., tenants: _Optional[_Iterable[_Union[TenantDepth, _Mapping]]] = ..., counted_before: _Optional[int] = ..., policy: _Optional[_Union[PolicyVersion, _Mapping]] = ...) -> None: ...

class PolicyVersion(_message.Message):
    __slots__ = ("version", "json", "loaded_at", "refused", "restart")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    LOADED_AT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    version: int
    json: str
    loaded_at: _timestamp_pb2.Timestamp
    refused: str
    restart: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[int] = ..., json: _Optional[str] = ..., loaded_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., refused: _Optional[str] = ..., restart: _Optional[_Iterable[str]] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("base_s", "sequence_s", "context_token_s", "prefill_token_s", "chunk_tokens")
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    base_s: float
    sequence_s: float
    context_token_s: float
    prefill_token_s: float
    chunk_tokens: int
    def __init__(self, base_s: _Optional[float] = ..., sequence_s: _Optional[float] = ..., context_token_s: _Optional[float] = ..., prefill_token_s: _Optional[float] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class HomePlan(_message.Message):
    __slots__ = ("home", "worker_id", "ready", "running", "oldest_wait")
    HOME_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAIT_FIELD_NUMBER: _ClassVar[int]
    home: str
    worker_id: str
    ready: int
    running: int
    oldest_wait: _duration_pb2.Duration
    def __init__(self, home: _Optional[str] = ..., worker_id: _Optional[str] = ..., ready: _Optional[int] = ..., running: _Optional[int] = ..., oldest_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Demand(_message.Message):
    __slots__ = ("by", "device_s")
    BY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    by: _timestamp_pb2.Timestamp
    device_s: float
    def __init__(self, by: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., device_s: _Optional[float] = ...) -> None: ...

class EtaFit(_message.Message):
    __slots__ = ("p50", "p90", "samples")
    P50_FIELD_NUMBER: _ClassVar[int]
    P90_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    p50: float
    p90: float
    samples: int
    def __init__(self, p50: _Optional[float] = ..., p90: _Optional[float] = ..., samples: _Optional[int] = ...) -> None: ...

class TenantDepth(_message.Message):
    __slots__ = ("tenant", "lane", "open")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    lane: _common_pb2.Lane
    open: int
    def __init__(self, tenant: _Optional[str] = ..., lane: _Optional[_Union[_common_pb2.Lane, str]] = ..., open: _Optional[int] = ...) -> None: ...

class PoolPlan(_message.Message):
    __slots__ = ("pool", "workers", "slots", "free_slots", "kv_tokens", "free_kv_tokens", "prefill_tokens_per_s", "decode_tokens_per_s", "service_s", "desired_workers", "lanes", "homes", "lower_tokens_per_s", "priority_per_s", "burstiness", "reserved_slots", "step_times", "hot_prefixes", "desired_reason")
    POOL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SERVICE_S_FIELD_NUMBER: _ClassVar[int]
    DESIRED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    HOMES_FIELD_NUMBER: _ClassVar[int]
    LOWER_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_PER_S_FIELD_NUMBER: _ClassVar[int]
    BURSTINESS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    HOT_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    DESIRED_REASON_FIELD_NUMBER: _ClassVar[int]
    pool: str
    workers: int
    slots: int
    free_slots: int
    kv_tokens: int
    free_kv_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    service_s: float
    desired_workers: int
    lanes: _containers.RepeatedCompositeFieldContainer[LanePlan]
    homes: _containers.RepeatedCompositeFieldContainer[HomePlan]
    lower_tokens_per_s: float
    priority_per_s: float
    burstiness: float
    reserved_slots: int
    step_times: StepTimes
    hot_prefixes: _containers.RepeatedScalarFieldContainer[int]
    desired_reason: str
    def __init__(self, pool: _Optional[str] = ..., workers: _Optional[int] = ..., slots: _Optional[int] = ..., free_slots: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., free_kv_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ..., service_s: _Optional[float] = ..., desired_workers: _Optional[int] = ..., lanes: _Optional[_Iterable[_Union[LanePlan, _Mapping]]] = ..., homes: _Optional[_Iterable[_Union[HomePlan, _Mapping]]] = ..., lower_tokens_per_s: _Optional[float] = ..., priority_per_s: _Optional[float] = ..., burstiness: _Optional[float] = ..., reserved_slots: _Optional[int] = ..., step_times: _Optional[_Union[StepTimes, _Mapping]] = ..., hot_prefixes: _Optional[_Iterable[int]] = ..., desired_reason: _Optional[str] = ...) -> None: ...

class LanePlan(_message.Message):
    __slots__ = ("lane", "ready", "running", "parked", "parked_device_s", "limit", "oldest_wait", "demand", "ttft_fit", "completion_fit")
    LANE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    PARKED_DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAIT_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIT_FIELD_NUMBER: _ClassVar[int]
    lane: _common_pb2.Lane
    ready: int
    running: int
    parked: int
    parked_device_s: float
    limit: int
    oldest_wait: _duration_pb2.Duration
    demand: _containers.RepeatedCompositeFieldContainer[Demand]
    ttft_fit: EtaFit
    completion_fit: EtaFit
    def __init__(self, lane: _Optional[_Union[_common_pb2.Lane, str]] = ..., ready: _Optional[int] = ..., running: _Optional[int] = ..., parked: _Optional[int] = ..., parked_device_s: _Optional[float] = ..., limit: _Optional[int] = ..., oldest_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., demand: _Optional[_Iterable[_Union[Demand, _Mapping]]] = ..., ttft_fit: _Optional[_Union[EtaFit, _Mapping]] = ..., completion_fit: _Optional[_Union[EtaFit, _Mapping]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "name", "pool", "engine", "state", "detail", "slots", "running", "kv_tokens", "kv_tokens_used", "prefill_tokens_per_s", "decode_tokens_per_s", "started_at", "seen_at", "jobs_done", "tokens_done", "capabilities", "busy_s", "process_id", "home", "lower_tokens_per_s", "priority_tpot_p95_s", "theta", "step_times", "load_progress", "engine_deaths")
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
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    SEEN_AT_FIELD_NUMBER: _ClassVar[int]
    JOBS_DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DONE_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    LOWER_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_TPOT_P95_S_FIELD_NUMBER: _ClassVar[int]
    THETA_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    LOAD_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_DEATHS_FIELD_NUMBER: _ClassVar[int]
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
    started_at: _timestamp_pb2.Timestamp
    seen_at: _timestamp_pb2.Timestamp
    jobs_done: int
    tokens_done: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    busy_s: float
    process_id: int
    home: str
    lower_tokens_per_s: float
    priority_tpot_p95_s: float
    theta: float
    step_times: StepTimes
    load_progress: float
    engine_deaths: int
    def __init__(self, worker_id: _Optional[str] = ..., name: _Optional[str] = ..., pool: _Optional[str] = ..., engine: _Optional[str] = ..., state: _Optional[str] = ..., detail: _Optional[str] = ..., slots: _Optional[int] = ..., running: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., kv_tokens_used: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_tokens_per_s: _Optional[float] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., seen_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., jobs_done: _Optional[int] = ..., tokens_done: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., busy_s: _Optional[float] = ..., process_id: _Optional[int] = ..., home: _Optional[str] = ..., lower_tokens_per_s: _Optional[float] = ..., priority_tpot_p95_s: _Optional[float] = ..., theta: _Optional[float] = ..., step_times: _Optional[_Union[StepTimes, _Mapping]] = ..., load_progress: _Optional[float] = ..., engine_deaths: _Optional[int] = ...) -> None: ...

class LaneStatus(_message.Message):
    __slots__ = ("lane", "pool", "paused", "ready", "running", "parked", "limit", "next_due", "released")
    LANE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    lane: _common_pb2.Lane
    pool: str
    paused: bool
    ready: int
    running: int
    parked: int
    limit: int
    next_due: _timestamp_pb2.Timestamp
    released: int
    def __init__(self, lane: _Optional[_Union[_common_pb2.Lane, str]] = ..., pool: _Optional[str] = ..., paused: _Optional[bool] = ..., ready: _Optional[int] = ..., running: _Optional[int] = ..., parked: _Optional[int] = ..., limit: _Optional[int] = ..., next_due: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., released: _Optional[int] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "tier", "pool", "engine", "context_length", "vocabulary_size", "capabilities", "workers", "price_per_million_prompt_tokens", "price_per_million_completion_tokens", "price_per_device_s", "weights", "precision", "lanes", "prompt_tokens_min", "prompt_tokens_max", "features", "planned_workers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PRICE_PER_MILLION_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRICE_PER_MILLION_COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRICE_PER_DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_MIN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PLANNED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    tier: str
    pool: str
    engine: str
    context_length: int
    vocabulary_size: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    workers: int
    price_per_million_prompt_tokens: float
    price_per_million_completion_tokens: float
    price_per_device_s: float
    weights: str
    precision: str
    lanes: _containers.RepeatedScalarFieldContainer[_common_pb2.Lane]
    prompt_tokens_min: int
    prompt_tokens_max: int
    features: _containers.RepeatedScalarFieldContainer[str]
    planned_workers: int
    def __init__(self, name: _Optional[str] = ..., tier: _Optional[str] = ..., pool: _Optional[str] = ..., engine: _Optional[str] = ..., context_length: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., workers: _Optional[int] = ..., price_per_million_prompt_tokens: _Optional[float] = ..., price_per_million_completion_tokens: _Optional[float] = ..., price_per_device_s: _Optional[float] = ..., weights: _Optional[str] = ..., precision: _Optional[str] = ..., lanes: _Optional[_Iterable[_Union[_common_pb2.Lane, str]]] = ..., prompt_tokens_min: _Optional[int] = ..., prompt_tokens_max: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., planned_workers: _Optional[int] = ...) -> None: ...

class GetPlanRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPlanResponse(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class WatchPlanRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchPlanResponse(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "pool")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    pool: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., pool: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "next_page_token")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    next_page_token: str
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListLanesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListLanesResponse(_message.Message):
    __slots__ = ("lanes", "next_page_token")
    LANES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    lanes: _containers.RepeatedCompositeFieldContainer[LaneStatus]
    next_page_token: str
    def __init__(self, lanes: _Optional[_Iterable[_Union[LaneStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "next_page_token")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    next_page_token: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class PauseLaneRequest(_message.Message):
    __slots__ = ("lane",)
    LANE_FIELD_NUMBER: _ClassVar[int]
    lane: _common_pb2.Lane
    def __init__(self, lane: _Optional[_Union[_common_pb2.Lane, str]] = ...) -> None: ...

class PauseLaneResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeLaneRequest(_message.Message):
    __slots__ = ("lane",)
    LANE_FIELD_NUMBER: _ClassVar[int]
    lane: _common_pb2.Lane
    def __init__(self, lane: _Optional[_Union[_common_pb2.Lane, str]] = ...) -> None: ...

class ResumeLaneResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class UndrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExplainJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class ExplainJobResponse(_message.Message):
    __slots__ = ("job_id", "state", "steps")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    state: _common_pb2.JobState
    steps: _containers.RepeatedCompositeFieldContainer[Explanation]
    def __init__(self, job_id: _Optional[str] = ..., state: _Optional[_Union[_common_pb2.JobState, str]] = ..., steps: _Optional[_Iterable[_Union[Explanation, _Mapping]]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("at", "actor", "action", "reason", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    AT_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    at: _timestamp_pb2.Timestamp
    actor: str
    action: str
    reason: str
    facts: _containers.ScalarMap[str, str]
    def __init__(self, at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., actor: _Optional[str] = ..., action: _Optional[str] = ..., reason: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...
