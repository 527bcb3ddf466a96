"""What came of each request of a trace, and what the fleet did meanwhile: all that a report is made from.

Filled in by a simulated run or by a replay against a live stack, so that both are judged by the same code. Times in
seconds from the trace's begin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from laneway.simulator.trace import Floats, Ints, Trace


class End(IntEnum):
    """How a request ended. Attainment counts over all of them: only DONE can have kept its promise."""

    OPEN = 0  # the run ended first
    DONE = 1
    REFUSED = 2  # the last time it asked, too
    LEFT = 3  # its caller went away
    EXPIRED = 4  # dropped after its deadline
    FAILED = 5  # lost with a worker, or by a fault


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Columns as long as the trace."""

    end: NDArray[np.int8]  # End
    asked_s: Floats  # when it first asked: its arrival; of a later turn what came of the turn before
    accepted_s: Floats  # when it asked for the last time: then it was taken, unless it ended REFUSED
    first_s: Floats  # first token; nan: none
    end_s: Floats  # nan: OPEN
    tokens: Ints  # that its caller got
    cached_tokens: Ints  # of its prompt, found in a prefix cache
    recomputed_tokens: Ints  # prompt and answer tokens computed again, after a preemption or a loss
    retries: Ints  # times it came again after a refusal
    worker: Ints  # that ended it; -1: none

    @classmethod
    def of_size(cls, size: int) -> Outcomes:
        def ints() -> Ints:
            return np.zeros(size, dtype=np.int64)

        def unknown() -> Floats:
            return np.full(size, np.nan)

        return cls(
            np.zeros(size, dtype=np.int8),
            unknown(),
            unknown(),
            unknown(),
            unknown(),
            ints(),
            ints(),
            ints(),
            ints(),
            ints() - 1,
        )

    @property
    def ttft_s(self) -> Floats:
        return self.first_s - self.asked_s

    @property
    def tpot_s(self) -> Floats:
        """Mean time between tokens; 0 for an answer of one token."""
        gaps = np.maximum(self.tokens - 1, 1)
        return np.where(self.tokens > 1, (self.end_s - self.first_s) / gaps, 0.0)


@dataclass(frozen=True, slots=True)
class Usage:
    """The fleet over time, one row for each `every_s` seconds; a row covers the time from its own to the next."""

    every_s: float
    workers: Floats  # paid for, booting ones included, on average
    busy: Floats  # share of their time in which steps ran, 0 to 1
    tokens: NDArray[np.float64]  # a row for each time, a column for each lane: output tokens
    device_s: NDArray[np.float64]  # the same: device-seconds of useful work by the profile
    waiting: NDArray[np.float64]  # the same: requests that wait, at the row's begin
    kv: Floats  # share of KV in use, on average


@dataclass(frozen=True, slots=True)
class Run:
    """One policy on one trace."""

    policy: str
    seed: int
    trace: Trace
    outcomes: Outcomes
    usage: Usage
    parameters: dict[str, float | str | bool] = field(default_factory=dict)  # of the policy and of the fleet
    counts: dict[str, float] = field(default_factory=dict)  # preemptions, steals, scale reversals, events, ...
