"""Budgets of further attempts at a worker: what earns and costs a retry, who waits for how long, how many are kept."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core import job as jobs
from laneway.core.clock import ManualClock
from laneway.core.job import JobRecord
from laneway.core.lanes import Lane
from laneway.policy.retry import RetryBudget, RetryParams
from laneway.workers.retries import Retries, least_service_s
from tests.support.nats import make_record

FLOOR_OF_ALL = 10  # 1 a second for the ten seconds that a deposit lasts


def record(tenant: str = "acme", lane: Lane = Lane.PRIORITY, **changes: Any) -> JobRecord:
    return make_record(lane=lane, tenant=tenant, **changes)


def retries(clock: ManualClock, **more: Any) -> Retries:
    return Retries(clock, Random(1), **more)


def paid(budgets: Retries, of: JobRecord, tries: int) -> int:
    return sum(budgets.pay(of) == 0.0 for _ in range(tries))


# --- which claims are retries ----------------------------------------------------------------------


def test_a_claim_is_a_retry_after_a_failed_start_and_only_once():
    waiting = record()
    assert not jobs.is_retry(waiting)
    first = jobs.claim(waiting, "w1", 1.0)
    lost = jobs.requeue(first, "w1", 1)
    assert jobs.is_retry(lost)
    second = jobs.claim(lost, "w2", 2.0)
    assert second.retries == 1
    assert not jobs.is_retry(jobs.hand_back(second, "w2", 2))  # a drain in between costs nothing
    assert jobs.is_retry(jobs.requeue(second, "w2", 2))
    assert jobs.is_retry(second)  # as a taker finds it, whose owner died


def test_a_clean_hand_back_is_no_retry():
    waiting = record()
    for attempt in range(1, 5):
        waiting = jobs.hand_back(jobs.claim(waiting, "w", 1.0), "w", attempt)
        assert not jobs.is_retry(waiting)
    assert waiting.retries == 0


# --- earning and paying ----------------------------------------------------------------------------


def test_ten_first_attempts_earn_one_retry_beyond_the_floor():
    clock = ManualClock()
    budgets = retries(clock)
    assert paid(budgets, record(), 20) == FLOOR_OF_ALL
    for _ in range(9):
        budgets.first_attempt(record())
    assert paid(budgets, record(), 3) == 0
    budgets.first_attempt(record())
    assert paid(budgets, record(), 3) == 1
    clock.advance(1.0)
    assert paid(budgets, record(), 3) == 1  # the floor


def test_tenants_and_lanes_pay_for_themselves():
    budgets = retries(ManualClock())
    assert paid(budgets, record("acme"), 20) == FLOOR_OF_ALL
    assert paid(budgets, record("other"), 20) == FLOOR_OF_ALL
    assert paid(budgets, record("acme", Lane.BATCH), 20) == FLOOR_OF_ALL
    assert paid(budgets, record("acme"), 1) == 0


def test_whoever_finds_an_empty_budget_waits_behind_those_who_did_before():
    """Each longer than the one before, with chance in it, and never far beyond the longest wait of the lane."""
    budgets = retries(ManualClock())
    paid(budgets, record(), FLOOR_OF_ALL)
    delays_s = [budgets.pay(record()) for _ in range(40)]
    for place, delay_s in enumerate(delays_s, start=1):
        assert min(5.0, place - 1.0) <= delay_s <= min(5.0, place) + 1.0
    assert len(set(delays_s)) == len(delays_s)
    batch = record(lane=Lane.BATCH)
    paid(budgets, batch, FLOOR_OF_ALL)
    delays_s = [budgets.pay(batch) for _ in range(100)]
    assert max(delays_s) <= 61.0
    assert max(delays_s) > 50.0


def test_a_storm_of_attempts_that_all_fail_adds_a_bounded_share():
    """Four hundred jobs of which each attempt dies at once, over forty seconds."""
    clock = ManualClock()
    budgets = retries(clock)
    firsts, again = 0, 0
    due_s: list[float] = []
    for _ in range(40):
        for _ in range(10):
            firsts += 1
            budgets.first_attempt(record())
            due_s.append(0.0)
        waiting, due_s = [at for at in due_s if at <= clock.elapsed_s], [at for at in due_s if at > clock.elapsed_s]
        for _ in waiting:
            delay_s = budgets.pay(record())
            again += delay_s == 0.0
            due_s.append(clock.elapsed_s + delay_s)
        clock.advance(1.0)
    assert firsts == 400
    assert 0.15 * firsts < again <= 0.1 * firsts + 40 + FLOOR_OF_ALL


FLOORS = st.sampled_from([0.0, 0.3, 1.0])


@given(spent=st.integers(0, 10), firsts=st.integers(0, 30), at_s=st.floats(0.0, 30.0), floor=FLOORS)
def test_a_retry_can_be_paid_when_the_budget_says_and_not_before(spent: int, firsts: int, at_s: float, floor: float):
    params = RetryParams(floor_per_s=floor)
    budget = RetryBudget()
    for _ in range(firsts):
        budget = budget.first_attempt(0.0, params)
    for _ in range(spent):
        budget = budget.spend(0.0, params) or budget
    wait_s = budget.payable_in_s(at_s, params)
    if wait_s is None:
        assert all(budget.spend(at_s + second, params) is None for second in range(params.expiry_s))
    else:
        assert budget.spend(at_s + wait_s + 1e-6, params) is not None
        assert not wait_s or budget.spend(at_s, params) is None
        assert 0.0 <= wait_s <= params.expiry_s


@pytest.mark.parametrize("tenants", [5, 6])
def test_budgets_of_so_many_tenants_are_kept_and_no_more(tenants: int):
    budgets = retries(ManualClock(), budgets_max=5)
    first = record("t0")
    assert paid(budgets, first, 20) == FLOOR_OF_ALL
    for number in range(1, tenants):
        budgets.first_attempt(replace(first, tenant=f"t{number}"))
    assert len(budgets) == 5
    assert paid(budgets, first, 20) == (0 if tenants == 5 else FLOOR_OF_ALL)  # forgotten: a fresh one


# --- how long a failed job is left alone -----------------------------------------------------------


def test_the_wait_after_a_failure_grows_has_chance_in_it_and_ends_at_the_deadline():
    clock = ManualClock()
    budgets = retries(clock)
    contract = replace(record().contract, deadline_s=clock.now() + 60.0)
    for strikes, ceiling_s in ((1, 0.2), (2, 0.4), (3, 0.8)):
        delays_s = [budgets.backoff_s(record(starts=strikes, contract=contract)) for _ in range(200)]
        assert all(0.0 <= delay_s < ceiling_s for delay_s in delays_s)
        assert max(delays_s) > 0.9 * ceiling_s
    late = replace(contract, deadline_s=clock.now() + 0.001)
    assert budgets.backoff_s(record(starts=9, contract=late)) <= 0.001
    over = replace(contract, deadline_s=clock.now() - 5.0)
    assert budgets.backoff_s(record(starts=9, contract=over)) == 0.0


def test_what_another_attempt_needs_at_least_is_what_no_earlier_one_can_have_done():
    waiting = record(device_ms=60_000)
    assert least_service_s(waiting, 1000.0) == 60.0
    lost = jobs.requeue(jobs.claim(waiting, "w", 1000.0), "w", 1)
    assert least_service_s(lost, 1000.0) == 60.0
    assert least_service_s(lost, 1050.0) == 10.0  # it may have come so far, and go on from there
    assert least_service_s(lost, 2000.0) == 0.0
