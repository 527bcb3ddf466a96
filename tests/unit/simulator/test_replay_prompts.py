"""Prompts of a replay: of the trace's lengths, and as much in common as the trace says."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from laneway.cli.replaying.played import as_played, only
from laneway.cli.replaying.prompts import WORDS, Pieces, Prompts, find_pieces, letters, words
from laneway.runtime.tokenizer import Tokenizer, load_tokenizer
from laneway.simulator.outcomes import Outcomes
from laneway.simulator.trace import Trace
from tests.support.traces import asked, trace

BYTES = load_tokenizer("bytes")


def prompts(of: Trace, pieces: Pieces | None = None, *, block_salt: str = "a", own_salt: str = "b") -> Prompts:
    return Prompts(of, pieces or letters(), block_salt=block_salt, own_salt=own_salt)


def shared(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 12)), min_size=1, max_size=8), st.integers(1, 40))
@settings(max_examples=30)
def test_every_prompt_has_the_traces_length_with_the_byte_tokenizer(rows: list[tuple[int, int]], block_tokens: int):
    played = trace(*(asked(prompt_tokens=n, blocks=tuple(range(b))) for n, b in rows), block_tokens=block_tokens)
    made = prompts(played)
    assert [len(BYTES.encode(made.text(i))) for i in range(len(rows))] == [n for n, _ in rows]


def test_prompts_share_the_blocks_whose_ids_are_equal_and_no_more():
    played = trace(
        asked(prompt_tokens=60, blocks=(1, 2, 3)),
        asked(prompt_tokens=60, blocks=(1, 2, 4)),
        asked(prompt_tokens=48, blocks=(1, 2, 3)),
        asked(prompt_tokens=60),
    )
    texts = [prompts(played).text(i) for i in range(4)]
    assert 32 <= shared(texts[0], texts[1]) < 36  # a letter of 32 may be equal by chance, not four of them
    assert 48 <= shared(texts[0], texts[2]) < 52
    assert shared(texts[0], texts[3]) < 4


def test_a_new_salt_makes_a_prompt_that_no_cache_has_met_from_its_first_token_on():
    played = trace(asked(prompt_tokens=60, blocks=(1, 2, 3)))
    assert shared(prompts(played).text(0), prompts(played, block_salt="c").text(0)) < 4


def test_a_warm_pass_knows_the_blocks_of_the_pass_before_and_not_what_is_a_requests_own():
    played = trace(asked(prompt_tokens=60, blocks=(1, 2)))
    before, now = (prompts(played, own_salt=salt).text(0) for salt in ("first", "second"))
    assert 32 <= shared(before, now) < 36


def test_what_the_tokenizer_puts_before_a_text_counts_and_blocks_are_shared_all_the_same():
    played = trace(asked(prompt_tokens=32, blocks=(1, 2)), asked(prompt_tokens=33, blocks=(1, 2)))
    made = prompts(played, Pieces(letters().of_byte, before_tokens=2))
    assert [len(made.text(i)) for i in (0, 1)] == [30, 31]
    assert shared(made.text(0), made.text(1)) == 30


def test_a_prompt_of_one_token_is_asked_with_one_whatever_is_put_before_it():
    made = prompts(trace(asked(prompt_tokens=1)), Pieces(letters().of_byte, before_tokens=3))
    assert len(made.text(0)) == 1


# --- what prompts are made of ------------------------------------------------------------------------


def counted_by(tokenizer: Tokenizer, before: int = 0):
    async def quote(text: str) -> int:
        return before + len(tokenizer.encode(text))

    return quote


async def test_letters_are_taken_for_a_tokenizer_of_bytes():
    found = await find_pieces(counted_by(BYTES))
    assert (found.of_byte, found.before_tokens, found.exact) == (letters().of_byte, 0, True)


async def test_words_are_taken_for_a_real_vocabulary_and_every_prompt_has_its_length():
    tokenizer = load_tokenizer("smollm2")
    found = await find_pieces(counted_by(tokenizer))
    assert (found.of_byte, found.before_tokens, found.exact) == (words().of_byte, 0, True)
    played = trace(*(asked(prompt_tokens=n, blocks=(1, 2)) for n in (1, 31, 32, 33, 700)))
    made = prompts(played, found)
    assert [len(tokenizer.encode(made.text(i))) for i in range(5)] == [1, 31, 32, 33, 700]


async def test_a_begin_mark_is_found_out():
    assert (await find_pieces(counted_by(BYTES, before=1))).before_tokens == 1


async def test_a_tokenizer_that_joins_the_pieces_is_found_out():
    async def quote(text: str) -> int:
        return len(text) // 3

    assert not (await find_pieces(quote)).exact


def test_every_piece_can_be_drawn_and_the_longer_quote_has_all_of_them():
    assert len(set(words().of_byte[:64])) == len(WORDS.split()) == 64
    assert len(set(letters().of_byte[:64])) == 32


# --- the trace as it is played -----------------------------------------------------------------------


def test_speed_compresses_arrivals_and_think_times_and_leaves_promises_alone():
    whole = trace(asked(2.0, session=1, ttft_s=0.5, patience_s=4.0), asked(session=1, think_s=6.0, deadline_s=30.0))
    played = as_played(whole, speed=2.0)
    assert played.arrival_s.tolist() == [1.0, 0.0]
    assert played.think_s.tolist() == [0.0, 3.0]
    assert (played.ttft_s[0], played.patience_s[0], played.deadline_s[1]) == (0.5, 4.0, 30.0)
    assert whole.arrival_s.tolist() == [2.0, 0.0]


@given(st.integers(1, 5000), st.integers(1, 64), st.floats(1.0, 100.0))
@settings(max_examples=50)
def test_divided_prompts_still_hold_their_divided_blocks(prompt_tokens: int, block_tokens: int, by: float):
    count = prompt_tokens // block_tokens
    whole = trace(asked(prompt_tokens=prompt_tokens, blocks=tuple(range(count))), block_tokens=block_tokens)
    played = as_played(whole, divide_prompt=by)
    assert played.prompt_tokens[0] == max(1, int(prompt_tokens / by))
    if played.prefixes is not None and block_tokens >= by:
        assert len(played.prefixes.of(0)) * played.prefixes.block_tokens <= played.prompt_tokens[0]


def test_answers_are_divided_and_callers_leave_after_as_much_less():
    whole = trace(asked(output_tokens=40, leaves_after=20), asked(output_tokens=40))
    played = as_played(whole, divide_output=4.0)
    assert played.output_tokens.tolist() == played.max_tokens.tolist() == [10, 10]
    assert played.leaves_after.tolist() == [5, 0]


def test_what_is_changed_is_noted():
    notes = as_played(trace(asked()), speed=2.0, divide_prompt=8.0, divide_output=4.0).notes
    assert [word in " ".join(notes) for word in ("2 times as fast", "divided by 8", "divided by 4")] == [True] * 3


def test_some_requests_of_a_trace_keep_their_own_columns_and_blocks():
    whole = trace(asked(0.0, blocks=(1,)), asked(1.0, blocks=(2, 3)), asked(2.0), asked(3.0, blocks=(4,)))
    outcomes = Outcomes.of_size(4)
    outcomes.tokens[:] = (10, 11, 12, 13)
    kept, theirs = only(whole, outcomes, np.array([1, 3]))
    assert kept.arrival_s.tolist() == [1.0, 3.0]
    assert theirs.tokens.tolist() == [11, 13]
    assert kept.prefixes is not None
    assert [kept.prefixes.of(i).tolist() for i in (0, 1)] == [[2, 3], [4]]
