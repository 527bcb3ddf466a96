"""What another attempt at a job costs: one retry of the budget of its tenant and lane at this worker.

A job is tried again when its engine failed, its worker died, or a start of it came to nothing. Each first claim earns a
tenth of a retry, as at the client (policy.retry), and a budget at rest pays for as many as the worker has places. So
attempts which all fail add a bounded share of work and not a multiple of it, and one tenant's failures take nothing
from another's. What was handed back on purpose costs nothing.

Where a budget is empty its jobs wait in their lanes, one behind the other at the rate at which retries come in. How
often a job may fail at all is a matter of its own strikes (claims).
"""

from __future__ import annotations

from random import Random

from msgspec import Struct

from laneway.core.clock import Clock
from laneway.core.job import JobRecord, strikes
from laneway.core.lanes import Lane
from laneway.policy.retry import RetryBudget, RetryParams, backoff_s
from laneway.runtime import metrics
from laneway.runtime.clock import SYSTEM_RANDOM

BUDGETS_MAX = 10_000  # tenants and lanes; whoever was away longest begins with a fresh one

_retries = metrics.counter(
    "laneway_worker_retries_total", "Claims after a failed start: paid, or put off.", ("lane", "outcome")
)


class _Budget(Struct):
    left: RetryBudget
    firsts: int = 0  # first attempts that `left` does not have yet, all of one second: counting is done for each job
    second: int = 0
    turn_s: float = 0.0  # monotonic: when the last of those who wait may ask again


class Retries:
    """The budgets of one worker."""

    def __init__(
        self,
        clock: Clock,
        random: Random = SYSTEM_RANDOM,
        params: RetryParams = RetryParams(),  # noqa: B008 - frozen
        budgets_max: int = BUDGETS_MAX,
    ) -> None:
        self._clock = clock
        self._random = random
        self._params = params
        self._budgets_max = budgets_max
        self._budgets: dict[tuple[str, Lane], _Budget] = {}  # those used last at the end

    def __len__(self) -> int:
        return len(self._budgets)

    def first_attempt(self, record: JobRecord) -> None:
        """A job was claimed that nobody had claimed before."""
        budget, second = self._of(record), int(self._clock.monotonic())
        if second != budget.second:
            self._deposit(budget)
            budget.second = second
        budget.firsts += 1

    def pay(self, record: JobRecord) -> float:
        """Pays for one more attempt and returns 0; or seconds after which to ask again, and nothing was paid."""
        budget, now_s, lane = self._of(record), self._clock.monotonic(), record.contract.lane
        self._deposit(budget)
        paid = budget.left.spend(now_s, self._params)
        _retries.labels(lane=lane.value, outcome="put_off" if paid is None else "paid").inc()
        if paid is not None:
            budget.left = paid
            return 0.0
        wait_s_max, floor_per_s = self._params.backoff_s_max[lane], self._params.floor_per_s
        gap_s = min(wait_s_max, 1.0 / floor_per_s) if floor_per_s > 0.0 else wait_s_max
        soonest_s = budget.left.payable_in_s(now_s, self._params)
        budget.turn_s = max(budget.turn_s + gap_s, now_s + (wait_s_max if soonest_s is None else soonest_s))
        return min(wait_s_max, budget.turn_s - now_s) + self._random.random() * gap_s

    def refund(self, record: JobRecord) -> None:
        """What was paid for comes to nothing, through no fault of the job."""
        budget = self._of(record)
        budget.left = budget.left.refund(self._clock.monotonic(), self._params)

    def backoff_s(self, record: JobRecord) -> float:
        """How long a job whose attempt just failed is left alone, within its deadline."""
        delay_s = backoff_s(strikes(record), record.contract.lane, self._random.random(), self._params)
        return min(delay_s, max(0.0, record.contract.deadline_s - self._clock.now()))

    def _deposit(self, budget: _Budget) -> None:
        if budget.firsts:
            budget.left = budget.left.first_attempt(budget.second, self._params, budget.firsts)
            budget.firsts = 0

    def _of(self, record: JobRecord) -> _Budget:
        key = record.tenant, record.contract.lane
        budget = self._budgets.pop(key, None) or _Budget(RetryBudget())
        self._budgets[key] = budget
        if len(self._budgets) > self._budgets_max:
            del self._budgets[next(iter(self._budgets))]
        return budget


def least_service_s(record: JobRecord, now_s: float) -> float:
    """What another attempt needs at least: what was predicted, less all that earlier attempts may have done."""
    first_s = record.lineage[0].claimed_s if record.lineage else now_s
    return max(0.0, record.device_ms / 1000.0 - max(0.0, now_s - first_s))
