"""Traffic made from clients: each with its rate and burstiness by time, and its lengths.

After ServeGen (Xiang et al., arXiv 2505.09999): in every window a client's gaps are gamma or Weibull with the window's
coefficient of variation. Here one process of unit rate runs through all of a client's windows, faster and slower as the
rate says: bursts go on from one window to the next, and the mean rate is the published one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laneway.simulator.columns import trace_of
from laneway.simulator.processes import drawn_tenants, varying
from laneway.simulator.trace import Floats, Ints, Trace

CV_LEAST, CV_BOUND = 0.05, 40.0  # of gaps: beyond, a shape is no longer computed with some accuracy
LEAD = 10.0  # a process runs so many times cv^2 + 1 events before it is watched, so that its begin is nothing special


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Lengths by their distribution function: `tokens` at `shares`, both rising, the last share 1. Straight between."""

    shares: Floats
    tokens: Floats

    def draw(self, random: np.random.Generator, size: int) -> Ints:
        drawn = np.interp(random.random(size), self.shares, self.tokens)
        return np.maximum(1, np.rint(drawn)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Client:
    """Columns have a row for each window. `prompts`, `answers`: None where they are not published."""

    name: str
    rate: Floats  # per second
    cv: Floats
    weibull: NDArray[np.bool_]  # else gamma
    prompts: Quantiles | None = None
    answers: Quantiles | None = None


def trace_of_clients(
    name: str,
    clients: Sequence[Client],
    window_s: float,
    random: np.random.Generator,
    *,
    per_s: float | None = None,
    notes: Sequence[str] = (),
) -> Trace:
    """`per_s`: mean rate of all together, to which every client is scaled alike; as published by default.

    Clients without lengths get those of the others, drawn by their traffic. ValueError: no client has lengths.
    """
    known = [client for client in clients if client.prompts is not None and client.answers is not None]
    if not known:
        raise ValueError(f"{name}: no client has both lengths")
    windows = max(len(client.rate) for client in clients)
    published = sum(float(client.rate.sum()) for client in clients) / windows
    scale = 1.0 if per_s is None else per_s / published
    weights = np.array([float(client.rate.sum()) for client in known])
    arrivals, tenants, prompts, answers = [], [], [], []
    for number, (client, own) in enumerate(zip(clients, random.spawn(len(clients)), strict=True)):
        times_s = _arrivals(client, window_s, scale, own)
        arrivals.append(times_s)
        tenants.append(np.full(len(times_s), number, dtype=np.int64))
        lengths = _lengths(client, known, weights, len(times_s), own)
        prompts.append(lengths[0])
        answers.append(lengths[1])
    return trace_of(
        name,
        np.concatenate(arrivals),
        np.concatenate(prompts),
        np.concatenate(answers),
        tenant=np.concatenate(tenants),
        tenants=tuple(client.name for client in clients),
        notes=notes,
    )


def _arrivals(client: Client, window_s: float, scale: float, random: np.random.Generator) -> Floats:
    rates = client.rate * scale
    expected = float(rates.sum()) * window_s
    if expected <= 0.0:
        return np.zeros(0)
    reached = np.cumsum(rates * window_s)
    active = rates > 0.0
    most = float(np.clip(client.cv[active], CV_LEAST, CV_BOUND).max())
    lead = math.ceil(LEAD * (most**2 + 1.0))
    size = lead + math.ceil(expected + 6.0 * most * math.sqrt(expected) + 10.0 * (most**2 + 1.0))
    # Gaps have mean 1, so the n-th one lies near operational time n: that says in which window it is.
    window = np.searchsorted(reached, np.clip(np.arange(size) - lead, 0.0, reached[-1] * (1.0 - 1e-12)), side="right")
    cv = np.clip(client.cv[window], CV_LEAST, CV_BOUND)
    gaps = _gaps(random, cv, client.weibull[window])
    operational = np.cumsum(gaps)
    return varying(operational - lead, rates, window_s)


def _gaps(random: np.random.Generator, cv: Floats, weibull: NDArray[np.bool_]) -> Floats:
    """Of mean 1 and these coefficients of variation."""
    gaps = np.empty(len(cv))
    shape = 1.0 / cv[~weibull] ** 2
    gaps[~weibull] = random.standard_gamma(shape) / shape
    shape = np.interp(cv[weibull], WEIBULL_CV, WEIBULL_SHAPE)
    gaps[weibull] = random.standard_exponential(len(shape)) ** (1.0 / shape) / np.interp(
        cv[weibull], WEIBULL_CV, WEIBULL_MEAN
    )
    return gaps


def _weibull_table() -> tuple[Floats, Floats, Floats]:
    """Coefficient of variation (rising), shape and mean (at scale 1) of Weibull distributions."""
    shapes = np.geomspace(25.0, 0.12, 400)
    mean = np.array([math.gamma(1.0 + 1.0 / shape) for shape in shapes])
    square = np.array([math.gamma(1.0 + 2.0 / shape) for shape in shapes])
    return np.sqrt(square / mean**2 - 1.0), shapes, mean


WEIBULL_CV, WEIBULL_SHAPE, WEIBULL_MEAN = _weibull_table()


def _lengths(
    client: Client, known: Sequence[Client], weights: Floats, size: int, random: np.random.Generator
) -> tuple[Ints, Ints]:
    if client.prompts is not None and client.answers is not None:
        return client.prompts.draw(random, size), client.answers.draw(random, size)
    prompts, answers = np.ones(size, dtype=np.int64), np.ones(size, dtype=np.int64)
    like = drawn_tenants(random, size, weights)
    for number in np.unique(like).tolist():
        rows = np.flatnonzero(like == number)
        other = known[number]
        assert other.prompts is not None
        assert other.answers is not None
        prompts[rows] = other.prompts.draw(random, len(rows))
        answers[rows] = other.answers.draw(random, len(rows))
    return prompts, answers
