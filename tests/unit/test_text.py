"""Text from token ids: whole characters, stop strings across tokens, and no difference that the splitting makes."""

import random
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from laneway.workers.text import TextAssembler

ONE_BYTE = [bytes([b]) for b in range(256)]


def reference(raw: bytes, stop: list[str]) -> str:
    """The whole output decoded at once and cut at the match that ends first, the longest of those."""
    text = raw.decode(errors="replace")
    ends = [(at + len(s), at) for s in stop for at in range(len(text)) if text.startswith(s, at)]
    return text[: min(ends)[1]] if ends else text


def tokens_of(raw: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted({c % (len(raw) + 1) for c in cuts}), len(raw)]
    return [raw[a:b] for a, b in pairwise(borders)]


def assemble(tokens: list[bytes], stop: list[str], steps: list[int] | None = None) -> tuple[str, list[int], int]:
    """Joined text, lengths with the flushed rest at the last token, and tokens used."""
    assembler = TextAssembler(tokens.__getitem__, stop)
    text, lengths, used, at = "", [], 0, 0
    sizes = iter(steps or [])
    while at < len(tokens) and not assembler.stopped:
        size = next(sizes, 1)
        out = assembler.feed(range(at, min(at + size, len(tokens))))
        assert len(out.text) == sum(out.lengths)
        assert len(out.lengths) == out.used
        text += out.text
        lengths += out.lengths
        used += out.used
        at += size
    rest = assembler.flush()
    if rest:
        lengths[-1] += len(rest)
    return text + rest, lengths, used


ALPHABET = st.sampled_from(["a", "b", " ", "ab", "é", "漢", "👩‍👩‍👧", "�"])
TEXTS = st.lists(ALPHABET, max_size=12).map("".join)
STOPS = st.lists(st.lists(ALPHABET, min_size=1, max_size=3).map("".join), max_size=3)


@given(TEXTS, STOPS, st.lists(st.integers(0, 200), max_size=30), st.lists(st.integers(1, 5), max_size=30))
@example("abab", ["ba", "abab"], [1, 2, 3], [])
@example("aab", ["ab"], [1, 2], [])
def test_a_stream_equals_the_whole_output_however_it_was_cut(text, stop, cuts, steps):
    tokens = tokens_of(text.encode(), cuts)
    joined, lengths, used = assemble(tokens, stop, steps)
    assert joined == reference(text.encode(), stop)
    assert sum(lengths) == len(joined)
    assert len(lengths) == used <= len(tokens)


@given(st.binary(max_size=40), STOPS, st.lists(st.integers(0, 200), max_size=30))
def test_bytes_that_are_no_text_are_replaced_as_in_the_whole_output(raw, stop, cuts):
    joined, _, _ = assemble(tokens_of(raw, cuts), stop)
    assert joined == reference(raw, stop)


@pytest.mark.parametrize("text", ["👩‍👩‍👧", "Привет", "漢字", "naïve"])
def test_no_replacement_character_ever_leaves_for_sound_text(text):
    assembler = TextAssembler(ONE_BYTE.__getitem__)
    chunks = [assembler.feed([b]).text for b in text.encode()]
    assert "".join(chunks) + assembler.flush() == text
    assert not any("�" in c for c in chunks)
    assert not assembler.holding


def test_an_unfinished_character_at_the_end_becomes_one_replacement_character():
    assembler = TextAssembler(ONE_BYTE.__getitem__)
    assert assembler.feed(list(b"a\xe6\xbc")).text == "a"
    assert assembler.holding
    assert assembler.flush() == "�"
    assert assembler.flush() == ""


def test_a_stop_string_of_several_tokens_never_leaks():
    words = [b" delta", b" epsilon", b" zeta", b" eta", b" theta", b" iota"]
    assembler = TextAssembler(words.__getitem__, [" zeta eta theta"])
    out = [assembler.feed([i]) for i in range(6)]
    assert [o.text for o in out] == [" delta", " epsilon", "", "", "", ""]
    assert [o.stopped for o in out] == [False, False, False, False, True, True]
    assert out[4].used == 1
    assert out[5].used == 0
    assert assembler.flush() == ""


def test_a_tail_that_can_no_longer_become_a_stop_string_is_given_out_at_once():
    words = [b"one", b" END", b"ING"]
    assembler = TextAssembler(words.__getitem__, [" END."])
    assert [assembler.feed([i]).text for i in range(3)] == ["one", "", " ENDING"]


def test_the_first_of_several_stop_strings_in_one_token_counts():
    assembler = TextAssembler([b"x", b"abcd"].__getitem__, ["cd", "b", "bc"])
    out = assembler.feed([0, 1, 0])
    assert (out.text, out.lengths, out.stopped, out.used) == ("xa", [1, 1], True, 2)


def test_held_text_counts_to_the_token_that_made_it_final():
    words = [b"a", b"st", b"o", b"x"]
    assembler = TextAssembler(words.__getitem__, ["stop"])
    assert assembler.feed([0, 1, 2, 3]).lengths == [1, 0, 0, 4]


def test_what_is_held_is_given_out_at_the_end():
    assembler = TextAssembler([b"sto"].__getitem__, ["stop"])
    assert assembler.feed([0]).text == ""
    assert assembler.holding
    assert assembler.flush() == "sto"


def test_control_tokens_have_no_text():
    assembler = TextAssembler({0: b"a", 1: b"", 2: b"b"}.__getitem__)
    assert assembler.feed([0, 1, 2]).lengths == [1, 0, 1]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        TextAssembler(ONE_BYTE.__getitem__, [""])


def test_the_longest_allowed_stop_strings_hold_no_more_than_they_must():
    stop = ["a" * 255 + str(i) for i in range(10)]
    rng = random.Random(5)
    raw = "".join(rng.choice("ab") for _ in range(2000)) + "a" * 300 + "3" + "tail"
    joined, _, _ = assemble([c.encode() for c in raw], stop)
    assert joined == reference(raw.encode(), stop)
