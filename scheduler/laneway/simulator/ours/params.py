"""The parameters of every part of the policy, made from the same `[policy]` section that services read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from laneway.core.lanes import LANES, Lane
from laneway.policy.admit import AdmitParams
from laneway.policy.desired import DesiredParams
from laneway.policy.headroom import HeadroomParams
from laneway.policy.interference import InterferenceParams
from laneway.policy.kv import KvParams
from laneway.policy.overload import OverloadParams
from laneway.policy.preempt import PreemptParams
from laneway.policy.pull import PullParams
from laneway.policy.release import ReleaseParams
from laneway.policy.stealing import StealParams
from laneway.runtime import params as made
from laneway.runtime.settings import AdmissionSettings, PolicySettings


@dataclass(frozen=True, slots=True)
class OurParams:
    """`of` makes them; a field may be replaced to leave a part out (an ablation)."""

    admit: AdmitParams = field(default_factory=AdmitParams)
    release: ReleaseParams = field(default_factory=ReleaseParams)
    pull: PullParams = field(default_factory=PullParams)
    interference: InterferenceParams = field(default_factory=InterferenceParams)
    headroom: HeadroomParams = field(default_factory=HeadroomParams)
    preempt: PreemptParams = field(default_factory=PreemptParams)
    overload: OverloadParams = field(default_factory=OverloadParams)
    kv: KvParams = field(default_factory=KvParams)
    desired: DesiredParams = field(default_factory=DesiredParams)
    steal: StealParams = field(default_factory=StealParams)
    ttft_default_s: Mapping[Lane, float] = field(default_factory=dict)  # where a contract does not say, by lane
    affinity: bool = True  # jobs of a session, or with a long beginning in common, meet one worker's caches
    strict: bool = False  # every priority contract asks for isolation `strict`
    refuse: bool = True  # off: doors accept everything
    autoscale: bool = False
    length_noise: float = 1.0  # predictions of lengths are off by up to this factor either way

    @classmethod
    def of(cls, policy: PolicySettings, *, slots: int, look_s: float) -> OurParams:
        return cls(
            admit=made.admit_params(policy, AdmissionSettings()),
            release=made.release_params(policy, look_s),
            pull=made.pull_params(policy),
            interference=made.interference_params(policy),
            headroom=made.headroom_params(policy, slots),
            preempt=made.preempt_params(policy),
            overload=made.overload_params(policy),
            kv=made.kv_params(policy),
            desired=made.desired_params(policy),
            steal=made.steal_params(policy),
            ttft_default_s={lane: policy.lane(lane).ttft_target_s for lane in LANES},
            strict=policy.isolation == "strict",
        )
