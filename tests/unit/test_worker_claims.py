"""The claim rule, case by case: who may run a job, who must leave it, and how the lane message is answered."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from laneway.core import job as jobs
from laneway.core.errors import Code
from laneway.core.job import Attempt, JobError, JobRecord
from laneway.core.lanes import JobState, Lane
from laneway.runtime.records import StoredRecord
from laneway.workers.claims import NO_RECORD_DELAY_S, Ack, Delivered, End, Nak, Stands, Term, Write, judge
from tests.support.nats import make_record

NOW_S = 1_800_000_000.0
ME, OTHER = "me-1", "other-2"


def record(**changes: object) -> JobRecord:
    waiting = make_record()
    contract = replace(waiting.contract, deadline_s=NOW_S + 600.0)
    return replace(waiting, contract=contract, **changes)


def running(owner: str = OTHER, **changes: object) -> JobRecord:
    return jobs.claim(record(**changes), owner, NOW_S - 5.0)


def rule(
    found: JobRecord | None,
    *,
    wrote: Attempt | None = None,
    owner_alive: bool | None = False,
    redelivered: bool = True,
):
    stored = StoredRecord(found, 7) if found is not None else None
    return judge(
        stored,
        me=ME,
        wrote=wrote,
        owner_alive=owner_alive,
        redelivered=redelivered,
        now_s=NOW_S,
        ack_wait_s=3.0,
    )


def test_no_record_means_the_message_goes_once_it_is_seen_twice():
    """A deposed leader that stood still says for a moment that what came meanwhile is not there."""
    assert rule(None, redelivered=False) == Nak(NO_RECORD_DELAY_S, "no_record")
    assert rule(None) == Term("NO_RECORD")


def test_only_what_its_door_left_to_the_claim_may_be_claimed_without_a_record():
    attached = record(attached=True)
    left = StoredRecord(attached, 0)
    assert delivered(left).claimable == delivered(left).unstored == left
    assert delivered(left, redelivered=True).claimable is None
    assert delivered(left, redelivered=True).unstored == left
    for other in (
        StoredRecord(attached, 7),
        StoredRecord(record(), 0),
        StoredRecord(record(attached=True, idempotency_key="k"), 0),
        StoredRecord(record(attached=True, attempt=1), 0),
        StoredRecord(replace(attached, contract=replace(attached.contract, lane=Lane.BATCH)), 0),
        None,
    ):
        assert delivered(other).unstored is None


def delivered(accepted: StoredRecord | None, *, redelivered: bool = False) -> Delivered:
    return Delivered("local", "t", "j", accepted, redelivered, 3.0)


@pytest.mark.parametrize("state", [state for state in JobState if state.terminal])
def test_a_terminal_record_means_acknowledge(state: JobState):
    found = record(state=state)
    assert rule(found) == Ack(StoredRecord(found, 7))


def test_a_waiting_record_may_be_claimed_from_where_it_is():
    step = rule(record())
    assert isinstance(step, Write)
    assert (step.stored.sequence, step.takeover, step.alone) == (7, False, False)


def test_our_own_write_whose_acknowledgement_was_lost_stands():
    mine = running(ME)
    assert isinstance(rule(mine, wrote=mine.lineage[-1]), Stands)


def test_an_earlier_claim_of_ours_that_nobody_runs_is_taken_over():
    mine = running(ME)
    other_write = replace(mine.lineage[-1], claimed_s=NOW_S)
    for wrote in (None, other_write):
        step = rule(mine, wrote=wrote, owner_alive=True)
        assert isinstance(step, Write)
        assert step.takeover


def test_a_living_owner_keeps_its_job():
    assert rule(running(), owner_alive=True) == Nak(3.0, "owner_lives")


def test_takeover_needs_a_redelivery_and_a_dead_owner():
    assert rule(running(), owner_alive=False, redelivered=False) == Nak(3.0, "owner_lives")
    assert rule(running(), owner_alive=None) == Nak(1.0, "owner_not_watched")
    step = rule(running(), owner_alive=False)
    assert isinstance(step, Write)
    assert step.takeover


@pytest.mark.parametrize(("late_s", "ends"), [(-0.001, False), (0.0, True)])
def test_a_job_past_its_deadline_expires(late_s: float, ends: bool):
    found = record()
    found = replace(found, contract=replace(found.contract, deadline_s=NOW_S - late_s))
    step = rule(found)
    assert isinstance(step, End) is ends
    if isinstance(step, End):
        assert step.change(found).state is JobState.EXPIRED


def test_a_living_owner_is_not_expired_by_others():
    found = running()
    found = replace(found, contract=replace(found.contract, deadline_s=NOW_S - 1.0))
    assert isinstance(rule(found, owner_alive=True), Nak)


def test_a_job_before_its_time_waits_outside():
    found = record()
    found = replace(found, contract=replace(found.contract, not_before_s=NOW_S + 2.5))
    assert rule(found) == Nak(2.5, "not_before")


@pytest.mark.parametrize(("starts", "clean"), [(0, 0), (1, 0), (5, 5), (5, 4)])
def test_a_job_with_fewer_than_two_failed_starts_runs_among_others(starts: int, clean: int):
    step = rule(record(starts=starts, clean=clean))
    assert isinstance(step, Write)
    assert not step.alone


@pytest.mark.parametrize(("starts", "clean"), [(2, 0), (7, 5)])
def test_a_job_with_two_failed_starts_runs_alone(starts: int, clean: int):
    step = rule(record(starts=starts, clean=clean))
    assert isinstance(step, Write)
    assert step.alone


@pytest.mark.parametrize(("starts", "clean"), [(3, 0), (9, 5)])
def test_a_job_with_three_failed_starts_is_given_up(starts: int, clean: int):
    found = record(starts=starts, clean=clean)
    step = rule(found)
    assert isinstance(step, End)
    ended = step.change(found)
    assert ended.state is JobState.FAILED
    assert ended.error is not None
    assert ended.error.reason == "POISON"


def test_only_a_first_delivery_of_a_fresh_job_is_claimed_without_a_read():
    stored = StoredRecord(record(), 7)
    delivered = Delivered("local", "acme", "local-job", stored, redelivered=False, ack_wait_s=3.0)
    assert delivered.claimable == stored
    assert replace(delivered, redelivered=True).claimable is None
    assert replace(delivered, accepted=None).claimable is None
    assert replace(delivered, accepted=StoredRecord(record(), 0)).claimable is None
    assert replace(delivered, accepted=StoredRecord(record(attempt=1), 7)).claimable is None


def test_requeue_counts_as_a_failed_start_and_hand_back_does_not():
    mine = running(ME)
    assert jobs.requeue(mine, ME, 1).starts - jobs.requeue(mine, ME, 1).clean == 1
    assert jobs.hand_back(mine, ME, 1).starts - jobs.hand_back(mine, ME, 1).clean == 0
    with pytest.raises(jobs.IllegalTransition):
        jobs.requeue(mine, OTHER, 1)
    ended = jobs.reject(record(), JobError(Code.INTERNAL, "X", "x"), NOW_S)
    with pytest.raises(jobs.IllegalTransition):
        jobs.reject(ended, JobError(Code.INTERNAL, "X", "x"), NOW_S)
