"""Who may share a run with whom: identical deterministic jobs, and none else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from laneway.core.job import GenerateTask, Sampling
from laneway.core.lanes import LANES, Lane
from laneway.policy.single_flight import Flying, flight_key, may_join

TASK = GenerateTask((1, 2, 3), Sampling(max_tokens=8, temperature=0.0))
ids = st.lists(st.integers(0, 2), max_size=6).map(tuple)


def key(task: GenerateTask, tenant: str = "acme", *, exact: bool = True) -> Any:
    return flight_key(tenant, task, exact=exact)


def with_sampling(**changes: Any) -> GenerateTask:
    return replace(TASK, sampling=replace(TASK.sampling, **changes))


def test_identical_jobs_have_one_key_and_those_of_another_session_too():
    assert key(TASK) is not None
    assert key(TASK) == key(replace(TASK, prompt_ids=(1, 2, 3), session_id="another"))
    bias = with_sampling(logit_bias={5: 1.0, 7: 2.0})
    assert key(bias) == key(with_sampling(logit_bias={7: 2.0, 5: 1.0})), "in whatever order it was written"


def test_each_difference_that_may_change_the_answer_makes_another_key():
    others = [
        replace(TASK, prompt_ids=(1, 2)),
        replace(TASK, json_object=True),
        replace(TASK, json_schema="{}"),
        replace(TASK, regex="a"),
        replace(TASK, grammar="a"),
        replace(TASK, adapter="a"),
        replace(TASK, cache_salt="a"),
        *(
            with_sampling(**change)
            for change in (
                {"max_tokens": 9}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"seed": 1}, {"stop": ("a",)},
                {"stop_token_ids": (7,)}, {"logprobs": True}, {"top_logprobs": 2}, {"repetition_penalty": 1.1},
                {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"logit_bias": {5: 1.0}}, {"min_tokens": 1},
                {"ignore_eos": True},
            )
        ),
    ]  # fmt: skip
    keys = [key(TASK), key(TASK, "another tenant"), *map(key, others)]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    fields = {*GenerateTask.__struct_fields__, *Sampling.__struct_fields__} - {"sampling", "session_id"}
    assert len(fields) == len(others) + 2, "temperature and n make a job run by itself; a new field belongs here"


@pytest.mark.parametrize(
    ("changes", "exact", "shares"),
    [
        ({}, False, True),
        ({"temperature": 0.5}, True, False),
        ({"temperature": 0.5, "seed": 7}, True, True),
        ({"temperature": 0.5, "seed": 7}, False, False),
        ({"n": 2}, True, False),
    ],
)
def test_only_what_has_one_answer_is_shared(changes: dict[str, Any], exact: bool, shares: bool):
    assert (key(with_sampling(**changes), exact=exact) is not None) is shares


@pytest.mark.parametrize("first", LANES)
@pytest.mark.parametrize("second", LANES)
def test_before_the_first_token_no_job_waits_for_a_lane_below_its_own(first: Lane, second: Lane):
    assert may_join(Flying(first, (), ()), second, (), 0) is (LANES.index(second) >= LANES.index(first))
    assert may_join(Flying(first, (), (5,)), second, (), 0)


@given(done=ids, got=ids, prefix=ids, again=st.booleans())
def test_a_job_with_tokens_joins_only_where_they_agree_and_misses_none(
    done: tuple[int, ...], got: tuple[int, ...], prefix: tuple[int, ...], again: bool
):
    start = 0 if again else len(prefix)
    joins = may_join(Flying(Lane.PRIORITY, done, got), Lane.PRIORITY, prefix, start)
    whole = done + got
    if joins:
        assert whole[: len(prefix)] == prefix
        assert start >= len(done), "what it was begun with is not given again"
    elif whole[: len(prefix)] == prefix:
        assert start < len(done), "and it joins where nothing is in the way"
