"""The facts of a decision as people read them: `ahead_s 2.5` is "ahead 2.5 s". What is 0 says nothing and is left out;
`--json` has all of it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from laneway.cli.console import clock_time, moment, seconds

UNIX_MS_MIN = 1e12  # smaller numbers of milliseconds are spans
NEAR_S = 43_200.0  # a time of day says which day it means
_HIDDEN = ("message", "short_of")
_NAMES = {
    "ttft_eta": "first token in",
    "ttft_bound": "nine of ten first tokens within",
    "completion_eta": "whole answer in",
    "completion_bound": "nine of ten whole answers within",
}


def fact_words(facts: Iterable[tuple[str, str]]) -> str:
    """In a line, by name. Whatever is no number of a known unit is shown as it came."""
    words = (fact_word(name, value) for name, value in sorted(facts) if name not in _HIDDEN)
    return ", ".join(word for word in words if word)


def fact_word(name: str, value: str) -> str:
    """Empty for a number that is 0."""
    stem, _, unit = name.rpartition("_")
    try:
        number = float(value)
    except ValueError:
        return f"{name.replace('_', ' ')} {value}"
    if not number:
        return ""
    if stem and unit in ("ms", "s"):
        return f"{_NAMES.get(stem, stem.replace('_', ' '))} {_time(number / 1000.0 if unit == 'ms' else number)}"
    return f"{name.replace('_', ' ')} {value}"


def _time(value_s: float) -> str:
    if value_s < UNIX_MS_MIN / 1000.0:
        return seconds(value_s)
    return clock_time(value_s) if abs(value_s - time.time()) < NEAR_S else moment(value_s)
