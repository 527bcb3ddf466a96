"""Made-up traffic: arrival processes, lengths by their quantiles, tenants by their shares. One seed, one draw.

Times in seconds, rates per second, lengths in tokens. A gamma renewal process with coefficient of variation 1 is a
Poisson process; at 3 and more it has the clumps of recorded traffic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laneway.simulator.trace import Floats, Ints

P95 = 1.6448536269514722  # of the standard normal distribution


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal by its median and 95th percentile, cut off at `most`. Tokens, `p95` above `p50`."""

    p50: float
    p95: float
    most: int

    def draw(self, random: np.random.Generator, size: int) -> Ints:
        sigma = math.log(self.p95 / self.p50) / P95
        drawn = random.lognormal(math.log(self.p50), sigma, size)
        return np.clip(np.rint(drawn), 1, self.most).astype(np.int64)


def gamma_arrivals(random: np.random.Generator, size: int, per_s: float, cv: float) -> Floats:
    """So many arrivals at this mean rate, which is met exactly: bursty sequences would otherwise miss it by far."""
    shape = 1.0 / cv**2
    gaps = random.standard_gamma(shape, size)
    total = float(gaps.sum())
    if total <= 0.0:
        raise ValueError(f"no arrivals with a coefficient of variation of {cv}: every gap is 0")
    arrivals = np.cumsum(gaps)
    arrivals -= arrivals[0]
    arrivals *= size / (per_s * total)
    return arrivals


def poisson_arrivals(random: np.random.Generator, per_s: float, span_s: float) -> Floats:
    """Of a Poisson process; their number is drawn."""
    arrivals = random.random(random.poisson(per_s * span_s)) * span_s
    arrivals.sort()
    return arrivals


def diurnal(size: int, peak_over_mean: float, *, phase: float = 0.0) -> Floats:
    """Rates of equal parts of a day, mean 1: a raised cosine, lowest at the begin. `phase`: days later, 0 to 1.

    `peak_over_mean` from 1 to 4: sharper than a cosine beyond 2.
    """
    turn = 2.0 * math.pi * ((np.arange(size) + 0.5) / size - phase)
    wave = 0.5 * (1.0 - np.cos(turn))
    if peak_over_mean <= 2.0:
        gentle: Floats = 1.0 + (peak_over_mean - 1.0) * (2.0 * wave - 1.0)
        return gentle
    sharp = 1.0
    while (wave**sharp).max() / (wave**sharp).mean() < peak_over_mean and sharp < 32.0:
        sharp *= 1.05
    rates: Floats = wave**sharp / (wave**sharp).mean()
    return rates


def varying(operational: Floats, rates: Floats, part_s: float) -> Floats:
    """Times at which a process of unit rate, run at these rates (parts of equal length), has these operational times.

    Those beyond the end are left out. Kept: the order, and the coefficient of variation where the rate is steady.
    """
    reached = np.concatenate(([0.0], np.cumsum(rates * part_s)))
    inside = operational[(operational >= 0.0) & (operational < reached[-1])]
    times_s: Floats = np.interp(inside, reached, np.arange(len(rates) + 1) * part_s)
    return times_s


def shares_like(size: int, top: float, top10: float) -> Floats:
    """Falling shares of so many tenants, more than 10: `top` of the first, `top10` of the first ten; power laws."""
    first = _falling(10, top / top10) * top10
    rest = _falling(size - 10, min(first[-1] / (1.0 - top10), 0.5)) * (1.0 - top10)
    return np.concatenate((first, rest))


def _falling(size: int, top: float) -> Floats:
    low, high = 0.0, 20.0
    ranks = np.arange(1, size + 1, dtype=np.float64)
    for _ in range(60):
        power = 0.5 * (low + high)
        low, high = (power, high) if 1.0 / (ranks**-power).sum() < top else (low, power)
    weights: Floats = ranks**-low
    weights /= weights.sum()
    return weights


def drawn_tenants(random: np.random.Generator, size: int, shares: Sequence[float] | Floats) -> Ints:
    """Tenants of requests by these shares, which need not add up to 1."""
    reached = np.cumsum(np.asarray(shares, dtype=np.float64))
    place = np.searchsorted(reached, random.random(size) * reached[-1], side="right")
    tenants: Ints = np.minimum(place, len(reached) - 1).astype(np.int64)
    return tenants
