"""What the drills count as a second end."""

from __future__ import annotations

import pytest

from laneway.core.lanes import JobState
from tests.support.drill_count import Ends


@pytest.mark.parametrize(
    ("ends", "twice"),
    [
        ([JobState.SUCCEEDED], False),
        ([JobState.REFUSED], False),
        ([JobState.REFUSED, JobState.REFUSED], False),
        ([JobState.REFUSED, JobState.SUCCEEDED], False),
        ([JobState.REFUSED, JobState.SUCCEEDED, JobState.SUCCEEDED], True),
        ([JobState.SUCCEEDED, JobState.REFUSED], True),
        ([JobState.CANCELLED, JobState.SUCCEEDED], True),
    ],
)
def test_an_accepted_job_ends_once_and_a_refusal_before_it_is_no_end(ends: list[JobState], twice: bool):
    found = Ends()
    for sequence, state in enumerate(ends, start=1):
        found.stored["a-job"][sequence] = state
    assert bool(found.twice) is twice
