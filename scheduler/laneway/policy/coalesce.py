"""Whether a parked job waits for others of its group, so that they leave together: policy.md (c), coalescing key.

A group (the hash of the park subject: pool, tenant, adapter, salt, prompt beginning) gathers while another arrival is
likely, and is flushed when it has `size_max` jobs, when its oldest has waited `wait_s` (deferrable: at most
`slack_share` of its slack; batch a minute), or when its next arrival is overdue: no arrival for `silent_gaps` of its
usual gaps. The first arrival of a group waits only where the group is known to come often: P(another within the wait)
= 1 - exp(-wait / gap) >= `likely`. The gap is an average of the group's gaps that is kept for the last `keys_max`
groups.

Sizes and times of groups that gather at this moment are all that is kept: at most `gathering_max` groups; a job that
finds no room there does not wait. The caller takes jobs out early (`take`) where its pool has idle room and nothing
else to run: gathering never keeps a place empty.

Cost: O(log G) an arrival, G groups that gather. Known failure mode: the tail job of a burst waits for a companion that
does not come, for three usual gaps at most.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from laneway.core.lanes import Lane
from laneway.core.subjects import ParkSubject

STALE_MIN = 1_000  # entries of groups that left which the heap may hold beside twice as many as there are groups


@dataclass(frozen=True, slots=True)
class CoalesceParams:
    on: bool = True
    size_max: int = 16
    wait_s: Mapping[Lane, float] = field(default_factory=lambda: {Lane.DEFERRABLE: 2.0, Lane.BATCH: 60.0})
    slack_share: float = 0.05  # of the time until its latest start that a job may wait for others
    slack_s_min: float = 30.0  # with less a job does not wait at all
    likely: float = 0.5
    silent_gaps: float = 3.0
    gathering_max: int = 1_000  # groups that gather at once, of all pools
    keys_max: int = 10_000  # groups whose usual gap is known


@dataclass(slots=True)
class _Group:
    parks: list[ParkSubject]
    until_s: float  # its oldest waits no longer
    flush_s: float  # the earlier of that and its silence
    entry_s: float  # of its entry in the heap, never later than flush_s


class Gathering:
    """The groups that wait for more. Times are Unix seconds."""

    def __init__(self, params: CoalesceParams = CoalesceParams()) -> None:
        self.params = params
        self._groups: dict[tuple[str, Lane, str], _Group] = {}
        self._flushes: list[tuple[float, tuple[str, Lane, str]]] = []  # heap; entries of groups that left are skipped
        self.together: set[str] = set()  # parked jobs that waited and may go now, with others of their group
        self._gaps: OrderedDict[tuple[str, Lane, str], tuple[float, float]] = OrderedDict()  # last arrival, mean gap

    def __len__(self) -> int:
        return sum(len(group.parks) for group in self._groups.values())

    def arrived(self, park: ParkSubject, now_s: float) -> float | None:
        """Until when at most the job waits for others of its group; None: not at all. `flush` says when it may go."""
        key = (park.pool, park.lane, park.group)
        gap_s = self._gap_s(key, now_s)
        slack_s = park.due_ms / 1000.0 - now_s
        wait_s = min(self.params.wait_s[park.lane], self.params.slack_share * slack_s)
        sleeps = park.not_before_ms > now_s * 1000.0
        if not self.params.on or sleeps or slack_s < self.params.slack_s_min or wait_s <= 0.0:
            return None
        group = self._groups.get(key)
        if group is None:
            likely = gap_s is not None and 1.0 - math.exp(-wait_s / max(gap_s, 1e-6)) >= self.params.likely
            if not likely or len(self._groups) >= self.params.gathering_max:
                return None
            group = self._groups[key] = _Group([], now_s + wait_s, 0.0, math.inf)
        group.parks.append(park)
        group.until_s = min(group.until_s, now_s + wait_s)
        silent_s = now_s + self.params.silent_gaps * (gap_s if gap_s is not None else wait_s)
        group.flush_s = now_s if len(group.parks) >= self.params.size_max else min(group.until_s, silent_s)
        if group.flush_s < group.entry_s:
            self._enter(key, group)
        return group.until_s

    def _enter(self, key: tuple[str, Lane, str], group: _Group) -> None:
        group.entry_s = group.flush_s
        heapq.heappush(self._flushes, (group.entry_s, key))
        if len(self._flushes) > 2 * len(self._groups) + STALE_MIN:
            self._flushes = [(each.entry_s, name) for name, each in self._groups.items()]
            heapq.heapify(self._flushes)

    def _gap_s(self, key: tuple[str, Lane, str], now_s: float) -> float | None:
        known = self._gaps.pop(key, None)
        if known is None:
            mean_s = None
        else:
            gap_s = max(0.0, now_s - known[0])
            mean_s = gap_s if known[1] < 0.0 else known[1] + 0.3 * (gap_s - known[1])
        self._gaps[key] = now_s, -1.0 if mean_s is None else mean_s
        if len(self._gaps) > self.params.keys_max:
            self._gaps.popitem(last=False)
        return mean_s

    def flush(self, now_s: float) -> list[list[ParkSubject]]:
        """The groups that wait no longer, each together."""
        out: list[list[ParkSubject]] = []
        while self._flushes and self._flushes[0][0] <= now_s:
            at_s, key = heapq.heappop(self._flushes)
            group = self._groups.get(key)
            if group is None or group.entry_s != at_s:
                continue
            if group.flush_s > now_s:  # more came meanwhile
                self._enter(key, group)
                continue
            out.append(self._let_go(key))
        return out

    def _let_go(self, key: tuple[str, Lane, str]) -> list[ParkSubject]:
        parks = self._groups.pop(key).parks
        if len(parks) > 1:
            self.together.update(park.job for park in parks)
        return parks

    def take(self, pool: str, places: int) -> list[list[ParkSubject]]:
        """Groups of a pool that has so many places with nothing else to run, the longest waiting first."""
        waiting = sorted(
            (group.until_s, key) for key, group in self._groups.items() if key[0] == pool
        )  # fmt: skip
        out: list[list[ParkSubject]] = []
        for _, key in waiting:
            if places <= 0:
                break
            out.append(self._let_go(key))
            places -= len(out[-1])
        return out

    def left(self, park: ParkSubject) -> None:
        """The job is not parked any more."""
        self.together.discard(park.job)
        key = (park.pool, park.lane, park.group)
        group = self._groups.get(key)
        if group is not None:
            group.parks = [each for each in group.parks if each.job != park.job]
            if not group.parks:
                del self._groups[key]

    def holds(self, park: ParkSubject) -> bool:
        group = self._groups.get((park.pool, park.lane, park.group))
        return group is not None and any(each.job == park.job for each in group.parks)
