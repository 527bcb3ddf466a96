"""Moves fire times forward where parked jobs would otherwise fire later than the floor can serve them.

Admission sets each fire time from the work it knew of. The scheduler sees all of it, and packs the jobs from the back
(policy.fire.stagger). It only ever moves a fire time forward and only where that gains seconds, a few jobs a round:
with a scheduler alive the times hardly matter, and they need to be right when none is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import structlog

from laneway.core.clock import Clock
from laneway.core.lanes import PARKING_LANES
from laneway.core.subjects import ParkSubject
from laneway.policy.fire import Due, stagger
from laneway.policy.parked import ParkIndex
from laneway.runtime.lanes import LaneStore

LOOK_AHEAD_MAX = 2_000  # jobs of a pool, the earliest due first
MOVES_MAX = 100  # of a pool and round
GAIN_S_MIN = 5.0

_log = structlog.get_logger(__name__)


class Staggerer:
    """Remembers what it moved: a park subject does not show its fire time."""

    def __init__(self, lanes: LaneStore, clock: Clock, may_act: Callable[[], bool]) -> None:
        self._lanes = lanes
        self._clock = clock
        self._may_act = may_act
        self._fires_s: dict[str, float] = {}

    async def stagger(self, index: ParkIndex, pool: str, *, floor_rate: float) -> int:
        """One round for one pool; how many fire times it moved. Raises a BusError."""
        now_s = self._clock.now()
        self._fires_s = {job: at for job, at in self._fires_s.items() if job in index}
        parks = list(islice(index.by_due(pool, PARKING_LANES), LOOK_AHEAD_MAX))
        times = stagger([_due(park) for park in parks], now_s=now_s, floor_rate=floor_rate)
        moved = 0
        for park, at_s in zip(parks, times, strict=True):
            if moved >= MOVES_MAX or not self._may_act():
                break
            # What was never moved fires at its latest start at the latest.
            if at_s < self._fires_s.get(park.job, park.due_ms / 1000.0) - GAIN_S_MIN and at_s > now_s + GAIN_S_MIN:
                await self._lanes.restagger(park, at_s, now_s=now_s)
                self._fires_s[park.job] = at_s
                moved += 1
        if moved:
            _log.info("fire_times_moved", pool=pool, jobs=moved)
        return moved


def _due(park: ParkSubject) -> Due:
    return Due(park.job, park.not_before_ms / 1000.0, park.due_ms / 1000.0, park.cost_ms / 1000.0)
