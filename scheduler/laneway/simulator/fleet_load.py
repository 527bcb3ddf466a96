"""What comes to a fleet: arrivals a second of each region and request class, and the means of each class.

A class is a lane and a bucket of lengths. Means that are products (an answer's tokens times the context that they are
decoded at) are taken over requests, not over class means: long answers weigh more than their share.
Units: seconds, tokens, requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    shared = np.repeat(arrivals.astype(np.float32) / regions, regions, axis=1)
    return FleetLoad(_classes(trace, number, count, worth), shared)


def _classes(trace: Trace, number: Ints, count: int, worth: Floats) -> Classes:
    def mean(column: Floats | Ints) -> Floats:
        return np.bincount(number, weights=column, minlength=count) / sizes

    sizes = np.bincount(number, minlength=count).astype(np.float64)
    prompt, output = trace.prompt_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
    lane = np.zeros(count, dtype=np.int64)
    lane[number] = trace.lane
    # Of promises that differ within a class the median is taken: most have one.
    promised = [
        np.array([np.median(column[number == each]) for each in range(count)])
        for column in (trace.ttft_s, trace.tpot_s, trace.deadline_s)
    ]
    return Classes(
        lane, mean(prompt), mean(prompt**2), mean(output), mean(output**2),
        mean(output * (prompt + output / 2.0)) / mean(output), mean(prompt + trace.max_tokens), *promised, mean(worth),
    )  # fmt: skip


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


def one_class(lane: int, prompt_tokens: float, output_tokens: float, times: StepTimes, **promises: float) -> Classes:
    """A class of equal requests. `promises`: ttft_s, tpot_s, deadline_s; inf where left out."""
    return joined([_single(lane, prompt_tokens, output_tokens, times, promises)])


def joined(parts: Sequence[Classes]) -> Classes:
    names = Classes.__slots__
    return Classes(*(np.concatenate([getattr(each, name) for each in parts]) for name in names))


def _single(lane: int, prompt: float, output: float, times: StepTimes, promises: dict[str, float]) -> Classes:
    def column(value: float) -> Floats:
        return np.array([value], dtype=np.float64)

    return Classes(
        np.array([lane]), column(prompt), column(prompt**2), column(output), column(output**2),
        column(prompt + output / 2.0), column(prompt + output),
        *(column(promises.get(name, np.inf)) for name in ("ttft_s", "tpot_s", "deadline_s")),
        column(device_s(prompt, output, times)),
    )  # fmt: skip
