"""Float seconds and protobuf times. A wall time of 0 means "none" and travels as an unset field.

Wall times of this century survive the round trip exactly; spans to the nanosecond.
"""

from __future__ import annotations

import math

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

_NANOS = 1_000_000_000


def timestamp_of(unix_s: float) -> Timestamp | None:
    """None for 0: pass it to a message's constructor and the field stays unset."""
    if not unix_s:
        return None
    seconds = math.floor(unix_s)
    nanos = round((unix_s - seconds) * _NANOS)
    return Timestamp(seconds=seconds + nanos // _NANOS, nanos=nanos % _NANOS)


def unix_s(stamp: Timestamp) -> float:
    """0.0 for an unset field."""
    return stamp.seconds + stamp.nanos / _NANOS


def duration_of(span_s: float | None) -> Duration | None:
    """None for None, so that the field stays unset."""
    if span_s is None:
        return None
    whole = round(span_s * _NANOS)
    seconds, nanos = divmod(abs(whole), _NANOS)
    return Duration(seconds=seconds, nanos=nanos) if whole >= 0 else Duration(seconds=-seconds, nanos=-nanos)


def span_s(duration: Duration) -> float:
    return duration.seconds + duration.nanos / _NANOS
