"""What the sequences of an engine may come to hold together, by the formula and by letting them grow one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core.lanes import Lane
from laneway.policy.kv import (
    Drift,
    Growth,
    KvParams,
    limit_blocks,
    overrun_blocks,
    peak_blocks,
    rest_tokens,
)
from laneway.workers.engines.protocol import EngineCapacity, EngineStats
from laneway.workers.ledger import KvAsk, Seat, Seats, prefix_hashes

growths = st.lists(
    st.builds(Growth, st.integers(0, 50), st.integers(0, 50), st.integers(1, 3)),
    max_size=12,
)


def grown(each: Growth, blocks: int) -> int:
    """What it holds after each of its sequences has added so many; nothing once it has ended."""
    return each.held_blocks + each.sequences * blocks if blocks <= each.rest_blocks else 0


@given(growths, st.integers(0, 20))
def test_the_peak_is_what_they_hold_together_at_the_fullest_moment(running: list[Growth], shared: int):
    by_growing = max((sum(grown(each, t) for each in running) for t in range(52)), default=0)
    assert peak_blocks(running, shared) == by_growing + shared


@given(growths, st.randoms())
def test_the_order_of_the_running_changes_nothing(running: list[Growth], random: Any):
    shuffled = random.sample(running, len(running))
    assert peak_blocks(shuffled) == peak_blocks(running)


def test_sequences_that_end_one_after_the_other_need_less_than_all_at_their_longest():
    running = [Growth(held_blocks=10, rest_blocks=rest) for rest in (10, 20, 30, 40)]
    assert sum(each.held_blocks + each.rest_blocks for each in running) == 140
    assert peak_blocks(running) == 90  # when the second ends: the three that were left hold 30 each


@pytest.mark.parametrize(("made", "rest"), [(0, 40), (39, 1), (40, 60), (99, 1), (100, 0)], ids=str)
def test_an_answer_that_outlives_its_prediction_is_expected_to_go_on_to_its_limit(made: int, rest: int):
    assert rest_tokens(made, predicted=40, max_tokens=100) == rest


def test_only_predictions_leave_a_margin():
    params = KvParams(target=0.9)
    assert limit_blocks(100, 0.0, params, paged=True) == 90
    assert limit_blocks(100, 0.0, params, paged=False) == 100
    assert limit_blocks(100, 0.0, KvParams(prediction=False), paged=True) == 100
    assert limit_blocks(100, 30.0, params, paged=True) == 60


def test_a_run_yields_before_a_block_is_missing():
    assert overrun_blocks(certain_blocks=90, sequences=10, capacity_blocks=100, drift_blocks=0.0) == 0
    assert overrun_blocks(certain_blocks=91, sequences=10, capacity_blocks=100, drift_blocks=0.0) == 1
    assert overrun_blocks(certain_blocks=90, sequences=10, capacity_blocks=100, drift_blocks=2.0) == 2


def test_drift_takes_room_away_and_never_gives_any():
    drift = Drift()
    for _ in range(200):
        drift.observe(900, 1000)
    assert drift.tokens == 0.0
    for _ in range(200):
        drift.observe(1100, 1000)
    assert drift.tokens == pytest.approx(100.0, rel=0.01)


@pytest.mark.parametrize("target", [0.0, 1.1, float("nan")])
def test_a_target_is_a_share(target: float):
    with pytest.raises(ValueError):
        KvParams(target=target)


# --- the ledger that goes by it ----------------------------------------------------------------------

BLOCK = 16


def seats_of(kv_tokens: int = 1024, slots: int = 64, *, paged: bool = True, **options: Any) -> Seats:
    capacity = EngineCapacity(slots, kv_tokens, 4096, 260, block_tokens=BLOCK, paged=paged)
    return Seats(capacity, prefix_cache=True, **options)


asks = st.builds(
    lambda prompt, predicted, more: KvAsk(prompt, predicted + more, predicted),
    st.integers(1, 400),
    st.integers(1, 300),
    st.integers(0, 300),
)
moves = st.lists(st.one_of(asks, st.integers(0, 30)), max_size=40)


def played(seats: Seats, steps: list[KvAsk | int]) -> list[Seat]:
    """Takes what fits; a number lets one of the live leave."""
    live: list[Seat] = []
    for step in steps:
        if isinstance(step, int):
            if live:
                seats.give_back(live.pop(step % len(live)))
        elif seats.can_ever_fit(step) and seats.fits(step):
            live.append(seats.take(Lane.BATCH, step))
    return live


@given(moves)
def test_a_reserving_engine_is_never_given_more_than_it_holds(steps: list[KvAsk | int]):
    seats = seats_of(paged=False)
    live = played(seats, steps)
    reserved = sum(-(-seat.ask.tokens // BLOCK) * BLOCK for seat in live)
    assert reserved <= seats.kv_tokens
    assert seats.kv_tokens_used == reserved
    assert seats.kv_tokens_free == seats.kv_tokens - reserved


@given(moves)
def test_predicted_peaks_stay_within_the_target(steps: list[KvAsk | int]):
    seats = seats_of()
    live = played(seats, steps)
    if len(live) > 1:
        assert seats.kv_tokens_used <= 0.95 * seats.kv_tokens
    for seat in live:
        seats.give_back(seat)
    assert (len(seats), seats.kv_tokens_used, seats.kv_tokens_free) == (0, 0, seats.kv_tokens)


@given(moves, asks)
def test_what_a_job_needs_is_what_the_peak_rises_by(steps: list[KvAsk | int], ask: KvAsk):
    seats = seats_of(kv_tokens=8192)
    played(seats, steps)
    before, need = seats.kv_tokens_used, seats.need(ask)
    assert need >= 0
    if seats.fits(ask):
        seat = seats.take(Lane.BATCH, ask)
        assert seats.kv_tokens_used == before + need
        assert seats.frees(seat) == need
        assert seats.kv_tokens_used == before + need


@given(asks, st.booleans())
def test_an_idle_engine_takes_whatever_fits_it_alone(ask: KvAsk, paged: bool):
    seats = seats_of(paged=paged)
    assert seats.fits(ask) == seats.can_ever_fit(ask)


@given(st.lists(asks, min_size=1, max_size=8), st.randoms())
def test_who_came_first_changes_no_room(wanted: list[KvAsk], random: Any):
    one, other = seats_of(kv_tokens=65_536), seats_of(kv_tokens=65_536)
    for ask in wanted:
        one.take(Lane.BATCH, ask)
    for ask in random.sample(wanted, len(wanted)):
        other.take(Lane.BATCH, ask)
    assert one.kv_tokens_free == other.kv_tokens_free


def test_a_paged_engine_runs_more_answers_than_a_reserving_one():
    ask = KvAsk(prompt_tokens=64, max_tokens=448, predicted_tokens=64)

    def joined(seats: Seats) -> int:
        while seats.fits(ask):
            seats.take(Lane.BATCH, ask)
        return len(seats)

    assert joined(seats_of(paged=False)) == 2
    assert joined(seats_of(paged=True, params=lambda: KvParams(prediction=False))) == 2
    assert joined(seats_of(paged=True)) == 7


def test_answers_that_outlive_their_prediction_take_their_room_from_others():
    seats = seats_of()
    made = 0
    seat = seats.take(Lane.BATCH, KvAsk(64, 448, 64))
    seat.made = lambda: made
    assert seats.kv_tokens_used == 128
    made = 63
    assert seats.kv_tokens_used == 144  # 127 tokens, and the one more in a block of its own
    made = 64
    assert seats.kv_tokens_used == 512
    made = 448
    assert seats.kv_tokens_used == 512


def test_what_prompts_begin_with_in_common_is_counted_once_while_two_hold_it():
    shared, own = tuple(range(160)), tuple(range(500, 532))
    seats = seats_of(kv_tokens=65_536)
    first = seats.take(Lane.BATCH, KvAsk(192, 16, 0, 1, prefix_hashes(shared + own, BLOCK)))
    assert seats.kv_tokens_used == 208
    second = seats.take(Lane.BATCH, KvAsk(192, 16, 0, 1, prefix_hashes(shared + own[::-1], BLOCK)))
    assert seats.kv_tokens_used == 208 + 48
    assert seats.holds(first) == 32
    seats.give_back(first)
    assert seats.kv_tokens_used == 208
    seats.give_back(second)
    assert seats.kv_tokens_used == 0


def test_nothing_is_shared_with_another_salt_or_adapter_or_in_a_reserving_engine():
    ids = tuple(range(160))
    assert set(prefix_hashes(ids, BLOCK, "a")).isdisjoint(prefix_hashes(ids, BLOCK, "b"))
    assert set(prefix_hashes(ids, BLOCK, "a")).isdisjoint(prefix_hashes(ids, BLOCK, "a", "adapter"))
    assert prefix_hashes(ids[:15], BLOCK) == ()
    assert len(prefix_hashes(ids[:47], BLOCK)) == 2


def test_every_sequence_of_a_request_takes_a_slot_and_grows():
    seats = seats_of(slots=4)
    seat = seats.take(Lane.BATCH, KvAsk(100, 40, 20, sequences=3))
    assert (len(seats), seats.slots_free) == (3, 1)
    assert seats.kv_tokens_used == (7 + 3 * 2) * BLOCK
    assert not seats.fits(KvAsk(10, 10, 0, sequences=2))
    assert not seats_of(slots=2).can_ever_fit(seat.ask)


def test_what_the_engine_holds_beyond_the_ledger_is_no_room():
    seats = seats_of()
    seats.take(Lane.BATCH, KvAsk(64, 64, 64))
    free = seats.kv_tokens_free
    for _ in range(200):
        seats.observe(EngineStats(kv_tokens_used=60, prefilling_tokens=4))
    assert seats.kv_tokens_free == free
    for _ in range(200):
        seats.observe(EngineStats(kv_tokens_used=64 + 320))
    assert free - 21 * BLOCK <= seats.kv_tokens_free <= free - 19 * BLOCK


def test_an_overrun_is_told_before_the_engine_lacks_a_block():
    seats = seats_of(kv_tokens=BLOCK * 20)
    made = 0
    for _ in range(4):
        seats.take(Lane.BATCH, KvAsk(32, 64, 16)).made = lambda: made
    assert seats.overrun_tokens() == 0
    made = 32  # 4 x 4 blocks; each may need one more
    assert seats.overrun_tokens() == 0
    made = 33
    assert seats.overrun_tokens() == 4 * BLOCK
    reserving = seats_of(kv_tokens=BLOCK * 24, paged=False)
    reserving.take(Lane.BATCH, KvAsk(32, 64)).made = lambda: 64
    assert reserving.overrun_tokens() == 0
