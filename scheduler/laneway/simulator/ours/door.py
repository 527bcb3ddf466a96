"""The door of a simulated pool: verdicts of policy.admit on what plan and door know, and places for the refused."""

from __future__ import annotations

import math

import numpy as np
from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.fleet import Plan, PoolPlan
from laneway.core.job import Contract
from laneway.core.lanes import LANES, Lane
from laneway.policy import eta as etas
from laneway.policy.admit import Ask, Candidate, Decision, Placement, Situation, admit, brought
from laneway.policy.eta import Load, PoolView, pool_view, prefill_rate
from laneway.policy.inflow import Inflow
from laneway.policy.lengths import LengthBook
from laneway.policy.promises import NOTHING, Place, Promises
from laneway.simulator.ours.jobs import Job
from laneway.simulator.ours.params import OurParams
from laneway.simulator.ticket import Ticket

REGION = "sim"
MODEL = "model"
EXPECTED = {Lane.PRIORITY: 0.5, Lane.DEFERRABLE: 0.8, Lane.BATCH: 0.5}  # quantile of an answer's length
LONG = 0.9
FAR_S = 1e9


class Door:
    def __init__(self, pool: Pool, params: OurParams, tenants: tuple[str, ...], random: np.random.Generator) -> None:
        self._pool = pool
        self._params = params
        self._tenants = tenants
        self._random = random
        self._lengths = LengthBook()
        self._inflow = Inflow()
        self._promises = Promises()
        self._refusing: set[str] = set()
        self._plan: Plan | None = None
        self._view = PoolView(PoolPlan(pool.name, workers=pool.workers, slots=pool.slots * pool.workers))
        self._prefill_tokens_per_s = prefill_rate(pool, self._view.plan)
        self._total = Load()
        self._prompts = (0.0, 0.0)  # tokens not prefilled, as of

    # --- what it learns ----------------------------------------------------------------------------------

    def plan_arrived(self, plan: Plan, now_s: float) -> None:
        """The newest plan shows all that was accepted before it."""
        self._plan = plan
        self._inflow.observe(plan, now_s)
        view = pool_view(self._pool.name, plan, (), Load(), fresh=True)
        self._view = replace(view, inflow=self._inflow.of(self._pool.name))
        self._prefill_tokens_per_s = prefill_rate(self._pool, plan.pool(self._pool.name))
        self._total = Load()

    def answered(self, ticket: Ticket) -> None:
        self._lengths.observe(self._tenants[ticket.tenant], MODEL, ticket.made)

    def ended(self, ticket: Ticket) -> None:
        """A job that was sent to ready ended, or is parked again."""
        self._total += Load(jobs=-1)

    def predicted(self, ticket: Ticket) -> int:
        """Tokens of its answer, near the upper end."""
        job: Job = ticket.mind
        return job.predicted

    # --- verdicts ----------------------------------------------------------------------------------------

    def judge(self, ticket: Ticket, now_s: float) -> Decision:
        lane, tenant = LANES[ticket.lane], self._tenants[ticket.tenant]
        candidate = self._candidate(ticket, lane, tenant)
        job: Job = ticket.mind
        job.predicted = candidate.long_tokens
        contract = Contract(lane, min(ticket.ttft_s, FAR_S), min(ticket.tpot_s, FAR_S), min(ticket.due_s, FAR_S))
        place, near, later = self._places(candidate, contract, tenant, now_s)
        since = Load(self._total.jobs, round(self._waiting_prompts(now_s)), self._total.device_s)
        situation = Situation(
            {self._pool.name: replace(self._view, since=since + near)},
            now_s,
            float(self._random.random()),
            0.0,
            frozenset(self._refusing),
            redeeming=frozenset((self._pool.name,) if place is not None else ()),
            promised_later={self._pool.name: later},
        )
        decision = admit(Ask(contract, [candidate], REGION), situation, self._params.admit)
        if decision.refusal is not None and not self._params.refuse:
            decision = replace(decision, refusal=None, placement=Placement.READY)
        self._settle(decision, place, tenant, now_s)
        return decision

    def _candidate(self, ticket: Ticket, lane: Lane, tenant: str) -> Candidate:
        expected = self._lengths.predict(tenant, MODEL, EXPECTED[lane], ticket.max_tokens)
        long = self._lengths.predict(tenant, MODEL, LONG, ticket.max_tokens)
        noise = self._params.length_noise
        if noise != 1.0:
            factor = noise ** float(self._random.uniform(-1.0, 1.0))
            expected = max(1, min(ticket.max_tokens, round(expected * factor)))
            long = max(1, min(ticket.max_tokens, round(long * factor)))
        return Candidate(self._pool, ticket.prompt_tokens, ticket.max_tokens, expected, long)

    def _places(
        self, candidate: Candidate, contract: Contract, tenant: str, now_s: float
    ) -> tuple[Place | None, Load, Load]:
        promises, lane, name = self._promises, contract.lane, self._pool.name
        if not len(promises):
            return None, NOTHING.near, NOTHING.later
        promises.expire(now_s)
        place = promises.redeem(name, lane, tenant, now_s)
        if place is not None:
            return place, NOTHING.near, NOTHING.later
        service_s = etas.rates(self._pool, self._view.plan).service_s(
            candidate.prompt_tokens, candidate.expected_tokens
        )
        held_s = service_s + contract.ttft_target_s if lane is Lane.PRIORITY else contract.deadline_s - now_s
        load, first_s = self._load(candidate, lane, service_s), now_s + contract.ttft_target_s
        ahead = promises.ahead(name, lane, tenant, load, now_s + held_s, first_s)
        return None, ahead.near, ahead.later

    def _settle(self, decision: Decision, place: Place | None, tenant: str, now_s: float) -> None:
        lane, candidate = decision.contract.lane, decision.candidate
        if place is not None:
            self._promises.done(place)
        if decision.refusal is not None:
            if lane is Lane.PRIORITY:
                self._refusing.add(self._pool.name)
            if decision.place_s is not None:
                load = self._load(candidate, lane, decision.service_s)
                self._promises.promise(self._pool.name, lane, tenant, load, now_s, decision.place_s)
            return
        if lane is Lane.PRIORITY and not decision.redeemed:
            self._refusing.discard(self._pool.name)
        load = brought(decision)
        self._total += Load(load.jobs, 0, load.device_s)
        if load.prompt_tokens:
            self._prompts = self._waiting_prompts(now_s) + load.prompt_tokens, now_s

    def _load(self, candidate: Candidate, lane: Lane, service_s: float) -> Load:
        device_s = etas.device_s(self._pool, service_s) if lane.may_park else 0.0
        return Load(1, candidate.prompt_tokens, device_s)

    def _waiting_prompts(self, now_s: float) -> float:
        tokens, as_of_s = self._prompts
        return max(0.0, tokens - self._prefill_tokens_per_s * (now_s - as_of_s))


def retry_after_s(decision: Decision) -> float | None:
    """When a refused caller is told to come again; None: never, or not told."""
    if decision.place_s is not None:
        return decision.place_s
    after_s = decision.verdict.retry_after_s
    return after_s if after_s is not None and after_s < math.inf else None
