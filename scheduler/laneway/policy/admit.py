"""The verdict on a request: accept, hold, another tier, or refuse with a reason and a retry time.

Decides from values alone: the contract, what each candidate pool looks like, the time and one random number for the
jitter of retry times. Never decides about quotas, identities or malformed requests; those were settled before.

The order: the allowed regions, whether this one takes new work, the storage, what the tenant has open already, then
each candidate tier from the cheapest (what it can never do: cost, KV, deadline on an idle pool; then its load), the
first that fits wins; otherwise the refusal that can be retried soonest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.errors import (
    Infeasible,
    LaneSaturated,
    LanewayError,
    RegionNotAllowed,
    StorageFull,
    TenantLimit,
    Unavailable,
)
from laneway.core.job import Contract, Verdict
from laneway.core.lanes import Lane, VerdictKind
from laneway.policy import eta as etas
from laneway.policy.contract import within_reach
from laneway.policy.eta import Eta, PoolView
from laneway.policy.fire import FireParams, fire_at_s, latest_start_s


@dataclass(frozen=True, slots=True)
class AdmitParams:
    """Reference values and their sources are in docs/policy.md."""

    z: float = 1.28  # one-sided 90 %
    margin_s: float = 0.5
    margin_ratio: float = 0.1
    floor: float = 0.1  # share of a pool that its lower lanes always get
    jitter_min: float = 0.8
    jitter_max: float = 1.3
    retry_s_min: float = 0.1
    retry_s_max: float = 30.0
    resume_margin: float = 0.1
    stale_factor: float = 2.0
    yield_wait_s: float | None = None  # until running lower work has made room for priority; None: it never does
    storage_max: float = 0.8
    storage_retry_s: float = 2.0
    tenant_jobs_max: Mapping[Lane, int] = field(default_factory=dict)  # open jobs of one tenant; 0: no limit
    tenant_retry_s: float = 1.0  # to begin with: doors hear of ends with a plan, some times a second
    ttft_default_s: Mapping[Lane, float] = field(default_factory=dict)


class Candidate(Struct, frozen=True):
    """A pool that may serve the request, and the request in that pool's tokens."""

    pool: Pool
    prompt_tokens: int
    max_tokens: int  # of all answers together
    expected_tokens: int  # predicted output: the quantile that the lane's ETA uses
    long_tokens: int  # predicted output near its upper end: for the latest start


class Ask(Struct, frozen=True):
    contract: Contract
    candidates: Sequence[Candidate]  # cheapest first, at least one
    region: str


class Situation(Struct, frozen=True):
    """What admission knows at this moment."""

    views: Mapping[str, PoolView]  # by pool
    now_s: float
    jitter: float  # uniform in [0, 1)
    storage_used: float | None  # 0 .. 1; None: unknown
    refusing: frozenset[str] = frozenset()  # pools whose last priority answer was a refusal
    draining: bool = False  # an operator keeps new work out of the region
    tenant_open: int = 0  # the tenant's open jobs in the contract's lane


class Placement(StrEnum):
    READY = "ready"
    PARKED = "parked"


class Decision(Struct, frozen=True):
    """`refusal` is the error of a refused request; otherwise the rest says where the job goes."""

    verdict: Verdict
    candidate: Candidate
    contract: Contract
    placement: Placement = Placement.READY
    latest_start_s: float = 0.0
    fire_at_s: float = 0.0
    device_s: float = 0.0
    service_s: float = 0.0
    refusal: type[LanewayError] | None = None
    quota: Mapping[str, str] = {}  # of a refusal for a limit: its name and what it is compared with

    def error(self) -> LanewayError:
        """The refusal as the caller meets it."""
        assert self.refusal is not None, "the request was not refused"
        verdict = self.verdict
        facts = {"lane": verdict.lane.value, "pool": verdict.pool, **self.quota}
        if verdict.ttft_eta_s is not None:
            facts["eta_ms"] = str(round(verdict.ttft_eta_s * 1000))
        return self.refusal(verdict.message, reason=verdict.reason, retry_after_s=verdict.retry_after_s, facts=facts)


