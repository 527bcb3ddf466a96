"""The plan: from workers' leases, lane depths and parked work to what admission and operators need to know.

Capacity is counted in device-seconds a second: one worker gives at most one. Desired workers come from the work that is
due, never from message counts alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct, field

from laneway.core.catalogue import Catalogue, Pool
from laneway.core.fleet import HOT_PREFIXES_MAX, HomePlan, LanePlan, Plan, PoolPlan, WorkerLease, WorkerState
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.policy.affinity import merge_hot


@dataclass(frozen=True, slots=True)
class PlanParams:
    utilisation: float = 0.85  # share of a worker's time that may be planned with


class Depth(Struct, frozen=True):
    """Messages of one pool and lane."""

    ready: int = 0
    running: int = 0  # with a worker, not yet acknowledged


class Parked(Struct, frozen=True):
    """The parked jobs of one pool and lane."""

    count: int = 0
    device_s: float = 0.0


class Snapshot(Struct, frozen=True):
    """What a plan is made from."""

    leases: Sequence[WorkerLease] = ()
    depths: Mapping[tuple[str, Lane], Depth] = field(default_factory=dict)
    parked: Mapping[tuple[str, Lane], Parked] = field(default_factory=dict)
    demand: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)  # pool: (due Unix s, device-s)
    oldest_wait_s: Mapping[tuple[str, Lane], float] = field(default_factory=dict)
    paused: frozenset[Lane] = frozenset()
    homes: Mapping[str, tuple[HomePlan, ...]] = field(default_factory=dict)  # by pool


def make_plan(
    snapshot: Snapshot,
    catalogue: Catalogue,
    *,
    region: str,
    epoch: int,
    version: int,
    now_s: float,
    valid_s: float,
    params: PlanParams = PlanParams(),
) -> Plan:
    return Plan(
        region=region,
        epoch=epoch,
        version=version,
        made_s=now_s,
        valid_until_s=now_s + valid_s,
        pools=tuple(_pool_plan(pool, snapshot, now_s, params) for pool in catalogue.pools),
        paused=snapshot.paused,
    )


def _pool_plan(pool: Pool, snapshot: Snapshot, now_s: float, params: PlanParams) -> PoolPlan:
    leases = [each for each in snapshot.leases if each.pool == pool.name and each.state is WorkerState.READY]
    lanes = tuple(_lane_plan(pool, lane, snapshot) for lane in LANES)
    slots = sum(each.slots for each in leases)
    running = min(slots, _running(pool, leases, lanes, snapshot))
    kv_tokens = sum(each.kv_tokens for each in leases)
    service_s = _mean(each.service_s for each in leases)
    return PoolPlan(
        pool=pool.name,
        workers=len(leases),
        slots=slots,
        free_slots=slots - running,
        kv_tokens=kv_tokens,
        free_kv_tokens=max(0, kv_tokens - sum(each.kv_tokens_used for each in leases)),
        prefill_tokens_per_s=_mean(each.prefill_tokens_per_s for each in leases) or pool.prefill_tokens_per_s,
        decode_tokens_per_s=_mean(each.decode_tokens_per_s for each in leases) or pool.decode_tokens_per_s,
        service_s=service_s,
        desired_workers=desired_workers(pool, lanes, snapshot.demand.get(pool.name, ()), now_s, params),
        lanes=lanes,
        homes=snapshot.homes.get(pool.name, ()),
        hot_prefixes=merge_hot((each.hot_prefixes for each in leases), HOT_PREFIXES_MAX),
    )


def _running(pool: Pool, leases: Sequence[WorkerLease], lanes: Sequence[LanePlan], snapshot: Snapshot) -> int:
    """Places taken at the ready workers. Deliveries are known to the moment and never fewer than what runs; leases are
    up to a second old, and serve where deliveries of a lane are not known, and to tell what draining workers still
    hold."""
    elsewhere = sum(
        each.running for each in snapshot.leases if each.pool == pool.name and each.state is not WorkerState.READY
    )
    delivered = max(0, sum(lane.running for lane in lanes) - elsewhere)
    if all((pool.name, lane) in snapshot.depths for lane in LANES):
        return delivered
    return max(delivered, sum(each.running for each in leases))


def _lane_plan(pool: Pool, lane: Lane, snapshot: Snapshot) -> LanePlan:
    key = (pool.name, lane)
    depth = snapshot.depths.get(key, Depth())
    parked = snapshot.parked.get(key, Parked())
    return LanePlan(
        lane=lane,
        ready=depth.ready,
        running=depth.running,
        parked=parked.count,
        parked_device_s=parked.device_s,
        limit=pool.priority_limit if lane is Lane.PRIORITY else 0,
        oldest_wait_s=snapshot.oldest_wait_s.get(key, 0.0),
    )


def desired_workers(
    pool: Pool,
    lanes: Sequence[LanePlan],
    demand: Iterable[tuple[float, float]],
    now_s: float,
    params: PlanParams = PlanParams(),
) -> int:
    """Workers that would let the pool keep its promises, counting from when a new one could be ready.

    The largest of: places for the priority work there is, and for all that runs; for each due time, the parked work due
    by then over the time until then (processor demand); one, if anything at all waits or the pool is planned to have
    any. Never more workers than jobs would fill.
    """
    slots = max(1, pool.slots)
    priority = next((each for each in lanes if each.lane is Lane.PRIORITY), LanePlan(Lane.PRIORITY))
    wanted = math.ceil((priority.ready + priority.running) / (slots * params.utilisation))
    wanted = max(wanted, math.ceil(sum(each.running for each in lanes) / slots))
    work = 0.0
    for due_s, device_s in demand:
        work += device_s
        # Work due before a new worker could be ready asks for as many as could do it in the time of one load.
        time_left = max(due_s - now_s - pool.load_s, pool.load_s, 1.0)
        wanted = max(wanted, math.ceil(work / (time_left * params.utilisation)))
    jobs = sum(each.ready + each.running + (each.parked if each.lane in PARKING_LANES else 0) for each in lanes)
    least = 1 if jobs or pool.workers else 0
    return max(least, min(wanted, math.ceil(jobs / slots)))


def _mean(values: Iterable[float]) -> float:
    """Of those that were measured."""
    measured = [value for value in values if value > 0.0]
    return sum(measured) / len(measured) if measured else 0.0
