"""What can go wrong, by what a caller can do about it, and the one table that maps it to statuses and labels.

Codes are the numbers of google.rpc.Code, kept as an enum here so that this module needs no gRPC.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from laneway.core.lanes import Phase


class Code(IntEnum):
    """google.rpc.Code."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one kind of error leaves the system."""

    code: Code
    http_status: int
    retryable: bool  # the same request may succeed later; RetryInfo says when
    label: str  # value of the metric label `outcome`


class LanewayError(Exception):
    """Something went wrong."""

    row: ClassVar[ErrorRow] = ErrorRow(Code.INTERNAL, 500, False, "internal")
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str = "",
        *,
        reason: str = "",
        field: str = "",
        retry_after_s: float | None = None,
        phase: Phase | None = None,
        job_id: str = "",
        facts: dict[str, str] | None = None,
    ) -> None:
        self.message = message or (type(self).__doc__ or "").strip()
        super().__init__(self.message)
        self.reason = reason or self.default_reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.phase = phase
        self.job_id = job_id
        self.facts = facts or {}


class InvalidRequest(LanewayError):
    """The request is malformed; `field` names the part at fault."""

    row = ErrorRow(Code.INVALID_ARGUMENT, 400, False, "invalid")
    default_reason = "INVALID_FIELD"


class Unsupported(InvalidRequest):
    """The request uses an ability that the pool does not offer; `field` names it."""

    row = ErrorRow(Code.INVALID_ARGUMENT, 400, False, "unsupported")
    default_reason = "UNSUPPORTED_FIELD"


class Unauthenticated(LanewayError):
    """The call carries no valid credential."""

    row = ErrorRow(Code.UNAUTHENTICATED, 401, False, "unauthenticated")
    default_reason = "UNAUTHENTICATED"


class PermissionDenied(LanewayError):
    """The credential does not allow this."""

    row = ErrorRow(Code.PERMISSION_DENIED, 403, False, "denied")
    default_reason = "PERMISSION_DENIED"


class NotFound(LanewayError):
    """There is no such thing, or it is another tenant's."""

    row = ErrorRow(Code.NOT_FOUND, 404, False, "not_found")
    default_reason = "NOT_FOUND"


class JobNotFound(NotFound):
    """There is no such job, or it is another tenant's."""

    default_reason = "JOB_NOT_FOUND"


class DeadLetterNotFound(NotFound):
    """There is no such dead letter, or it is another tenant's."""

    default_reason = "DEAD_LETTER_NOT_FOUND"


class AlreadyExists(LanewayError):
    """The idempotency key was used with another body."""

    row = ErrorRow(Code.ALREADY_EXISTS, 409, False, "conflict")
    default_reason = "IDEMPOTENCY_CONFLICT"


class LaneSaturated(LanewayError):
    """The lane is full or its promise cannot be kept now."""

    row = ErrorRow(Code.RESOURCE_EXHAUSTED, 429, True, "saturated")
    default_reason = "LANE_SATURATED"


class StorageFull(LaneSaturated):
    """The queue's storage is nearly full."""

    row = ErrorRow(Code.RESOURCE_EXHAUSTED, 429, True, "storage_full")
    default_reason = "STORAGE_FULL"


class TenantLimit(LaneSaturated):
    """The tenant has as many jobs or streams as it may have at a time."""

    row = ErrorRow(Code.RESOURCE_EXHAUSTED, 429, True, "tenant_limit")
    default_reason = "TENANT_LIMIT"


class Infeasible(LanewayError):
    """The contract cannot be met at all: deadline, cost cap or tier rule it out."""

    row = ErrorRow(Code.FAILED_PRECONDITION, 412, False, "infeasible")
    default_reason = "INFEASIBLE"


class NotRequeueable(Infeasible):
    """The job that was given up cannot be run again as it is."""

    default_reason = "NOT_REQUEUEABLE"


class RegionNotAllowed(Infeasible):
    """The model is in none of the allowed regions."""

    default_reason = "REGION_NOT_ALLOWED"


class Unavailable(LanewayError):
    """No worker or no queue can take the request now."""

    row = ErrorRow(Code.UNAVAILABLE, 503, True, "unavailable")
    default_reason = "UNAVAILABLE"


class OutcomeUnknown(Unavailable):
    """The request may or may not have been stored; its record tells. Ask for the job again."""

    row = ErrorRow(Code.UNAVAILABLE, 503, True, "unknown")
    default_reason = "OUTCOME_UNKNOWN"


class DeadlineExceeded(LanewayError):
    """The deadline passed; `phase` says where."""

    row = ErrorRow(Code.DEADLINE_EXCEEDED, 504, False, "expired")
    default_reason = "DEADLINE_EXCEEDED"


class JobCancelled(LanewayError):
    """The job was cancelled."""

    row = ErrorRow(Code.CANCELLED, 499, False, "cancelled")
    default_reason = "CANCELLED"


class Aborted(LanewayError):
    """The job was interrupted after output had been delivered and cannot be resumed soundly."""

    row = ErrorRow(Code.ABORTED, 503, False, "aborted")
    default_reason = "NOT_RESUMABLE"


class EngineFailed(LanewayError):
    """The engine failed on this request."""

    row = ErrorRow(Code.INTERNAL, 500, False, "engine_failed")
    default_reason = "ENGINE_FAILED"


class ObjectStoreFull(StorageFull):
    """The object store has no room; nothing of it was kept."""

    default_reason = "OBJECT_STORE_FULL"


class ObjectLost(LanewayError):
    """What the object store held is gone, or it is not what was put there."""

    row = ErrorRow(Code.DATA_LOSS, 500, False, "lost")
    default_reason = "OBJECT_LOST"


class ResultTooLarge(LanewayError):
    """The result is too large for an answer to one call; Watch streams it."""

    row = ErrorRow(Code.RESOURCE_EXHAUSTED, 413, False, "too_large")
    default_reason = "RESULT_BEYOND_RESPONSE"


class ConfigError(Exception):
    """A setting is wrong; the message names it, its origin and what is allowed."""
