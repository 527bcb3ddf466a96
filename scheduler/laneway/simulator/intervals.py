"""Paired intervals over seeds: both policies play the same traces, so a seed's luck falls out of the difference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.random import Generator

from laneway.simulator.trace import Floats


class Interval(msgspec.Struct, frozen=True):
    """Around `mean`, over `seeds` pairs."""

    mean: float
    low: float
    high: float
    seeds: int

    def at_least(self, gate: float) -> bool:
        """On the bound: a mean that only luck holds up does not pass."""
        return self.low >= gate

    def at_most(self, gate: float) -> bool:
        return self.high <= gate


def difference(ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95) -> Interval:
    """Of ours less theirs, seed by seed, by Student's t. Raises ValueError unless there are two pairs."""
    first, second = _pairs(ours, theirs)
    return mean_interval(first - second, confidence)


def ratio(ours: Sequence[float], theirs: Sequence[float], confidence: float = 0.95) -> Interval:
    """Geometric mean of ours / theirs, seed by seed, by Student's t on the logarithms.

    Where ours is 0 at a seed (a harvest that does not count) the interval is by plain ratios. Raises ValueError unless
    theirs are more than 0 and there are two pairs.
    """
    first, second = _pairs(ours, theirs)
    if not (second > 0.0).all():
        raise ValueError("a ratio needs figures of more than 0 below the line")
    if not (first > 0.0).all():
        return mean_interval(first / second, confidence)
    found = mean_interval(np.log(first / second), confidence)
    return Interval(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.seeds)


def mean_interval(values: Floats, confidence: float = 0.95) -> Interval:
    """mean +- t s / sqrt(n). Raises ValueError for fewer than two values or any that is no finite number."""
    size = len(values)
    if size < 2:
        raise ValueError("an interval needs two seeds")
    if not np.isfinite(values).all():
        raise ValueError("an interval needs finite figures")
    mean = float(values.mean())
    half = t_quantile(0.5 + confidence / 2.0, size - 1) * float(values.std(ddof=1)) / math.sqrt(size)
    return Interval(mean, mean - half, mean + half, size)


def bootstrap_ratio(
    ours: Sequence[float],
    theirs: Sequence[float],
    random: Generator,
    *,
    confidence: float = 0.95,
    draws: int = 4000,
) -> Interval:
    """Of sum(ours) / sum(theirs), pairs drawn with replacement, by percentiles: a check on `ratio` that supposes no
    shape. With ten seeds it is somewhat narrow, so gates use the t-interval."""
    first, second = _pairs(ours, theirs)
    if not second.sum() > 0.0:
        raise ValueError("a ratio needs figures of more than 0 below the line")
    drawn = random.integers(len(first), size=(draws, len(first)))
    below = second[drawn].sum(axis=1)
    found = first[drawn].sum(axis=1)[below > 0.0] / below[below > 0.0]
    low, high = np.quantile(found, (0.5 - confidence / 2.0, 0.5 + confidence / 2.0))
    return Interval(float(first.sum() / second.sum()), float(low), float(high), len(first))


def t_quantile(probability: float, freedom: int) -> float:
    """Of Student's t with `freedom` degrees, `probability` in (0.5, 1): bisection on its distribution function."""
    if not (0.5 < probability < 1.0 and freedom >= 1):
        raise ValueError("a t quantile needs a probability between 0.5 and 1 and a degree of freedom")
    low, high = 0.0, 1.0
    while _t_below(high, freedom) < probability:
        low, high = high, 2.0 * high
    for _ in range(80):
        middle = (low + high) / 2.0
        if _t_below(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return high


def _t_below(value: float, freedom: int) -> float:
    """P(T <= value) in closed form for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(value / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2 == 1
    term = cosine if odd else 1.0
    total = term if not odd or freedom > 1 else 0.0
    for step in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (step - 1) / step
        total += term
    central = (angle + sine * total) * 2.0 / math.pi if odd else sine * total
    return 0.5 + central / 2.0


def _pairs(ours: Sequence[float], theirs: Sequence[float]) -> tuple[Floats, Floats]:
    if len(ours) != len(theirs):
        raise ValueError("pairs need one figure of each side for each seed")
    return np.array(ours, dtype=np.float64), np.array(theirs, dtype=np.float64)
