"""All that a report shows, as values: the JSON beside the page is this, and page and plots are made from nothing else.

Times in seconds, shares 0 to 1. Field names are read by others: they stay.
"""

from __future__ import annotations

import msgspec

from laneway.simulator.intervals import Interval
from laneway.simulator.judge import Verdict

VERSION = 1


class About(msgspec.Struct, frozen=True):
    """Where figures come from; whatever is not known is left out of the page."""

    title: str
    commit: str = ""
    machine: str = ""
    profile: str = ""  # of the engines
    command: str = ""
    made_at: str = ""
    notes: tuple[str, ...] = ()


class TraceFacts(msgspec.Struct, frozen=True):
    name: str
    requests: int
    span_s: float
    tenants: int
    lanes: dict[str, int]
    prompt_tokens_p50: float
    output_tokens_p50: float
    notes: tuple[str, ...]  # source, licence, what was done to it


class LaneRow(msgspec.Struct, frozen=True):
    """One lane under one policy at one load: means over seeds; counts are sums."""

    policy: str
    load: float | None
    lane: str
    seeds: int
    offered: int
    attainment: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    completion_p50_s: float | None
    completion_p99_s: float | None
    lateness_p99_s: float | None
    few: bool  # at a seed, too few requests for a p99
    goodput_requests_per_s: float
    goodput_tokens_per_s: float
    refused: int
    left: int
    expired: int
    failed: int
    open: int
    retries: int
    wasted_tokens: int
    rework_share: float
    cached_share: float
    jain: float | None  # mean over windows, then seeds
    jain_windows: int


class FleetRow(msgspec.Struct, frozen=True):
    """One policy at one load: means over seeds."""

    policy: str
    load: float | None
    seeds: int
    workers: float | None
    busy: float | None
    kv: float | None
    useful: float | None


class Bar(msgspec.Struct, frozen=True):
    """A figure of one policy, with its interval over seeds where there are two."""

    policy: str
    value: float
    interval: Interval | None
    ratio: Interval | None = None  # against the silo, seed by seed
    counts: bool | None = None  # equal attainment; None: nothing to compare with
    why: str = ""


class TimeLine(msgspec.Struct, frozen=True):
    """A share over time, pooled over seeds; None: nothing was asked for then."""

    policy: str
    lane: str
    at_s: list[float]
    share: list[float | None]


class Curve(msgspec.Struct, frozen=True):
    """How many of those offered had it by then: what was refused or left never had, so a curve need not come to 1."""

    policy: str
    lane: str
    measure: str  # ttft | tpot | completion
    at_s: list[float]
    share: list[float]
    promised_s: float | None  # where all were promised the same


class UsageLine(msgspec.Struct, frozen=True):
    """A fleet over time, of the first seed."""

    policy: str
    at_s: list[float]
    workers: list[float | None]
    busy: list[float | None]
    kv: list[float | None]
    lanes: dict[str, list[float]]  # device-seconds of useful work in a second paid for


class Report(msgspec.Struct, frozen=True):
    version: int
    about: About
    load_shown: float | None  # of plots over time, curves, harvest and cost
    silo: str | None  # policies that others are compared with
    alone: str | None
    traces: list[TraceFacts]
    lanes: list[LaneRow]
    fleets: list[FleetRow]
    harvest: list[Bar]  # device-hours
    gpu_hours: list[Bar]
    attainment: list[TimeLine]
    curves: list[Curve]
    usage: list[UsageLine]
    verdicts: list[Verdict]  # of each run, with its parameters
