"""What this door accepted, and what of it ended, that the newest plan does not show yet.

Without it a burst between two plans is invisible; without the ends a busy pool with short jobs looks full. Prompt
tokens are a queue of their own that the pool's workers empty at their prefill rate, whatever plans say.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from itertools import islice

from laneway.admission.homes import HomeLedger
from laneway.admission.tenants import TenantLedger
from laneway.core.clock import Clock
from laneway.core.fleet import Plan
from laneway.policy.eta import Load
from laneway.policy.inflow import Inflow

# A plan is made from numbers a little older than its arrival: consumer counts and leases of one scheduler tick.
PLAN_LAG_S = 0.3
# Without plans, leases show what was claimed within about this.
AGE_S_MAX = 2.0
# Jobs whose end is awaited; beyond this those not looked at for longest are forgotten, which errs to the careful side.
LIVE_JOBS_MAX = 100_000
# News of an end is a hint that may be lost. After its deadline and this a job has ended, whatever was heard.
ENDED_WITHIN_S = 5.0
LOOKS_A_PLAN = 64  # at jobs whose end is awaited, in turn


class Ledger:
    """Times are monotonic."""

    def __init__(self, clock: Clock) -> None:
        self.tenants = TenantLedger(clock)
        self.inflow = Inflow()
        self.homes = HomeLedger(clock)
        self._clock = clock
        self._entries: deque[tuple[float, str, Load]] = deque()
        self._totals: dict[str, Load] = {}
        self._live: OrderedDict[str, tuple[str, float]] = OrderedDict()  # job sent to ready -> pool, due
        self._prompts: dict[str, tuple[float, float]] = {}  # pool -> (tokens not prefilled, as of)
        self._shown_s = 0.0

    def plan_arrived(self, plan: Plan) -> None:
        self._shown_s = self._clock.monotonic() - PLAN_LAG_S
        self.tenants.plan_arrived(plan)
        self.inflow.observe(plan, self._clock.monotonic())
        self.homes.plan_arrived(plan)
        self._forget_overdue()

    def _forget_overdue(self) -> None:
        now_s = self._clock.monotonic()
        for job_id in tuple(islice(self._live, LOOKS_A_PLAN)):
            if self._live[job_id][1] + ENDED_WITHIN_S <= now_s:
                del self._live[job_id]
            else:
                self._live.move_to_end(job_id)

    def add(self, pool: str, job_id: str, load: Load, prefill_tokens_per_s: float, due_in_s: float = math.inf) -> None:
        """A job was accepted. `prefill_tokens_per_s` is that of the whole pool; `due_in_s`: until its deadline."""
        if load.jobs:
            self._live[job_id] = pool, self._clock.monotonic() + due_in_s
            if len(self._live) > LIVE_JOBS_MAX:
                self._live.popitem(last=False)
        now_s = self._clock.monotonic()
        self._prompts[pool] = (self._waiting_prompts(pool, prefill_tokens_per_s) + load.prompt_tokens, now_s)
        self._enter(pool, Load(load.jobs, 0, load.device_s))

    def awaits(self, job_id: str) -> bool:
        return job_id in self._live

    def ended(self, job_id: str) -> None:
        """A job ended, whoever ended it; those of other doors are ignored."""
        self.tenants.ended(job_id)
        self.homes.ended(job_id)
        live = self._live.pop(job_id, None)
        if live is not None:
            self._enter(live[0], Load(jobs=-1))

    def since(self, pool: str, prefill_tokens_per_s: float) -> Load:
        """The change since the newest plan; `jobs` is negative when more ended than were accepted."""
        oldest_s = max(self._shown_s, self._clock.monotonic() - AGE_S_MAX)
        while self._entries and self._entries[0][0] < oldest_s:
            _, name, load = self._entries.popleft()
            self._totals[name] = self._totals[name] - load
        total = self._totals.get(pool, Load())
        return Load(total.jobs, round(self._waiting_prompts(pool, prefill_tokens_per_s)), total.device_s)

    def _enter(self, pool: str, load: Load) -> None:
        self._entries.append((self._clock.monotonic(), pool, load))
        self._totals[pool] = self._totals.get(pool, Load()) + load

    def _waiting_prompts(self, pool: str, prefill_tokens_per_s: float) -> float:
        tokens, as_of_s = self._prompts.get(pool, (0.0, 0.0))
        return max(0.0, tokens - prefill_tokens_per_s * (self._clock.monotonic() - as_of_s))
