"""What a worker says of its caches: the keys that it ran most of late, few of them, none of a cache that is gone."""

from __future__ import annotations

import random

from laneway.core.fleet import HOT_PREFIXES_MAX
from laneway.policy.affinity import prefix_hash
from laneway.workers.hot_prefixes import COUNTED, HALF_LIFE, HotPrefixes


def test_the_hottest_come_first_and_jobs_without_a_key_do_not_count() -> None:
    hot = HotPrefixes()
    for key in ("a", "b", "b", "", "", ""):
        hot.met(key)
    assert hot.top() == (prefix_hash("b"), prefix_hash("a"))


def test_a_lease_shows_so_many_and_no_more() -> None:
    hot = HotPrefixes()
    for number in range(HOT_PREFIXES_MAX):
        hot.met(f"k{number}")
    assert len(hot.top()) == HOT_PREFIXES_MAX
    hot.met("one-more")
    assert len(hot.top()) == HOT_PREFIXES_MAX


def test_what_is_frequent_is_found_among_any_number_of_single_ones() -> None:
    hot, draw = HotPrefixes(), random.Random(7)
    for number in range(20_000):
        hot.met(f"single{number}")
        if draw.random() < 0.05:
            hot.met("frequent")
    assert hot.top()[0] == prefix_hash("frequent")
    assert len(hot._counts) <= COUNTED


def test_what_is_not_asked_for_any_more_is_forgotten() -> None:
    hot = HotPrefixes()
    hot.met("old")
    for _ in range(2 * HALF_LIFE):
        hot.met("new")
    assert hot.top() == (prefix_hash("new"),)


def test_a_new_engine_holds_nothing() -> None:
    hot = HotPrefixes()
    hot.met("a")
    hot.clear()
    assert hot.top() == ()
