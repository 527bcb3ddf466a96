import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Lane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_UNSPECIFIED: _ClassVar[Lane]
    LANE_PRIORITY: _ClassVar[Lane]
    LANE_DEFERRABLE: _ClassVar[Lane]
    LANE_BATCH: _ClassVar[Lane]

class Isolation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ISOLATION_UNSPECIFIED: _ClassVar[Isolation]
    ISOLATION_SLO: _ClassVar[Isolation]
    ISOLATION_STRICT: _ClassVar[Isolation]

class OnDisconnect(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_DISCONNECT_UNSPECIFIED: _ClassVar[OnDisconnect]
    ON_DISCONNECT_CANCEL: _ClassVar[OnDisconnect]
    ON_DISCONNECT_KEEP: _ClassVar[OnDisconnect]

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_WAITING: _ClassVar[JobState]
    JOB_STATE_PARKED: _ClassVar[JobState]
    JOB_STATE_READY: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_SUCCEEDED: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]
    JOB_STATE_EXPIRED: _ClassVar[JobState]
    JOB_STATE_REFUSED: _ClassVar[JobState]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_QUEUE: _ClassVar[Phase]
    PHASE_PREFILL: _ClassVar[Phase]
    PHASE_DECODE: _ClassVar[Phase]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_EXPIRED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class VerdictKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_KIND_UNSPECIFIED: _ClassVar[VerdictKind]
    VERDICT_KIND_ACCEPTED: _ClassVar[VerdictKind]
    VERDICT_KIND_HELD: _ClassVar[VerdictKind]
    VERDICT_KIND_MOVED: _ClassVar[VerdictKind]
    VERDICT_KIND_REFUSED: _ClassVar[VerdictKind]
LANE_UNSPECIFIED: Lane
LANE_PRIORITY: Lane
LANE_DEFERRABLE: Lane
LANE_BATCH: Lane
ISOLATION_UNSPECIFIED: Isolation
ISOLATION_SLO: Isolation
ISOLATION_STRICT: Isolation
ON_DISCONNECT_UNSPECIFIED: OnDisconnect
ON_DISCONNECT_CANCEL: OnDisconnect
ON_DISCONNECT_KEEP: OnDisconnect
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_WAITING: JobState
JOB_STATE_PARKED: JobState
JOB_STATE_READY: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_SUCCEEDED: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_CANCELLED: JobState
JOB_STATE_EXPIRED: JobState
JOB_STATE_REFUSED: JobState
PHASE_UNSPECIFIED: Phase
PHASE_QUEUE: Phase
PHASE_PREFILL: Phase
PHASE_DECODE: Phase
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_EXPIRED: FinishReason
FINISH_REASON_ERROR: FinishReason
VERDICT_KIND_UNSPECIFIED: VerdictKind
VERDICT_KIND_ACCEPTED: VerdictKind
VERDICT_KIND_HELD: VerdictKind
VERDICT_KIND_MOVED: VerdictKind
VERDICT_KIND_REFUSED: VerdictKind

class Contract(_message.Message):
    __slots__ = ("lane", "ttft_target", "tpot_target", "deadline", "not_before", "isolation", "least_tier", "cost_max", "regions", "on_disconnect", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LANE_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    LEAST_TIER_FIELD_NUMBER: _ClassVar[int]
    COST_MAX_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    ON_DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    lane: Lane
    ttft_target: _duration_pb2.Duration
    tpot_target: _duration_pb2.Duration
    deadline: _timestamp_pb2.Timestamp
    not_before: _timestamp_pb2.Timestamp
    isolation: Isolation
    least_tier: str
    cost_max: float
    regions: _containers.RepeatedScalarFieldContainer[str]
    on_disconnect: OnDisconnect
    labels: _containers.ScalarMap[str, str]
    def __init__(self, lane: _Optional[_Union[Lane, str]] = ..., ttft_target: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tpot_target: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., not_before: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., isolation: _Optional[_Union[Isolation, str]] = ..., least_tier: _Optional[str] = ..., cost_max: _Optional[float] = ..., regions: _Optional[_Iterable[str]] = ..., on_disconnect: _Optional[_Union[OnDisconnect, str]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("kind", "reason", "message", "ttft_eta", "completion_eta", "hold_until", "retry_after", "lane", "tier", "region", "pool", "cost", "ttft_bound", "completion_bound", "facts", "estimate")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TTFT_ETA_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_ETA_FIELD_NUMBER: _ClassVar[int]
    HOLD_UNTIL_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    TTFT_BOUND_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_BOUND_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    kind: VerdictKind
    reason: str
    message: str
    ttft_eta: _duration_pb2.Duration
    completion_eta: _duration_pb2.Duration
    hold_until: _timestamp_pb2.Timestamp
    retry_after: _duration_pb2.Duration
    lane: Lane
    tier: str
    region: str
    pool: str
    cost: float
    ttft_bound: _duration_pb2.Duration
    completion_bound: _duration_pb2.Duration
    facts: _containers.ScalarMap[str, str]
    estimate: Estimate
    def __init__(self, kind: _Optional[_Union[VerdictKind, str]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., ttft_eta: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., completion_eta: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., hold_until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., lane: _Optional[_Union[Lane, str]] = ..., tier: _Optional[str] = ..., region: _Optional[str] = ..., pool: _Optional[str] = ..., cost: _Optional[float] = ..., ttft_bound: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., completion_bound: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., facts: _Optional[_Mapping[str, str]] = ..., estimate: _Optional[_Union[Estimate, _Mapping]] = ...) -> None: ...

class Estimate(_message.Message):
    __slots__ = ("ttft_s", "ttft_bound_s", "completion_s", "completion_bound_s")
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_BOUND_S_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_S_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_BOUND_S_FIELD_NUMBER: _ClassVar[int]
    ttft_s: float
    ttft_bound_s: float
    completion_s: float
    completion_bound_s: float
    def __init__(self, ttft_s: _Optional[float] = ..., ttft_bound_s: _Optional[float] = ..., completion_s: _Optional[float] = ..., completion_bound_s: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cost: _Optional[float] = ...) -> None: ...

class JobError(_message.Message):
    __slots__ = ("code", "reason", "message", "phase", "field")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    phase: Phase
    field: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., field: _Optional[str] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("created_at", "claimed_at", "first_token_at", "ended_at", "prefill", "decode")
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_AT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    created_at: _timestamp_pb2.Timestamp
    claimed_at: _timestamp_pb2.Timestamp
    first_token_at: _timestamp_pb2.Timestamp
    ended_at: _timestamp_pb2.Timestamp
    prefill: _duration_pb2.Duration
    decode: _duration_pb2.Duration
    def __init__(self, created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., claimed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., first_token_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., prefill: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
