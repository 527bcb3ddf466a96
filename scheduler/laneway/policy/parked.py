"""The parked jobs of a region in the orders that release needs: by latest start, and by tenant with groups together.

Owns only order. Built from park subjects alone, so that a lost scheduler is rebuilt from NATS; knows nothing of fire
times, records or rooms. Sized for a million jobs: each is one object that all orders share (some 400 bytes in all), and
taking one in or out costs a binary search and a move within one block, whatever the number of jobs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Generic, TypeVar

from laneway.core.lanes import PARKING_LANES, Lane
from laneway.core.subjects import ParkSubject

# Latest starts are told apart only to this grain when jobs of one group are brought together.
COALESCE_MS: Mapping[Lane, int] = {Lane.DEFERRABLE: 1_000, Lane.BATCH: 30_000}
DEMAND_GRAIN_MS = 10_000
STALE_MIN = 1_000  # entries of jobs that left which the sleepers' heap may hold beside as many as there are jobs
WAKE_MAX = 5_000  # jobs that wake at once, so that a crowd with one not-before does not hold up a look
BLOCK = 1_000  # jobs of an order that are moved together; a block is split at twice as many

Key = tuple[str, Lane]  # pool, lane
_Due = tuple[int, str]  # latest start, job
_Turn = tuple[int, str, int, str]  # grain of the latest start, group, latest start, job
K = TypeVar("K", _Due, _Turn)

_due: Callable[[ParkSubject], _Due] = attrgetter("due_ms", "job")


def _turn(park: ParkSubject) -> _Turn:
    return (park.due_ms // COALESCE_MS[park.lane], park.group, park.due_ms, park.job)


class _Order(Generic[K]):
    """Jobs sorted by a key, in blocks. The key of a job is unique and made anew when it is needed: keeping it would
    cost more memory than the job."""

    __slots__ = ("_blocks", "_count", "_key")

    def __init__(self, key: Callable[[ParkSubject], K]) -> None:
        self._key: Callable[[ParkSubject], K] = key
        self._blocks: list[list[ParkSubject]] = []  # none is empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ParkSubject]:
        for block in self._blocks:
            yield from block

    def first(self) -> ParkSubject:
        return self._blocks[0][0]

    def add(self, park: ParkSubject) -> None:
        self._count += 1
        if not self._blocks:
            self._blocks.append([park])
            return
        i = self._place(self._key(park))
        insort(self._blocks[i], park, key=self._key)
        self._split(i)

    def add_all(self, parks: Iterable[ParkSubject]) -> None:
        """As add, block by block."""
        new = sorted(parks, key=self._key)
        self._count += len(new)
        if new and not self._blocks:
            self._blocks.append(new)
            self._split(0)
            return
        start = 0
        while start < len(new):
            i = self._place(self._key(new[start]))
            block = self._blocks[i]
            last = i == len(self._blocks) - 1
            end = len(new) if last else bisect_right(new, self._key(block[-1]), lo=start, key=self._key)
            block += new[start:end]
            block.sort(key=self._key)
            self._split(i)
            start = end

    def remove(self, park: ParkSubject) -> None:
        key = self._key(park)
        i = self._place(key)
        block = self._blocks[i]
        j = bisect_left(block, key, key=self._key)
        assert block[j].job == park.job
        del block[j]
        self._count -= 1
        if not block:
            del self._blocks[i]

    def _place(self, key: K) -> int:
        """The block that holds this key, or would."""
        return min(bisect_left(self._blocks, key, key=self._last), len(self._blocks) - 1)

    def _last(self, block: list[ParkSubject]) -> K:
        key: K = self._key(block[-1])
        return key

    def _split(self, i: int) -> None:
        block = self._blocks[i]
        if len(block) > 2 * BLOCK:
            self._blocks[i : i + 1] = [block[at : at + BLOCK] for at in range(0, len(block), BLOCK)]


@dataclass(slots=True)
class _Shelf:
    """The parked jobs of one pool and lane."""

    due: _Order[_Due] = field(default_factory=lambda: _Order(_due))  # all
    queues: dict[str, _Order[_Turn]] = field(default_factory=dict)  # by tenant: those that may be released
    cost_ms: int = 0
    demand_ms: dict[int, int] = field(default_factory=dict)  # grain of the latest start -> predicted work

    def queue(self, tenant: str) -> _Order[_Turn]:
        found = self.queues.get(tenant)
        if found is None:
            found = self.queues[tenant] = _Order(_turn)
        return found

    def unqueue(self, park: ParkSubject) -> None:
        queue = self.queues[park.tenant]
        queue.remove(park)
        if not queue:
            del self.queues[park.tenant]


class ParkIndex:
    """See the module. Not safe to change while one of its iterators is used."""

    def __init__(self, parks: Iterable[ParkSubject] = (), *, now_ms: int = 0) -> None:
        self._parks: dict[str, ParkSubject] = {}
        self._shelves: dict[Key, _Shelf] = {}
        self._wakes_ms: dict[str, int] = {}  # who sleeps until then: not before, or left alone for a while
        self._sleeping: list[tuple[int, str]] = []  # heap of the same; entries that left or woke are skipped
        self.add_all(parks, now_ms=now_ms)

    def __len__(self) -> int:
        return len(self._parks)

    def __contains__(self, job: str) -> bool:
        return job in self._parks

    def get(self, job: str) -> ParkSubject | None:
        return self._parks.get(job)

    def jobs(self) -> list[str]:
        return list(self._parks)

    def jobs_of(self, lane: Lane) -> set[str]:
        return {park.job for (_, of), shelf in self._shelves.items() if of is lane for park in shelf.due}

    # --- changes ---

    def add(self, park: ParkSubject, *, now_ms: int) -> bool:
        """Takes a job in; False if it is known."""
        if park.job in self._parks:
            return False
        shelf = self._enter(park)
        shelf.due.add(park)
        if park.not_before_ms > now_ms:
            self._sleep(park.job, park.not_before_ms)
        else:
            shelf.queue(park.tenant).add(park)
        return True

    def add_all(self, parks: Iterable[ParkSubject], *, now_ms: int) -> int:
        """As add, faster for many; how many were new."""
        due: dict[Key, list[ParkSubject]] = {}
        queued: dict[tuple[str, Lane, str], list[ParkSubject]] = {}
        new = 0
        for park in parks:
            if park.job in self._parks:
                continue
            new += 1
            self._enter(park)
            due.setdefault((park.pool, park.lane), []).append(park)
            if park.not_before_ms > now_ms:
                self._sleep(park.job, park.not_before_ms)
            else:
                queued.setdefault((park.pool, park.lane, park.tenant), []).append(park)
        for key, some in due.items():
            self._shelves[key].due.add_all(some)
        for (pool, lane, tenant), some in queued.items():
            self._shelves[pool, lane].queue(tenant).add_all(some)
        return new

    def _enter(self, park: ParkSubject) -> _Shelf:
        """All of adding but the orders."""
        shelf = self._shelves.setdefault((park.pool, park.lane), _Shelf())
        self._parks[park.job] = park
        shelf.cost_ms += park.cost_ms
        grain = park.due_ms // DEMAND_GRAIN_MS
        shelf.demand_ms[grain] = shelf.demand_ms.get(grain, 0) + park.cost_ms
        return shelf

    def _sleep(self, job: str, until_ms: int) -> None:
        self._wakes_ms[job] = until_ms
        heapq.heappush(self._sleeping, (until_ms, job))

    def discard(self, job: str) -> ParkSubject | None:
        park = self._parks.pop(job, None)
        if park is None:
            return None
        key = (park.pool, park.lane)
        shelf = self._shelves[key]
        shelf.due.remove(park)
        if self._wakes_ms.pop(job, None) is None:
            shelf.unqueue(park)
        shelf.cost_ms -= park.cost_ms
        grain = park.due_ms // DEMAND_GRAIN_MS
        left_ms = shelf.demand_ms.pop(grain, 0) - park.cost_ms
        if left_ms > 0:  # jobs that are predicted to cost nothing leave none
            shelf.demand_ms[grain] = left_ms
        if not shelf.due:
            del self._shelves[key]
        # A not-before may be weeks away: without this, every job that was cancelled until then would be remembered.
        if len(self._sleeping) > 2 * len(self._parks) + STALE_MIN:
            self._sleeping = [each for each in self._sleeping if self._asleep(*each)]
            heapq.heapify(self._sleeping)
        return park

    def _asleep(self, wake_ms: int, job: str) -> bool:
        """Whether an entry of the sleepers' heap still counts."""
        return self._wakes_ms.get(job) == wake_ms

    def leave_alone(self, job: str, until_ms: int) -> None:
        """Keeps a job from being chosen for a while: NATS is about to fire it, or a release failed."""
        park = self._parks.get(job)
        if park is None:
            return
        if job not in self._wakes_ms:
            self._shelves[park.pool, park.lane].unqueue(park)
        self._sleep(job, max(until_ms, park.not_before_ms))

    def wake(self, now_ms: int) -> int:
        """Makes the jobs eligible whose time has come, at most WAKE_MAX; how many. Call before choosing."""
        woken = 0
        while self._sleeping and self._sleeping[0][0] <= now_ms and woken < WAKE_MAX:
            at, job = heapq.heappop(self._sleeping)
            if self._asleep(at, job):
                del self._wakes_ms[job]
                park = self._parks[job]
                self._shelves[park.pool, park.lane].queue(park.tenant).add(park)
                woken += 1
        return woken

    def rouse(self, job: str) -> None:
        """Makes a job eligible that was left alone, if nothing else speaks against it."""
        if self._wakes_ms.pop(job, None) is not None:
            park = self._parks[job]
            self._shelves[park.pool, park.lane].queue(park.tenant).add(park)

    def next_wake_ms(self) -> int | None:
        return self._sleeping[0][0] if self._sleeping else None

    # --- views ---

    def awake(self, job: str) -> bool:
        return job in self._parks and job not in self._wakes_ms

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
        return shelf.due.first().due_ms if shelf else None

    def by_due(self, pool: str, lanes: Iterable[Lane], until_ms: int | None = None) -> Iterator[ParkSubject]:
        """Jobs of some lanes in the order of their latest starts, sleeping ones too, up to and with `until_ms`."""
        shelves = [self._shelves[pool, lane].due for lane in lanes if (pool, lane) in self._shelves]
        for park in heapq.merge(*shelves, key=_due):
            if until_ms is not None and park.due_ms > until_ms:
                return
            yield park

    def near(self, pool: str, most: int) -> list[tuple[str, float, float]]:
        """(tenant, latest start in Unix seconds, device-seconds) of the parked jobs that are due first."""
        parks = islice(self.by_due(pool, PARKING_LANES), most)
        return [(park.tenant, park.due_ms / 1000.0, park.cost_ms / 1000.0) for park in parks]

    def tenants(self, pool: str, lane: Lane) -> Collection[str]:
        """Tenants that have a job which may be released."""
        shelf = self._shelves.get((pool, lane))
        return shelf.queues.keys() if shelf else ()

    def few(self, pool: str, places: int) -> bool:
        """Whether fewer jobs of a pool may be released than there are places."""
        queues = (queue for (of, _), shelf in self._shelves.items() if of == pool for queue in shelf.queues.values())
        for queue in queues:
            places -= len(queue)
            if places <= 0:
                return False
        return places > 0

    def heads(self, pool: str, lane: Lane) -> Iterator[tuple[str, ParkSubject]]:
        """Each tenant that has a job which may be released, with the first of these."""
        shelf = self._shelves.get((pool, lane))
        for tenant, queue in shelf.queues.items() if shelf else ():
            yield tenant, queue.first()

    def queue(self, pool: str, lane: Lane, tenant: str) -> Iterator[ParkSubject]:
        """A tenant's jobs that may be released, in the order of release."""
        return iter(self._shelves[pool, lane].queues[tenant])

    def demand(self, pool: str, lanes: Iterable[Lane]) -> list[tuple[float, float]]:
        """(latest start in Unix seconds, device-seconds due then), earliest first, to a grain of 10 s."""
        sums: dict[int, int] = {}
        for lane in lanes:
            shelf = self._shelves.get((pool, lane))
            for grain, cost_ms in shelf.demand_ms.items() if shelf else ():
                sums[grain] = sums.get(grain, 0) + cost_ms
        return [((grain + 1) * DEMAND_GRAIN_MS / 1000.0, sums[grain] / 1000.0) for grain in sorted(sums)]
