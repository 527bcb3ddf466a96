"""The fewest workers with which a promise holds."""

from hypothesis import given
from hypothesis import strategies as st

from laneway.simulator.sizing import fewest


@given(st.integers(1, 500), st.integers(1, 500))
def test_the_fewest_is_found_with_few_questions_each_asked_once(needed: int, most: int):
    asked: list[int] = []

    def holds(workers: int) -> bool:
        asked.append(workers)
        return workers >= needed

    assert fewest(holds, most) == (needed if needed <= most else None)
    assert len(asked) == len(set(asked)) <= 2 * most.bit_length() + 2
    assert max(asked) <= most


@given(st.sets(st.integers(1, 60), min_size=1))
def test_where_more_is_not_always_better_the_answer_holds_and_one_less_does_not(good: set[int]):
    found = fewest(lambda workers: workers in good, 60)
    if found is not None:
        assert found in good
        assert found == 1 or found - 1 not in good
