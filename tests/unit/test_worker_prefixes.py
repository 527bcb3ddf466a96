"""The guess of what the engine's prefix cache holds."""

from __future__ import annotations

from laneway.workers.prefixes import KnownPrefixes

PLAIN = ("", "")


def test_the_longest_known_beginning_is_found_in_whole_blocks_and_never_all_of_it():
    known = KnownPrefixes(4, 100)
    known.learn(range(10), PLAIN)
    assert known.known_tokens(range(20), PLAIN) == 8
    assert known.known_tokens(range(8), PLAIN) == 4, "the last token is computed in any case"
    assert known.known_tokens((0, 1, 2, 9, 4, 5, 6, 7, 8), PLAIN) == 0
    assert known.known_tokens((0, 1, 2, 3, 4, 5, 6, 9, 8), PLAIN) == 4


def test_another_salt_or_adapter_has_a_cache_of_its_own():
    known = KnownPrefixes(4, 100)
    known.learn(range(10), ("", "salt"))
    assert known.known_tokens(range(20), PLAIN) == 0


def test_it_holds_no_more_than_the_engine_and_forgets_ends_before_beginnings():
    known = KnownPrefixes(4, 3)
    known.learn(range(20), PLAIN)
    assert known.known_tokens(range(20), PLAIN) == 12
    known.learn(range(100, 108), PLAIN)
    assert known.known_tokens(range(100, 120), PLAIN) == 8
    assert known.known_tokens(range(20), PLAIN) == 4


def test_a_new_engine_begins_with_nothing():
    known = KnownPrefixes(4, 100)
    known.learn(range(10), PLAIN)
    known.forget()
    assert known.known_tokens(range(10), PLAIN) == 0
