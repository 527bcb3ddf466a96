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

class RouteRequest(_message.Message):
    __slots__ = ("model", "lane", "regions", "prompt_tokens", "max_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    lane: _common_pb2.Lane
    regions: _containers.RepeatedScalarFieldContainer[str]
    prompt_tokens: int
    max_tokens: int
    def __init__(self, model: _Optional[str] = ..., lane: _Optional[_Union[_common_pb2.Lane, str]] = ..., regions: _Optional[_Iterable[str]] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("region", "reason", "scores")
    REGION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    region: str
    reason: str
    scores: _containers.RepeatedCompositeFieldContainer[RegionScore]
    def __init__(self, region: _Optional[str] = ..., reason: _Optional[str] = ..., scores: _Optional[_Iterable[_Union[RegionScore, _Mapping]]] = ...) -> None: ...

class RegionScore(_message.Message):
    __slots__ = ("region", "score_s", "excluded")
    REGION_FIELD_NUMBER: _ClassVar[int]
    SCORE_S_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    region: str
    score_s: float
    excluded: str
    def __init__(self, region: _Optional[str] = ..., score_s: _Optional[float] = ..., excluded: _Optional[str] = ...) -> None: ...

class RegionDigest(_message.Message):
    __slots__ = ("region", "made_at", "draining", "healthy", "zones", "models", "price_factor", "round_trip")
    REGION_FIELD_NUMBER: _ClassVar[int]
    MADE_AT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    ZONES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    PRICE_FACTOR_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_FIELD_NUMBER: _ClassVar[int]
    region: str
    made_at: _timestamp_pb2.Timestamp
    draining: bool
    healthy: bool
    zones: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedCompositeFieldContainer[ModelDigest]
    price_factor: float
    round_trip: _duration_pb2.Duration
    def __init__(self, region: _Optional[str] = ..., made_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., draining: _Optional[bool] = ..., healthy: _Optional[bool] = ..., zones: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[_Union[ModelDigest, _Mapping]]] = ..., price_factor: _Optional[float] = ..., round_trip: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ModelDigest(_message.Message):
    __slots__ = ("model", "tier", "workers", "free_slots", "ttft_eta", "batch_eta", "hot_prefixes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TTFT_ETA_FIELD_NUMBER: _ClassVar[int]
    BATCH_ETA_FIELD_NUMBER: _ClassVar[int]
    HOT_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    model: str
    tier: str
    workers: int
    free_slots: int
    ttft_eta: _duration_pb2.Duration
    batch_eta: _duration_pb2.Duration
    hot_prefixes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., tier: _Optional[str] = ..., workers: _Optional[int] = ..., free_slots: _Optional[int] = ..., ttft_eta: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., batch_eta: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., hot_prefixes: _Optional[_Iterable[int]] = ...) -> None: ...

class ListRegionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRegionsResponse(_message.Message):
    __slots__ = ("regions", "next_page_token")
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    regions: _containers.RepeatedCompositeFieldContainer[RegionDigest]
    next_page_token: str
    def __init__(self, regions: _Optional[_Iterable[_Union[RegionDigest, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class WatchRegionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRegionsResponse(_message.Message):
    __slots__ = ("regions",)
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    regions: _containers.RepeatedCompositeFieldContainer[RegionDigest]
    def __init__(self, regions: _Optional[_Iterable[_Union[RegionDigest, _Mapping]]] = ...) -> None: ...

class DrainRegionRequest(_message.Message):
    __slots__ = ("region",)
    REGION_FIELD_NUMBER: _ClassVar[int]
    region: str
    def __init__(self, region: _Optional[str] = ...) -> None: ...

class DrainRegionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainRegionRequest(_message.Message):
    __slots__ = ("region",)
    REGION_FIELD_NUMBER: _ClassVar[int]
    region: str
    def __init__(self, region: _Optional[str] = ...) -> None: ...

class UndrainRegionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
