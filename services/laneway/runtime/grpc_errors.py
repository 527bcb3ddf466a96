"""Laneway's errors as gRPC statuses with google.rpc details, and back. The code of each error is core's one table.

ErrorInfo carries the reason (domain "laneway") and facts; RetryInfo and grpc-retry-pushback-ms say when to try
again; BadRequest names the field at fault; QuotaFailure names the quota.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from laneway.core import errors
from laneway.core.errors import Code, LanewayError
from laneway.core.job import JobError
from laneway.core.lanes import Phase
from laneway.runtime.wire.times import duration_of, span_s

DOMAIN = "laneway"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
NEVER = "-1"  # the same call can never succeed: a gRPC library that retries by itself must not
MESSAGE_BYTES_MAX = 512  # all of a status travels in HTTP/2 headers, whose usual limit is 8 KiB
FACTS_MAX = 16
FACT_BYTES_MAX = 128
_TOO_LARGE = "larger than max"  # "Received message larger than max (5000000 vs. 921600)", either side
_CODES: dict[int, grpc.StatusCode] = {status.value[0]: status for status in grpc.StatusCode}

Metadata = tuple[tuple[str, str | bytes], ...]


def status_code(error: LanewayError) -> grpc.StatusCode:
    return _CODES[error.row.code]


def to_status(error: LanewayError) -> status_pb2.Status:
    status = status_pb2.Status(code=int(error.row.code), message=_shortened(error.message))
    facts = {key: _shortened(value, FACT_BYTES_MAX) for key, value in islice(error.facts.items(), FACTS_MAX)}
    if error.job_id:
        facts["job_id"] = error.job_id
    if error.phase:
        facts["phase"] = error.phase.name
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=facts))
    if error.retry_after_s is not None:
        delay = duration_of(_retry_ms(error.retry_after_s) / 1000)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=status.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if "quota" in error.facts:
        exceeded = error_details_pb2.QuotaFailure.Violation(subject=facts.get("quota", ""), description=status.message)
        status.details.add().Pack(error_details_pb2.QuotaFailure(violations=[exceeded]))
    return status


def status_message(error: LanewayError) -> str:
    return _shortened(error.message)


def trailing_metadata(error: LanewayError) -> Metadata:
    details: Metadata = ((DETAILS_KEY, to_status(error).SerializeToString()),)
    if error.retry_after_s is not None:
        return (*details, (PUSHBACK_KEY, str(_retry_ms(error.retry_after_s))))
    return details if error.row.retryable else (*details, (PUSHBACK_KEY, NEVER))


def from_rpc_error(error: grpc.aio.AioRpcError) -> LanewayError:
    """What a caller can act on, from a failed call: our details where the server sent them, else the bare code."""
    code = Code(error.code().value[0])
    status = status_pb2.Status()
    pushback_s: float | None = None
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            status = _parsed(value)
        elif key == PUSHBACK_KEY and isinstance(value, str) and value.isdigit():
            pushback_s = int(value) / 1000
    return _from_details(code, error.details() or "", status, pushback_s)


def from_status(status: status_pb2.Status) -> LanewayError:
    return _from_details(Code(status.code), status.message, status, None)


def error_of(job_error: JobError, job_id: str = "") -> LanewayError:
    """The error that a job ended with, to be raised to its caller."""
    kind = _kind(job_error.code, job_error.reason)
    return _make(
        kind,
        job_error.code,
        job_error.message,
        reason=job_error.reason,
        field=job_error.field,
        phase=job_error.phase,
        job_id=job_id,
    )


def job_error_of(error: LanewayError) -> JobError:
    """The same error as a job record keeps it."""
    return JobError(error.row.code, error.reason, error.message, error.phase, error.field)


# --- details ---------------------------------------------------------------------------------------


def _from_details(code: Code, message: str, status: status_pb2.Status, pushback_s: float | None) -> LanewayError:
    info, retry, request = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        for target in (info, retry, request):
            detail.Unpack(target)  # only where the types agree
    if code is Code.RESOURCE_EXHAUSTED and not info.reason and _TOO_LARGE in message:
        return errors.InvalidRequest(message, reason="MESSAGE_TOO_LARGE")  # from the gRPC library: no retry can help
    facts = dict(info.metadata)
    phase = facts.pop("phase", "").lower()
    reason = info.reason if info.domain == DOMAIN else ""
    return _make(
        _kind(code, reason),
        code,
        message,
        reason=reason,
        field=request.field_violations[0].field if request.field_violations else "",
        retry_after_s=span_s(retry.retry_delay) if retry.HasField("retry_delay") else pushback_s,
        phase=Phase(phase) if phase in set(Phase) else None,
        job_id=facts.pop("job_id", ""),
        facts=facts,
    )


def _parsed(data: bytes) -> status_pb2.Status:
    try:
        return status_pb2.Status.FromString(data)
    except DecodeError:  # another server's idea of details; the code and message stand
        return status_pb2.Status()


def _retry_ms(retry_after_s: float) -> int:
    return max(0, math.ceil(retry_after_s * 1000 - 1e-6))


def _shortened(text: str, bytes_max: int = MESSAGE_BYTES_MAX) -> str:
    data = text.encode("utf-8", "replace")
    return text if len(data) <= bytes_max else f"{data[: bytes_max - 3].decode('utf-8', 'ignore')}…"


# --- kinds -----------------------------------------------------------------------------------------

_BY_CODE: dict[Code, type[LanewayError]] = {
    Code.CANCELLED: errors.JobCancelled,
    Code.INVALID_ARGUMENT: errors.InvalidRequest,
    Code.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    Code.NOT_FOUND: errors.NotFound,
    Code.ALREADY_EXISTS: errors.AlreadyExists,
    Code.PERMISSION_DENIED: errors.PermissionDenied,
    Code.RESOURCE_EXHAUSTED: errors.LaneSaturated,
    Code.FAILED_PRECONDITION: errors.Infeasible,
    Code.ABORTED: errors.Aborted,
    Code.INTERNAL: errors.LanewayError,
    Code.UNAVAILABLE: errors.Unavailable,
    Code.UNAUTHENTICATED: errors.Unauthenticated,
}


def _core_errors(root: type[LanewayError] = LanewayError) -> Iterator[type[LanewayError]]:
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield kind
        yield from _core_errors(kind)


_BY_REASON: dict[tuple[Code, str], type[LanewayError]] = {
    (kind.row.code, kind.default_reason): kind for kind in _core_errors()
}


def _kind(code: Code, reason: str) -> type[LanewayError]:
    return _BY_REASON.get((code, reason)) or _BY_CODE.get(code, LanewayError)


def _make(
    kind: type[LanewayError],
    code: Code,
    message: str,
    *,
    reason: str,
    field: str = "",
    retry_after_s: float | None = None,
    phase: Phase | None = None,
    job_id: str = "",
    facts: dict[str, str] | None = None,
) -> LanewayError:
    error = kind(
        message, reason=reason, field=field, retry_after_s=retry_after_s, phase=phase, job_id=job_id, facts=facts
    )
    if error.row.code is not code and code is not Code.OK:  # a code that no class of ours stands for, such as UNKNOWN
        error.reason = reason or code.name
        error.facts = {**error.facts, "code": code.name}
    return error
