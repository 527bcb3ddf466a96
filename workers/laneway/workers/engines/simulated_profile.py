"""What a step of a simulated engine costs: a fixed pace, or the shape of a real engine as its profile has it.

It decides time only; which sequences share a step is decided elsewhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from laneway.core.errors import ConfigError
from laneway.runtime.engine_profile import EngineProfile


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


class ProfilePrice:
    """Interpolates linearly between the points of a profile and goes on with the last slope beyond them."""

    def __init__(self, profile: EngineProfile) -> None:
        self._prefill = profile.prefill
        self._decode = profile.decode
        self._full = profile.full_tokens
        self._rate_ms = _at(profile.prefill.new_tokens, profile.prefill.ms, self._full) / self._full
        # Of a prompt token beside decoding, as far as it was measured.
        self._mixed_ms = profile.engine.step_times.prefill_token_s * 1e3 if profile.engine is not None else 0.0

    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        total_ms = 0.0
        if prefill:
            total_ms += self._prefill_ms(prefill, mixed=bool(decode))
        if decode:
            total_ms += self._decode_ms(len(decode), sum(decode) / len(decode))
        return total_ms / 1e3

    def _prefill_ms(self, pieces: Sequence[tuple[int, int]], *, mixed: bool) -> float:
        """Priced by all new tokens of the step, plus the attention of long contexts.

        Beside a decode step the weights are read anyway, so new tokens cost what was measured of them there, or their
        share of a full chunk, and not the floor that the table shows for few of them alone.
        """
        times, full = self._prefill, self._full
        new = sum(n for _, n in pieces)
        ms = _at(times.new_tokens, times.ms, new)
        if mixed and new <= full:
            ms = new * self._mixed_ms or min(ms, new * self._rate_ms)
        for context, n in pieces:
            if context >= full:
                longer = _at(times.new_tokens, times.ms, context + n) - _at(times.new_tokens, times.ms, context)
                more_ms = longer - n * self._rate_ms
                ms += max(0.0, more_ms) if mixed else more_ms
        return ms

    def _decode_ms(self, batch: int, context: float) -> float:
        times = self._decode
        above = min(max(bisect_right(times.batch, batch), 1), len(times.batch) - 1)
        near = slice(max(above - 1, 0), above + 1)
        return _at(times.batch[near], [_at(times.context, row, context) for row in times.ms[near]], batch)


def _at(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """Between points a line; below the first its value; beyond the last the last slope."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    i = min(bisect_right(xs, x), len(xs) - 1)
    return _line(x, xs[i - 1], ys[i - 1], xs[i], ys[i])


def _line(x: float, x0: float, y0: float, x1: float, y1: float) -> float:
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
