"""How much work comes into each lane of a pool, and how it swings, from the plans that one door sees.

Formula: inflow = workers x running / slots + change of the parked work a second (device-seconds a second): what is
served, and what piles up beside it. It is smoothed over FAST_S; `rate` is the mean over MEMORY_S, and `spread` the
standard deviation of what is smoothed, over SWING_S, around its `mean` there. It needs no counter at every door, and no
door needs to know of the others. O(pools) a plan. Source: conservation of work.

Failure modes: work parked and released unmeasured between two plans is seen as running only; a lane whose jobs end by
their deadlines without running seems to have less inflow than it has; a swing is known once it was seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

from laneway.core.fleet import Plan
from laneway.core.lanes import Lane

FAST_S, MEMORY_S, SWING_S = 10.0, 45.0, 300.0
GAP_S_MAX = 15.0  # a longer silence is none of one load: what was parked before is not compared with


class Flow(Struct, frozen=True):
    """Device-seconds a second."""

    rate: float = 0.0
    spread: float = 0.0
    mean: float = 0.0  # in the long run


class _Seen:
    __slots__ = ("fast", "mean", "parked", "rate", "variance")

    def __init__(self) -> None:
        self.parked = 0.0
        self.fast = self.rate = self.mean = self.variance = 0.0


class Inflow:
    """One owner feeds it each plan, in order."""

    def __init__(self) -> None:
        self._lanes: dict[str, dict[Lane, _Seen]] = {}
        self._seen_s = -math.inf
        self._began_s = math.inf

    def observe(self, plan: Plan, now_s: float) -> None:
        """`now_s` is monotonic."""
        gap_s = now_s - self._seen_s
        if gap_s <= 0.0:
            return
        followed = gap_s <= GAP_S_MAX
        if not followed:
            self._began_s = now_s
        age_s = now_s - self._began_s
        self._lanes = {pool.pool: self._lanes.get(pool.pool, {}) for pool in plan.pools}
        for pool in plan.pools:
            seen_of = self._lanes[pool.pool]
            for lane in pool.lanes:
                seen = seen_of.setdefault(lane.lane, _Seen())
                if followed:
                    served = pool.workers * lane.running / max(1, pool.slots)
                    _add(seen, served + (lane.parked_device_s - seen.parked) / gap_s, gap_s, age_s)
                seen.parked = lane.parked_device_s
        self._seen_s = now_s

    def of(self, pool: str) -> Mapping[Lane, Flow]:
        return {
            lane: Flow(max(0.0, seen.rate), max(0.0, seen.variance) ** 0.5, max(0.0, seen.mean))
            for lane, seen in self._lanes.get(pool, {}).items()
        }


def _add(seen: _Seen, rate: float, gap_s: float, age_s: float) -> None:
    """A plain mean until it is as old as its memory, after MEMORY_S without anything: thousands of jobs that come at
    once into a pool at rest are no load that goes on, and were taken for one when their second was all that counted."""

    def weight(memory_s: float) -> float:
        return max(1.0 - math.exp(-gap_s / memory_s), gap_s / (MEMORY_S + age_s))

    seen.fast += weight(FAST_S) * (rate - seen.fast)
    seen.rate += weight(MEMORY_S) * (rate - seen.rate)
    share, off = weight(SWING_S), seen.fast - seen.mean
    seen.mean += share * off
    seen.variance = (1.0 - share) * (seen.variance + share * off * off)
