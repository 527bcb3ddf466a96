"""Choosing among providers, when one that fails may be asked, and what their headers say."""

from __future__ import annotations

from math import inf

import pytest

from laneway.policy import breaker as b
from laneway.policy.breaker import Breaker, BreakerParams
from laneway.policy.providers import Offer, choose
from laneway.policy.rate_headers import Told, retry_after_s, told_of, told_wait_s

NOW_S = 1_800_000_000.0
PARAMS = BreakerParams(failures_max=3, open_s=5.0, open_s_max=15.0)


# --- choice ----------------------------------------------------------------------------------------


def test_the_cheapest_that_fits_the_deadline_is_asked():
    cheap, fast, dear = Offer("cheap", 1.0, 30.0, 2.0), Offer("fast", 2.0, 0.0, 2.0), Offer("dear", 3.0, 0.0, 1.0)
    assert choose([dear, fast, cheap], 60.0) is cheap
    assert choose([dear, fast, cheap], 32.0) is cheap
    assert choose([dear, fast, cheap], 31.9) is fast
    assert choose([dear, fast, cheap], 1.5) is dear
    assert choose([dear, fast, cheap]) is cheap


def test_where_none_fits_the_soonest_is_asked():
    assert choose([Offer("cheap", 1.0, 30.0, 2.0), Offer("dear", 2.0, 5.0, 2.0)], 1.0).name == "dear"  # type: ignore[union-attr]


def test_one_that_can_never_be_asked_is_not_chosen():
    assert choose([Offer("never", 0.0, inf, 1.0), Offer("later", 9.0, 99.0, 1.0)], 1.0).name == "later"  # type: ignore[union-attr]
    assert choose([Offer("never", 0.0, inf, 1.0)]) is None
    assert choose([]) is None


def test_of_equal_ones_the_sooner_is_asked():
    assert choose([Offer("a", 1.0, 2.0, 1.0), Offer("b", 1.0, 1.0, 1.0)], 60.0).name == "b"  # type: ignore[union-attr]


# --- breaker ---------------------------------------------------------------------------------------


def fails(breaker: Breaker, times: int, *, probe: bool = False, now_s: float = NOW_S) -> Breaker:
    for _ in range(times):
        breaker = b.failed(breaker, now_s, probe=probe, params=PARAMS)
    return breaker


def test_it_opens_at_so_many_failures_in_a_row_and_at_no_fewer():
    assert b.wait_s(fails(Breaker(), 2), NOW_S) == 0.0
    assert b.wait_s(fails(b.succeeded(fails(Breaker(), 2), probe=False), 2), NOW_S) == 0.0
    assert b.wait_s(fails(Breaker(), 3), NOW_S) == 5.0


def test_after_its_time_one_may_try_and_no_second():
    broken = fails(Breaker(), 3)
    assert b.wait_s(broken, NOW_S + 5.0) == 0.0
    assert b.wait_s(b.asked(broken), NOW_S + 5.0) is None


def test_the_probes_success_closes_it_and_its_failure_opens_it_for_longer_up_to_a_limit():
    broken = fails(Breaker(), 3)
    assert b.succeeded(b.asked(broken), probe=True) == Breaker()
    for expected_s in (10.0, 15.0, 15.0):
        broken = fails(b.asked(broken), 1, probe=True)
        assert b.wait_s(broken, NOW_S) == expected_s


def test_what_was_asked_before_it_opened_neither_closes_nor_prolongs_it():
    broken = fails(Breaker(), 3)
    assert fails(broken, 5, now_s=NOW_S + 3.0) == broken
    assert b.succeeded(broken, probe=False) == broken


def test_a_lost_probe_lets_another_try():
    broken = b.asked(fails(Breaker(), 3))
    assert b.wait_s(b.probe_lost(broken), NOW_S + 5.0) == 0.0


# --- headers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "expected_s"),
    [
        ({"retry-after": "20"}, 20.0),
        ({"Retry-After": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after": "Fri, 15 Jan 2027 08:00:30 GMT"}, 30.0),
        ({"retry-after": "Fri, 15 Jan 2027 07:00:00 GMT"}, 0.0),
        ({"retry-after": "3600"}, 3600.0),
        ({"retry-after": "3601"}, 3600.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after-ms": "x", "retry-after": "2"}, 2.0),
        ({}, None),
    ],
)
def test_how_long_a_provider_wants_to_rest(headers: dict[str, str], expected_s: float | None):
    assert retry_after_s(headers, NOW_S) == expected_s


@pytest.mark.parametrize(
    ("reset", "expected_s"),
    [("1s", 1.0), ("6m0s", 360.0), ("120ms", 0.12), ("1h2m3.5s", 3723.5), ("17", 17.0), ("soon", None), ("", None)],
)
def test_a_providers_own_count(reset: str, expected_s: float | None):
    headers = {
        "X-RateLimit-Limit-Tokens": "20000", "x-ratelimit-remaining-tokens": "150", "x-ratelimit-reset-tokens": reset,
    }  # fmt: skip
    expected = () if expected_s is None else (Told("tokens", 20000, 150, NOW_S, NOW_S + expected_s),)
    assert told_of(headers, NOW_S) == expected


def test_a_count_without_what_it_needs_is_not_used():
    assert told_of({"x-ratelimit-remaining-requests": "5"}, NOW_S) == ()
    assert told_of({"x-ratelimit-remaining-requests": "-1", "x-ratelimit-reset-requests": "1s"}, NOW_S) == ()


def test_what_is_left_grows_evenly_until_the_reset():
    told = Told("requests", 100, 0, NOW_S, NOW_S + 60.0)
    assert told_wait_s(told, 1, NOW_S) == pytest.approx(0.6)
    assert told_wait_s(told, 10, NOW_S) == pytest.approx(6.0)
    assert told_wait_s(told, 10, NOW_S + 6.0) == 0.0
    assert told_wait_s(told, 1000, NOW_S) == 60.0  # at the reset the count is forgotten
    assert told_wait_s(Told("requests", 5, 5, NOW_S, NOW_S + 1.0), 5, NOW_S) == 0.0
    assert told_wait_s(Told("requests", 0, 0, NOW_S, NOW_S + 9.0), 1, NOW_S) == 9.0
