"""What a fleet-mode run gives, second by second, and how it compares with the exact mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from laneway.core.lanes import LANES, Lane
from laneway.simulator.fleet_load import FleetLoad
from laneway.simulator.trace import Floats

Table = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Tables: a row for each second, then region, then (where it says so) lane. Requests, unless a unit is named."""

    arrived: Table  # by lane
    judged: Table  # by lane: whose fate was decided: started, refused or dropped (below 0: lost, they start again)
    kept: Table  # by lane: of these, those that keep their promise
    refused: Table  # by lane
    dropped: Table  # by lane: past the longest deadline of their lane
    done: Table  # by lane
    waiting: Table  # by lane, at the second's end
    running: Table  # by lane, at the second's end: those that decode
    wait_s: Table  # by lane: mean wait of those that start, before their own prefill
    device_s: Table  # by lane: worth of those that end and keep their promise (usage.device_s)
    tpot_s: Table  # mean time of a token of priority work
    busy: Table  # share of workers' time in which steps run
    kv: Table  # share of KV that is held
    workers: Table  # paid for, booting ones included
    reversals: int  # of the direction of scaling, all regions together

    def attainment(self, lane: Lane) -> float:
        """Of all requests that arrived, those that kept their promise; those still waiting at the end did not. nan:
        none arrived."""
        number = LANES.index(lane)
        arrived = float(self.arrived[:, :, number].sum(dtype=np.float64))
        return float(self.kept[:, :, number].sum(dtype=np.float64)) / arrived if arrived else float("nan")

    def attainment_over_time(self, every_s: int = 60) -> Floats:
        """Rows of `every_s` seconds by lane: kept of judged; nan where none was."""
        rows = len(self.judged) // every_s

        def summed(table: Table) -> Floats:
            whole = table[: rows * every_s].sum(axis=1, dtype=np.float64)
            return np.asarray(whole.reshape(rows, every_s, len(LANES)).sum(axis=1))

        judged, kept = summed(self.judged), summed(self.kept)
        return np.where(judged > 0.0, kept / np.where(judged > 0.0, judged, 1.0), np.nan)

    @property
    def harvest_s(self) -> float:
        """Device-seconds of the lower lanes' work that kept its promise."""
        return float(self.device_s[:, :, 1:].sum(dtype=np.float64))

    @property
    def worker_hours(self) -> float:
        return float(self.workers.sum(dtype=np.float64)) / 3600.0

    @property
    def unaccounted(self) -> float:
        """Requests that arrived less all that became of them: 0 but for rounding."""
        ended = sum(float(table.sum(dtype=np.float64)) for table in (self.done, self.refused, self.dropped))
        there = float(self.waiting[-1].sum(dtype=np.float64) + self.running[-1].sum(dtype=np.float64))
        return float(self.arrived.sum(dtype=np.float64)) - ended - there


@dataclass(frozen=True, slots=True)
class Comparison:
    """Fleet mode less exact mode."""

    attainment_points: Mapping[Lane, float]  # percentage points
    harvest_ratio: float  # fleet / exact; nan: exact has none

    def within(self, points: float = 3.0, harvest: float = 0.05) -> bool:
        near = all(abs(each) <= points for each in self.attainment_points.values())
        return near and (np.isnan(self.harvest_ratio) or abs(self.harvest_ratio - 1.0) <= harvest)


def compare(fleet: FleetResult, exact_attainment: Mapping[Lane, float], exact_harvest_s: float) -> Comparison:
    """`exact_attainment`: by lane, 0 to 1, of all that arrived; `exact_harvest_s`: device-seconds as `harvest_s` has
    them."""
    points = {lane: 100.0 * (fleet.attainment(lane) - share) for lane, share in exact_attainment.items()}
    return Comparison(points, fleet.harvest_s / exact_harvest_s if exact_harvest_s > 0.0 else float("nan"))


class Recorder:
    """Fills the tables of a run."""

    def __init__(self, load: FleetLoad) -> None:
        self._classes = load.classes
        self._of_lane = load.classes.of_lane
        shape = load.arrivals.shape[:2]

        def by_lane() -> Table:
            return np.zeros((*shape, len(LANES)), dtype=np.float32)

        def by_region() -> Table:
            return np.zeros(shape, dtype=np.float32)

        self._tables = FleetResult(
            by_lane(), by_lane(), by_lane(), by_lane(), by_lane(),
            by_lane(), by_lane(), by_lane(), by_lane(), by_lane(),
            by_region(), by_region(), by_region(), by_region(), 0,
        )  # fmt: skip

    def came(self, second: int, arrived: Floats, refused: Floats) -> None:
        """By region and class; refused ones are judged."""
        self._tables.arrived[second] = arrived @ self._of_lane
        by_lane = refused @ self._of_lane
        self._tables.refused[second] = by_lane
        self._tables.judged[second] += by_lane

    def dropped(self, second: int, late: Floats) -> None:
        by_lane = late @ self._of_lane
        self._tables.dropped[second] = by_lane
        self._tables.judged[second] += by_lane

    def withdrawn(self, second: int, lost: Floats, timely: Floats) -> None:
        """So many that run were lost; of these, `timely` had been counted as kept."""
        self._tables.judged[second] -= lost @ self._of_lane
        self._tables.kept[second] -= timely @ self._of_lane

    def started(self, second: int, starts: Floats, kept: Floats, wait_s: Floats) -> None:
        """By class: how many, and how many of them will keep their promise; by lane: their wait."""
        self._tables.judged[second] += starts @ self._of_lane
        self._tables.kept[second] += kept @ self._of_lane
        self._tables.wait_s[second] = wait_s

    def ended(self, second: int, done: Floats, timely: Floats, waiting: Floats, running: Floats) -> None:
        self._tables.done[second] = done @ self._of_lane
        self._tables.device_s[second] = (timely * self._classes.device_s) @ self._of_lane
        self._tables.waiting[second] = waiting @ self._of_lane
        self._tables.running[second] = running @ self._of_lane

    def fleet(self, second: int, busy: Floats, kv: Floats, tpot_s: Floats, workers: Floats) -> None:
        tables = self._tables
        tables.busy[second], tables.kv[second] = busy, kv
        tables.tpot_s[second], tables.workers[second] = tpot_s, workers

    def result(self, reversals: int) -> FleetResult:
        return replace(self._tables, reversals=reversals)
