"""What a step of a simulated engine costs: a fixed pace, or the measured shape of a GPU serving a model.

A profile is a JSON file: prefill milliseconds by new tokens, decode milliseconds by batch and context, and how many
tokens of KV cache there are. It decides time and capacity only; which sequences share a step is decided elsewhere.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import msgspec

from laneway.core.errors import ConfigError


class StepPrice(Protocol):
    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        """Length of a step: (context before, new tokens) of each prefill piece, context of each decoding sequence."""
        ...


class FixedPace:
    """Every step takes the same time."""

    def __init__(self, pace_s: float) -> None:
        if not 0.0 <= pace_s <= 60.0:
            raise ConfigError(f"pace_s = {pace_s}: must be 0 to 60 seconds")
        self._pace_s = pace_s

    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        return self._pace_s


class PrefillTimes(msgspec.Struct, frozen=True):
    new_tokens: list[int]
    ms: list[float]


class DecodeTimes(msgspec.Struct, frozen=True):
    batch: list[int]
    context: list[int]
    ms: list[list[float]]  # a row for each batch, a column for each context


class GpuProfile(msgspec.Struct, frozen=True):
    """Interpolates linearly between the measured points and goes on with the last slope beyond them."""

    prefill: PrefillTimes
    decode: DecodeTimes
    kv_capacity_tokens: int

    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        total_ms = 0.0
        if prefill:
            total_ms += self._prefill_ms(prefill, mixed=bool(decode))
        if decode:
            total_ms += self._decode_ms(len(decode), sum(decode) / len(decode))
        return total_ms / 1e3

    def _prefill_ms(self, pieces: Sequence[tuple[int, int]], *, mixed: bool) -> float:
        """Priced by all new tokens of the step, plus the attention of long contexts.

        Beside a decode step the weights are read anyway, so few new tokens cost their share of a full chunk and not
        the floor that the table shows for them alone.
        """
        times = self.prefill
        full = min(2048, times.new_tokens[-1])
        rate_ms = _at(times.new_tokens, times.ms, full) / full
        new = sum(n for _, n in pieces)
        ms = _at(times.new_tokens, times.ms, new)
        if mixed and new < full:
            ms = min(ms, new * rate_ms)
        for context, n in pieces:
            if context >= full:
                longer = _at(times.new_tokens, times.ms, context + n) - _at(times.new_tokens, times.ms, context)
                ms += max(0.0, longer - n * rate_ms)
        return ms

    def _decode_ms(self, batch: int, context: float) -> float:
        times = self.decode
        above = min(max(bisect_right(times.batch, batch), 1), len(times.batch) - 1)
        near = slice(max(above - 1, 0), above + 1)
        return _at(times.batch[near], [_at(times.context, row, context) for row in times.ms[near]], batch)


def load_profile(name: str) -> GpuProfile:
    """A packaged profile by name, or a file by path; `path#name` picks from a file that holds several."""
    path_text, _, inner = name.partition("#")
    if not path_text.endswith(".json"):
        folder = resources.files("laneway.workers.engines") / "profiles"
        known = sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))
        if name not in known:
            raise ConfigError(f'profile = "{name}": no such profile; packaged: {", ".join(known)}; or a .json file')
        raw = (folder / f"{name}.json").read_bytes()
    else:
        try:
            raw = Path(path_text).read_bytes()
        except OSError as error:
            raise ConfigError(f'profile = "{name}": cannot read the file: {error.strerror}') from error
    try:
        if inner:
            profiles = msgspec.json.decode(raw, type=_ProfileFile).profiles
            if inner not in profiles:
                raise ConfigError(f'profile = "{name}": the file holds {", ".join(sorted(profiles))}')
            profile = profiles[inner]
        else:
            profile = msgspec.json.decode(raw, type=GpuProfile)
    except msgspec.DecodeError as error:
        raise ConfigError(f'profile = "{name}": not a GPU profile: {error}') from error
    _check(profile, name)
    return profile


class _ProfileFile(msgspec.Struct):
    profiles: dict[str, GpuProfile]


def _check(profile: GpuProfile, name: str) -> None:
    pre, dec = profile.prefill, profile.decode
    fits = (
        len(pre.new_tokens) == len(pre.ms)
        and len(dec.batch) == len(dec.ms)
        and all(len(row) == len(dec.context) for row in dec.ms)
    )
    axes = (pre.new_tokens, dec.batch, dec.context)
    rising = all(axis and axis[0] > 0 and all(a < b for a, b in pairwise(axis)) for axis in axes)
    positive = all(math.isfinite(ms) and ms > 0.0 for row in (pre.ms, *dec.ms) for ms in row)
    if not (fits and rising and positive and profile.kv_capacity_tokens > 0):
        raise ConfigError(f'profile = "{name}": axes must rise, times be positive, and tables fit their axes')


def _at(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """Between points a line; below the first its value; beyond the last the last slope."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    i = min(bisect_right(xs, x), len(xs) - 1)
    return _line(x, xs[i - 1], ys[i - 1], xs[i], ys[i])


def _line(x: float, x0: float, y0: float, x1: float, y1: float) -> float:
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
