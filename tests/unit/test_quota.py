"""A provider's quota is never exceeded, whoever takes, dies or waits; and everybody gets a turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.policy import quota as q
from laneway.policy.breaker import BreakerParams
from laneway.policy.quota import Amount, Quota, QuotaRecord, Taken, WindowQuota
from laneway.policy.rate_headers import Told

NOW_S = 1_800_000_000.0
GRANT_S, PLACE_S = 10.0, 5.0
MINUTE = Quota((WindowQuota(60.0, requests=10, tokens=1000),))
HOLDERS = ("a", "b", "c", "d")


@dataclass
class Event:
    """What really happened at the provider."""

    at_s: float
    amount: Amount


@dataclass
class Desk:
    """A record and its holders, in virtual time."""

    quota: Quota
    now_s: float = NOW_S
    record: QuotaRecord = field(default_factory=QuotaRecord)
    numbers: dict[str, int] = field(default_factory=dict)
    log: list[Event] = field(default_factory=list)
    live: dict[tuple[str, int], Event] = field(default_factory=dict)

    def take(self, holder: str, *wants: Amount) -> Taken:
        first = self.numbers.get(holder, 0)
        taken = q.take(
            self.record, self.quota, holder, wants, self.now_s, first_number=first, grant_s=GRANT_S, place_s=PLACE_S
        )
        self.record = taken.record
        self.numbers[holder] = first + len(taken.grants)
        for grant in taken.grants:
            entry = Event(self.now_s, grant.amount)
            self.log.append(entry)
            self.live[holder, grant.number] = entry
        return taken

    def settle(self, holder: str, number: int, spent: Amount) -> None:
        self.record = q.settled(self.record, self.quota, holder, number, spent)
        self.live.pop((holder, number)).amount = spent

    def spent_since(self, since_s: float) -> Amount:
        return sum((event.amount for event in self.log if event.at_s > since_s), Amount())


def one(tokens: int = 0, spend: float = 0.0) -> Amount:
    return Amount(1, tokens, spend)


amounts = st.builds(one, st.integers(0, 600))
steps: st.SearchStrategy[tuple[str, str, list[Amount], float]] = st.one_of(
    st.builds(
        lambda holder, wants: ("take", holder, wants, 0.0),
        st.sampled_from(HOLDERS),
        st.lists(amounts, min_size=1, max_size=4),
    ),
    st.builds(lambda share: ("settle", "", [], share), st.floats(0.0, 1.0)),
    st.builds(lambda span_s: ("pass", "", [], span_s), st.floats(0.0, 40.0)),
    st.builds(lambda holder: ("renew", holder, [], 0.0), st.sampled_from(HOLDERS)),
)


@given(st.lists(steps, max_size=60), st.integers(0, 3), st.randoms())
@settings(max_examples=200, deadline=None)
def test_no_window_ever_holds_more_than_the_quota_whoever_takes_settles_renews_or_dies(
    ops: list[tuple[str, str, list[Amount], float]], concurrency: int, random: Random
):
    desk = Desk(Quota((WindowQuota(60.0, requests=6, tokens=1000), WindowQuota(10.0, requests=4)), concurrency))
    for op, holder, wants, number in ops:
        if op == "take":
            desk.take(holder, *wants)
        elif op == "settle" and desk.live:
            key = random.choice(list(desk.live))
            desk.settle(*key, one(int(desk.live[key].amount.tokens * number)))
        elif op == "renew":
            desk.record = q.renewed(desk.record, holder, desk.now_s + GRANT_S)
        elif op == "pass":
            desk.now_s += number
            desk.record = q.swept(desk.record, desk.quota, desk.now_s)
        for window in desk.quota.windows:
            seen = desk.spent_since(desk.now_s - window.window_s)
            assert seen.requests <= window.requests
            assert not window.tokens or seen.tokens <= window.tokens
            counted = q.used_of(desk.record, window, desk.quota, desk.now_s)
            # What happened counts in the record too: so much the less is left, and never less than nothing.
            assert seen.requests <= counted.requests <= window.requests
            assert seen.tokens <= counted.tokens <= (window.tokens or inf)
        alive = [grant for grant in desk.record.grants if grant.until_s > desk.now_s]
        assert not concurrency or len(alive) <= concurrency


@given(st.lists(amounts, min_size=1, max_size=12), st.floats(0.0, 100.0))
def test_what_is_told_to_wait_may_be_taken_after_that_wait_if_nothing_else_happens(wants: list[Amount], later_s: float):
    desk = Desk(MINUTE)
    desk.take("a", *wants)
    desk.now_s += later_s
    taken = desk.take("b", *wants)
    if taken.wait_s > 0:
        assert taken.wait_s < inf
        desk.now_s += taken.wait_s
        desk.record = QuotaRecord(desk.record.grants, (), desk.record.used)  # nobody else waits
        assert desk.take("b", wants[len(taken.grants)]).grants


def test_a_window_gives_what_it_has_and_gives_it_again_when_it_has_passed():
    desk = Desk(MINUTE, NOW_S + 0.2)  # late in a slice
    taken = desk.take("a", *[one(10)] * 12)
    assert len(taken.grants) == 10
    assert 60.0 + MINUTE.margin_s <= taken.wait_s <= 60.0 + MINUTE.windows[0].slice_s + MINUTE.margin_s
    desk.now_s += taken.wait_s
    assert len(desk.take("a", *[one(10)] * 2).grants) == 2


def test_tokens_are_reserved_and_settled_with_what_was_used_down_and_up():
    desk = Desk(MINUTE)
    (first, second) = desk.take("a", one(500), one(500)).grants
    assert not desk.take("b", one(1)).grants
    desk.settle("a", first.number, one(100))
    assert desk.take("b", one(400)).grants
    desk.settle("a", second.number, one(900))  # more than estimated: 1,400 of 1,000 now, and nothing is granted
    assert not desk.take("c", one(1)).grants
    assert q.used_of(desk.record, desk.quota.windows[0], desk.quota, desk.now_s).tokens == 1400


def test_a_grant_that_was_not_used_counts_for_nothing():
    desk = Desk(Quota((WindowQuota(60.0, requests=1),)))
    (grant,) = desk.take("a", one()).grants
    desk.settle("a", grant.number, Amount())
    assert desk.take("b", one()).grants


def test_what_a_dead_holder_took_counts_as_spent_until_its_window_has_passed():
    desk = Desk(Quota((WindowQuota(60.0, requests=2, tokens=1000),), concurrency=1))
    desk.take("dead", one(900))
    assert not desk.take("b", one(100)).grants  # its place among the concurrent ones is taken
    desk.now_s += GRANT_S
    assert desk.take("b", one(100)).grants  # and free again, but what it took is spent
    desk.settle("b", 0, one(100))
    assert not desk.take("b", one(1)).grants
    desk.now_s += 60.0 + desk.quota.margin_s + desk.quota.windows[0].slice_s - GRANT_S
    assert desk.take("b", one(900)).grants


def test_who_renews_keeps_a_grant_and_may_settle_it_late():
    desk = Desk(Quota((WindowQuota(600.0, tokens=1000),)))
    (grant,) = desk.take("a", one(1000)).grants
    for _ in range(5):
        desk.now_s += GRANT_S / 2
        desk.record = q.renewed(desk.record, "a", desk.now_s + GRANT_S)
    desk.settle("a", grant.number, one(10))
    assert desk.take("b", one(990)).grants


def test_a_settlement_of_a_grant_that_was_given_up_changes_nothing():
    desk = Desk(MINUTE)
    (grant,) = desk.take("a", one(1000)).grants
    desk.now_s += GRANT_S
    swept = q.swept(desk.record, desk.quota, desk.now_s)
    assert q.settled(swept, desk.quota, "a", grant.number, one(1)) == swept
    assert q.used_of(swept, MINUTE.windows[0], MINUTE, desk.now_s).tokens == 1000


def test_spend_is_bounded_as_tokens_are():
    desk = Desk(Quota((WindowQuota(86_400.0, spend=1.0),)))
    assert len(desk.take("a", *[one(5, 0.1)] * 11).grants) == 10


def test_a_large_request_is_granted_however_many_small_ones_come():
    """Three holders take whatever they are given, all the time; one wants nine tenths of the window."""
    desk = Desk(Quota((WindowQuota(60.0, tokens=1000),)))
    for holder in "abc":
        while desk.take(holder, one(20)).grants:
            pass
    waits, end_s, large = dict.fromkeys("abc", 0.0), desk.now_s + 150.0, False
    small = 0
    while desk.now_s < end_s and not large:
        large = bool(desk.take("large", one(900)).grants)
        for holder in waits:
            small += len(desk.take(holder, one(20)).grants)
        desk.now_s += 0.5
        for key in [key for key in desk.live if key[0] != "large"]:
            desk.settle(*key, one(20))
    assert large
    assert desk.now_s - NOW_S < 70.0  # one window after it came
    assert small == 3  # of those who stood there before it


def test_holders_that_always_want_get_equal_shares():
    desk = Desk(Quota((WindowQuota(60.0, requests=60),)))
    got = dict.fromkeys(HOLDERS, 0)
    for _ in range(1800):
        for holder in HOLDERS:  # always in the same order: the place decides, not the speed
            for grant in desk.take(holder, one(), one(), one()).grants:
                desk.settle(holder, grant.number, one())
                got[holder] += desk.now_s > NOW_S + 65.0
        desk.now_s += 0.1
    assert sum(got.values()) >= 60
    assert max(got.values()) - min(got.values()) <= 3


def test_the_place_of_a_dead_holder_is_given_up():
    desk = Desk(Quota((WindowQuota(60.0, tokens=1000),)))
    desk.take("a", one(600))
    assert not desk.take("dead", one(500)).grants
    assert not desk.take("b", one(300)).grants  # would be fine, were nobody before it
    desk.now_s += PLACE_S
    assert desk.take("b", one(300)).grants


def test_more_than_a_window_is_never_granted_and_an_estimate_is_cut_to_it():
    desk = Desk(MINUTE)
    assert desk.take("a", one(1001)).wait_s == inf
    assert q.cut_to(MINUTE, one(5000)) == one(1000)
    assert q.cut_to(Quota(concurrency=1), one(5000, 2.0)) == one(5000, 2.0)


def test_requests_at_once_are_bounded():
    desk = Desk(Quota(concurrency=2))
    (first, _) = desk.take("a", one(), one(), one()).grants
    desk.settle("a", first.number, one())
    assert len(desk.take("b", one()).grants) == 0  # a has its place
    assert len(desk.take("a", one()).grants) == 1


def test_nothing_is_granted_while_the_provider_wants_to_rest():
    desk = Desk(MINUTE)
    desk.record = q.rested(q.rested(desk.record, NOW_S + 7.0), NOW_S + 3.0)
    assert desk.take("a", one()).wait_s == 7.0
    desk.now_s += 7.0
    assert desk.take("a", one()).grants


def test_a_broken_provider_is_probed_by_one_holder_and_its_success_lets_all_in():
    desk, params = Desk(MINUTE), BreakerParams(failures_max=2, open_s=5.0)
    for number in range(2):
        (grant,) = desk.take("a", one()).grants
        desk.record = q.failed(desk.record, "a", grant.number, desk.now_s, params)
        desk.settle("a", grant.number, one())
        assert number == grant.number
    assert desk.take("a", one()).wait_s == 5.0
    desk.take("b", one())
    desk.now_s += 4.9
    desk.take("a", one())
    desk.take("b", one())
    desk.now_s += 0.1
    assert not desk.take("b", one()).grants  # a was first
    (probe,) = desk.take("a", one(), one()).grants
    assert probe.probe
    assert not desk.take("b", one()).grants
    desk.record = q.succeeded(desk.record, "a", probe.number)
    desk.settle("a", probe.number, one())
    assert desk.take("b", one(), one()).grants


@pytest.mark.parametrize("end", ["dies", "drops it"])
def test_a_probe_that_comes_to_nothing_makes_way_for_another(end: str):
    desk = Desk(MINUTE)
    (grant,) = desk.take("a", one()).grants
    desk.record = q.failed(desk.record, "a", grant.number, desk.now_s, BreakerParams(failures_max=1))
    desk.settle("a", grant.number, one())
    desk.now_s += 5.0
    (probe,) = desk.take("a", one()).grants
    if end == "dies":
        desk.now_s += GRANT_S
    else:
        desk.record = q.undecided(desk.record, "a", probe.number)
        desk.settle("a", probe.number, one())
    (again,) = desk.take("b", one()).grants
    assert again.probe


def test_the_providers_own_count_is_obeyed_where_it_is_lower_than_ours():
    desk = Desk(MINUTE)
    desk.record = q.told(desk.record, [Told("requests", 10, 2, NOW_S, NOW_S + 40.0)])
    desk.now_s += 0.001
    taken = desk.take("a", one(), one(), one())
    assert len(taken.grants) == 2
    assert 4.9 <= taken.wait_s <= 5.1  # 8 come back in 40 s
    desk.record = q.told(desk.record, [Told("requests", 10, 9, NOW_S - 1.0, NOW_S + 40.0)])  # heard before
    assert len(desk.take("a", one()).grants) == 0
    desk.record = q.told(desk.record, [Told("requests", 10, 9, NOW_S + 2.0, NOW_S + 40.0)])
    desk.now_s += 2.0
    assert len(desk.take("a", one()).grants) == 1
