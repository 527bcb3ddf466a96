"""Lanes, job states and the other closed sets of words. Values are what subjects, metrics and the CLI show."""

from __future__ import annotations

from enum import StrEnum


class Lane(StrEnum):
    PRIORITY = "priority"
    DEFERRABLE = "deferrable"
    BATCH = "batch"

    @property
    def may_park(self) -> bool:
        return self is not Lane.PRIORITY


LANES: tuple[Lane, ...] = (Lane.PRIORITY, Lane.DEFERRABLE, Lane.BATCH)
PARKING_LANES: tuple[Lane, ...] = (Lane.DEFERRABLE, Lane.BATCH)


class JobState(StrEnum):
    WAITING = "waiting"
    PARKED = "parked"
    READY = "ready"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REFUSED = "refused"

    @property
    def terminal(self) -> bool:
        return self in _TERMINAL


_TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED, JobState.REFUSED})


class Isolation(StrEnum):
    SLO = "slo"
    STRICT = "strict"


class OnDisconnect(StrEnum):
    CANCEL = "cancel"
    KEEP = "keep"


class Phase(StrEnum):
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    STOP = "stop"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"


class VerdictKind(StrEnum):
    ACCEPTED = "accepted"
    HELD = "held"
    MOVED = "moved"
    REFUSED = "refused"
