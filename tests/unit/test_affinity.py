"""Homes: who shares one, how evenly they load, and how little moves when homes or workers come and go."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core.fleet import HomePlan, WorkerLease, WorkerState
from laneway.core.job import GenerateTask, Sampling
from laneway.policy.affinity import (
    FEW,
    LOAD_RATIO,
    affinity_key,
    assign_homes,
    choose_home,
    home_again,
    merge_hot,
    others_at,
    prefix_hash,
    room_of,
    served_loads,
)
from laneway.policy.grouping import PREFIX_TOKENS

LONG = tuple(range(500, 500 + PREFIX_TOKENS + 1))
KEYS = [f"key{i:013}" for i in range(2000)]


def homes_of(count: int) -> list[str]:
    return [f"h{i}" for i in range(count)]


key_st = st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=16, max_size=16)
loads_st = st.integers(1, 16).flatmap(
    lambda n: st.lists(st.integers(0, 40), min_size=n, max_size=n).map(
        lambda some: dict(zip(homes_of(n), some, strict=True))
    )
)


def task(ids: tuple[int, ...] = LONG, *, session_id: str = "", adapter: str = "", cache_salt: str = "") -> GenerateTask:
    return GenerateTask(ids, Sampling(max_tokens=4), session_id=session_id, adapter=adapter, cache_salt=cache_salt)


def lease(name: str, run: int = 0, home: str = "", state: WorkerState = WorkerState.READY) -> WorkerLease:
    return WorkerLease(f"{name}-{run}", name, "p", "simulated", state, started_s=100.0 + run, home=home)


# --- keys ------------------------------------------------------------------------------------------


def test_jobs_of_a_session_share_a_key_whatever_they_ask() -> None:
    assert affinity_key("p", "acme", task((1, 2), session_id="s")) == affinity_key("p", "acme", task(session_id="s"))


def test_jobs_that_begin_alike_share_a_key_and_those_that_do_not_have_another() -> None:
    same = affinity_key("p", "acme", task())
    assert affinity_key("p", "acme", task((*LONG, 1, 2, 3))) == same
    assert affinity_key("p", "acme", task((0, *LONG[1:]))) != same


def test_a_prompt_too_short_to_gain_from_a_cache_has_no_key() -> None:
    assert affinity_key("p", "acme", task(LONG[:PREFIX_TOKENS])) == ""
    assert affinity_key("p", "acme", task(LONG)) != ""


@pytest.mark.parametrize(
    "other",
    [
        ("q", "acme", task()),
        ("p", "acme2", task()),
        ("p", "acme", task(adapter="a")),
        ("p", "acme", task(cache_salt="a")),
        ("p", "acme", task(session_id="a")),
    ],
)
def test_what_may_not_share_a_cache_shares_no_key(other: tuple[str, str, GenerateTask]) -> None:
    assert affinity_key(*other) != affinity_key("p", "acme", task())


def test_a_key_holds_nothing_of_what_the_caller_wrote() -> None:
    assert re.fullmatch(r"[a-z2-7]{16}", affinity_key("p", "acme", task(session_id="a > b.*\x00é")))


# --- homes -----------------------------------------------------------------------------------------


def test_no_home_without_a_key_or_without_homes() -> None:
    assert choose_home("", {"h0": 0, "h1": 0}) == ""
    assert choose_home(KEYS[0], {}) == ""


@given(key_st, loads_st, st.randoms())
def test_the_home_depends_on_nothing_but_key_and_loads(key: str, loads: dict[str, float], draw: random.Random) -> None:
    shuffled = list(loads.items())
    draw.shuffle(shuffled)
    assert choose_home(key, dict(shuffled)) == choose_home(key, loads)


@given(key_st, loads_st)
def test_a_home_is_always_found_and_never_one_that_is_full(key: str, loads: dict[str, float]) -> None:
    home = choose_home(key, loads)
    assert loads[home] < room_of(loads)
    mean = (sum(loads.values()) + 1) / len(loads)
    assert loads[home] + 1 <= max(FEW, LOAD_RATIO * mean)


@given(st.integers(2, 16), st.integers(1, 300))
def test_one_hot_key_never_loads_a_home_above_one_and_a_half_times_the_mean(count: int, jobs: int) -> None:
    loads = dict.fromkeys(homes_of(count), 0.0)
    last = ""
    for _ in range(jobs):
        last = choose_home(KEYS[0], loads, last)
        loads[last] += 1
    assert max(loads.values()) <= max(FEW, LOAD_RATIO * jobs / count)


def test_keys_spread_evenly_over_idle_homes() -> None:
    counts = Counter(choose_home(key, dict.fromkeys(homes_of(8), 0)) for key in KEYS)
    assert max(counts.values()) < 1.25 * len(KEYS) / 8


@pytest.mark.parametrize("count", [2, 5, 16])
def test_a_home_that_comes_or_goes_moves_only_the_keys_that_it_wins(count: int) -> None:
    fewer, more = dict.fromkeys(homes_of(count), 0), dict.fromkeys(homes_of(count + 1), 0)
    moved = 0
    for key in KEYS:
        before, after = choose_home(key, fewer), choose_home(key, more)
        if after != before:
            assert after == f"h{count}"
            moved += 1
    assert moved < 1.4 * len(KEYS) / (count + 1)
    gone = {home: 0.0 for home in fewer if home != "h0"}
    for key in KEYS:
        before = choose_home(key, fewer)
        assert choose_home(key, gone) == before or before == "h0"


def test_a_key_keeps_its_home_while_that_has_room() -> None:
    loads = {"h0": 8, "h1": 8}
    home = choose_home(KEYS[0], loads)
    other = "h1" if home == "h0" else "h0"
    assert choose_home(KEYS[0], {home: 9, other: 7}) == home
    assert choose_home(KEYS[0], {home: 11, other: 5}) == other


def test_a_key_stays_where_its_last_job_went_until_that_is_full_or_gone() -> None:
    home = choose_home(KEYS[0], {"h0": 0, "h1": 0, "h2": 0})
    last = next(each for each in homes_of(3) if each != home)
    assert choose_home(KEYS[0], {"h0": 0, "h1": 0, "h2": 0}, last) == last
    assert choose_home(KEYS[0], {"h0": 0, "h1": 0, "h2": 0} | {last: 9}, last) == home
    assert choose_home(KEYS[0], {each: 0 for each in homes_of(3) if each != last}, last) == home


def test_only_homes_that_somebody_serves_are_offered_and_only_where_there_are_two() -> None:
    homes = [HomePlan("h0", "w0"), HomePlan("h1"), HomePlan("h2", "w2")]
    assert served_loads(homes, {"h0": 6, "h2": 0}.__getitem__) == {"h0": 6, "h2": 0}
    assert served_loads(homes[:1], {"h0": 6}.__getitem__) == {}


@pytest.mark.parametrize(
    ("shown", "own", "others"), [(5, (2, 2), 3), (5, (4, 6), 0), (5, (1, 3), 2), (5, (7, 9), -2), (0, (0, 0), 0)]
)
def test_what_a_plan_shows_beyond_what_was_ours_is_others(shown: int, own: tuple[int, int], others: int) -> None:
    assert others_at(HomePlan("h0", ready=1, running=shown - 1), *own) == others


# --- who serves ------------------------------------------------------------------------------------


def test_each_worker_serves_one_home_and_each_home_has_one_worker() -> None:
    assert assign_homes(homes_of(2), [lease("b"), lease("a")], {}) == {"h0": "a-0", "h1": "b-0"}


def test_more_homes_than_workers_leave_homes_unserved_and_more_workers_serve_none() -> None:
    assert assign_homes(homes_of(3), [lease("a")], {}) == {"h0": "a-0"}
    assert assign_homes(homes_of(1), [lease("a"), lease("b")], {}) == {"h0": "a-0"}


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.DRAINING, WorkerState.BROKEN])
def test_only_a_ready_worker_serves_a_home(state: WorkerState) -> None:
    assert assign_homes(homes_of(2), [lease("a", state=state), lease("b")], {"h0": "a", "h1": "b"}) == {"h1": "b-0"}


def test_a_job_goes_back_to_its_workers_home_or_to_one_that_is_served():
    homes = (HomePlan("h0", "w0"), HomePlan("h1", "w1"), HomePlan("h2"), HomePlan("a-stray-consumer", ready=1))
    assert home_again("key", homes, "w1") == "h1"
    assert {home_again(f"key{i}", homes, "spare") for i in range(50)} == {"h0", "h1"}
    assert home_again("key", homes[2:], "spare") == ""


def test_a_worker_that_restarts_under_its_name_gets_its_home_again() -> None:
    assert assign_homes(homes_of(2), [lease("b"), lease("a", run=1)], {"h0": "b", "h1": "a"}) == {
        "h0": "b-0",
        "h1": "a-1",
    }


def test_a_newcomer_takes_a_home_that_nobody_had_before_one_whose_holder_may_come_back() -> None:
    assert assign_homes(homes_of(3), [lease("b"), lease("new")], {"h0": "gone", "h1": "b"}) == {
        "h1": "b-0",
        "h2": "new-0",
    }
    assert assign_homes(homes_of(2), [lease("b"), lease("new")], {"h0": "gone", "h1": "b"}) == {
        "h1": "b-0",
        "h0": "new-0",
    }


def test_a_new_leader_reads_the_homes_from_the_leases() -> None:
    workers = [lease("a", home="h1"), lease("b", home="h0"), lease("c")]
    assert assign_homes(homes_of(3), workers, {}) == {"h1": "a-0", "h0": "b-0", "h2": "c-0"}


def test_two_workers_that_claim_one_home_are_told_apart() -> None:
    workers = [lease("a", home="h0"), lease("b", run=1, home="h0")]
    assert assign_homes(homes_of(2), workers, {}) == {"h0": "b-1", "h1": "a-0"}


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.sampled_from(["", "h0", "h1", "h9"])),
        max_size=8,
        unique_by=lambda each: each[:2],
    ),
    st.dictionaries(st.sampled_from(homes_of(6)), st.sampled_from("abcdef")),
    st.randoms(),
)
def test_assignments_are_one_to_one_keep_as_many_as_they_can_and_stay(
    count: int, some: list[tuple[str, int, str]], previous: dict[str, str], draw: random.Random
) -> None:
    workers = [lease(name, run, home) for name, run, home in some]
    given_ = assign_homes(homes_of(count), workers, previous)
    assert len(set(given_.values())) == len(given_) == min(count, len(workers))
    names = {each.worker_id: each.name for each in workers}
    again = list(workers)
    draw.shuffle(again)
    assert assign_homes(homes_of(count), again, previous) == given_
    if len(set(names.values())) == len(workers):
        assert assign_homes(homes_of(count), workers, {h: names[w] for h, w in given_.items()}) == given_


# --- what is hot -----------------------------------------------------------------------------------


def test_the_hottest_of_each_worker_come_first_and_there_are_at_most_so_many() -> None:
    assert merge_hot([(1, 2, 3), (9, 1)], 3) == (1, 9, 2)
    assert merge_hot([], 3) == ()
    assert 0 <= prefix_hash(KEYS[0]) < 2**64
