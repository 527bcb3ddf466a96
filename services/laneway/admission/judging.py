"""What admission knows at this moment, put before the pure policy."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from msgspec import Struct

from laneway.admission.ledger import Ledger
from laneway.admission.preparing import Option
from laneway.admission.storage import StorageWatch
from laneway.core.clock import Clock
from laneway.core.errors import LaneSaturated
from laneway.core.fleet import Plan, PoolPlan
from laneway.core.job import Contract
from laneway.core.lanes import Lane
from laneway.policy.admit import AdmitParams, Ask, Decision, Placement, Situation, admit, full_lane_retry_s
from laneway.policy.eta import Load, pool_view, rates
from laneway.runtime.draining import Draining
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.plans import PlanView


class Judged(Struct, frozen=True):
    decision: Decision
    option: Option  # the chosen pool's
    full_retry_s: float  # what a caller is told if the lane itself refuses


class Judge:
    def __init__(
        self,
        region: str,
        plans: PlanView,
        leases: LeaseWatcher,
        ledger: Ledger,
        storage: StorageWatch,
        draining: Draining,
        params: AdmitParams,
        clock: Clock,
        random: Random,
    ) -> None:
        self._region = region
        self._plans = plans
        self._leases = leases
        self._ledger = ledger
        self._storage = storage
        self._draining = draining
        self._params = params
        self._clock = clock
        self._random = random
        self._refusing: set[str] = set()

    def judge(self, options: Sequence[Option], contract: Contract, job_id: str = "") -> Judged:
        """The verdict; with a job id it counts in the ledger when it accepts."""
        now_s = self._clock.now()
        plan, fresh = self._plans.plan, self._plans.fresh()
        leases = () if fresh else self._leases.live()
        pools = [option.candidate.pool.name for option in options]
        since = {o.candidate.pool.name: self._ledger.since(o.candidate.pool.name, _prefill(o, plan)) for o in options}
        views = {pool: pool_view(pool, plan, leases, since[pool], fresh=fresh) for pool in pools}
        situation = Situation(
            views, now_s, self._random.random(), self._storage.used(), frozenset(self._refusing), self._draining.on
        )
        decision = admit(Ask(contract, [o.candidate for o in options], self._region), situation, self._params)
        option = next(o for o in options if o.candidate is decision.candidate)
        if job_id:
            self._remember(decision, pools, job_id, _prefill(option, plan))
        return Judged(decision, option, full_lane_retry_s(decision, situation, self._params))

    def withdraw(self, job_id: str) -> None:
        """A job that was judged acceptable did not reach its lane, or was there before."""
        self._ledger.ended(job_id)

    def _remember(self, decision: Decision, pools: list[str], job_id: str, prefill_tokens_per_s: float) -> None:
        candidate = decision.candidate
        if decision.refusal is LaneSaturated and decision.contract.lane is Lane.PRIORITY:
            self._refusing.update(pools)
        elif decision.refusal is None:
            ready = decision.placement is Placement.READY
            if decision.contract.lane is Lane.PRIORITY:
                self._refusing.discard(candidate.pool.name)
            load = Load(
                jobs=1 if ready else 0,
                prompt_tokens=candidate.prompt_tokens if ready else 0,
                device_s=decision.device_s if decision.contract.lane.may_park else 0.0,
            )
            self._ledger.add(candidate.pool.name, job_id, load, prefill_tokens_per_s)


def _prefill(option: Option, plan: Plan | None) -> float:
    """Prompt tokens that all workers of the pool compute in a second."""
    pool = option.candidate.pool
    known = plan.pool(pool.name) if plan is not None else PoolPlan(pool.name)
    return rates(pool, known).prefill_tokens_per_s * max(1, known.workers)
