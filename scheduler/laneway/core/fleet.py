"""What services know of workers and lanes: leases, and the plan that the scheduler publishes. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field

from laneway.core.lanes import Lane

LEASE_S = 3.0  # a worker incarnation is dead when it has not been heard of for this long (monotonic)
RENEW_S = 1.0


class WorkerState(StrEnum):
    STARTING = "STARTING"
    READY = "READY"
    DRAINING = "DRAINING"
    BROKEN = "BROKEN"


class WorkerLease(Struct, frozen=True):
    worker_id: str  # one incarnation; also its control subject token
    name: str  # stable across restarts
    pool: str
    engine: str
    state: WorkerState
    detail: str = ""
    slots: int = 0
    running: int = 0
    kv_tokens: int = 0
    kv_tokens_used: int = 0
    prefill_tokens_per_s: float = 0.0  # 0: not measured yet
    decode_tokens_per_s: float = 0.0  # of one sequence at the present batch; 0: not measured yet
    service_s: float = 0.0  # mean time of a job from claim to end; 0: not measured yet
    started_s: float = 0.0  # Unix seconds
    renewed_s: float = 0.0  # Unix seconds
    jobs_done: int = 0
    tokens_done: int = 0
    busy_s: float = 0.0
    capabilities: tuple[str, ...] = ()
    running_by_lane: Mapping[Lane, int] = field(default_factory=dict)
    process_id: int = 0


class LanePlan(Struct, frozen=True):
    lane: Lane
    ready: int = 0
    running: int = 0
    parked: int = 0
    parked_device_s: float = 0.0
    limit: int = 0  # 0: none
    oldest_wait_s: float = 0.0


class PoolPlan(Struct, frozen=True):
    pool: str
    workers: int = 0
    slots: int = 0
    free_slots: int = 0
    kv_tokens: int = 0
    free_kv_tokens: int = 0
    prefill_tokens_per_s: float = 0.0  # of one worker
    decode_tokens_per_s: float = 0.0  # of one sequence
    service_s: float = 0.0
    desired_workers: int = 0
    lanes: tuple[LanePlan, ...] = ()

    def lane(self, lane: Lane) -> LanePlan:
        for plan in self.lanes:
            if plan.lane is lane:
                return plan
        return LanePlan(lane)


class TenantDepth(Struct, frozen=True):
    """Jobs of a tenant in a lane that were accepted and have not ended."""

    tenant: str
    lane: Lane
    open: int


class Plan(Struct, frozen=True):
    region: str
    epoch: int = 0
    version: int = 0
    made_s: float = 0.0  # Unix seconds
    valid_until_s: float = 0.0  # Unix seconds; a reader whose last plan is older than this span is conservative
    pools: tuple[PoolPlan, ...] = ()
    paused: frozenset[Lane] = frozenset()
    tenants: tuple[TenantDepth, ...] = ()  # those near their limits: policy.tenants
    counted_before: int = 0  # `tenants` counts the writes of records below this sequence; 0: they are not counted

    def pool(self, name: str) -> PoolPlan:
        for plan in self.pools:
            if plan.pool == name:
                return plan
        return PoolPlan(name)
