"""From which home slot a worker takes its next job: its own in turn, what nobody serves at once, others' late."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.policy.stealing import (
    PrefixSaved,
    Slot,
    StealParams,
    StealReason,
    Turn,
    look_in_s,
    next_turn,
    patience_s,
)

OWN, ANY = Slot("h0", True, 1.0), Slot("any", True, 1.0)


def theirs(home: str, waited_s: float, **changes: object) -> Slot:
    return Slot(home, False, waited_s, **changes)  # type: ignore[arg-type]  # fields of Slot


def turn(*slots: Slot, fresh: bool = True, patience: float = 0.5) -> Turn | None:
    return next_turn(slots, plan_fresh=fresh, patience_s=patience)


def test_of_our_own_slots_the_one_that_waited_longest_goes_first():
    assert turn(Slot("h0", True, 1.0), Slot("any", True, 2.0)) == Turn("any", None)
    assert turn(Slot("h0", True, 3.0), Slot("any", True, 2.0)) == Turn("h0", None)


def test_another_workers_jobs_are_left_to_it_until_they_waited():
    assert turn(theirs("h1", 0.49)) is None
    assert turn(theirs("h1", 0.5)) == Turn("h1", StealReason.WAITED)


def test_nobody_steals_who_has_work_of_its_own():
    assert turn(OWN, theirs("h1", 100.0, ready=9)) == Turn("h0", None)


def test_the_longest_slot_is_stolen_from_first():
    assert turn(theirs("h1", 9.0, ready=1), theirs("h2", 1.0, ready=7)) == Turn("h2", StealReason.WAITED)


def test_a_slot_that_no_living_worker_serves_is_anyones_at_once():
    assert turn(theirs("h1", 0.0, served=False)) == Turn("h1", StealReason.ORPHAN)
    assert turn(OWN, theirs("h1", 2.0, served=False)) == Turn("h1", StealReason.ORPHAN)  # nor does it starve


def test_without_a_fresh_plan_every_slot_is_anyones():
    assert turn(theirs("h1", 0.0), fresh=False) == Turn("h1", StealReason.NO_PLAN)


def test_a_steal_that_found_nothing_is_tried_later_and_later():
    assert turn(theirs("h1", 0.9, misses=1)) is None
    assert turn(theirs("h1", 1.0, misses=1)) is not None
    assert turn(theirs("h1", 8.0, misses=100)) is not None


def test_patience_is_what_the_prefix_saves_and_never_more_than_a_part_of_the_target():
    assert patience_s(2000, 10_000.0, 1.0) == pytest.approx(0.2)
    assert patience_s(2000, 1_000.0, 1.0) == pytest.approx(0.25)
    assert patience_s(2000, 1_000.0, 3600.0) == pytest.approx(2.0)
    assert patience_s(0, 1_000.0, 1.0) == pytest.approx(0.05)  # its worker needs a moment
    assert patience_s(2000, 0.0, 2.0) == pytest.approx(0.5)  # the rate is not known
    assert patience_s(2000, 1_000.0, 1.0, StealParams(ttft_share=0.0)) == 0.0


def test_it_is_known_when_to_look_again():
    assert look_in_s([OWN, theirs("h1", 0.1), theirs("h2", 0.3)], patience_s=0.5) == pytest.approx(0.2)
    assert look_in_s([theirs("h1", 0.1, misses=1)], patience_s=0.5) == pytest.approx(0.9)
    assert look_in_s([OWN, theirs("h1", 0.7)], patience_s=0.5) is None  # it may be taken now
    assert look_in_s([], patience_s=0.5) is None


def test_what_prefixes_save_is_learned_and_forgotten():
    saved = PrefixSaved()
    assert saved.tokens == 1024
    saved.heard(0)
    assert saved.tokens == pytest.approx(922, abs=1)  # the first turns of conversations find nothing
    for _ in range(60):
        saved.heard(2000)
    assert saved.tokens == pytest.approx(2000, abs=5)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_out_of_range_is_refused(share: float):
    with pytest.raises(ValueError, match="ttft_share"):
        StealParams(ttft_share=share)


slots = st.lists(
    st.builds(
        Slot,
        st.sampled_from(["any", *(f"h{i}" for i in range(8))]),
        st.booleans(),
        st.floats(0.0, 100.0),
        st.booleans(),
        st.integers(0, 50),
        st.integers(0, 6),
    ),
    unique_by=lambda slot: slot.home,
    max_size=9,
)


@given(slots, st.booleans(), st.floats(0.0, 10.0), st.randoms(use_true_random=False))
def test_the_order_of_the_slots_decides_nothing(some: list[Slot], fresh: bool, patience: float, random):
    wanted = next_turn(some, plan_fresh=fresh, patience_s=patience)
    look = look_in_s(some, patience_s=patience)
    random.shuffle(some)
    assert next_turn(some, plan_fresh=fresh, patience_s=patience) == wanted
    assert look_in_s(some, patience_s=patience) == look


@given(slots, st.booleans(), st.floats(0.0, 10.0))
def test_work_is_conserved(some: list[Slot], fresh: bool, patience: float):
    """Where a slot may hold a job that is ours to take, or waited too long for another's, something is taken."""
    took = next_turn(some, plan_fresh=fresh, patience_s=patience)
    free = [slot for slot in some if slot.ours or not slot.served or not fresh]
    late = [slot for slot in some if slot.waited_s >= patience * 16]
    assert (took is not None) or not (free or late)
    if took is not None:
        slot = next(slot for slot in some if slot.home == took.home)
        assert (took.reason is None) == slot.ours
        assert slot in free or slot.waited_s >= patience


@given(st.integers(2, 6), st.integers(1, 40))
def test_no_source_starves(sources: int, rounds: int):
    """Each that always has work gets its turn, whoever else has: the counts differ by one at most."""
    since = {f"h{i}": 0.0 for i in range(sources)}
    turns: Counter[str] = Counter()
    for now_s in range(1, rounds * sources + 1):
        took = next_turn(
            [Slot(home, home == "h0", now_s - since_s, served=False) for home, since_s in since.items()],
            plan_fresh=True,
            patience_s=1.0,
        )
        assert took is not None
        turns[took.home] += 1
        since[took.home] = float(now_s)
    assert max(turns.values()) - min(turns.values()) <= 1
    assert len(turns) == sources
