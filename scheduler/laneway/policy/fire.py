"""When a parked job must leave by itself: its latest start, and the time at which NATS fires it without a scheduler.

Units: times are Unix seconds (`_s`), work is device-seconds (one worker at full use does one device-second a second),
rates are device-seconds per second.

Source: policy.md (a), latest start, and ADR 7. O(1), `stagger` O(jobs). Known failure modes: a service that is
predicted too short makes a job start too late by as much as the margin does not cover; capacity below the floor rate
makes jobs late that nobody but NATS releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

DEADLINE_MAX_S = 30 * 86400.0  # NATS fires schedules that are farther out at once


@dataclass(frozen=True, slots=True)
class FireParams:
    """Margin between the end of the predicted service and the deadline: the larger of the two."""

    margin_s: float = 0.5
    margin_ratio: float = 0.1  # of the predicted service


def latest_start_s(deadline_s: float, service_s: float, params: FireParams = FireParams()) -> float:
    """Unix time after which a job of this predicted service can no longer be expected to make its deadline."""
    service = max(0.0, service_s)
    return deadline_s - service - max(params.margin_s, params.margin_ratio * service)


def fire_at_s(
    *,
    now_s: float,
    not_before_s: float,
    latest_start_s: float,
    parked_device_s_ahead: float,
    floor_rate: float,
) -> float:
    """Unix time at which NATS is to release the job if no scheduler does it earlier.

    `parked_device_s_ahead` is the pool's parked work that is due no later than this job; `floor_rate` is what the pool
    gives to parked work in the worst case that its owner plans for. With nothing ahead the job fires at its latest
    start; with work ahead it fires so much earlier that all of it fits; a pool without a floor lets it fire at once.
    `not_before_s` of 0 means none.
    """
    if parked_device_s_ahead > 0.0:
        start = latest_start_s - parked_device_s_ahead / floor_rate if floor_rate > 0.0 else now_s
    else:
        start = latest_start_s
    return max(now_s, not_before_s, start)


class Due(Struct, frozen=True):
    """What staggering needs to know of a parked job."""

    job: str
    not_before_s: float
    latest_start_s: float
    device_s: float


def stagger(jobs: Sequence[Due], *, now_s: float, floor_rate: float) -> list[float]:
    """Fire times of one pool's parked jobs, given in the order of their latest starts.

    Packed from the back: a job fires early enough that it and everything that fires after it can start in time at the
    floor rate, and never after a job due later. (Admission cannot do this: `fire_at_s` places one job before the work
    that is ahead of it and leaves the earlier ones where they are, so that two jobs due close together may fire in the
    wrong order. The scheduler puts that right with these times.)
    """
    out = [0.0] * len(jobs)
    after = float("inf")
    for i in range(len(jobs) - 1, -1, -1):
        job = jobs[i]
        takes = job.device_s / floor_rate if floor_rate > 0.0 else float("inf") if job.device_s > 0.0 else 0.0
        after = min(job.latest_start_s, after - takes if i < len(jobs) - 1 else job.latest_start_s)
        out[i] = max(now_s, job.not_before_s, after)
    return out
