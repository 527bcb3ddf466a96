"""When tokens of a stream wait for the next step's."""

from itertools import pairwise

import pytest

from laneway.workers.joining import JOIN_S, JOIN_SEQUENCES_MIN, Joiner


def sent(step_s: float, steps: int, sequences: int) -> list[int]:
    """Numbers of the steps whose tokens left at once."""
    joiner = Joiner()
    return [i for i in range(steps) if not joiner.may_wait(100.0 + i * step_s, sequences)]


def test_few_sequences_never_wait():
    assert sent(0.010, 10, JOIN_SEQUENCES_MIN - 1) == list(range(10))


def test_many_sequences_send_three_short_steps_at_once_and_the_first_alone():
    assert sent(0.010, 10, JOIN_SEQUENCES_MIN) == [0, 3, 6, 9]


def test_steps_of_twenty_milliseconds_and_more_never_wait():
    assert sent(0.020, 5, 64) == list(range(5))
    assert sent(0.150, 5, 64) == list(range(5))


@pytest.mark.parametrize("step_s", [0.001, 0.004, 0.007, 0.010, 0.013, 0.017])
def test_no_token_waits_longer_than_twenty_milliseconds(step_s: float):
    left = sent(step_s, 200, 64)
    waits_s = [(after - before - 1) * step_s for before, after in pairwise(left)]  # of the first token held
    assert waits_s
    assert max(waits_s) <= JOIN_S


def test_tokens_after_a_stall_leave_at_once():
    joiner = Joiner()
    assert not joiner.may_wait(100.0, 64)
    assert joiner.may_wait(100.010, 64)
    assert not joiner.may_wait(100.200, 64)
