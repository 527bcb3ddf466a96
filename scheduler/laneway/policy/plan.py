"""The plan: from workers' leases, lane depths and parked work to what admission and operators need to know.

Capacity is counted in device-seconds a second: one worker gives at most one. Desired workers are policy.desired's.
Cost: O(workers + points of the demand curves + nearest jobs), whatever the number of parked jobs.

Source: DESIGN 2, policy.md (g) for what it wants. Known failure mode: leases are up to a second old, so that what it
says of running work and free places lags by that much where deliveries are not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from laneway.core.catalogue import Catalogue, Pool
from laneway.core.fleet import (
    HOT_PREFIXES_MAX,
    Demand,
    HomePlan,
    LanePlan,
    Plan,
    PoolPlan,
    StepTimes,
    WorkerLease,
    WorkerState,
)
from laneway.core.lanes import LANES, Lane
from laneway.policy.affinity import merge_hot
from laneway.policy.desired import DesiredParams, Load, desired
from laneway.policy.forecast import Outlook

DEFAULTS = DesiredParams()


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
    demand: Mapping[tuple[str, Lane], tuple[Demand, ...]] = field(default_factory=dict)  # policy.demand, of the parked
    near: Mapping[str, Sequence[tuple[str, float, float]]] = field(default_factory=dict)  # as desired.Load, by pool
    outlook: Mapping[str, Outlook] = field(default_factory=dict)  # by pool
    job_tokens: Mapping[str, float] = field(default_factory=dict)  # prompt and output of a job on average, by pool
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
    params: DesiredParams = DEFAULTS,
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


def _pool_plan(pool: Pool, snapshot: Snapshot, now_s: float, params: DesiredParams) -> PoolPlan:
    leases = [each for each in snapshot.leases if each.pool == pool.name and each.state is WorkerState.READY]
    lanes = tuple(_lane_plan(pool, lane, snapshot) for lane in LANES)
    slots = sum(each.slots for each in leases)
    running = min(slots, _running(pool, leases, lanes, snapshot))
    kv_tokens = sum(each.kv_tokens for each in leases)
    service_s = _mean(each.service_s for each in leases)
    step_times = _step_times(leases) or pool.step_times
    outlook = snapshot.outlook.get(pool.name, Outlook())
    load = Load(
        lanes=lanes,
        deferrable=snapshot.demand.get((pool.name, Lane.DEFERRABLE), ()),
        batch=snapshot.demand.get((pool.name, Lane.BATCH), ()),
        near=snapshot.near.get(pool.name, ()),
        workers=len(leases),
        kv_tokens_used=sum(each.kv_tokens_used for each in leases),
        kv_tokens=kv_tokens // len(leases) if leases else 0,
        job_tokens=snapshot.job_tokens.get(pool.name, 0.0),
        step_times=step_times,
        outlook=outlook,
    )
    wanted = desired(pool, load, now_s, params)
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
        desired_workers=wanted.workers,
        desired_reason=wanted.reason,
        lanes=lanes,
        lower_tokens_per_s=math.fsum(each.lower_tokens_per_s for each in leases),
        priority_per_s=_shown(outlook.per_s),
        burstiness=_shown(outlook.burstiness),
        reserved_slots=min(slots // 2, math.ceil(outlook.surge - 1e-9)),
        step_times=step_times,
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
        demand=snapshot.demand.get(key, ()),
    )


def _step_times(leases: Sequence[WorkerLease]) -> StepTimes | None:
    """The mean of what the workers measured."""
    known = [each.step_times for each in leases if each.step_times.base_s > 0.0]
    if not known:
        return None
    return StepTimes(
        base_s=_mean(each.base_s for each in known),
        sequence_s=_mean(each.sequence_s for each in known),
        context_token_s=_mean(each.context_token_s for each in known),
        prefill_token_s=_mean(each.prefill_token_s for each in known),
        chunk_tokens=max(each.chunk_tokens for each in known),
    )


def _shown(value: float) -> float:
    """To three digits: a plan whose forecast moved by less says nothing new."""
    return float(f"{value:.3g}")


def _mean(values: Iterable[float]) -> float:
    """Of those that were measured."""
    measured = [value for value in values if value > 0.0]
    return math.fsum(measured) / len(measured) if measured else 0.0  # exact: in whatever order they come