def admit(ask: Ask, situation: Situation, params: AdmitParams) -> Decision:
    contract = ask.contract
    first = ask.candidates[0]
    if contract.regions and ask.region not in contract.regions:
        allowed = ", ".join(contract.regions)
        return _refused(
            ask, first, contract, RegionNotAllowed, "REGION_NOT_ALLOWED",
            f"the model runs in {ask.region}, which is none of the allowed regions ({allowed})",
        )  # fmt: skip
    if situation.draining:
        return _refused(
            ask, first, contract, Unavailable, "REGION_DRAINING", f"the region {ask.region} takes no new work now",
            retry_s=_retry(params.retry_s_max, situation, params),
        )  # fmt: skip
    if situation.storage_used is None:  # NATS is away, most likely: whoever calls it full sends people to look there
        return _refused(
            ask, first, contract, Unavailable, "STORAGE_UNKNOWN", "NATS does not tell how full the queue's storage is",
            retry_s=_retry(params.storage_retry_s, situation, params),
        )  # fmt: skip
    if situation.storage_used > params.storage_max:
        return _refused(
            ask, first, contract, StorageFull, "STORAGE_FULL",
            f"the queue's storage use is {situation.storage_used:.0%}",
            retry_s=_retry(params.storage_retry_s, situation, params),
        )  # fmt: skip
    most = params.tenant_jobs_max.get(contract.lane, 0)
    if most and situation.tenant_open >= most:
        refusal = _refused(
            ask, first, contract, TenantLimit, "TENANT_LIMIT",
            f"the tenant has {situation.tenant_open} open jobs in this lane, and may have {most}",
            retry_s=_retry(params.tenant_retry_s, situation, params),
        )  # fmt: skip
        return replace(refusal, quota={"quota": "tenant_jobs_max", "limit": str(most)})
    judge = _judge_parking if contract.lane.may_park else _judge_priority
    refused: list[Decision] = []
    for index, candidate in enumerate(ask.candidates):
        reachable = _reachable(contract, candidate, situation, params)
        decision = _never(ask, candidate, reachable, situation)
        if decision is None:
            decision = judge(ask, candidate, reachable, situation, params, index > 0)
        if decision.refusal is None:
            return decision
        refused.append(decision)
    return min(refused, key=_retry_order)


def full_lane_retry_s(decision: Decision, situation: Situation, params: AdmitParams) -> float:
    """When the caller of a lane that refused the message itself should come again: once a slot is expected to free."""
    pool = decision.candidate.pool
    wait_s = etas.slot_wait_s(pool, situation.views[pool.name], jobs_ahead=0, service_s=decision.service_s)
    return _retry(wait_s, situation, params)


def _retry_order(decision: Decision) -> float:
    retry = decision.verdict.retry_after_s
    return retry if retry is not None else float("inf")


def _never(ask: Ask, candidate: Candidate, contract: Contract, situation: Situation) -> Decision | None:
    """The refusal of a request that this pool could not serve even if it were idle."""
    pool = candidate.pool
    view = situation.views[pool.name]
    most = pool.cost(candidate.prompt_tokens, candidate.max_tokens)
    if contract.cost_max is not None and most > contract.cost_max:
        return _refused(
            ask, candidate, contract, Infeasible, "COST_ABOVE_MAX",
            f"the job may cost up to {most:.6g}, above cost_max {contract.cost_max:.6g}",
        )  # fmt: skip
    need = candidate.prompt_tokens + candidate.max_tokens
    if pool.kv_tokens and need > pool.kv_tokens:
        return _refused(
            ask, candidate, contract, Infeasible, "KV_TOO_SMALL",
            f"prompt and answers need {need} tokens of KV cache, and a worker has {pool.kv_tokens}",
        )  # fmt: skip
    best = etas.best_rates(pool, view.plan)
    start = max(situation.now_s, contract.not_before_s)
    soonest = start + best.service_s(candidate.prompt_tokens, candidate.expected_tokens)
    if soonest > contract.deadline_s:
        return _refused(
            ask, candidate, contract, Infeasible, "DEADLINE_INFEASIBLE",
            f"an idle worker needs about {soonest - start:.2f} s, and {contract.deadline_s - start:.2f} s are left",
        )  # fmt: skip
    ttft = best.ttft_s(candidate.prompt_tokens)
    if contract.lane is Lane.PRIORITY and ttft > contract.ttft_target_s:
        return _refused(
            ask, candidate, contract, Infeasible, "TTFT_TARGET_INFEASIBLE",
            f"an idle worker needs about {ttft:.3f} s to the first token, above the target of "
            f"{contract.ttft_target_s:.3f} s",
        )  # fmt: skip
    return None


