"""What a step of a simulated engine costs: a fixed pace, a line, or the shape of a real engine as its profile has it.

It decides time only; which sequences share a step is decided elsewhere. Two ask: the simulated engine, step by step
(`step_s`), and the simulator, for as many equal steps at once as a straight line holds for (`line`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from laneway.core.errors import ConfigError
from laneway.core.fleet import StepTimes
from laneway.runtime.engine_profile import DecodeTimes, EngineProfile, PrefillTimes

FOREVER = 10**15  # steps, or tokens: more than any run has


class Line(NamedTuple):
    """The next steps in a row, of which the j-th (from 0) takes `first_s + j grow_s`."""

    steps: int  # for how many this holds, 1 to FOREVER
    first_s: float
    grow_s: float  # by how much each is longer than the one before


class StepPrice(Protocol):
    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        """Length of a step: (context before, new tokens) of each prefill piece, context of each decoding sequence."""
        ...


class LinePrice(Protocol):
    def line(self, prefill: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> Line:
        """Of steps with the same sequences: `batch` of them decode, which hold `context_tokens` together before the
        first step and one more each after every step; a single prefill piece goes on by its new tokens in each step.
        With several pieces one step is priced."""
        ...


class FixedPace:
    """Every step takes the same time."""

    def __init__(self, pace_s: float) -> None:
        if not 0.0 <= pace_s <= 60.0:
            raise ConfigError(f"pace_s = {pace_s}: must be 0 to 60 seconds")
        self._pace_s = pace_s

    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        return self._pace_s

    def line(self, prefill: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> Line:
        return Line(FOREVER, self._pace_s, 0.0)


class LinearPrice:
    """As `StepTimes` has it: what the policy believes of an engine."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        return self.line(prefill, len(decode), sum(decode)).first_s

    def line(self, prefill: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> Line:
        new_tokens = sum(n for _, n in prefill)
        first_s = self._times.step_s(batch, context_tokens, new_tokens)
        return Line(FOREVER if len(prefill) < 2 else 1, first_s, self._times.context_token_s * batch)


class ProfilePrice:
    """Interpolates linearly between the points of a profile and goes on with the last slope beyond them.

    The mean context of a batch grows by one token a step, so between two points of the table steps lie on a line, and
    what is made of the table for a batch size is kept.
    """

    def __init__(self, profile: EngineProfile) -> None:
        self._decode = profile.decode
        self._prefill = _Prefill(profile)
        self._batches: dict[int, _Curve] = {}

    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        return self.line(prefill, len(decode), sum(decode)).first_s

    def line(self, prefill: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> Line:
        steps, first_s, grow_s = FOREVER, 0.0, 0.0
        if batch:
            curve = self._batches.get(batch)
            if curve is None:
                curve = self._batches[batch] = _decode_of(self._decode, batch)
            context = context_tokens / batch
            piece = curve.piece(context)
            grow_s = curve.slopes[piece]
            first_s = curve.starts[piece] + grow_s * context
            steps = int(curve.ends[piece] - context) + 1
        if prefill:
            held, prefill_s = self._prefill.line(prefill, mixed=batch > 0)
            return Line(min(steps, held), first_s + prefill_s, grow_s)
        return Line(steps, first_s, grow_s)


class _Prefill:
    """Priced by all new tokens of the step, plus the attention of long contexts.

    Beside a decode step the weights are read anyway, so new tokens cost what was measured of them there, or their share
    of a full chunk, and not the floor that the table shows for few of them alone.
    """

    def __init__(self, profile: EngineProfile) -> None:
        self._curve = _prefill_of(profile.prefill)
        self._full = profile.full_tokens
        self._rate_s = self._curve.at(self._full) / self._full
        # Of a prompt token beside decoding, as far as it was measured.
        self._mixed_s = profile.engine.step_times.prefill_token_s if profile.engine is not None else 0.0
        self._known: tuple[dict[int, float], dict[int, float]] = {}, {}  # alone, beside decoding

    def line(self, pieces: Sequence[tuple[int, int]], *, mixed: bool) -> tuple[int, float]:
        """For how many steps it holds, and seconds of each."""
        new = pieces[0][1] if len(pieces) == 1 else sum(n for _, n in pieces)
        known = self._known[mixed]
        seconds = known.get(new)
        if seconds is None:
            seconds = known[new] = self._new_s(new, mixed)
        steps = FOREVER if len(pieces) == 1 else 1
        for context, n in pieces:
            if context < self._full:
                steps = min(steps, -((context - self._full) // n))
            else:
                held, more_s = self._attention(context, n)
                steps = min(steps, held)
                seconds += max(0.0, more_s) if mixed else more_s
        return steps, seconds

    def _new_s(self, new: int, mixed: bool) -> float:
        seconds = self._curve.at(new)
        if mixed and new <= self._full:
            return new * self._mixed_s or min(seconds, new * self._rate_s)
        return seconds

    def _attention(self, context: int, n: int) -> tuple[int, float]:
        """What a piece costs beyond its share, where so much was computed before; and for how many steps that holds."""
        curve = self._curve
        piece = curve.piece(context)
        whole = (curve.ends[piece] - context) // n
        if whole:
            return whole, n * (curve.slopes[piece] - self._rate_s)
        return 1, curve.at(context + n) - curve.at(context) - n * self._rate_s


class _Curve:
    """Straight pieces: a constant before the first point, lines between points, the last of them without end. From
    milliseconds at its points; in seconds."""

    __slots__ = ("_xs", "ends", "slopes", "starts")

    def __init__(self, xs: Sequence[int], ms: Sequence[float]) -> None:
        self._xs = list(xs[:-1])  # where a new piece begins
        self.ends = [*xs[:-1], FOREVER]
        self.starts = [ms[0] / 1e3]  # of each piece continued to 0
        self.slopes = [0.0]
        for i in range(1, len(xs)):
            slope = (ms[i] - ms[i - 1]) / (xs[i] - xs[i - 1]) / 1e3
            self.slopes.append(slope)
            self.starts.append(ms[i] / 1e3 - slope * xs[i])

    def piece(self, x: float) -> int:
        return bisect_right(self._xs, x)

    def at(self, x: float) -> float:
        piece = self.piece(x)
        return self.starts[piece] + self.slopes[piece] * x


def _prefill_of(times: PrefillTimes) -> _Curve:
    return _Curve(times.new_tokens, times.ms)


def _decode_of(times: DecodeTimes, batch: int) -> _Curve:
    """By mean context, for a batch size between two rows of the table or beyond the last."""
    if len(times.batch) == 1 or batch <= times.batch[0]:
        return _Curve(times.context, times.ms[0])
    above = min(bisect_right(times.batch, batch), len(times.batch) - 1)
    low, high = times.batch[above - 1], times.batch[above]
    share = (batch - low) / (high - low)
    rows = zip(times.ms[above - 1], times.ms[above], strict=True)
    return _Curve(times.context, [a + (b - a) * share for a, b in rows])
