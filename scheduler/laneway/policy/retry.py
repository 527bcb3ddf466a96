"""Whether a failed call is tried again, and when. Decides; never waits, draws or counts time by itself.

One layer retries calls: the one nearest the caller. Workers try again only accepted jobs whose attempt was lost, and
pay from budgets of the same kind (workers/retries.py). Retries are paid from a budget that first attempts fill, so that
a storm of failures adds a fixed share of traffic and not a multiple. A delay that the server asked for is kept to the
letter; without one, full jitter spreads the attempts. Nothing is retried that has already given a token, that may have
run without a key to recognise it by, or that could not end in time.

Reading on in a job that exists runs nothing again. It is bounded by the length of the outage and not by attempts, and
pays from no budget: one read of each stream in some seconds, after a delay that is always jittered, is no storm.

Seconds and attempts; deposits, expiry and back-off are policy.md (f). O(1): a budget has one entry for each second of
its expiry. Known failure modes: a caller that calls rarely lives on the floor alone; budgets of several processes of
one caller do not know of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from msgspec import Struct

from laneway.core.errors import Code, LanewayError
from laneway.core.lanes import Lane

_WHOLE = 1.0 - 1e-9  # ten deposits of 0.1 buy a retry, whatever binary fractions make of their sum


def _attempts_max() -> dict[Lane, int | None]:
    return {Lane.PRIORITY: 2, Lane.DEFERRABLE: 4, Lane.BATCH: None}


def _backoff_s_max() -> dict[Lane, float]:
    return {Lane.PRIORITY: 5.0, Lane.DEFERRABLE: 5.0, Lane.BATCH: 60.0}


@dataclass(frozen=True, slots=True)
class RetryParams:
    """How much retrying is allowed. Defaults: Finagle's floor and expiry, half its deposit."""

    attempts_max: Mapping[Lane, int | None] = field(default_factory=_attempts_max)  # None: until the deadline
    attempts_max_without_deadline: int = 4  # where attempts_max is None
    backoff_base_s: float = 0.2
    backoff_factor: float = 2.0
    backoff_s_max: Mapping[Lane, float] = field(default_factory=_backoff_s_max)
    deposit: float = 0.1  # retries earned by a first attempt
    floor_per_s: float = 1.0  # retries earned by a second
    expiry_s: int = 10  # whole seconds after which an unused deposit is gone
    outage_s_max: float = 60.0  # a stream of a job that exists is taken up again through an outage this long

    @classmethod
    def of_worker(cls, slots: int) -> RetryParams:
        """Of a worker with so many places: a budget at rest pays for as many jobs as it has room for, since one death
        beside it may leave it as many."""
        usual = cls()
        return replace(usual, floor_per_s=max(usual.floor_per_s, slots / usual.expiry_s))

    @classmethod
    def never(cls) -> RetryParams:
        """No retries at all."""
        return cls(attempts_max=dict.fromkeys(Lane, 1), outage_s_max=0.0)


