"""What can go wrong on the bus, by what the caller knows afterwards.

The question a caller must answer after a failed publish is whether the message may be stored. NotConnected, NoStream,
StreamFull, OutOfStorage, WrongSequence and PayloadTooLarge say no; only PublishUnknown says perhaps.
"""

from __future__ import annotations

import re

from laneway.core.errors import (
    Code,
    ErrorRow,
    InvalidRequest,
    LaneSaturated,
    LanewayError,
    OutcomeUnknown,
    StorageFull,
    Unavailable,
)

AWAY_RETRY_S = 1.0  # what a caller is told to wait
FULL_RETRY_S = 2.0  # the same; admission knows of it by then, and names its own time

# Numbers of nats-server's server/errors.json.
ERR_STREAM_NOT_FOUND = 10059
ERR_STREAM_NAME_IN_USE = 10058
ERR_CONSUMER_NOT_FOUND = 10014
ERR_MESSAGE_NOT_FOUND = 10037
ERR_STORE_FAILED = 10077
# A replicated stream answers 10164 while another write to the subject is on its way.
ERR_WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
# Account, server or memory limits: 10002, 10023, 10028, 10047, 10180.
ERR_OUT_OF_STORAGE = frozenset({10002, 10023, 10028, 10047})
# Not stored, and the same publish may succeed soon: no leader yet, too many requests, sequence state not ready.
ERR_TRY_AGAIN = frozenset({10008, 10009, 10163, 10167})


class BusError(LanewayError):
    """The message bus failed."""


class WrongSequence(BusError):
    """Somebody else wrote this subject first: the compare-and-set was refused and nothing was stored."""

    row = ErrorRow(Code.ABORTED, 409, True, "conflict")
    default_reason = "WRITE_CONFLICT"

    def __init__(self, message: str = "") -> None:
        super().__init__(message, retry_after_s=AWAY_RETRY_S)


class StreamFull(BusError, LaneSaturated):
    """The stream is at its limit and refused the message; nothing was stored."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message, retry_after_s=FULL_RETRY_S)


class OutOfStorage(BusError, StorageFull):
    """The account or server has no storage left; nothing was stored."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message, retry_after_s=FULL_RETRY_S)


class _Away(BusError, Unavailable):
    """NATS cannot be reached now; nothing was stored, so that whoever asked may ask again soon."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message, retry_after_s=AWAY_RETRY_S)


class NotConnected(_Away):
    """There is no connection to NATS; nothing was sent."""

    default_reason = "NOT_CONNECTED"


class NoStream(_Away):
    """No stream takes this subject now (not provisioned, or no leader); nothing was stored."""

    default_reason = "NO_STREAM"


class NoAnswer(_Away):
    """NATS did not answer in time to what stores nothing. (Of a publish this is PublishUnknown.)"""

    default_reason = "NO_ANSWER"


class PublishUnknown(BusError, OutcomeUnknown):
    """The publish was sent and not acknowledged: it may be stored now, or later, or never."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message, retry_after_s=AWAY_RETRY_S)


class NotPermitted(BusError):
    """NATS does not let this user do that; nothing was sent on."""

    default_reason = "NOT_PERMITTED"

    def __init__(self, act: str) -> None:
        super().__init__(
            f"NATS does not let us {act}: is nats.nkey_file that of this service's role, and the server's list of its"
            " rights of this release (laneway secrets)?"
        )


class ApiError(BusError):
    """JetStream refused a request of its API."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"JetStream error {err_code}: {description}", facts={"err_code": str(err_code)})
        self.code = code
        self.err_code = err_code
        self.description = description


class PayloadTooLarge(InvalidRequest):
    """The message is larger than NATS takes; it was not sent."""

    default_reason = "PAYLOAD_TOO_LARGE"

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"the message has {size_bytes} bytes, the limit is {limit_bytes}",
            facts={"size_bytes": str(size_bytes), "limit_bytes": str(limit_bytes)},
        )
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)


def refused_act(error: Exception) -> tuple[str, str] | None:
    """("publish" or "subscription", subject in lower case) of a refusal that the server told asynchronously."""
    found = _VIOLATION.search(str(error))
    return (found[1].lower(), found[2].lower()) if found else None


def publish_error(code: int, err_code: int, description: str) -> BusError:
    """The error for a publish that JetStream answered with a refusal."""
    if err_code in ERR_WRONG_LAST_SEQUENCE:
        return WrongSequence(f"{description} ({err_code})")
    if err_code == ERR_STORE_FAILED and "maximum" in description:
        return StreamFull(description)
    if err_code in ERR_OUT_OF_STORAGE:
        return OutOfStorage(description)
    return api_error(code, err_code, description)


def api_error(code: int, err_code: int, description: str) -> BusError:
    """The error for a request of the API that JetStream refused. What it will take soon is no fault of the asker's."""
    if err_code in ERR_TRY_AGAIN:
        return NoStream(description)
    return ApiError(code, err_code, description)
