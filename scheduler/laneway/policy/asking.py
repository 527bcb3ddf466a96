"""What a verdict is decided from: the request in the tokens of each pool, what admission knows now, the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from laneway.core.catalogue import Pool
from laneway.core.job import Contract
from laneway.core.lanes import Lane
from laneway.policy.eta import Load, PoolView


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
    batch_share: float = 0.2  # of what the parking lanes get, batch's least while deferrable work waits
    place_s_max: float = 300.0  # how far ahead a place may be promised (policy.promises)
    place_spread_s: float = 2.0  # most that jitter puts off a promised time: places are spread already
    audit_share: float = 0.01
    audit_over_max: float = 0.5


class Candidate(Struct, frozen=True):
    """A pool that may serve the request, and the request in that pool's tokens."""

    pool: Pool
    prompt_tokens: int
    max_tokens: int  # of all answers together
    expected_tokens: int  # predicted output: the quantile that the lane's ETA uses
    long_tokens: int  # predicted output near its upper end: for the latest start
    because: str = ""  # why this pool of its tier; empty: the tier has no other


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
    redeeming: frozenset[str] = frozenset()  # pools at which the request comes at its promised time
    promised_later: Mapping[str, Load] = {}  # by pool: promised work that only a new place comes after
