"""Text that comes in pieces becomes ids that spell it exactly, however it was cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Bpe
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from laneway.core.errors import InvalidRequest
from laneway.core.prompt import ChatTurn
from laneway.runtime.gguf_tokenizer import _BYTE_OF, BpeTokenizer
from laneway.runtime.tokenizer import Tokenizer, load_tokenizer
from laneway.workers.engines.text_ids import SEGMENT_CHARACTERS, NotSpelled, Spelling, TextIds, segment_end
from laneway.workers.text import TextAssembler

NAMES = ("bytes", "smollm2")
SPELLINGS = {name: Spelling(load_tokenizer(name)) for name in NAMES}
each_tokenizer = pytest.mark.parametrize("name", NAMES)

PARTS = st.sampled_from(
    [
        "a",
        "The",
        " road",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "1",
        "234",
        "'s",
        "—",
        "é",
        "e\u0301",
        "漢字",
        "👩‍👩‍👧",
        "\ufffd",
        "<|im_end|>",
    ]
)
TEXTS = st.one_of(st.lists(PARTS, max_size=40).map("".join), st.text())
CUTS = st.lists(st.integers(0, 400), max_size=30)


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    borders = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


def chunks_of(spelling: Spelling, pieces: Sequence[str]) -> list[list[int]]:
    ids = TextIds(spelling)
    return [*(ids.feed(piece) for piece in pieces), ids.end()]


def joined(chunks: Sequence[Sequence[int]]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk]


def assembled(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]]) -> str:
    """As a worker makes text of an engine's ids."""
    assembler = TextAssembler(tokenizer.token_bytes)
    return "".join(assembler.feed(chunk).text for chunk in chunks) + assembler.flush()


@each_tokenizer
@given(text=TEXTS, cuts=CUTS)
@example(text="a" * (3 * SEGMENT_CHARACTERS), cuts=[1, SEGMENT_CHARACTERS, SEGMENT_CHARACTERS + 1])
@example(text="👩‍👩‍👧" * SEGMENT_CHARACTERS, cuts=[1, 2, 3])
def test_the_text_of_the_ids_is_the_text_that_came_and_no_cut_shows_in_them(name, text, cuts):
    spelling, tokenizer = SPELLINGS[name], load_tokenizer(name)
    try:
        tokenizer.encode(text)
    except InvalidRequest:  # smollm2 lacks bytes; no text of the model has them
        with pytest.raises(NotSpelled):
            chunks_of(spelling, pieces_of(text, cuts))
        return
    chunks = chunks_of(spelling, pieces_of(text, cuts))
    assert assembled(tokenizer, chunks) == text
    assert joined(chunks) == joined(chunks_of(spelling, [text]))


WORDS = st.lists(
    st.sampled_from(["The", "road", "x1", "12", "it's", "漢字", "naïve,", "(a)", "end.\nNew", "on\n\nPart", "…"]),
    min_size=1,
)


@each_tokenizer
@given(words=WORDS, cuts=CUTS)
def test_the_ids_of_words_with_spaces_between_are_those_of_the_whole_text(name, words, cuts):
    text = " ".join(words)
    chunks = chunks_of(SPELLINGS[name], pieces_of(text, cuts))
    assert joined(chunks) == load_tokenizer(name).encode(text)


def test_a_word_is_given_out_when_the_next_one_begins():
    ids = TextIds(SPELLINGS["bytes"])
    fed = [bytes(ids.feed(piece)).decode() for piece in ("The", " ro", "ad", " ", "is", " long")]
    assert [*fed, bytes(ids.end()).decode()] == ["", "The", "", "", " road", " is", " long"]


def test_a_text_without_spaces_is_not_held_for_ever():
    ids, given_out = TextIds(SPELLINGS["bytes"]), 0
    for n, character in enumerate("字" * 100, 1):
        given_out += len(bytes(ids.feed(character)).decode())
        assert n - given_out <= SEGMENT_CHARACTERS


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("", 0),
        ("a b", 1),
        ("a ", 0),
        (" a", 0),
        (" a b", 2),
        ("a  b", 0),
        ("a\n b c", 4),
        ("x" * SEGMENT_CHARACTERS, 0),
        ("x" * (SEGMENT_CHARACTERS + 1), SEGMENT_CHARACTERS),
        ("x" * (SEGMENT_CHARACTERS - 1) + " y", SEGMENT_CHARACTERS - 1),
        ("x" * SEGMENT_CHARACTERS + " y", SEGMENT_CHARACTERS),
    ],
)
def test_where_a_segment_ends(text, end):
    assert segment_end(text) == end


@given(text=st.text(), cuts=CUTS)
def test_halves_of_surrogate_pairs_are_joined_wherever_they_were_cut(text, cuts):
    halves = text.encode("utf-16-le", "surrogatepass")
    units = "".join(chr(int.from_bytes(halves[i : i + 2], "little")) for i in range(0, len(halves), 2))
    chunks = chunks_of(SPELLINGS["bytes"], pieces_of(units, cuts))
    assert bytes(joined(chunks)).decode() == text


@pytest.mark.parametrize("pieces", [["\ud83d"], ["a\ud83d", "b"], ["x\ude00"], ["\ud83d", "\ud83d", "\ude00"]])
def test_half_a_pair_alone_is_no_character(pieces):
    text = bytes(joined(chunks_of(SPELLINGS["bytes"], pieces))).decode()
    assert text.count("\ufffd") == 1


class TestTokenizersThatChangeText:
    """Some compose characters, or lack bytes."""

    def tokenizer(self, missing: str = "") -> BpeTokenizer:

        tokens = [c for c in _BYTE_OF if c not in missing]
        encoder = Bpe(BPE({c: i for i, c in enumerate(tokens)}, []))
        encoder.normalizer = normalizers.NFC()
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoder.decoder = decoders.ByteLevel()
        begin = len(tokens)
        return BpeTokenizer(
            encoder,
            [*(bytes([_BYTE_OF[c]]) for c in tokens), b""],
            {"<s>": begin},
            frozenset({begin}),
            None,
            bos_id=begin,
        )

    @pytest.mark.parametrize("text", ["cafe\u0301 au lait", "\u212b", "\u0958 x"])
    def test_a_text_that_the_tokenizer_would_compose_comes_as_it_was(self, text):
        tokenizer = self.tokenizer()
        assert tokenizer.encode(text) != Spelling(tokenizer).ids(text)
        assert b"".join(map(tokenizer.token_bytes, Spelling(tokenizer).ids(text))).decode() == text

    def test_a_begin_mark_is_not_among_the_ids(self):
        tokenizer = self.tokenizer()
        ids = Spelling(tokenizer).ids("a b")
        assert tokenizer.encode("a b") == [tokenizer.vocabulary_size - 1, *ids]

    def test_a_character_that_it_cannot_spell_is_named_and_the_others_are_spelled(self):
        tokenizer = self.tokenizer(missing="\u0101")  # stands for the byte 1
        with pytest.raises(NotSpelled, match="U\\+0001"):
            Spelling(tokenizer).ids("a\x01b")


def test_names_of_control_tokens_in_a_text_are_text():
    tokenizer = load_tokenizer("smollm2")
    control = {i for i in tokenizer.encode_chat([ChatTurn("user", "x")]) if not tokenizer.token_bytes(i)}
    assert control
    assert not control & set(SPELLINGS["smollm2"].ids("<|im_start|><|im_end|>"))
