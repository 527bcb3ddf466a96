"""When a failed call is tried again."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LaneSaturated,
    LanewayError,
    OutcomeUnknown,
    Unavailable,
)
from laneway.core.lanes import Lane
from laneway.policy.retry import Attempted, RetryBudget, RetryDecision, RetryParams, RetryReason, decide_retry

PARAMS = RetryParams()
NO_FLOOR = RetryParams(floor_per_s=0.0)
FULL = RetryBudget()


def decide(
    error: LanewayError,
    *,
    attempt: int = 1,
    budget: RetryBudget = FULL,
    draw: float = 0.5,
    params: RetryParams = PARAMS,
    **more: Any,
) -> RetryDecision:
    return decide_retry(Attempted(error, attempt, **more), budget, 100.0, draw, params)


def test_the_delay_that_the_server_asked_for_is_kept_to_the_letter():
    for draw in (0.0, 0.5, 0.999):
        decision = decide(LaneSaturated(retry_after_s=7.0), draw=draw)
        assert (decision.retry, decision.wait_s) == (True, 7.0)


def test_without_a_delay_the_wait_is_full_jitter_below_a_doubling_ceiling():
    params = RetryParams(attempts_max=dict.fromkeys(Lane, 100))
    for attempt, ceiling in ((1, 0.2), (2, 0.4), (3, 0.8), (6, 5.0), (50, 5.0)):
        decision = decide(Unavailable(), attempt=attempt, draw=0.5, params=params)
        assert decision.wait_s == pytest.approx(0.5 * ceiling)
    assert decide(Unavailable(), attempt=20, draw=0.5, lane=Lane.BATCH, deadline_s=1e9).wait_s == pytest.approx(30.0)
    assert decide(Unavailable(), draw=0.0).wait_s == 0.0


@pytest.mark.parametrize(("lane", "allowed"), [(Lane.PRIORITY, 2), (Lane.DEFERRABLE, 4), (Lane.BATCH, 4)])
def test_attempts_are_limited_by_lane(lane: Lane, allowed: int):
    assert decide(Unavailable(), attempt=allowed - 1, lane=lane).retry
    assert decide(Unavailable(), attempt=allowed, lane=lane).reason is RetryReason.ATTEMPTS_USED


def test_batch_goes_on_until_its_deadline():
    assert decide(Unavailable(), attempt=1000, lane=Lane.BATCH, deadline_s=1e6).retry


def test_nothing_is_retried_that_could_not_end_before_the_deadline():
    saturated = LaneSaturated(retry_after_s=7.0)
    assert decide(saturated, deadline_s=107.0).retry
    assert decide(saturated, deadline_s=106.9).reason is RetryReason.DEADLINE
    assert decide(saturated, deadline_s=108.0, eta_s=1.1).reason is RetryReason.DEADLINE


def test_nothing_is_retried_after_the_first_token():
    assert decide(Unavailable(), output_started=True).reason is RetryReason.OUTPUT_STARTED


@pytest.mark.parametrize("error", [InvalidRequest(), DeadlineExceeded(), LaneSaturated(), LanewayError()])
def test_only_what_may_succeed_later_is_retried(error: LanewayError):
    assert decide(error).reason is RetryReason.NOT_RETRYABLE


def test_what_may_have_run_is_retried_only_with_a_key():
    unknown = OutcomeUnknown(retry_after_s=1.0)
    assert decide(unknown).retry
    assert decide(unknown, idempotent=False).reason is RetryReason.MAY_HAVE_RUN
    assert decide(Unavailable(), idempotent=False).reason is RetryReason.MAY_HAVE_RUN
    # a refusal that names a time stored nothing
    assert decide(LaneSaturated(retry_after_s=1.0), idempotent=False).retry


def test_never_allows_no_retry_at_all():
    for lane in Lane:
        assert not decide(Unavailable(), lane=lane, params=RetryParams.never(), deadline_s=1e9).retry


# --- reading on in a job that exists ---------------------------------------------------------------


def test_an_outage_is_bounded_by_its_length_and_not_by_attempts_or_the_budget():
    empty: RetryBudget | None = FULL
    for _ in range(10):
        assert empty is not None
        empty = empty.spend(100.0, PARAMS)
    assert empty is not None
    decision = decide(Unavailable(), attempt=1000, budget=empty, draw=0.0, outage_s=59.9)
    assert (decision.retry, decision.budget) == (True, empty)
    assert decide(Unavailable(), draw=0.0, outage_s=60.0).reason is RetryReason.OUTAGE
    assert decide(Unavailable(), draw=0.5, attempt=10, outage_s=57.5).reason is RetryReason.OUTAGE
    assert decide(Unavailable(), outage_s=0.0, params=RetryParams.never()).reason is RetryReason.OUTAGE
    assert decide(Unavailable(), draw=0.5, outage_s=0.0, deadline_s=100.05).reason is RetryReason.DEADLINE


def test_in_an_outage_the_delay_asked_for_is_kept_and_spread():
    assert decide(Unavailable(retry_after_s=1.0), draw=0.5, outage_s=0.0).wait_s == pytest.approx(1.1)
    assert decide(Unavailable(retry_after_s=1.0), draw=0.0, outage_s=0.0).wait_s == 1.0


# --- the budget ------------------------------------------------------------------------------------


def test_ten_first_attempts_buy_one_retry():
    budget = RetryBudget()
    for _ in range(9):
        budget = budget.first_attempt(100.0, NO_FLOOR)
    assert budget.spend(100.0, NO_FLOOR) is None
    budget = budget.first_attempt(100.0, NO_FLOOR)
    spent = budget.spend(100.0, NO_FLOOR)
    assert spent is not None
    assert spent.spend(100.0, NO_FLOOR) is None


def test_a_refused_retry_costs_nothing():
    budget = RetryBudget()
    for _ in range(10):
        budget = budget.first_attempt(100.0, NO_FLOOR)
    assert decide(InvalidRequest(), budget=budget, params=NO_FLOOR).budget is budget


def test_deposits_are_gone_after_ten_seconds():
    budget = RetryBudget()
    for _ in range(20):
        budget = budget.first_attempt(100.0, NO_FLOOR)
    assert budget.left(109.9, NO_FLOOR) == pytest.approx(2.0)
    assert budget.left(110.0, NO_FLOOR) == 0.0


def test_the_floor_allows_one_retry_a_second_and_no_more():
    budget: RetryBudget | None = RetryBudget()
    for _ in range(10):  # what a fresh budget holds
        assert budget is not None
        budget = budget.spend(100.0, PARAMS)
    assert budget is not None
    assert budget.spend(100.9, PARAMS) is None
    later = budget.spend(101.0, PARAMS)
    assert later is not None
    assert later.spend(101.9, PARAMS) is None


@given(steps=st.lists(st.tuples(st.booleans(), st.floats(0.0, 3.0)), max_size=300))
def test_retries_never_exceed_what_was_deposited_and_the_floor(steps: list[tuple[bool, float]]):
    now_s, firsts, retries, budget = 1000.0, 0, 0, RetryBudget()
    for is_first, gap_s in steps:
        now_s += gap_s
        if is_first:
            budget, firsts = budget.first_attempt(now_s, PARAMS), firsts + 1
        else:
            paid = budget.spend(now_s, PARAMS)
            if paid is not None:
                budget, retries = paid, retries + 1
        assert all(amount >= -1e-9 for _, amount in budget.deposits)
        assert len(budget.deposits) <= PARAMS.expiry_s
    floor = PARAMS.floor_per_s * (PARAMS.expiry_s + math.floor(now_s) - 1000)
    assert retries <= firsts * PARAMS.deposit + floor + 1e-6


@given(draw=st.floats(0.0, 1.0, exclude_max=True), attempt=st.integers(1, 10_000), lane=st.sampled_from(Lane))
def test_a_wait_is_never_negative_nor_above_the_ceiling(draw: float, attempt: int, lane: Lane):
    decision = decide(Unavailable(), attempt=attempt, lane=lane, draw=draw, deadline_s=1e12)
    assert 0.0 <= decision.wait_s <= PARAMS.backoff_s_max[lane]


@pytest.mark.parametrize(("slots", "paid"), [(1, 10), (10, 10), (11, 11), (64, 64)])
def test_a_workers_budget_at_rest_pays_for_all_it_has_room_for_and_no_more(slots: int, paid: int):
    params, budget, count = RetryParams.of_worker(slots), RetryBudget(), 0
    while (rest := budget.spend(1000.0, params)) is not None:
        budget, count = rest, count + 1
    assert count == paid