class RetryBudget(Struct, frozen=True):
    """Deposits of the last seconds, oldest first: (second, amount left). A value; each change gives a new one."""

    deposits: tuple[tuple[int, float], ...] = ()

    def first_attempt(self, now_s: float, params: RetryParams, count: int = 1) -> RetryBudget:
        """The budget after so many more first attempts."""
        return self._with(count * params.deposit, now_s, params)

    def refund(self, now_s: float, params: RetryParams) -> RetryBudget:
        """The budget after a retry that was paid for and did not take place."""
        return self._with(1.0, now_s, params)

    def _with(self, more: float, now_s: float, params: RetryParams) -> RetryBudget:
        kept = self._refilled(now_s, params)
        second, amount = kept[-1]
        return RetryBudget((*kept[:-1], (second, amount + more)))

    def left(self, now_s: float, params: RetryParams) -> float:
        """Retries that could be paid now."""
        return sum(amount for _, amount in self._refilled(now_s, params))

    def spend(self, now_s: float, params: RetryParams) -> RetryBudget | None:
        """The budget after one retry, paid from the oldest deposits; None if it cannot pay for one."""
        kept = self._refilled(now_s, params)
        if sum(amount for _, amount in kept) < _WHOLE:
            return None
        due = 1.0
        result: list[tuple[int, float]] = []
        for second, amount in kept:
            paid = min(amount, due)
            due -= paid
            result.append((second, amount - paid))
        return RetryBudget(tuple(result))

    def payable_in_s(self, now_s: float, params: RetryParams) -> float | None:
        """Seconds until one retry can be paid if no other is and nothing else comes in; None: not within the expiry."""
        kept = self._refilled(now_s, params)
        for seconds in range(params.expiry_s + 1):
            if sum(amount for _, amount in kept[seconds:]) + seconds * params.floor_per_s >= _WHOLE:
                return 0.0 if not seconds else seconds - now_s % 1
        return None

    def _refilled(self, now_s: float, params: RetryParams) -> tuple[tuple[int, float], ...]:
        """One entry for each of the last `expiry_s` seconds; the floor comes with each new second. A fresh budget
        holds the floor of all of them, so that a caller's first failure can be retried."""
        now = int(now_s // 1)
        known = dict(self.deposits)
        return tuple((s, known.get(s, params.floor_per_s)) for s in range(now - params.expiry_s + 1, now + 1))


class RetryReason(StrEnum):
    RETRY = "RETRY"
    NOT_RETRYABLE = "NOT_RETRYABLE"
    OUTPUT_STARTED = "OUTPUT_STARTED"  # a token was delivered: a second run would be another answer
    MAY_HAVE_RUN = "MAY_HAVE_RUN"  # and nothing lets the server recognise it
    ATTEMPTS_USED = "ATTEMPTS_USED"
    DEADLINE = "DEADLINE"  # it could not end in time
    BUDGET_EMPTY = "BUDGET_EMPTY"
    OUTAGE = "OUTAGE"  # nothing was heard of the job for as long as an outage may last


class RetryDecision(Struct, frozen=True):
    """What to do about a failure, and the budget to go on with."""

    retry: bool
    wait_s: float
    reason: RetryReason
    budget: RetryBudget


class Attempted(Struct, frozen=True):
    """What was tried and how it ended."""

    error: LanewayError
    attempt: int  # the one that failed, from 1; where only a job is read on, since the last that it gave
    lane: Lane = Lane.PRIORITY
    idempotent: bool = True  # a read, or carries a key by which the server recognises it
    output_started: bool = False
    deadline_s: float | None = None  # on the same clock as `now_s`
    eta_s: float = 0.0  # expected time of the next attempt itself
    outage_s: float | None = None  # how long nothing was heard; set where the next attempt only reads on in a job


def decide_retry(
    tried: Attempted, budget: RetryBudget, now_s: float, draw: float, params: RetryParams
) -> RetryDecision:
    """`now_s` is monotonic; `draw` is uniform in [0, 1). The cheapest "no" comes first, so the budget pays last."""
    wait_s = _wait_s(tried, draw, params)
    refusal = _refusal(tried, now_s, wait_s, params)
    if refusal is not None:
        return RetryDecision(False, 0.0, refusal, budget)
    if tried.outage_s is not None:
        return RetryDecision(True, wait_s, RetryReason.RETRY, budget)
    paid = budget.spend(now_s, params)
    if paid is None:
        return RetryDecision(False, 0.0, RetryReason.BUDGET_EMPTY, budget)
    return RetryDecision(True, wait_s, RetryReason.RETRY, paid)


def _refusal(tried: Attempted, now_s: float, wait_s: float, params: RetryParams) -> RetryReason | None:
    error = tried.error
    asked = error.retry_after_s is not None
    if tried.output_started:
        return RetryReason.OUTPUT_STARTED
    if not (error.row.code is Code.UNAVAILABLE or (error.row.code is Code.RESOURCE_EXHAUSTED and asked)):
        return RetryReason.NOT_RETRYABLE
    # A refusal that names a time stored nothing. Anything else may have been stored before the answer was lost.
    if not tried.idempotent and (not asked or error.reason == "OUTCOME_UNKNOWN"):
        return RetryReason.MAY_HAVE_RUN
    if tried.outage_s is not None:
        if tried.outage_s + wait_s >= params.outage_s_max:
            return RetryReason.OUTAGE
    elif tried.attempt >= _attempts_allowed(tried, params):
        return RetryReason.ATTEMPTS_USED
    if tried.deadline_s is not None and now_s + wait_s + tried.eta_s > tried.deadline_s:
        return RetryReason.DEADLINE
    return None


def _attempts_allowed(tried: Attempted, params: RetryParams) -> float:
    allowed = params.attempts_max[tried.lane]
    if allowed is not None:
        return allowed
    return params.attempts_max_without_deadline if tried.deadline_s is None else float("inf")


def _wait_s(tried: Attempted, draw: float, params: RetryParams) -> float:
    """The delay that the server asked for, else full jitter: uniform below a ceiling that doubles. All streams of a
    door that goes away are told the same delay, so they add the jitter to it."""
    jitter_s = backoff_s(tried.attempt, tried.lane, draw, params)
    asked_s = tried.error.retry_after_s
    if asked_s is None:
        return jitter_s
    return asked_s if tried.outage_s is None else asked_s + jitter_s


def backoff_s(failed: int, lane: Lane, draw: float, params: RetryParams) -> float:
    """Full jitter after so many attempts failed: uniform below a ceiling that doubles with each."""
    exponent = min(max(0, failed - 1), 32)  # beyond any ceiling; keeps the power finite
    return draw * min(params.backoff_s_max[lane], params.backoff_base_s * params.backoff_factor**exponent)
