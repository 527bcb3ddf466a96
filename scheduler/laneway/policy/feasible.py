"""Whether an estimate keeps what a contract promises, and what is said of it: the corrected times and their grounds.

    k x (wait + z sigma) + own time <= target      k = what such waits came to before (policy.calibration), p90

on the first token (priority) and on the whole answer. The request's own time counts as expected and not by its 90 %
length: what does not fit an idle pool is refused for good, and what fits one must be acceptable at last, or no retry
time would be true. A pool that has just refused asks for `resume_margin` more of the wait. A request that comes at its
promised time (policy.promises) is judged by expectations alone: z = 0, k = 1, no margin. Units: seconds from now. O(1).
Source: policy.md (a). Failure mode: k is of the lane, so one unlike kind of request is judged by the others.
"""

from __future__ import annotations

import math

from msgspec import Struct

from laneway.core.catalogue import Pool
from laneway.core.fleet import EtaFit
from laneway.core.job import Contract, Estimate
from laneway.core.lanes import Lane
from laneway.policy.asking import AdmitParams, Candidate, Situation
from laneway.policy.calibration import Stated, stated
from laneway.policy.eta import Eta, Rates
from laneway.policy.fire import FireParams, latest_start_s

WAIT_FACTOR_MIN, WAIT_FACTOR_MAX = 0.5, 2.0  # what was learned of waits decides within these


class Judged(Struct, frozen=True):
    """An estimate against what was promised. Times from now; `over`: beyond the target, negative where it is kept."""

    eta: Eta
    estimate: Estimate
    stated: Stated
    ttft_s: float  # as it is judged: with what doubt and experience add to its wait
    over_ttft_s: float
    over_deadline_s: float
    time_s: float  # until the deadline
    fits: tuple[EtaFit, EtaFit]
    wait_factor: float  # k
    redeemed: bool = False

    @property
    def over_s(self) -> float:
        return max(self.over_ttft_s, self.over_deadline_s)


def judge(pool: Pool, contract: Contract, eta: Eta, situation: Situation, params: AdmitParams) -> Judged:
    view, lane = situation.views[pool.name], contract.lane
    if view.stale:
        eta = eta.scaled(params.stale_factor)
    start_s = max(0.0, contract.not_before_s - situation.now_s)
    delay_s = start_s if start_s > eta.wait_s else 0.0
    if start_s:
        eta = eta.waiting_until(start_s)
    ttft_bound_s, completion_bound_s = eta.bounds_s(params.z)
    estimate = Estimate(eta.ttft_s, ttft_bound_s, eta.completion_s, completion_bound_s)
    plan = view.plan.lane(lane)
    fits = plan.ttft_fit, plan.completion_fit
    redeemed, factor = pool.name in situation.redeeming, _trusted(fits[0])
    wait_s = eta.wait_s
    if not redeemed:
        room = 1.0 + (params.resume_margin if lane is Lane.PRIORITY and pool.name in situation.refusing else 0.0)
        wait_s = delay_s + room * factor * (eta.wait_s - delay_s + params.z * eta.wait_sigma_s)
    ttft_s = wait_s + eta.ttft_s - eta.wait_s
    time_s = contract.deadline_s - situation.now_s
    return Judged(
        eta,
        estimate,
        stated(estimate, *fits, delay_s=delay_s),
        ttft_s,
        ttft_s - contract.ttft_target_s if lane is Lane.PRIORITY else -math.inf,
        wait_s + eta.service_s - time_s,
        time_s,
        fits,
        factor,
        redeemed,
    )


def _trusted(fit: EtaFit) -> float:
    """What waits are multiplied by before they are compared with a target."""
    return min(WAIT_FACTOR_MAX, max(WAIT_FACTOR_MIN, fit.p90)) if fit.samples else 1.0


def audited(contract: Contract, judged: Judged, situation: Situation, params: AdmitParams) -> bool:
    if situation.jitter >= params.audit_share or judged.eta.completion_s > judged.time_s:
        return False
    target_s = contract.ttft_target_s if contract.lane is Lane.PRIORITY else judged.time_s
    return judged.over_s <= params.audit_over_max * target_s


def latest_start_of(contract: Contract, rate: Rates, candidate: Candidate, params: AdmitParams) -> float:
    service = rate.service_s(candidate.prompt_tokens, candidate.long_tokens)
    return latest_start_s(contract.deadline_s, service, FireParams(params.margin_s, params.margin_ratio))


def facts_of(judged: Judged, contract: Contract, candidate: Candidate) -> tuple[tuple[str, str], ...]:
    """For people: the numbers of a verdict, spans in seconds. What is 0 is left out, but for the wait: each is stored
    with the job, twice."""
    eta, (ttft, completion) = judged.eta, judged.fits
    facts = [("wait_s", f"{eta.wait_s:.4g}"), ("service_s", f"{eta.service_s:.4g}")]
    numbers = (
        ("wait_sigma_s", eta.wait_sigma_s),
        ("longer_s", eta.longer_s),
        ("ahead_jobs", eta.ahead_jobs),
        ("ahead_tokens", eta.ahead_tokens),
        ("ahead_device_s", eta.ahead_device_s if contract.lane.may_park else 0.0),
        ("capacity", eta.capacity),
    )
    facts += [(name, f"{value:.4g}") for name, value in numbers if value]
    if contract.lane is Lane.PRIORITY:
        facts.append(("target_s", f"{contract.ttft_target_s:g}"))
    if ttft.samples:
        facts.append(("ttft_fit", f"{ttft.p50:.3g} {ttft.p90:.3g}"))
    if completion.samples:
        facts.append(("completion_fit", f"{completion.p50:.3g} {completion.p90:.3g}"))
    if judged.redeemed:
        facts.append(("place", "promised"))
    return (*facts, *because_of(candidate))


def because_of(candidate: Candidate) -> tuple[tuple[str, str], ...]:
    """Why this pool of its tier, where the tier has several by what they are for."""
    return (("chosen_for", candidate.because),) if candidate.because else ()
