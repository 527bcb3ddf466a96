"""What a provider says in the headers of its answers about when it may be asked again, and how much is left.

`retry-after-ms` (milliseconds), `retry-after` (seconds, or a date), and `x-ratelimit-{limit,remaining,reset}-requests`
and `-tokens`, where a reset is a span such as `1s`, `6m0s`, `120ms` or a bare number of seconds after which nothing
counts any more. What does not parse is taken for not said. Between an answer and its reset the amount that is left is
taken to grow evenly, as that of a token bucket does; a provider that gives all back at once at the reset refuses a
request in between, and says for how long.

Seconds; names and forms are those of hosted providers (reference: their clients read the same). O(headers). Known
failure modes: counts of answers that overtook each other are some requests old; a provider whose `remaining` leaves out
what runs is asked too early, and refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from math import isfinite

from msgspec import Struct

RETRY_AFTER_S_MAX = 3600.0  # beyond it a provider is asked once an hour all the same
RESET_S_MAX = 86_400.0
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")


class Told(Struct, frozen=True):
    """The provider's own count of one kind, `requests` or `tokens`, as of an answer."""

    kind: str
    limit: float
    remaining: float
    heard_s: float
    full_s: float  # when all of it is left again


def told_wait_s(told: Told, need: float, now_s: float) -> float:
    """Seconds until so much of what was left at the answer, and has grown since, may have been used."""
    span_s = told.full_s - told.heard_s
    beyond = need - told.remaining
    if need <= 0 or beyond <= 0 or span_s <= 0:
        return 0.0
    grows = told.limit - told.remaining
    after_s = span_s if grows <= 0 else min(span_s, span_s * beyond / grows)
    return max(0.0, told.heard_s + after_s - now_s)


def retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """Seconds for which the provider wants to be left alone; None: it does not say. `now_s`: Unix seconds."""
    low = _lower(headers)
    after_ms = _number(low.get("retry-after-ms", ""))
    if after_ms is not None:
        return _within(after_ms / 1000.0)
    said = low.get("retry-after", "").strip()
    after_s = _number(said)
    if after_s is None and said:
        try:
            after_s = parsedate_to_datetime(said).timestamp() - now_s
        except ValueError:
            return None
    return None if after_s is None else _within(after_s)


def told_of(headers: Mapping[str, str], heard_s: float) -> tuple[Told, ...]:
    """The provider's own counts, of the kinds of which it says enough."""
    low = _lower(headers)
    found = []
    for kind in ("requests", "tokens"):
        remaining = _number(low.get(f"x-ratelimit-remaining-{kind}", ""))
        reset_s = _span_s(low.get(f"x-ratelimit-reset-{kind}", ""))
        if remaining is None or reset_s is None or reset_s <= 0:
            continue
        limit = _number(low.get(f"x-ratelimit-limit-{kind}", ""))
        found.append(Told(kind, remaining if limit is None else limit, remaining, heard_s, heard_s + reset_s))
    return tuple(found)


def _within(seconds: float) -> float:
    return min(max(0.0, seconds), RETRY_AFTER_S_MAX)


def _number(text: str) -> float | None:
    try:
        number = float(text.strip())
    except ValueError:
        return None
    return number if isfinite(number) and number >= 0 else None


def _span_s(text: str) -> float | None:
    number = _number(text)
    if number is None:
        if not _SPAN.fullmatch(text.strip()):
            return None
        number = sum(float(amount) * _UNITS_S[unit] for amount, unit in _PART.findall(text))
    return min(number, RESET_S_MAX)


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
