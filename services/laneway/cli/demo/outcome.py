"""What became of each arrival, judged against what its lane was promised. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from laneway.cli.demo.script import PRIORITY_TPOT_S, PRIORITY_TTFT_S, Arrival
from laneway.core.lanes import LANES, Lane

TTFT_ATTAINMENT_MIN = 0.9  # share of priority requests with TTFT and TPOT inside their targets, a kill included


@dataclass(slots=True)
class Outcome:
    """Times in seconds; None where not measured."""

    arrival: Arrival
    job_id: str = ""
    ends: int = 0  # how often it ended; a promise says once
    error: str = ""  # reason, when it did not succeed
    refused: bool = False  # never accepted: nothing was promised
    ttft_s: float | None = None
    tpot_s: float | None = None
    stall_s: float | None = None
    completion_s: float | None = None
    tokens: int = 0
    attempts: int = 1

    @property
    def succeeded(self) -> bool:
        return self.ends == 1 and not self.error

    @property
    def in_time(self) -> bool:
        """Whether it kept the promise of its lane: TTFT and TPOT for priority, the deadline for the others."""
        if not self.succeeded:
            return False
        if self.arrival.lane is Lane.PRIORITY:
            return (self.ttft_s or 0.0) <= PRIORITY_TTFT_S and (self.tpot_s or 0.0) <= PRIORITY_TPOT_S
        return self.arrival.within_s is None or (self.completion_s or 0.0) <= self.arrival.within_s


@dataclass(frozen=True, slots=True)
class LaneSummary:
    lane: Lane
    sent: int
    refused: int
    succeeded: int
    in_time: int
    ttft_s: tuple[float, float, float] | None  # p50, p95, p99
    tpot_s: tuple[float, float, float] | None
    completion_s: tuple[float, float, float] | None
    tokens: int


@dataclass(slots=True)
class RunResult:
    """One pass over the arrivals."""

    name: str
    outcomes: list[Outcome] = field(default_factory=list)
    length_s: float = 0.0
    utilisation: float | None = None  # share of time in which the engines worked
    resumed: int = 0  # jobs that another worker took over


def percentiles(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Nearest-rank p50, p95 and p99; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p95, p99 = (ordered[max(0, -(-len(ordered) * q // 100) - 1)] for q in (50, 95, 99))
    return p50, p95, p99


def summarise(outcomes: Sequence[Outcome]) -> list[LaneSummary]:
    rows = []
    for lane in LANES:
        mine = [o for o in outcomes if o.arrival.lane is lane]
        done = [o for o in mine if o.succeeded]
        rows.append(
            LaneSummary(
                lane,
                len(mine),
                sum(o.refused for o in mine),
                len(done),
                sum(o.in_time for o in mine),
                percentiles([o.ttft_s for o in done if o.ttft_s is not None]),
                percentiles([o.tpot_s for o in done if o.tpot_s is not None]),
                percentiles([o.completion_s for o in done if o.completion_s is not None]),
                sum(o.tokens for o in mine),
            )
        )
    return rows


def broken_promises(result: RunResult) -> list[str]:
    """Each promise that was not kept, in one sentence; empty when all were."""
    broken = []
    for o in result.outcomes:
        if o.refused:
            continue
        if o.ends != 1:
            broken.append(f"{o.arrival.name} ended {o.ends} times instead of once")
        elif o.error:
            broken.append(f"{o.arrival.name} was accepted and ended with {o.error}")
    for row in summarise(result.outcomes):
        if row.lane is Lane.PRIORITY:
            accepted = row.sent - row.refused
            if row.in_time < TTFT_ATTAINMENT_MIN * accepted:
                broken.append(f"priority kept its targets in only {row.in_time} of {accepted} accepted requests")
        elif row.in_time < row.succeeded:
            broken.append(f"{row.lane.value} missed {row.succeeded - row.in_time} deadlines")
    return broken
