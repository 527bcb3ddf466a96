"""The parked jobs of a region in the orders that release needs: by latest start, and by tenant with groups together.

Owns only order. Built from park subjects alone, so that a lost scheduler is rebuilt from NATS; knows nothing of fire
times, records or rooms. Sized for 100,000 jobs: adding and removing cost a binary search and a move of a list's tail
(tens of microseconds at that size).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from laneway.core.lanes import Lane
from laneway.core.subjects import ParkSubject

# Latest starts are told apart only to this grain when jobs of one group are brought together.
COALESCE_MS: Mapping[Lane, int] = {Lane.DEFERRABLE: 1_000, Lane.BATCH: 30_000}
DEMAND_GRAIN_MS = 10_000
STALE_MIN = 1_000  # entries of jobs that left which the sleepers' heap may hold beside as many as there are jobs

Key = tuple[str, Lane]  # pool, lane
_Due = tuple[int, str]  # latest start, job
_Turn = tuple[int, str, int, str]  # grain of the latest start, group, latest start, job
T = TypeVar("T", _Due, _Turn)


@dataclass(slots=True)
class _Shelf:
    """The parked jobs of one pool and lane."""

    due: list[_Due] = field(default_factory=list)  # all
    queues: dict[str, list[_Turn]] = field(default_factory=dict)  # by tenant: those that may be released
    cost_ms: int = 0
    demand_ms: dict[int, int] = field(default_factory=dict)  # grain of the latest start -> predicted work


@dataclass(slots=True)
class _Entry:
    park: ParkSubject
    wake_ms: int  # asleep until then: not before, or left alone for a while; 0: awake


def _turn(park: ParkSubject) -> _Turn:
    return (park.due_ms // COALESCE_MS[park.lane], park.group, park.due_ms, park.job)


def _take(items: list[T], item: T) -> None:
    i = bisect_left(items, item)
    assert items[i] == item
    del items[i]


class ParkIndex:
    """See the module. Not safe to change while one of its iterators is used."""

    def __init__(self, parks: Iterable[ParkSubject] = (), *, now_ms: int = 0) -> None:
        self._entries: dict[str, _Entry] = {}
        self._shelves: dict[Key, _Shelf] = {}
        self._sleeping: list[tuple[int, str]] = []  # heap; entries that left or woke are skipped
        self.add_all(parks, now_ms=now_ms)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job: str) -> bool:
        return job in self._entries

    def get(self, job: str) -> ParkSubject | None:
        entry = self._entries.get(job)
        return entry.park if entry else None

    def jobs(self) -> list[str]:
        return list(self._entries)

    # --- changes ---

    def add(self, park: ParkSubject, *, now_ms: int) -> bool:
        """Takes a job in; False if it is known."""
        if park.job in self._entries:
            return False
        insort(self._enter(park, now_ms).due, (park.due_ms, park.job))
        return True

    def add_all(self, parks: Iterable[ParkSubject], *, now_ms: int) -> int:
        """As add, faster for many; how many were new."""
        touched: dict[int, _Shelf] = {}
        new = 0
        for park in parks:
            if park.job not in self._entries:
                shelf = self._enter(park, now_ms, ordered=False)
                shelf.due.append((park.due_ms, park.job))
                touched[id(shelf)] = shelf
                new += 1
        for shelf in touched.values():
            shelf.due.sort()
            for queue in shelf.queues.values():
                queue.sort()
        return new

    def discard(self, job: str) -> ParkSubject | None:
        entry = self._entries.pop(job, None)
        if entry is None:
            return None
        park = entry.park
        key = (park.pool, park.lane)
        shelf = self._shelves[key]
        _take(shelf.due, (park.due_ms, job))
        if not entry.wake_ms:
            self._unqueue(shelf, park)
        shelf.cost_ms -= park.cost_ms
        grain = park.due_ms // DEMAND_GRAIN_MS
        shelf.demand_ms[grain] -= park.cost_ms
        if shelf.demand_ms[grain] <= 0:
            del shelf.demand_ms[grain]
        if not shelf.due:
            del self._shelves[key]
        # A not-before may be weeks away: without this, every job that was cancelled until then would be remembered.
        if len(self._sleeping) > 2 * len(self._entries) + STALE_MIN:
            self._sleeping = [each for each in self._sleeping if self._asleep(*each)]
            heapq.heapify(self._sleeping)
        return park

    def _asleep(self, wake_ms: int, job: str) -> bool:
        """Whether an entry of the sleepers' heap still counts."""
        entry = self._entries.get(job)
        return entry is not None and entry.wake_ms == wake_ms

    def leave_alone(self, job: str, until_ms: int) -> None:
        """Keeps a job from being chosen for a while: NATS is about to fire it, or a release failed."""
        entry = self._entries.get(job)
        if entry is None:
            return
        if not entry.wake_ms:
            self._unqueue(self._shelves[entry.park.pool, entry.park.lane], entry.park)
        entry.wake_ms = max(until_ms, entry.park.not_before_ms, 1)
        heapq.heappush(self._sleeping, (entry.wake_ms, job))

    def wake(self, now_ms: int) -> int:
        """Makes the jobs eligible whose time has come; how many. Call before choosing."""
        woken = 0
        while self._sleeping and self._sleeping[0][0] <= now_ms:
            at, job = heapq.heappop(self._sleeping)
            if self._asleep(at, job):
                entry = self._entries[job]
                entry.wake_ms = 0
                shelf = self._shelves[entry.park.pool, entry.park.lane]
                insort(shelf.queues.setdefault(entry.park.tenant, []), _turn(entry.park))
                woken += 1
        return woken

    def next_wake_ms(self) -> int | None:
        return self._sleeping[0][0] if self._sleeping else None

    # --- views ---

    def awake(self, job: str) -> bool:
        entry = self._entries.get(job)
        return entry is not None and not entry.wake_ms

    def pools(self) -> set[str]:
        return {pool for pool, _ in self._shelves}

    def count(self, pool: str, lane: Lane) -> int:
        shelf = self._shelves.get((pool, lane))
        return len(shelf.due) if shelf else 0

    def device_s(self, pool: str, lane: Lane) -> float:
        """Predicted work, device-seconds."""
        shelf = self._shelves.get((pool, lane))
        return shelf.cost_ms / 1000.0 if shelf else 0.0

    def next_due_ms(self, pool: str, lane: Lane) -> int | None:
        shelf = self._shelves.get((pool, lane))
        return shelf.due[0][0] if shelf else None

    def by_due(self, pool: str, lanes: Iterable[Lane], until_ms: int | None = None) -> Iterator[ParkSubject]:
        """Jobs of some lanes in the order of their latest starts, sleeping ones too, up to and with `until_ms`."""
        shelves = [self._shelves[pool, lane].due for lane in lanes if (pool, lane) in self._shelves]
        for due_ms, job in heapq.merge(*shelves):
            if until_ms is not None and due_ms > until_ms:
                return
            yield self._entries[job].park

    def tenants(self, pool: str, lane: Lane) -> Sequence[str]:
        """Tenants that have a job which may be released."""
        shelf = self._shelves.get((pool, lane))
        return list(shelf.queues) if shelf else ()

    def queue(self, pool: str, lane: Lane, tenant: str) -> Iterator[ParkSubject]:
        """A tenant's jobs that may be released, in the order of release."""
        for turn in self._shelves[pool, lane].queues[tenant]:
            yield self._entries[turn[3]].park

    def demand(self, pool: str, lanes: Iterable[Lane]) -> list[tuple[float, float]]:
        """(latest start in Unix seconds, device-seconds due then), earliest first, to a grain of 10 s."""
        sums: dict[int, int] = {}
        for lane in lanes:
            shelf = self._shelves.get((pool, lane))
            for grain, cost_ms in shelf.demand_ms.items() if shelf else ():
                sums[grain] = sums.get(grain, 0) + cost_ms
        return [((grain + 1) * DEMAND_GRAIN_MS / 1000.0, sums[grain] / 1000.0) for grain in sorted(sums)]

    # --- helpers ---

    def _enter(self, park: ParkSubject, now_ms: int, *, ordered: bool = True) -> _Shelf:
        """All of adding but the order by latest start."""
        shelf = self._shelves.setdefault((park.pool, park.lane), _Shelf())
        asleep = park.not_before_ms > now_ms
        self._entries[park.job] = _Entry(park, park.not_before_ms if asleep else 0)
        if asleep:
            heapq.heappush(self._sleeping, (park.not_before_ms, park.job))
        elif ordered:
            insort(shelf.queues.setdefault(park.tenant, []), _turn(park))
        else:
            shelf.queues.setdefault(park.tenant, []).append(_turn(park))
        shelf.cost_ms += park.cost_ms
        grain = park.due_ms // DEMAND_GRAIN_MS
        shelf.demand_ms[grain] = shelf.demand_ms.get(grain, 0) + park.cost_ms
        return shelf

    @staticmethod
    def _unqueue(shelf: _Shelf, park: ParkSubject) -> None:
        queue = shelf.queues[park.tenant]
        _take(queue, _turn(park))
        if not queue:
            del shelf.queues[park.tenant]
