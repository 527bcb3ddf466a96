"""Which parked jobs to release now, and why.

The ready part of the lower lanes stays short, so that order is decided late: as many jobs as the pool has places that
would stay empty, and beyond these what the pool works off until the scheduler looks again. Who goes first: jobs at
their latest start; then urgent ones by latest start; then the lanes by weight and in a lane the tenants by what they
were given (start-time fair queueing on predicted device time), in a tenant by latest start with groups together.
Releases nothing of a paused lane and nothing before its not-before. Changes nothing: the caller acts, then charges.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from laneway.core.fleet import PoolPlan
from laneway.core.lanes import PARKING_LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.parked import ParkIndex

FIRE_GUARD_S = 2.0  # a job this near to its schedule is left to NATS


class ReleaseReason(StrEnum):
    IDLE_CAPACITY = "IDLE_CAPACITY"  # a place would stay empty
    READY_SHORT = "READY_SHORT"  # the pool would run dry before the scheduler looks again
    LATEST_START_NEAR = "LATEST_START_NEAR"
    OVERDUE = "OVERDUE"  # past its latest start and still parked: its schedule did not fire
    STRANDED = "STRANDED"  # past its fire time and still parked: NATS had no storage then


class HoldReason(StrEnum):
    POOL_BUSY = "POOL_BUSY"
    NO_WORKER = "NO_WORKER"
    LANE_PAUSED = "LANE_PAUSED"
    NOT_BEFORE = "NOT_BEFORE"
    FIRES_SOON = "FIRES_SOON"
    OTHERS_FIRST = "OTHERS_FIRST"


@dataclass(frozen=True, slots=True)
class ReleaseParams:
    ready_ahead_s: float = 2.0  # released work that waits beyond the free places, up to one job for each place
    look_s: float = 0.25  # between looks of the scheduler; at least two of these are bridged, however short the jobs
    lead_s: float = 5.0  # a job is released this long before its latest start, whatever the room
    urgent_s: float = 15.0  # or twice the service time, if longer: then by latest start, ahead of fairness
    urgent_charge: float = 2.0  # urgent jobs cost their tenant and lane this much more
    weights: Mapping[Lane, float] = field(default_factory=lambda: {Lane.DEFERRABLE: 4.0, Lane.BATCH: 1.0})
    releases_max: int = 256  # of one decision


class Room(Struct, frozen=True):
    """What a pool can take, in jobs."""

    pool: str
    idle: int  # places that nothing ready will fill
    queue: int  # more that may wait ready
    service_s: float = 0.0
    workers: int = 0


class Release(Struct, frozen=True):
    park: ParkSubject
    reason: ReleaseReason
    charge: float  # factor on the predicted cost


class Fair:
    """Start-time fair queueing: who has been given least goes first; who comes back owns no past."""

    def __init__(self, base: Fair | None = None) -> None:
        self._base = base
        self._finish: dict[str, float] = {}
        self._virtual: float = base._virtual if base else 0.0

    def start(self, key: str) -> float:
        known = self._finish.get(key)
        if known is None and self._base is not None:
            known = self._base._finish.get(key)
        return self._virtual if known is None else max(self._virtual, known)

    def charge(self, key: str, cost: float) -> None:
        start = self.start(key)
        self._virtual = start
        self._finish[key] = start + cost

    def draft(self) -> Fair:
        """A copy to try on, that costs nothing to make."""
        return Fair(self)

    def forget(self) -> None:
        """Drops who would not be told from a newcomer."""
        self._finish = {key: finish for key, finish in self._finish.items() if finish > self._virtual}


class Ledger:
    """What lanes and tenants of each pool were given; kept by the caller between decisions."""

    FORGET_AT = 10_000

    def __init__(self, params: ReleaseParams) -> None:
        self.params = params
        self._lanes: dict[str, Fair] = {}
        self._tenants: dict[tuple[str, Lane], Fair] = {}
        self._charges = 0

    def lanes(self, pool: str) -> Fair:
        return self._lanes.setdefault(pool, Fair())

    def tenants(self, pool: str, lane: Lane) -> Fair:
        return self._tenants.setdefault((pool, lane), Fair())

    def charge(self, release: Release) -> None:
        park = release.park
        charge(self.lanes(park.pool), self.tenants(park.pool, park.lane), release, self.params)
        self._charges += 1
        if self._charges % self.FORGET_AT == 0:
            for fair in (*self._lanes.values(), *self._tenants.values()):
                fair.forget()


def charge(lanes: Fair, tenants: Fair, release: Release, params: ReleaseParams) -> None:
    cost = max(1, release.park.cost_ms) * release.charge
    lanes.charge(release.park.lane.value, cost / params.weights[release.park.lane])
    tenants.charge(release.park.tenant, cost)


def room_of(pool: PoolPlan, params: ReleaseParams = ReleaseParams()) -> Room:
    """The room of a pool as the plan shows it."""
    ready_priority = pool.lane(Lane.PRIORITY).ready
    ready_lower = sum(pool.lane(lane).ready for lane in PARKING_LANES)
    left_by_priority = max(0, pool.free_slots - ready_priority)
    idle = max(0, left_by_priority - ready_lower)
    waiting = max(0, ready_lower - left_by_priority)
    if pool.service_s > 0.0:
        ahead = math.ceil(pool.slots * params.ready_ahead_s / pool.service_s)
        bridge = math.ceil(pool.slots * 2.0 * params.look_s / pool.service_s)
        target = max(pool.workers, min(pool.slots, ahead), bridge)
    else:
        target = pool.slots
    return Room(pool.pool, idle, max(0, target - waiting), pool.service_s, pool.workers)


def choose(
    index: ParkIndex,
    room: Room,
    ledger: Ledger,
    *,
    now_s: float,
    paused: frozenset[Lane] = frozenset(),
    params: ReleaseParams = ReleaseParams(),
) -> list[Release]:
    """The jobs of one pool to release now, in order; each at most once. The index must have been woken to `now_s`."""
    lanes = [lane for lane in PARKING_LANES if lane not in paused]
    chosen = _at_latest_start(index, room.pool, lanes, now_s, params)
    if len(chosen) >= params.releases_max or not lanes:
        return chosen
    # Jobs at their latest start take room as well: idle places first.
    idle = max(0, room.idle - len(chosen))
    places = min(room.idle + room.queue, params.releases_max) - len(chosen)
    if places <= 0:
        return chosen
    taken = {release.park.job for release in chosen}
    for i, (park, factor) in enumerate(_in_turn(index, room, ledger, lanes, taken, now_s, params)):
        if i >= places:
            break
        reason = ReleaseReason.IDLE_CAPACITY if i < idle else ReleaseReason.READY_SHORT
        chosen.append(Release(park, reason, factor))
    return chosen


def why_held(
    park: ParkSubject,
    room: Room,
    *,
    awake: bool,
    now_s: float,
    paused: frozenset[Lane] = frozenset(),
) -> HoldReason:
    """Why a job that is still parked was not chosen."""
    if park.lane in paused:
        return HoldReason.LANE_PAUSED
    if park.not_before_ms > now_s * 1000.0:
        return HoldReason.NOT_BEFORE
    if not awake:
        return HoldReason.FIRES_SOON
    if not room.workers:
        return HoldReason.NO_WORKER
    return HoldReason.OTHERS_FIRST if room.idle + room.queue else HoldReason.POOL_BUSY


def _at_latest_start(
    index: ParkIndex, pool: str, lanes: list[Lane], now_s: float, params: ReleaseParams
) -> list[Release]:
    out: list[Release] = []
    for park in index.by_due(pool, lanes, int((now_s + params.lead_s) * 1000.0)):
        if len(out) >= params.releases_max:
            break
        if index.awake(park.job):
            overdue = park.due_ms <= (now_s - FIRE_GUARD_S) * 1000.0
            reason = ReleaseReason.OVERDUE if overdue else ReleaseReason.LATEST_START_NEAR
            out.append(Release(park, reason, params.urgent_charge))
    return out


def _in_turn(
    index: ParkIndex,
    room: Room,
    ledger: Ledger,
    lanes: list[Lane],
    taken: set[str],
    now_s: float,
    params: ReleaseParams,
) -> Iterator[tuple[ParkSubject, float]]:
    """All other jobs that may go, first those that are urgent, then by fair turns. Grows `taken`."""
    by_lane = ledger.lanes(room.pool).draft()
    by_tenant = {lane: ledger.tenants(room.pool, lane).draft() for lane in lanes}
    urgent_ms = int((now_s + max(params.urgent_s, 2.0 * room.service_s)) * 1000.0)
    for park in index.by_due(room.pool, lanes, urgent_ms):
        if park.job not in taken and index.awake(park.job):
            taken.add(park.job)
            cost = max(1, park.cost_ms) * params.urgent_charge
            by_lane.charge(park.lane.value, cost / params.weights[park.lane])
            by_tenant[park.lane].charge(park.tenant, cost)
            yield park, params.urgent_charge
    turns = {lane: _tenant_turns(index, room.pool, lane, by_tenant[lane], taken) for lane in lanes}
    heads = {lane: head for lane in lanes if (head := next(turns[lane], None)) is not None}
    while heads:
        lane = min(heads, key=lambda each: by_lane.start(each.value))
        park = heads[lane]
        by_lane.charge(lane.value, max(1, park.cost_ms) / params.weights[lane])
        yield park, 1.0
        head = next(turns[lane], None)
        if head is None:
            del heads[lane]
        else:
            heads[lane] = head


def _tenant_turns(index: ParkIndex, pool: str, lane: Lane, fair: Fair, taken: set[str]) -> Iterator[ParkSubject]:
    """The jobs of one lane in the tenants' turns; charges the draft for each."""
    turns: list[tuple[float, int, str, ParkSubject, Iterator[ParkSubject]]] = []

    def enqueue(tenant: str, queue: Iterator[ParkSubject]) -> None:
        park = next((each for each in queue if each.job not in taken), None)
        if park is not None:
            heapq.heappush(turns, (fair.start(tenant), park.due_ms, tenant, park, queue))

    for tenant in index.tenants(pool, lane):
        enqueue(tenant, index.queue(pool, lane, tenant))
    while turns:
        _, _, tenant, park, queue = heapq.heappop(turns)
        fair.charge(tenant, max(1, park.cost_ms))
        yield park
        enqueue(tenant, queue)
