"""Checks that every parser of caller input shares. Each failure is an InvalidRequest that names the field.

Numeric checks are written so that NaN fails. Messages never repeat a caller's text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import NoReturn, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.unknown_fields import UnknownFieldSet

from laneway.core.errors import InvalidRequest, Unsupported
from laneway.core.ids import is_token

KEY_CHARACTERS_MAX = 128  # of an idempotency key
_NANOS = 1_000_000_000
_SECONDS_MAX = 253_402_300_799  # end of the year 9999, as google.protobuf.Timestamp defines

W = TypeVar("W")


def refuse(field: str, message: str, *, reason: str = "") -> NoReturn:
    raise InvalidRequest(f"{field} {message}", field=field, reason=reason)


def no_unknown_fields(message: Message, field: str) -> None:
    """A caller newer than this release may send fields we do not know: dropping them would be ignoring them."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise Unsupported(
            f"{field} has field number {unknown[0].field_number}, which this release does not know",
            field=field,
            reason="UNKNOWN_FIELD",
        )


def within(value: float, low: float, high: float, field: str) -> float:
    if not low <= value <= high:
        refuse(field, f"must be {low:g} to {high:g}")
    return value


def at_most(items: Sized, count_max: int, field: str) -> None:
    if len(items) > count_max:
        refuse(field, f"has {len(items)} entries, at most {count_max} are allowed")


def text(value: str, field: str, *, bytes_max: int = 0) -> str:
    """Any UTF-8 text but NUL, which databases, terminals and C libraries behind us cut at."""
    if "\x00" in value:
        refuse(field, "must not contain the character NUL")
    if bytes_max and len(value) > bytes_max // 4 and len(value.encode()) > bytes_max:
        refuse(field, f"is longer than {bytes_max} bytes")
    return value


def filled(value: str, field: str, *, bytes_max: int = 0) -> str:
    if not value:
        refuse(field, "must not be empty")
    return text(value, field, bytes_max=bytes_max)


def token(value: str, field: str, *, length_max: int = 64) -> str:
    if not is_token(value) or len(value) > length_max:
        refuse(field, f"must be 1 to {length_max} of the characters A-Z a-z 0-9 _ -")
    return value


def word(table: Mapping[int, W], number: int, default: W, field: str) -> W:
    """The word of an enum number; 0 is the default, an unknown one is refused."""
    if number == 0:
        return default
    found = table.get(number)
    if found is None:
        refuse(field, f"is {number}, which is no value of this enum")
    return found


def duration_s(value: Duration, low_s: float, high_s: float, field: str) -> float:
    if not 0 <= value.nanos < _NANOS or value.seconds < 0:
        refuse(field, "is not a valid Duration that is not negative")
    span_s = value.seconds + value.nanos / _NANOS
    if not low_s <= span_s <= high_s:
        refuse(field, f"must be {low_s:g} s to {high_s:g} s")
    return span_s


def time_s(value: Timestamp, field: str) -> float:
    """Unix seconds; only times from 1970 to 9999 make sense anywhere here."""
    if not 0 <= value.nanos < _NANOS or not 0 <= value.seconds <= _SECONDS_MAX:
        refuse(field, "is not a valid Timestamp from 1970 on")
    return value.seconds + value.nanos / _NANOS


def idempotency_key(value: str, field: str = "idempotency_key") -> str:
    """Empty for none; else 1 to KEY_CHARACTERS_MAX characters."""
    if len(value) > KEY_CHARACTERS_MAX:
        refuse(field, f"has {len(value)} characters, at most {KEY_CHARACTERS_MAX} are allowed")
    return text(value, field)