def _reachable(contract: Contract, candidate: Candidate, situation: Situation, params: AdmitParams) -> Contract:
    rate = etas.rates(candidate.pool, situation.views[candidate.pool.name].plan)
    default = params.ttft_default_s.get(contract.lane, 0.0)
    return within_reach(contract, default, rate.ttft_s(candidate.prompt_tokens))


def _judge_priority(
    ask: Ask, candidate: Candidate, contract: Contract, situation: Situation, params: AdmitParams, moved: bool
) -> Decision:
    pool = candidate.pool
    view = situation.views[pool.name]
    if not view.plan.workers:
        return _refused(
            ask, candidate, contract, Unavailable, "NO_WORKER", f"the pool {pool.name} has no worker now",
            retry_s=_retry(pool.load_s, situation, params),
        )  # fmt: skip
    if Lane.PRIORITY in view.paused:
        return _refused(
            ask, candidate, contract, Unavailable, "LANE_PAUSED", "the lane is paused by its operator",
            retry_s=_retry(params.retry_s_max, situation, params),
        )  # fmt: skip
    eta = etas.priority_eta(
        pool, view, candidate.prompt_tokens, candidate.expected_tokens, yield_wait_s=params.yield_wait_s
    )
    if view.stale:
        eta = eta.scaled(params.stale_factor)
    lane = view.plan.lane(Lane.PRIORITY)
    room = 1.0 + params.resume_margin if pool.name in situation.refusing else 1.0
    doubt = params.z * eta.wait_sigma_s
    over_ttft = (eta.ttft_s + doubt) * room - contract.ttft_target_s
    over_deadline = situation.now_s + (eta.completion_s + doubt) * room - contract.deadline_s
    full = lane.limit and lane.ready + lane.running >= lane.limit
    if full or max(over_ttft, over_deadline) > 0.0:
        wait = etas.slot_wait_s(pool, view, jobs_ahead=0, service_s=eta.completion_s - eta.wait_s)
        message = "the lane is full"
        if not full and over_ttft > 0.0:
            late = f"{eta.ttft_s:.2f} s, perhaps {(eta.ttft_s + doubt) * room:.2f} s"
            message = f"the first token is expected in {late}, and its target is {contract.ttft_target_s:g} s"
        elif not full:
            message = f"the answer is expected in {eta.completion_s:.2f} s, after its deadline"
        return _refused(
            ask, candidate, contract, LaneSaturated, "LANE_SATURATED", message, eta=eta,
            retry_s=_retry(max(wait, over_ttft, over_deadline), situation, params),
        )  # fmt: skip
    return _accepted(ask, candidate, contract, situation, params, eta, moved)


def _judge_parking(
    ask: Ask, candidate: Candidate, contract: Contract, situation: Situation, params: AdmitParams, moved: bool
) -> Decision:
    pool, lane = candidate.pool, ask.contract.lane
    view = situation.views[pool.name]
    eta = etas.parking_eta(
        pool, view, lane, candidate.prompt_tokens, candidate.expected_tokens, floor=max(1e-3, params.floor)
    )
    if view.stale:
        eta = eta.scaled(params.stale_factor)
    shift = max(0.0, contract.not_before_s - situation.now_s - eta.wait_s)  # the queue is worked off meanwhile
    eta = Eta(eta.wait_s + shift, eta.wait_sigma_s, eta.ttft_s + shift, eta.completion_s + shift)
    over = situation.now_s + eta.completion_s + params.z * eta.wait_sigma_s - contract.deadline_s
    if over > 0.0:
        return _refused(
            ask, candidate, contract, LaneSaturated, "LANE_SATURATED",
            f"the answer is expected in {eta.completion_s:.1f} s, after its deadline", eta=eta,
            retry_s=_retry(over, situation, params),
        )  # fmt: skip
    return _accepted(ask, candidate, contract, situation, params, eta, moved)


