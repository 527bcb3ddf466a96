"""Parameters of admission from the settings: the one place that knows both names."""

from __future__ import annotations

from laneway.admission.door import DoorLimits
from laneway.admission.holding import HoldLimits
from laneway.admission.streams import StreamLimits
from laneway.core.lanes import LANES, Lane
from laneway.policy.admit import AdmitParams
from laneway.runtime.settings import AdmissionSettings, PolicySettings

# Beyond the workers' own delay: a pull, the engine's step or prefill chunk under way, and the abort.
YIELD_S = 0.15


def admit_params(policy: PolicySettings, admission: AdmissionSettings) -> AdmitParams:
    return AdmitParams(
        margin_s=policy.margin_s_min,
        margin_ratio=policy.margin_fraction,
        floor=policy.lower_lane_floor,
        jitter_min=policy.refusal_jitter_min,
        jitter_max=policy.refusal_jitter_max,
        retry_s_min=policy.retry_after_s_min,
        retry_s_max=policy.retry_after_s_max,
        resume_margin=policy.resume_margin,
        stale_factor=policy.stale_plan_factor,
        yield_wait_s=policy.preempt_delay_s + YIELD_S if policy.preemptions_max else None,
        storage_max=admission.storage_fraction_max,
        storage_retry_s=admission.storage_poll_s,
        tenant_jobs_max=admission.tenant_jobs_max.by_lane,
        ttft_default_s={lane: policy.lane(lane).ttft_target_s for lane in LANES},
    )


def door_limits(admission: AdmissionSettings) -> DoorLimits:
    stream = StreamLimits(admission.stream_buffer_bytes, admission.delivered_ids_max)
    holds = {
        Lane.PRIORITY: admission.coalesce_priority_s,
        Lane.DEFERRABLE: admission.coalesce_deferrable_s,
        Lane.BATCH: admission.coalesce_batch_s,
    }
    return DoorLimits(
        admission.beat_s, admission.silence_s, stream, HoldLimits(holds, admission.coalesce_priority_streams)
    )
