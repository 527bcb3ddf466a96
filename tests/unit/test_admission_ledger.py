"""What a door remembers between two plans."""

from laneway.admission.ledger import ENDED_WITHIN_S, LOOKS_A_PLAN, Ledger
from laneway.core.clock import ManualClock
from laneway.core.fleet import Plan
from laneway.policy.eta import Load


def test_a_job_that_ended_makes_room_before_the_next_plan():
    ledger = Ledger(ManualClock())
    for i in range(20):
        ledger.add("p", f"job-{i}", Load(jobs=1), 1000.0)
    for i in range(15):
        ledger.ended(f"job-{i}")
    assert ledger.since("p", 1000.0).jobs == 5


def test_an_end_counts_once_and_only_of_own_jobs():
    ledger = Ledger(ManualClock())
    ledger.add("p", "a", Load(jobs=1), 1000.0)
    ledger.ended("a")
    ledger.ended("a")
    ledger.ended("of-another-door")
    assert ledger.since("p", 1000.0).jobs == 0
    assert not ledger.awaits("a")


def test_a_job_that_the_plan_shows_may_end_after_it():
    clock = ManualClock()
    ledger = Ledger(clock)
    ledger.add("p", "a", Load(jobs=1), 1000.0)
    clock.advance(1.0)
    ledger.plan_arrived(Plan("local"))
    assert ledger.since("p", 1000.0).jobs == 0
    ledger.ended("a")
    assert ledger.since("p", 1000.0).jobs == -1


def test_prompts_wait_only_as_long_as_prefill_takes():
    clock = ManualClock()
    ledger = Ledger(clock)
    for i in range(10):
        ledger.add("p", f"job-{i}", Load(jobs=1, prompt_tokens=100), 1000.0)
    assert ledger.since("p", 1000.0).prompt_tokens == 1000
    clock.advance(0.4)
    assert ledger.since("p", 1000.0).prompt_tokens == 600
    clock.advance(0.6)
    assert ledger.since("p", 1000.0).prompt_tokens == 0


def test_a_job_whose_end_nobody_told_is_forgotten_after_its_deadline():
    clock = ManualClock()
    ledger = Ledger(clock)
    for i in range(LOOKS_A_PLAN + 1):
        ledger.add("p", f"lost-{i}", Load(jobs=1), 1000.0, 10.0)
    ledger.add("p", "later", Load(jobs=1), 1000.0, 3600.0)
    clock.advance(10.0 + ENDED_WITHIN_S - 0.1)
    ledger.plan_arrived(Plan("local"))
    assert ledger.awaits("lost-0")
    clock.advance(0.1)
    for _ in range(3):  # each looks at some
        ledger.plan_arrived(Plan("local"))
    assert not any(ledger.awaits(f"lost-{i}") for i in range(LOOKS_A_PLAN + 1))
    assert ledger.awaits("later")
