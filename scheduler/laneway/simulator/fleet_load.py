"""What comes to a fleet: arrivals a second of each region and request class, and the means of each class.

A class is a lane and a bucket of lengths. Means that are products (an answer's tokens times the context that they are
decoded at) are taken over requests, not over class means: long answers weigh more than their share.
Units: seconds, tokens, requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from laneway.core.fleet import StepTimes
from laneway.core.lanes import LANES
from laneway.simulator.trace import Floats, Ints, Trace
from laneway.simulator.usage import device_s

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Classes:
    """Columns, a row for each class."""

    lane: Ints  # index into LANES
    prompt_tokens: Floats  # mean
    prompt_square: Floats  # mean of the square, tokens^2
    output_tokens: Floats  # mean
    answer_square: Floats  # mean of the square, tokens^2
    context_tokens: Floats  # of a sequence that decodes, on average over its tokens
    reserve_tokens: Floats  # prompt + most that the caller allows, mean: what it holds of KV
    ttft_s: Floats  # promised; inf: no such promise
    tpot_s: Floats
    deadline_s: Floats
    device_s: Floats  # what one is worth: usage.device_s, mean

    def __len__(self) -> int:
        return len(self.lane)

    @property
    def of_lane(self) -> Floats:
        """1 where a class (row) is of a lane (column), else 0."""
        return np.asarray(self.lane[:, None] == np.arange(len(LANES)), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class FleetLoad:
    classes: Classes
    arrivals: NDArray[np.float32]  # second, region, class: requests
    dispersion: float = 1.0  # variance / mean of the counts of moments within a second; 1: Poisson

    @property
    def span_s(self) -> int:
        return int(self.arrivals.shape[0])

    @property
    def regions(self) -> int:
        return int(self.arrivals.shape[1])


def load_of(trace: Trace, times: StepTimes, *, buckets: int = 6, regions: int = 1, after_s: int = 0) -> FleetLoad:
    """A trace's requests by second, divided evenly among regions; then `after_s` seconds in which none comes.

    Each lane has at most `buckets` classes, of about equally many requests each, by what they are worth in time of the
    device. Later turns of sessions have no time of arrival before they run: they have to be left out.
    """
    if not len(trace):
        raise ValueError(f"{trace.name}: no requests")
    if np.any(trace.think_s > 0.0):
        raise ValueError(f"{trace.name}: fleet mode has no sessions")
    worth = device_s(trace.prompt_tokens.astype(np.float64), trace.output_tokens.astype(np.float64), times)
    number = np.zeros(len(trace), dtype=np.int64)
    count = 0
    for lane in range(len(LANES)):
        rows = np.flatnonzero(trace.lane == lane)
        if len(rows):
            edges = np.unique(np.quantile(worth[rows], np.linspace(0.0, 1.0, buckets + 1)[1:-1]))
            _, inside = np.unique(np.searchsorted(edges, worth[rows], side="right"), return_inverse=True)
            number[rows] = count + inside
            count = int(number[rows].max()) + 1
    seconds = trace.arrival_s.astype(np.int64)
    span_s = int(seconds[-1]) + 1 + after_s
    arrivals = np.bincount(seconds * count + number, minlength=span_s * count).reshape(span_s, 1, count)
    shared = np.repeat(arrivals / regions, regions, axis=1).astype(np.float32)
    return FleetLoad(_classes(trace, number, count, worth), shared, dispersion_within(trace.arrival_s[trace.lane == 0]))


def dispersion_within(arrival_s: Floats) -> float:
    """Index of dispersion of the counts of tenths of a second around the mean of their second; at least 1."""
    if len(arrival_s) < 2:
        return 1.0
    tenths = np.floor(arrival_s * 10.0).astype(np.int64)
    counts = np.bincount(tenths, minlength=(int(tenths[-1]) // 10 + 1) * 10).reshape(-1, 10)
    variance = counts.var(axis=1, ddof=1)
    return max(1.0, float(variance.sum() / counts.mean(axis=1).sum()))


def _classes(trace: Trace, number: Ints, count: int, worth: Floats) -> Classes:
    def mean(column: Floats | Ints) -> Floats:
        return np.bincount(number, weights=column, minlength=count) / sizes

    sizes = np.bincount(number, minlength=count).astype(np.float64)
    prompt, output = trace.prompt_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
    lane = np.zeros(count, dtype=np.int64)
    lane[number] = trace.lane
    # Of promises that differ within a class the median is taken: most have one.
    ttft_s, tpot_s, deadline_s = (
        np.array([np.median(column[number == each]) for each in range(count)])
        for column in (trace.ttft_s, trace.tpot_s, trace.deadline_s)
    )
    return Classes(
        lane=lane,
        prompt_tokens=mean(prompt),
        prompt_square=mean(prompt**2),
        output_tokens=mean(output),
        answer_square=mean(output**2),
        context_tokens=mean(output * (prompt + output / 2.0)) / mean(output),
        reserve_tokens=mean(prompt + trace.max_tokens),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        deadline_s=deadline_s,
        device_s=mean(worth),
    )


def diurnal(
    classes: Classes,
    per_s: Floats,
    *,
    regions: int,
    span_s: int = DAY_S,
    swing: float = 0.6,
    shape: Callable[[Floats], Floats] = np.sin,
    random: np.random.Generator | None = None,
) -> FleetLoad:
    """Made-up days: a region's rate of each class is `per_s` x (1 + swing x shape(phase)), a day long, and the phases
    of the regions are spread evenly over the day. Lanes that may wait come at their mean rate all day. With `random`
    the counts of seconds are drawn (Poisson), else they are their means."""
    at = np.arange(span_s, dtype=np.float64)
    out = np.empty((span_s, regions, len(classes)), dtype=np.float32)
    swings = np.where(classes.lane == 0, swing, 0.0)
    for region in range(regions):
        phase = 2.0 * np.pi * (at / DAY_S + region / regions)
        mean = np.maximum(0.0, per_s * (1.0 + shape(phase)[:, None] * swings))
        out[:, region] = mean if random is None else random.poisson(mean)
    return FleetLoad(classes, out)


def equal_requests(
    lane: int, prompt_tokens: float, output_tokens: float, times: StepTimes, *, ttft_s: float = math.inf,
    tpot_s: float = math.inf, deadline_s: float = math.inf,
) -> Classes:  # fmt: skip
    """One class, of requests that are all the same."""

    def column(value: float) -> Floats:
        return np.array([value], dtype=np.float64)

    return Classes(
        lane=np.array([lane]),
        prompt_tokens=column(prompt_tokens),
        prompt_square=column(prompt_tokens**2),
        output_tokens=column(output_tokens),
        answer_square=column(output_tokens**2),
        context_tokens=column(prompt_tokens + output_tokens / 2.0),
        reserve_tokens=column(prompt_tokens + output_tokens),
        ttft_s=column(ttft_s),
        tpot_s=column(tpot_s),
        deadline_s=column(deadline_s),
        device_s=column(device_s(prompt_tokens, output_tokens, times)),
    )


def joined(parts: Sequence[Classes]) -> Classes:
    return Classes(
        **{each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Classes)}
    )
