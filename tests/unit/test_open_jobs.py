"""Which jobs the sweeps look at: each open job at its deadline, and each that was not written for a while."""

from laneway.core.lanes import JobState, Lane
from laneway.core.subjects import ParkSubject
from laneway.runtime.records import RecordHead
from laneway.scheduler.sweeps import LOOK_AFTER_S, STALE_MIN, SWEEP_MAX, OpenJobs


def head(job: str, sequence: int, state: JobState = JobState.WAITING, deadline_s: float = 100.0) -> RecordHead:
    return RecordHead("acme", job, sequence, state, deadline_s)


def test_a_job_is_overdue_once_at_its_deadline_unless_it_ended() -> None:
    jobs = OpenJobs()
    jobs.see(head("a", 1), 0.0)
    jobs.see(head("b", 2), 0.0)
    jobs.see(head("c", 3, deadline_s=300.0), 0.0)
    jobs.see(head("b", 4, JobState.SUCCEEDED), 0.0)
    assert jobs.overdue(99.0) == []
    assert jobs.overdue(100.0) == [("acme", "a")]
    assert jobs.overdue(101.0) == []
    jobs.again("a")
    assert jobs.overdue(101.0) == [("acme", "a")]
    jobs.drop("a")
    jobs.again("a")
    assert jobs.overdue(101.0) == []
    assert len(jobs) == 1


def test_a_claimed_job_stays_open_and_is_overdue_once() -> None:
    jobs = OpenJobs()
    jobs.see(head("a", 1), 0.0)
    jobs.see(head("a", 2, JobState.RUNNING), 1.0)
    jobs.see(head("a", 3, JobState.WAITING), 2.0)
    assert jobs.overdue(100.0) == [("acme", "a")]
    assert jobs.overdue(100.0) == []


def test_only_jobs_that_nobody_wrote_since_are_looked_at() -> None:
    jobs = OpenJobs()
    jobs.see(head("a", 1), 0.0)
    jobs.see(head("b", 2), 0.0)
    jobs.see(head("b", 3, JobState.RUNNING), 1.0)
    assert jobs.unclaimed(LOOK_AFTER_S - 1) == []
    assert jobs.unclaimed(LOOK_AFTER_S) == [("acme", "a")]
    assert jobs.unclaimed(LOOK_AFTER_S) == []
    jobs.look_again("a", 50.0)
    jobs.look_again("gone", 50.0)
    assert jobs.unclaimed(60.0) == [("acme", "a")]


def test_memory_follows_the_open_jobs_and_not_all_that_ever_were() -> None:
    jobs = OpenJobs()
    jobs.see(head("stays", 1, deadline_s=500.0), 0.0)
    for i in range(20 * STALE_MIN):  # each due in weeks, and over in no time
        jobs.see(head(f"j{i}", 10 * i + 2, deadline_s=2e6), 0.0)
        jobs.see(head(f"j{i}", 10 * i + 3, JobState.RUNNING, deadline_s=2e6), 0.0)
        jobs.see(head(f"j{i}", 10 * i + 4, JobState.SUCCEEDED, deadline_s=2e6), 0.0)
    assert jobs.remembered <= 2 * STALE_MIN + 10
    assert jobs.unclaimed(LOOK_AFTER_S) == [("acme", "stays")]
    assert jobs.overdue(500.0) == [("acme", "stays")]


def test_a_job_known_to_be_parked_needs_no_look_until_somebody_writes_it() -> None:
    jobs = OpenJobs()
    park = ParkSubject("local", Lane.BATCH, "p", "acme", 0, 90_000, 1, "g", "a")
    jobs.see(head("a", 1), 0.0, parked=park)
    assert jobs.unclaimed(LOOK_AFTER_S) == []
    assert jobs.overdue(100.0) == [("acme", "a")]
    jobs.see(head("a", 2, JobState.RUNNING), 1.0)
    jobs.see(head("a", 3), 2.0)
    assert jobs.unclaimed(LOOK_AFTER_S + 2.0) == [("acme", "a")]


def test_a_crowd_due_at_once_is_given_in_parts_each_job_once() -> None:
    jobs = OpenJobs()
    count = 2 * SWEEP_MAX + 7
    for i in range(count):
        jobs.see(head(f"j{i}", i, deadline_s=99.5), 0.0)
    parts = [jobs.overdue(100.0) for _ in range(4)]
    assert [len(part) for part in parts] == [SWEEP_MAX, SWEEP_MAX, 7, 0]
    assert len({job for part in parts for _, job in part}) == count
    jobs.again("j3")
    assert jobs.overdue(100.0) == [("acme", "j3")]
    for i in range(count):
        jobs.drop(f"j{i}")
    assert len(jobs) == 0
