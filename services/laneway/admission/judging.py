"""What admission knows at this moment, put before the pure policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import Counter

from laneway.admission.ledger import Ledger
from laneway.admission.places import Places
from laneway.admission.preparing import Option
from laneway.admission.storage import StorageWatch
from laneway.core.catalogue import Pool
from laneway.core.clock import Clock
from laneway.core.errors import LaneSaturated
from laneway.core.fleet import Plan, PoolPlan
from laneway.core.job import Contract
from laneway.core.lanes import Lane
from laneway.policy.admit import AdmitParams, Ask, Decision, Situation, admit, brought, full_lane_retry_s
from laneway.policy.eta import Load, PoolView, pool_view, prefill_rate
from laneway.runtime import metrics
from laneway.runtime.draining import Draining
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.plans import PlanView

_verdicts = metrics.counter("laneway_verdicts_total", "Verdicts by their reason.", ("lane", "reason"))


@lru_cache(128)  # looking a counter up costs more than counting
def _count_of(lane: Lane, reason: str) -> Counter:
    return _verdicts.labels(lane=lane.value, reason=reason)


class Judged(Struct, frozen=True):
    decision: Decision
    option: Option  # the chosen pool's
    situation: Situation
    params: AdmitParams

    def full_retry_s(self) -> float:
        """What a caller is told if the lane itself refuses."""
        return full_lane_retry_s(self.decision, self.situation, self.params)


class _Known(NamedTuple):
    pool: str
    view: PoolView
    prefill_tokens_per_s: float  # prompt tokens that all workers of the pool compute in a second


class Judge:
    def __init__(
        self,
        region: str,
        plans: PlanView,
        leases: LeaseWatcher,
        ledger: Ledger,
        storage: StorageWatch,
        draining: Draining,
        params: Callable[[], AdmitParams],
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
        self._places = Places(clock)
        self._refusing: set[str] = set()
        self._plan: Plan | None = None  # what the following was made from
        self._by_plan: dict[str, _Known] = {}  # by pool

    def judge(
        self, options: Sequence[Option], contract: Contract, tenant: str, job_id: str = "", *, attached: bool = False
    ) -> Judged:
        """The verdict; with a job id it counts in the ledger when it accepts."""
        now_s, params = self._clock.now(), self._params()
        known = [self._known(option.candidate.pool) for option in options]
        looked = self._places.look(
            tenant, contract, now_s, [(o.candidate, k.view) for o, k in zip(options, known, strict=True)]
        )
        views = {
            name: replace(view, since=self._ledger.since(name, prefill_tokens_per_s) + looked.near(name))
            for name, view, prefill_tokens_per_s in known
        }
        situation = Situation(
            views,
            now_s,
            self._random.random(),
            self._storage.used(),
            frozenset(self._refusing),
            self._draining.on,
            self._ledger.tenants.open(tenant, contract.lane),
            frozenset(looked.places),
            {pool: ahead.later for pool, ahead in looked.ahead.items()},
        )
        decision = admit(Ask(contract, [o.candidate for o in options], self._region), situation, params)
        chosen = next(i for i, option in enumerate(options) if option.candidate is decision.candidate)
        if job_id:
            decision = self._places.settle(decision, looked, tenant)
            due_in_s = decision.contract.deadline_s - now_s
            self._remember(decision, list(views), job_id, known[chosen].prefill_tokens_per_s, due_in_s)
            _count_of(decision.verdict.lane, decision.verdict.reason).inc()
            if decision.refusal is None:
                self._ledger.tenants.accepted(job_id, tenant, decision.contract.lane, attached=attached)
        return Judged(decision, options[chosen], situation, params)

    def _known(self, pool: Pool) -> _Known:
        """A pool as plan and leases show it. A fresh plan shows the same until the next one."""
        plan, fresh = self._plans.plan, self._plans.fresh()
        if not fresh or plan is not self._plan:
            self._plan, self._by_plan = plan if fresh else None, {}
        known = self._by_plan.get(pool.name)
        if known is None:
            view = pool_view(pool.name, plan, () if fresh else self._leases.live(), Load(), fresh=fresh)
            view = replace(view, inflow=self._ledger.inflow.of(pool.name))
            on_record = plan.pool(pool.name) if plan is not None else PoolPlan(pool.name)
            prefill = prefill_rate(pool, on_record)
            known = self._by_plan[pool.name] = _Known(pool.name, view, prefill)
        return known

    def withdraw(self, job_id: str) -> None:
        """A job that was judged acceptable did not reach its lane, or was there before."""
        self._ledger.ended(job_id)

    def stored(self, job_id: str, sequence: int) -> None:
        """A job is in its lane; `sequence` of its record, or 0 where that is left to the first claim."""
        self._ledger.tenants.stored(job_id, sequence)

    def left(self, job_id: str, *, ended: bool) -> None:
        """Nobody waits here any more for a job that was accepted here."""
        if ended:
            self._ledger.ended(job_id)
        else:
            self._ledger.tenants.left(job_id)

    def _remember(
        self, decision: Decision, pools: list[str], job_id: str, prefill_tokens_per_s: float, due_in_s: float
    ) -> None:
        candidate = decision.candidate
        if decision.refusal is LaneSaturated and decision.contract.lane is Lane.PRIORITY:
            self._refusing.update(pools)
        elif decision.refusal is None:
            # A promised place says nothing of room for those who come without one.
            if decision.contract.lane is Lane.PRIORITY and not decision.redeemed:
                self._refusing.discard(candidate.pool.name)
            self._ledger.add(candidate.pool.name, job_id, brought(decision), prefill_tokens_per_s, due_in_s)
