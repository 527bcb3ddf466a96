"""Which parked jobs to release now, and why.

The ready part of the lower lanes stays short, so that order is decided late: as many jobs as the pool has places that
would stay empty, and beyond these what the pool works off until the scheduler looks again. Who goes first: jobs at
their latest start; then urgent ones by latest start; then the lanes by weight and in a lane the tenants by what they
were given (policy.fairness), in a tenant by latest start with groups together. Work that is planned into a trough of
priority demand waits for it while the pool is busy (policy.holding). Releases nothing of a paused lane and nothing
before its not-before. Changes nothing: the caller acts, then charges.

Cost: O(T) for the tenants with work, and O(log T) for each job released; nothing reads the jobs that stay.

Units: jobs, seconds, device-milliseconds. Source: policy.md (c) and (i), DESIGN 5. Known failure modes: a place that
the plan shows free and a worker's budget does not take leaves a job ready and waiting; service times of jobs that
ended say little of those to come, so that the ready part is too long or too short for some seconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from laneway.core.fleet import PoolPlan, WorkerLease, WorkerState
from laneway.core.lanes import PARKING_LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.coalesce import CoalesceParams
from laneway.policy.fairness import Counters, FairParams, Ledger
from laneway.policy.holding import NO_HOLD, Hold, HoldParams
from laneway.policy.parked import ParkIndex

FIRE_GUARD_S = 2.0  # a job this near to its schedule is left to NATS


class ReleaseReason(StrEnum):
    IDLE_CAPACITY = "IDLE_CAPACITY"  # a place would stay empty
    READY_SHORT = "READY_SHORT"  # the pool would run dry before the scheduler looks again
    PRICE_LOW = "PRICE_LOW"  # its trough of priority demand is here, or this moment is as good
    COALESCED = "COALESCED"  # with others of its group that it waited for
    LATEST_START_NEAR = "LATEST_START_NEAR"
    OVERDUE = "OVERDUE"  # past its latest start and still parked: its schedule did not fire
    STRANDED = "STRANDED"  # past its fire time and still parked: NATS had no storage then


# Released because its time had come, not because there was room: such a job runs also while priority is overloaded.
DUE_REASONS = frozenset({ReleaseReason.LATEST_START_NEAR, ReleaseReason.OVERDUE, ReleaseReason.STRANDED})


class HoldReason(StrEnum):
    POOL_BUSY = "POOL_BUSY"
    NO_WORKER = "NO_WORKER"
    LANE_PAUSED = "LANE_PAUSED"
    NOT_BEFORE = "NOT_BEFORE"
    FIRES_SOON = "FIRES_SOON"
    OTHERS_FIRST = "OTHERS_FIRST"
    HELD_FOR_TROUGH = "HELD_FOR_TROUGH"  # less priority work is expected before its latest start
    COALESCING = "COALESCING"  # another of its group is likely to come at once


@dataclass(frozen=True, slots=True)
class ReleaseParams:
    ready_ahead_s: float = 2.0  # released work that waits beyond the free places, up to one job for each place
    look_s: float = 0.25  # between looks of the scheduler; at least two of these are bridged, however short the jobs
    lead_s: float = 5.0  # a job is released this long before its latest start, whatever the room
    urgent_s: float = 15.0  # or twice the service time, if longer: then by latest start, ahead of fairness
    urgent_charge: float = 2.0  # urgent jobs cost their tenant and lane this much more
    releases_max: int = 256  # of one decision
    fair: FairParams = field(default_factory=FairParams)
    hold: HoldParams = field(default_factory=HoldParams)
    coalesce: CoalesceParams = field(default_factory=CoalesceParams)


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


def room_of(
    pool: PoolPlan,
    params: ReleaseParams = ReleaseParams(),
    *,
    leases: Sequence[WorkerLease] = (),
    prompt_tokens: float = 0.0,
) -> Room:
    """The room of a pool as the plan and its workers show it.

    idle = free places - those that priority fills - what is ready, and no more than the lower-lane jobs that the
    workers say they would start at this moment (`lower_places`: their interference budget, guard and headroom); where
    they do not say, no more than the forecast leaves free.
    queue = what the pool works off in `ready_ahead_s` by its service time, and by the prompt tokens that the budgets
    leave to the lower lanes (`prompt_tokens`: of such a job on average; 0: not known), but at least one for each
    worker, less what waits already.
    """
    ready_priority = pool.lane(Lane.PRIORITY).ready
    ready_lower = sum(pool.lane(lane).ready for lane in PARKING_LANES)
    takes = _lower_places(pool, leases)
    if takes is None:
        takes = pool.free_slots - pool.reserved_slots
    left_by_priority = max(0, min(pool.free_slots - ready_priority, takes))
    idle = max(0, left_by_priority - ready_lower)
    waiting = max(0, ready_lower - left_by_priority)
    queue = max(0, _ready_target(pool, params, prompt_tokens) - waiting)
    return Room(pool.pool, idle, queue, pool.service_s, pool.workers)


def _lower_places(pool: PoolPlan, leases: Sequence[WorkerLease]) -> int | None:
    """Lower-lane jobs that the pool's workers would start now; None where one of them does not say (an older release
    has no budget, and so no share of the TPOT target that it fills)."""
    mine = [each for each in leases if each.pool == pool.pool and each.state is WorkerState.READY]
    if not mine or any(each.theta <= 0.0 for each in mine):
        return None
    return sum(each.lower_places for each in mine)


def _ready_target(pool: PoolPlan, params: ReleaseParams, prompt_tokens: float) -> int:
    """How many jobs may wait ready beyond the free places."""
    if pool.service_s <= 0.0:
        return pool.slots
    ahead = math.ceil(pool.slots * params.ready_ahead_s / pool.service_s)
    bridge = math.ceil(pool.slots * 2.0 * params.look_s / pool.service_s)
    target = max(min(pool.slots, ahead), bridge)
    if prompt_tokens > 0.0 and pool.lower_tokens_per_s > 0.0:
        span_s = max(params.ready_ahead_s, 2.0 * params.look_s)
        target = min(target, math.ceil(pool.lower_tokens_per_s * span_s / prompt_tokens))
    return max(pool.workers, target)


def choose(
    index: ParkIndex,
    room: Room,
    ledger: Ledger,
    *,
    now_s: float,
    paused: frozenset[Lane] = frozenset(),
    params: ReleaseParams = ReleaseParams(),
    hold: Hold = NO_HOLD,
    coalesced: Container[str] = (),
    busy: Container[str] = (),
) -> list[Release]:
    """The jobs of one pool to release now, in order; each at most once. The index must have been woken to `now_s`.

    `hold`: how much of what is neither due nor urgent may go; `coalesced`: jobs that waited for others of their group;
    `busy`: groups whose home has no room now.
    """
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
    left_s = hold.device_s
    for i, (park, factor) in enumerate(_in_turn(index, room, ledger, lanes, taken, now_s, params, busy)):
        urgent = factor != 1.0
        if i >= places or (not urgent and left_s <= 0.0):
            break
        reason = ReleaseReason.IDLE_CAPACITY if i < idle else ReleaseReason.READY_SHORT
        if park.job in coalesced:
            reason = ReleaseReason.COALESCED
        if not urgent:
            left_s -= park.cost_ms / 1000.0
            reason = ReleaseReason.PRICE_LOW if hold.low else reason
        chosen.append(Release(park, reason, factor))
    return chosen


def why_held(
    park: ParkSubject,
    room: Room,
    *,
    awake: bool,
    now_s: float,
    paused: frozenset[Lane] = frozenset(),
    hold: Hold = NO_HOLD,
    gathers: bool = False,
) -> HoldReason:
    """Why a job that is still parked was not chosen. `gathers`: it waits for others of its group."""
    if park.lane in paused:
        return HoldReason.LANE_PAUSED
    if park.not_before_ms > now_s * 1000.0:
        return HoldReason.NOT_BEFORE
    if gathers:
        return HoldReason.COALESCING
    if not awake:
        return HoldReason.FIRES_SOON
    if not room.workers:
        return HoldReason.NO_WORKER
    if hold.holds and hold.device_s <= 0.0 and room.idle + room.queue:
        return HoldReason.HELD_FOR_TROUGH
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
    busy: Container[str],
) -> Iterator[tuple[ParkSubject, float]]:
    """All other jobs that may go, first those that are urgent, then by fair turns. Grows `taken`."""
    working = [lane for lane in lanes if index.tenants(room.pool, lane)]
    ledger.lanes(room.pool).meet([lane.value for lane in working])
    by_lane = ledger.lanes(room.pool).draft()
    by_tenant: dict[Lane, Counters] = {}
    for lane in lanes:
        ledger.tenants(room.pool, lane).meet(index.tenants(room.pool, lane))
        by_tenant[lane] = ledger.tenants(room.pool, lane).draft()
    fair = ledger.params

    def charge(park: ParkSubject, factor: float) -> None:
        tokens = ledger.predicted(park, factor)
        by_lane.charge(park.lane.value, tokens / fair.lane_weights[park.lane])
        by_tenant[park.lane].charge(park.tenant, tokens / fair.tenant_weight(park.tenant))

    urgent_ms = int((now_s + max(params.urgent_s, 2.0 * room.service_s)) * 1000.0)
    for park in index.by_due(room.pool, lanes, urgent_ms):
        if park.job not in taken and index.awake(park.job):
            taken.add(park.job)
            charge(park, params.urgent_charge)
            yield park, params.urgent_charge
    turns = {lane: _tenant_turns(index, room.pool, lane, by_tenant[lane], fair, taken, busy) for lane in working}
    heads = {lane: head for lane in working if (head := next(turns[lane], None)) is not None}
    while heads:
        lane = min(heads, key=lambda each: by_lane.of(each.value))
        park = heads[lane]
        charge(park, 1.0)
        yield park, 1.0
        head = next(turns[lane], None)
        if head is None:
            del heads[lane]
        else:
            heads[lane] = head


def _tenant_turns(
    index: ParkIndex,
    pool: str,
    lane: Lane,
    counters: Counters,
    fair: FairParams,
    taken: Container[str],
    busy: Container[str],
) -> Iterator[ParkSubject]:
    """The jobs of one lane in the tenants' turns. The caller charges each before it asks for the next."""
    heads: dict[str, ParkSubject] = {}
    queues: dict[str, Iterator[ParkSubject]] = {}  # of the tenants whose turn came

    def following(tenant: str) -> ParkSubject | None:
        queue = queues.get(tenant)
        if queue is None:
            queue = queues[tenant] = index.queue(pool, lane, tenant)
            if tenant in heads:
                next(queue)
        return next((each for each in queue if each.job not in taken), None)

    def entry(tenant: str, park: ParkSubject) -> tuple[float, int, str]:
        heads[tenant] = park
        key = counters.of(tenant)
        if park.group in busy:
            key += fair.locality_tokens / fair.tenant_weight(tenant)
        return key, park.due_ms, tenant

    turns: list[tuple[float, int, str]] = []
    for tenant, first in index.heads(pool, lane):
        park = first if first.job not in taken else following(tenant)
        if park is not None:
            turns.append(entry(tenant, park))
    heapq.heapify(turns)
    while turns:
        tenant = heapq.heappop(turns)[2]
        park = heads[tenant]
        last_key = turns[0][0] + fair.locality_tokens / fair.tenant_weight(tenant) if turns else math.inf
        jobs = 0
        while True:
            yield park
            jobs += 1
            after = following(tenant)
            if after is None:
                break
            together = after.group == park.group and jobs < fair.turn_jobs_max
            park = after
            if not together or counters.of(tenant) >= last_key:
                heapq.heappush(turns, entry(tenant, park))
                break
