"""The verdict on a request: accept, hold, another tier, or refuse with a reason and a retry time.

Decides from values alone: the contract, what each candidate pool looks like, the time and one random number for the
jitter of retry times and for audits. Never decides about quotas, identities or malformed requests; those were settled
before.

The order: the allowed regions, whether this one takes new work, the storage, what the tenant has open already, then
each candidate tier from the cheapest (what it can never do: cost, KV, deadline on an idle pool; then its load), the
first that fits wins; otherwise the refusal that can be retried soonest.

Feasible is what keeps its times with nine chances in ten as far as load goes (policy.feasible).

One in a hundred (`audit_share`) of what would be refused for its ETA, while the expectation keeps the deadline and the
bound is over by `audit_over_max` of the time at most, is accepted all the same (AUDIT): where estimates have gone wrong
to the careful side, nothing else would ever show it.

Times are stated corrected by what earlier ones came to, with their 90 % bounds, and with the numbers they rest on
(facts). Source: policy.md (a). O(tiers). Left out of it: the lane demotion (no contract can allow it yet), moving to
another region, and the shedding of tenants over their share by sojourn time: the fair shares of promised places do part
of that.

Units: seconds and tokens. Known failure modes: lengths that changed (a new prompt template) mislead until the sketches
follow, which audits and corrections (policy.calibration) bound; doors judge the same room between two plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

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
from laneway.policy.asking import AdmitParams, Ask, Candidate, Situation
from laneway.policy.contract import within_reach
from laneway.policy.cost import job_cost
from laneway.policy.eta import Load, PoolView, Rates
from laneway.policy.feasible import Judged, audited, because_of, facts_of, judge, latest_start_of
from laneway.policy.fire import fire_at_s

__all__ = [
    "AdmitParams",
    "Ask",
    "Candidate",
    "Decision",
    "Placement",
    "Situation",
    "admit",
    "brought",
    "full_lane_retry_s",
]

TIERS_TOLD_MAX = 4  # other tiers that a verdict names


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
    redeemed: bool = False  # it was judged as one that comes at its promised time
    place_s: float | None = None  # of a refusal for its ETA: from now until the work ahead has gone, if none comes
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
    by_lane = _judge_parking if contract.lane.may_park else _judge_priority
    refused: list[Decision] = []
    for index, candidate in enumerate(ask.candidates):
        reachable = _reachable(contract, candidate, situation, params)
        decision = _never(ask, candidate, reachable, situation)
        if decision is None:
            decision = by_lane(ask, candidate, reachable, situation, params, index > 0)
        if decision.refusal is None:
            return _with_tiers(decision, refused)
        refused.append(decision)
    soonest = min(refused, key=_retry_order)
    return _with_tiers(soonest, [each for each in refused if each is not soonest])


def _with_tiers(decision: Decision, others: Sequence[Decision]) -> Decision:
    """Says what the other tiers answered."""
    if not others:
        return decision
    tried = " ".join(f"{each.verdict.tier}:{each.verdict.reason}" for each in others[:TIERS_TOLD_MAX])
    return replace(decision, verdict=replace(decision.verdict, facts=(*decision.verdict.facts, ("other_tiers", tried))))


def brought(decision: Decision) -> Load:
    """What an accepted request brings to its pool that no plan shows yet: a place taken where it is ready, its work
    where its lane parks. Its prompt counts in the priority lane alone: those of lower lanes keep no priority prompt
    waiting but for the chunk that is under way (policy.interference), however many were sent at once. O(1)."""
    ready = decision.placement is Placement.READY
    priority = decision.contract.lane is Lane.PRIORITY
    return Load(
        jobs=1 if ready else 0,
        prompt_tokens=decision.candidate.prompt_tokens if ready and priority else 0,
        device_s=0.0 if priority else decision.device_s,
    )


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
    most = job_cost(pool, view.plan, candidate.prompt_tokens, candidate.max_tokens)
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
        pool, view, candidate.prompt_tokens, candidate.expected_tokens,
        long_tokens=candidate.long_tokens, yield_wait_s=params.yield_wait_s, floor=params.floor,
    )  # fmt: skip
    judged = judge(pool, contract, eta, situation, params)
    lane = view.plan.lane(Lane.PRIORITY)
    full = lane.limit and lane.ready + lane.running >= lane.limit
    if not (full or judged.over_s > 0.0):
        return _accepted(ask, candidate, contract, situation, params, judged, moved=moved)
    if not full and audited(contract, judged, situation, params):
        return _accepted(ask, candidate, contract, situation, params, judged, moved=moved, audit=True)
    message = "the lane is full"
    if not full and judged.over_ttft_s > 0.0:
        late = f"{judged.stated.ttft_s:.2f} s, perhaps {judged.ttft_s:.2f} s"
        message = f"the first token is expected in {late}, and its target is {contract.ttft_target_s:g} s"
    elif not full:
        message = f"the answer is expected in {judged.stated.completion_s:.2f} s, after its deadline"
    wait = etas.slot_wait_s(pool, view, jobs_ahead=0, service_s=eta.service_s)
    return _saturated(ask, candidate, contract, situation, params, judged, message, max(wait, judged.over_s))


def _judge_parking(
    ask: Ask, candidate: Candidate, contract: Contract, situation: Situation, params: AdmitParams, moved: bool
) -> Decision:
    pool, lane = candidate.pool, ask.contract.lane
    view = situation.views[pool.name]
    rate = etas.rates(pool, view.plan, context_tokens=candidate.prompt_tokens)
    eta = etas.parking_eta(
        pool, view, lane, candidate.prompt_tokens, candidate.expected_tokens,
        long_tokens=candidate.long_tokens, floor=max(1e-3, params.floor),
        due_s=latest_start_of(contract, rate, candidate, params),
        share=params.batch_share if lane is Lane.BATCH else 1.0, rate=rate,
    )  # fmt: skip
    judged = judge(pool, contract, eta, situation, params)
    if judged.over_s <= 0.0:
        return _accepted(ask, candidate, contract, situation, params, judged, moved=moved, rate=rate)
    if audited(contract, judged, situation, params):
        return _accepted(ask, candidate, contract, situation, params, judged, moved=moved, rate=rate, audit=True)
    message = f"the answer is expected in {judged.stated.completion_s:.1f} s, perhaps later than its deadline"
    return _saturated(ask, candidate, contract, situation, params, judged, message, judged.over_s)


def _accepted(
    ask: Ask,
    candidate: Candidate,
    contract: Contract,
    situation: Situation,
    params: AdmitParams,
    judged: Judged,
    *,
    moved: bool,
    audit: bool = False,
    rate: Rates | None = None,
) -> Decision:
    pool, lane, now = candidate.pool, contract.lane, situation.now_s
    view = situation.views[pool.name]
    rate = rate or etas.rates(pool, view.plan, context_tokens=candidate.prompt_tokens)
    service = rate.service_s(candidate.prompt_tokens, candidate.long_tokens)
    latest = latest_start_of(contract, rate, candidate, params)
    hold = _hold_reason(contract, view, now) if lane.may_park else ""
    fire_at = now
    if hold:
        fire_at = fire_at_s(
            now_s=now,
            not_before_s=contract.not_before_s,
            latest_start_s=latest,
            parked_device_s_ahead=etas.work_ahead_s(pool, view, lane, service_s=service, due_s=latest),
            floor_rate=params.floor * max(1, view.plan.workers or pool.workers),
        )
    kind, reason, message = VerdictKind.ACCEPTED, "LANE_OPEN", "the job goes to a worker as soon as one has room"
    if hold:
        kind, reason, message = VerdictKind.HELD, hold, _HOLD_MESSAGES[hold]
    elif moved:
        kind, reason = VerdictKind.MOVED, "TIER_MOVED"
        message = f"the tier {pool.tier} takes it: the cheaper ones cannot keep the promise now"
    if audit:
        reason, message = "AUDIT", "the estimate speaks against it, and one in a hundred is tried all the same"
    verdict = Verdict(
        kind=kind,
        reason=reason,
        message=message,
        lane=lane,
        tier=pool.tier,
        region=ask.region,
        pool=pool.name,
        ttft_eta_s=judged.stated.ttft_s,
        completion_eta_s=judged.stated.completion_s,
        hold_until_s=fire_at if hold else None,
        cost=job_cost(pool, view.plan, candidate.prompt_tokens, candidate.expected_tokens),
        ttft_bound_s=judged.stated.ttft_bound_s,
        completion_bound_s=judged.stated.completion_bound_s,
        facts=facts_of(judged, contract, candidate),
        estimate=judged.estimate,
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
        redeemed=judged.redeemed,
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


def _saturated(
    ask: Ask,
    candidate: Candidate,
    contract: Contract,
    situation: Situation,
    params: AdmitParams,
    judged: Judged,
    message: str,
    after_s: float,
) -> Decision:
    """The refusal for an ETA. `after_s`: until the work ahead has gone. What that and the promised work come to is the
    retry time, and a place where one so far ahead may be promised; a shorter time would be one of which it is known
    that it will be refused again."""
    view = situation.views[candidate.pool.name]
    later = situation.promised_later.get(candidate.pool.name, Load())
    after_s += judged.wait_factor * etas.promised_wait_s(candidate.pool, view, contract.lane, later, judged.eta)
    after_s = max(params.retry_s_min, after_s)
    spread = max(0.0, params.jitter_max - 1.0) * situation.jitter
    told_s = min(after_s, params.place_s_max) * (1.0 + spread)
    refusal = _refused(
        ask, candidate, contract, LaneSaturated, "LANE_SATURATED", message, judged=judged, retry_s=told_s
    )  # fmt: skip
    refusal = replace(refusal, service_s=judged.eta.service_s, redeemed=judged.redeemed)
    if after_s > params.place_s_max:
        return refusal
    return replace(refusal, place_s=after_s + min(params.place_spread_s, spread * after_s))


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
    judged: Judged | None = None,
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
        ttft_eta_s=judged.stated.ttft_s if judged else None,
        completion_eta_s=judged.stated.completion_s if judged else None,
        retry_after_s=retry_s,
        cost=job_cost(pool, None, candidate.prompt_tokens, candidate.expected_tokens),
        ttft_bound_s=judged.stated.ttft_bound_s if judged else None,
        completion_bound_s=judged.stated.completion_bound_s if judged else None,
        facts=facts_of(judged, contract, candidate) if judged else because_of(candidate),
    )
    return Decision(verdict=verdict, candidate=candidate, contract=contract, refusal=error)
