"""What services know of workers and lanes: leases, and the plan that the scheduler publishes. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field

from laneway.core.lanes import Lane

LEASE_S = 3.0  # a worker incarnation is dead when it has not been heard of for this long (monotonic)
RENEW_S = 1.0
HOT_PREFIXES_MAX = 64  # that a worker, a pool or a region names as being in its caches


class WorkerState(StrEnum):
    STARTING = "STARTING"
    READY = "READY"
    DRAINING = "DRAINING"
    BROKEN = "BROKEN"


class StepTimes(Struct, frozen=True):
    """What a step of an engine costs, in seconds: base + sequences x each + context tokens x each + prompt tokens x
    each. All at least 0; a base of 0 means that nothing is known."""

    base_s: float = 0.0
    sequence_s: float = 0.0  # for each decoding sequence
    context_token_s: float = 0.0  # for each KV token of the decoding sequences
    prefill_token_s: float = 0.0  # for each prompt token that the step computes
    chunk_tokens: int = 0  # most prompt tokens of one step

    def decode_s(self, sequences: int, context_tokens: int = 0) -> float:
        """A step of so many decoding sequences that hold so many KV tokens together, without prefill."""
        return self.base_s + self.sequence_s * sequences + self.context_token_s * context_tokens

    def step_s(self, sequences: int, context_tokens: int, prompt_tokens: int) -> float:
        return self.decode_s(sequences, context_tokens) + self.prefill_token_s * prompt_tokens


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
    home: str = ""  # home slot that it serves; empty: none
    step_times: StepTimes = StepTimes()
    lower_tokens_per_s: float = 0.0  # prompt tokens a second that its interference budget leaves to the lower lanes
    priority_tpot_p95_s: float = 0.0  # of priority work in the last minute; 0: none
    theta: float = 0.0  # share of the TPOT target that it fills
    hot_prefixes: tuple[int, ...] = ()  # hashes of prompt beginnings that its prefix cache holds, hottest first
    block_tokens: int = 0
    lower_places: int = 0  # lower-lane jobs that it would start at this moment
    load_progress: float = 0.0  # of its engine's start, 0 .. 1, by how long that takes; 0: none is under way
    engine_deaths: int = 0  # how often its engine died, or did not start, lately


class Demand(Struct, frozen=True):
    """Parked work that is due by a time, all earlier work included."""

    by_s: float  # Unix seconds
    device_s: float


class EtaFit(Struct, frozen=True):
    """How real times compare with what the model behind verdicts says (policy.calibration)."""

    p50: float = 1.0  # of real / estimate
    p90: float = 1.0  # of real / the estimate's bound
    samples: int = 0  # 0: nothing was learned


class LanePlan(Struct, frozen=True):
    lane: Lane
    ready: int = 0
    running: int = 0
    parked: int = 0
    parked_device_s: float = 0.0
    limit: int = 0  # 0: none
    oldest_wait_s: float = 0.0
    demand: tuple[Demand, ...] = ()  # of the parked, by rising time
    ttft_fit: EtaFit = EtaFit()
    completion_fit: EtaFit = EtaFit()


class HomePlan(Struct, frozen=True):
    """A home slot of a pool: which worker's caches its jobs meet."""

    home: str
    worker_id: str = ""  # who serves it; empty: nobody, anyone may take its jobs
    ready: int = 0  # of all lanes
    running: int = 0
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
    homes: tuple[HomePlan, ...] = ()
    lower_tokens_per_s: float = 0.0  # prompt tokens a second that the interference budgets leave to the lower lanes
    priority_per_s: float = 0.0  # arrivals of priority jobs a second
    burstiness: float = 1.0  # variance over mean of priority arrivals in short windows
    reserved_slots: int = 0  # places kept free for priority jobs that may come
    step_times: StepTimes = StepTimes()  # of a worker
    hot_prefixes: tuple[int, ...] = ()
    desired_reason: str = ""  # what asks for desired_workers: SLO, DUE, KV, RUNNING, COLD, PLANNED

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


class PolicyVersion(Struct, frozen=True):
    """The [policy] section of the settings as the leading scheduler read it last."""

    version: int = 0  # rises with each change; 0: none was published
    json: str = ""  # all values, defaults filled in
    loaded_s: float = 0.0  # Unix seconds
    refused: str = ""  # why the settings as they stand now were not taken; empty: they were
    restart: tuple[str, ...] = ()  # settings that changed since the scheduler started, and only a restart takes up


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
    policy: PolicyVersion = PolicyVersion()

    def pool(self, name: str) -> PoolPlan:
        for plan in self.pools:
            if plan.pool == name:
                return plan
        return PoolPlan(name)