def _accepted(
    ask: Ask, candidate: Candidate, contract: Contract, situation: Situation, params: AdmitParams, eta: Eta, moved: bool
) -> Decision:
    pool, lane, now = candidate.pool, contract.lane, situation.now_s
    view = situation.views[pool.name]
    rate = etas.rates(pool, view.plan)
    service = rate.service_s(candidate.prompt_tokens, candidate.long_tokens)
    latest = latest_start_s(contract.deadline_s, service, FireParams(params.margin_s, params.margin_ratio))
    hold = _hold_reason(contract, view, now) if lane.may_park else ""
    fire_at = now
    if hold:
        fire_at = fire_at_s(
            now_s=now,
            not_before_s=contract.not_before_s,
            latest_start_s=latest,
            parked_device_s_ahead=etas.work_ahead_s(pool, view, lane, service_s=service),
            floor_rate=params.floor * max(1, view.plan.workers or pool.workers),
        )
    kind, reason, message = VerdictKind.ACCEPTED, "LANE_OPEN", "the job goes to a worker as soon as one has room"
    if hold:
        kind, reason, message = VerdictKind.HELD, hold, _HOLD_MESSAGES[hold]
    elif moved:
        kind, reason = VerdictKind.MOVED, "TIER_MOVED"
        message = f"the tier {pool.tier} takes it: the cheaper ones cannot keep the promise now"
    verdict = Verdict(
        kind=kind,
        reason=reason,
        message=message,
        lane=lane,
        tier=pool.tier,
        region=ask.region,
        pool=pool.name,
        ttft_eta_s=eta.ttft_s,
        completion_eta_s=eta.completion_s,
        hold_until_s=fire_at if hold else None,
        cost=pool.cost(candidate.prompt_tokens, candidate.expected_tokens),
    )
    return Decision(
        verdict=verdict,
        candidate=candidate,
        contract=contract,
        placement=Placement.PARKED if hold else Placement.READY,
        latest_start_s=latest,
        fire_at_s=fire_at,
        device_s=etas.device_s(pool, service),
        service_s=service,
    )


_HOLD_MESSAGES = {
    "HELD_UNTIL_NOT_BEFORE": "the job is held until its not_before",
    "HELD_FOR_WORKERS": "the job is held until the pool has a worker",
    "HELD_LANE_PAUSED": "the job is held: the lane is paused by its operator",
    "HELD_FOR_PLAN": "the job is held: there is no valid plan now",
    "HELD_FOR_CAPACITY": "the job is held until the pool has room for it",
}


def _hold_reason(contract: Contract, view: PoolView, now_s: float) -> str:
    """Why a deferrable or batch job is parked; empty where the pool has idle room now and nothing waits before it."""
    if contract.not_before_s > now_s:
        return "HELD_UNTIL_NOT_BEFORE"
    if contract.lane in view.paused:
        return "HELD_LANE_PAUSED"
    if view.stale:
        return "HELD_FOR_PLAN"
    if not view.plan.workers:
        return "HELD_FOR_WORKERS"
    waiting = sum(plan.ready for plan in view.plan.lanes) + view.since.jobs
    parked = sum(plan.parked for plan in view.plan.lanes)
    if parked or view.plan.free_slots <= waiting:
        return "HELD_FOR_CAPACITY"
    return ""


def _retry(after_s: float, situation: Situation, params: AdmitParams) -> float:
    """Jittered, so that those refused together do not come back together."""
    spread = params.jitter_min + (params.jitter_max - params.jitter_min) * situation.jitter
    return min(params.retry_s_max, max(params.retry_s_min, after_s * spread))


def _refused(
    ask: Ask,
    candidate: Candidate,
    contract: Contract,
    error: type[LanewayError],
    reason: str,
    message: str,
    *,
    eta: Eta | None = None,
    retry_s: float | None = None,
) -> Decision:
    pool = candidate.pool
    verdict = Verdict(
        kind=VerdictKind.REFUSED,
        reason=reason,
        message=message,
        lane=contract.lane,
        tier=pool.tier,
        region=ask.region,
        pool=pool.name,
        ttft_eta_s=eta.ttft_s if eta else None,
        completion_eta_s=eta.completion_s if eta else None,
        retry_after_s=retry_s,
        cost=pool.cost(candidate.prompt_tokens, candidate.expected_tokens),
    )
    return Decision(verdict=verdict, candidate=candidate, contract=contract, refusal=error)
