"""Iterations that an engine tells of apart from their ids: when a worker may take them for a step."""

from __future__ import annotations

from laneway.workers.engines.iterations import SILENT_REPORTS, Iteration, Iterations

PLAIN = Iteration(0.01, 4, 0)
WITH_PROMPT = Iteration(0.03, 4, 256)


def counts(told: Iterations) -> tuple[int, float, int, int]:
    return told.steps, round(told.busy_s, 6), told.prefilled_tokens, told.decoded_tokens


def test_one_that_decoded_as_many_as_were_told_of_is_a_step():
    told = Iterations()
    told.hear([WITH_PROMPT])
    told.tell(4, 4)
    assert counts(told) == (1, 0.03, 256, 4)


def test_of_one_of_another_batch_the_sums_are_told_and_its_step_with_the_next_so_that_nobody_learns_from_it():
    told = Iterations()
    told.hear([WITH_PROMPT])
    told.tell(3, 4)
    assert counts(told) == (0, 0.03, 256, 4)
    told.hear([PLAIN])
    told.tell(4, 4)
    assert counts(told) == (2, 0.04, 256, 8)
    told.hear([PLAIN])
    told.tell(4, 4)
    assert counts(told) == (3, 0.05, 256, 12)


def test_several_at_once_are_told_of_together():
    told = Iterations()
    told.hear([PLAIN, WITH_PROMPT, PLAIN])
    told.tell(9, 0)
    assert counts(told) == (3, 0.05, 256, 0)


def test_reports_without_any_do_not_count_as_steps_at_first():
    told = Iterations()
    for _ in range(SILENT_REPORTS):
        told.tell(1, 1)
    assert counts(told) == (0, 0.0, 0, SILENT_REPORTS)


def test_an_engine_that_tells_of_none_is_not_taken_for_hung():
    told = Iterations()
    for _ in range(SILENT_REPORTS + 3):
        told.tell(1, 1)
    assert told.steps == 3
    told.hear([Iteration(0.01, 1, 0)])
    told.tell(1, 1)
    told.tell(1, 1)
    assert told.steps == 4
