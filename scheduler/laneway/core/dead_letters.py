"""Jobs that are not tried any more, through no doing of their callers: which ones those are, and what is kept of them.

A job that runs out of its deadline, that its caller cancels or that can never fit ended as its contract says, and is
none of these: to run it again is for its caller to decide.
"""

from __future__ import annotations

from msgspec import Struct

from laneway.core.job import JobRecord, QueuedJob
from laneway.core.lanes import JobState

POISON = "POISON"  # its attempts ended without a result, too often
UNREADABLE_JOB = "UNREADABLE_JOB"  # its lane message cannot be read
TASK_LOST = "TASK_LOST"  # its prompt was in the object store, and is gone from there

_REASONS = frozenset({POISON, UNREADABLE_JOB, TASK_LOST})


class DeadLetter(Struct, frozen=True):
    """What is kept of a job that was given up, so that people see why and can run it again."""

    record: JobRecord  # terminal
    job: QueuedJob | None  # as it was delivered; None where that cannot be read, so that it cannot be run again
    died_s: float  # Unix seconds
    left_out: bool = False  # `job` can be read, and is None in a list: many prompts are large together

    @property
    def reason(self) -> str:
        return self.record.error.reason if self.record.error is not None else ""

    @property
    def requeueable(self) -> bool:
        """Whether what it was to do is known. Its prompt may still be kept elsewhere, and gone by then."""
        return (self.job is not None or self.left_out) and self.reason != TASK_LOST

    @property
    def span_s(self) -> float:
        """From the job's acceptance to its deadline."""
        return self.record.contract.deadline_s - self.record.timings.created_s


def given_up(record: JobRecord) -> bool:
    """Whether a dead letter belongs to this record: one that a worker ended because it is not to be tried again."""
    return record.state is JobState.FAILED and record.error is not None and record.error.reason in _REASONS
