"""Parameters of the pure policy from the settings: the one place that knows both names.

One pure function for each kind of parameters. They are called whenever the settings change (LivePolicy.derive), so they
are cheap, and nothing keeps what they gave beyond one decision.
"""

from __future__ import annotations

from collections.abc import Callable

from laneway.core.errors import ConfigError
from laneway.core.lanes import LANES, Lane
from laneway.policy.admit import AdmitParams
from laneway.policy.coalesce import CoalesceParams
from laneway.policy.desired import DesiredParams
from laneway.policy.fairness import FairParams
from laneway.policy.fire import FireParams
from laneway.policy.headroom import HeadroomParams
from laneway.policy.holding import HoldParams
from laneway.policy.interference import InterferenceParams
from laneway.policy.kv import KvParams
from laneway.policy.overload import OverloadParams
from laneway.policy.preempt import PreemptParams
from laneway.policy.pull import PullParams
from laneway.policy.release import ReleaseParams
from laneway.policy.stealing import StealParams
from laneway.runtime.settings import AdmissionSettings, PolicySettings

# Beyond the workers' own delay: a pull, the engine's step or prefill chunk under way, and the abort.
YIELD_S = 0.15
RESERVE_FROM_SLOTS = 4  # smaller workers reserve no slot for priority unless told to


def check_params(policy: PolicySettings) -> None:
    """ConfigError where these values make no sense together: what a function below objects to must come up when they
    are read, and not at a decision."""
    made: tuple[Callable[[], object], ...] = (
        lambda: fire_params(policy),
        lambda: admit_params(policy, AdmissionSettings()),
        lambda: release_params(policy, 1.0),
        lambda: pull_params(policy),
        lambda: preempt_params(policy),
        lambda: desired_params(policy),
        lambda: overload_params(policy),
        lambda: steal_params(policy),
        lambda: kv_params(policy),
        lambda: interference_params(policy),
        lambda: headroom_params(policy, 1),
    )
    for make in made:
        try:
            make()
        except (ValueError, ArithmeticError) as error:  # such as a weight of next to nothing
            raise ConfigError(f"policy: {error}") from None


def fire_params(policy: PolicySettings) -> FireParams:
    return FireParams(margin_s=policy.margin_s_min, margin_ratio=policy.margin_fraction)


def admit_params(policy: PolicySettings, admission: AdmissionSettings) -> AdmitParams:
    return AdmitParams(
        margin_s=policy.margin_s_min,
        margin_ratio=policy.margin_fraction,
        floor=policy.lower_lane_floor,
        jitter_min=policy.refusal_jitter_min,
        jitter_max=policy.refusal_jitter_max,
        retry_s_min=policy.retry_after_s_min,
        retry_s_max=policy.retry_after_s_max,
        place_s_max=policy.retry_place_s_max,
        resume_margin=policy.resume_margin,
        audit_share=policy.audit_fraction,
        batch_share=policy.batch_weight / (policy.batch_weight + policy.deferrable_weight),
        stale_factor=policy.stale_plan_factor,
        yield_wait_s=policy.preempt_delay_s + YIELD_S if policy.preemptions_max else None,
        storage_max=admission.storage_fraction_max,
        storage_retry_s=admission.storage_poll_s,
        tenant_jobs_max=admission.tenant_jobs_max.by_lane,
        ttft_default_s={lane: policy.lane(lane).ttft_target_s for lane in LANES},
    )


def release_params(policy: PolicySettings, look_s: float) -> ReleaseParams:
    """`look_s`: between two looks of the scheduler."""
    return ReleaseParams(
        ready_ahead_s=policy.ready_ahead_s,
        look_s=look_s,
        fair=FairParams(
            lane_weights={Lane.DEFERRABLE: policy.deferrable_weight, Lane.BATCH: policy.batch_weight},
            tenant_weights=policy.tenant_weights,
        ),
        hold=HoldParams(on=policy.hold_windows),
        coalesce=CoalesceParams(on=policy.coalesce),
    )


def desired_params(policy: PolicySettings) -> DesiredParams:
    return DesiredParams(tpot_s=policy.priority.tpot_target_s, batch_workers_max=policy.batch_workers_max)


def pull_params(policy: PolicySettings) -> PullParams:
    """Shares as counts of jobs."""
    floor = policy.lower_lane_floor
    return PullParams(
        floor_turns=max(2, round(1.0 / floor)) if floor > 0.0 else 0,
        deferrable_per_batch=max(1, round(policy.deferrable_weight / policy.batch_weight)),
    )


def overload_params(policy: PolicySettings) -> OverloadParams:
    return OverloadParams(policy.priority.ttft_target_s, policy.priority.tpot_target_s)


def steal_params(policy: PolicySettings) -> StealParams:
    return StealParams(ttft_share=policy.steal_ttft_share)


def interference_params(policy: PolicySettings) -> InterferenceParams:
    return InterferenceParams(
        budget=policy.interference_budget,
        slices=policy.slices,
        theta=policy.theta,
        theta_min=policy.theta_min,
        theta_max=policy.theta_max,
        guard_fraction=policy.ttft_guard_fraction,
        strict_factor=policy.strict_tpot_factor,
        lower_prefills_max=policy.lower_lane_prefills_max,
    )


def headroom_params(policy: PolicySettings, slots: int) -> HeadroomParams:
    """`slots`: of the worker."""
    floor = policy.priority_reserved_slots
    if floor is None:
        floor = 1 if slots >= RESERVE_FROM_SLOTS else 0
    return HeadroomParams(window_s=policy.headroom_window_s, z=policy.headroom_z, slots_min=floor)


def kv_params(policy: PolicySettings) -> KvParams:
    return KvParams(prediction=policy.kv_prediction, target=policy.kv_target)


def preempt_params(policy: PolicySettings) -> PreemptParams:
    return PreemptParams(
        preemptions_max=policy.preemptions_max,
        done_max=policy.preempt_done_max,
        slack_s_min=policy.preempt_slack_s_min,
        delay_s=policy.preempt_delay_s,
        delay_elsewhere_s=policy.preempt_delay_elsewhere_s,
    )
