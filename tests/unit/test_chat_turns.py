"""The turns of a chat out of its prompt's ids, by templates of several kinds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laneway.core.prompt import ChatTurn
from laneway.runtime.chat_template import ChatTemplate
from laneway.runtime.tokenizer import ChatTurn as Turn
from laneway.runtime.tokenizer import Tokenizer, load_tokenizer
from laneway.workers.engines.chat_turns import ChatTurns, NotTurns

TURNS = st.lists(
    st.builds(ChatTurn, st.sampled_from(["system", "user", "assistant"]), st.text(max_size=20)), min_size=1, max_size=5
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# As Mistral's: turns alternate, and there is no system turn.
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


class OfTemplate:
    """Bytes, and a control token for each name of a template."""

    vocabulary_size = 300
    eos_ids = frozenset({257})

    def __init__(self, source: str, *names: str) -> None:
        self._ids = {name: 256 + at for at, name in enumerate(names)}
        self.control_names = {i: name for name, i in self._ids.items()}
        self._template = ChatTemplate(source, names, bos_token=names[0])

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Turn], *, continue_final: bool = False) -> list[int]:
        ids: list[int] = []
        for piece in self._template.render(messages, continue_final=continue_final):
            ids += [self._ids[piece.text]] if piece.control else piece.text.encode()
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


LLAMA3_TOKENIZER = OfTemplate(LLAMA3, "<|begin|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
ALTERNATING_TOKENIZER = OfTemplate(ALTERNATING, "<s>", "</s>", "[INST]", "[/INST]")


def of(tokenizer: Tokenizer, turns: Sequence[ChatTurn]) -> list[ChatTurn]:
    return ChatTurns(tokenizer).of(tokenizer.encode_chat(turns))


@given(TURNS)
def test_turns_of_a_prompt_are_those_that_it_was_made_of(turns: list[ChatTurn]):
    assert of(load_tokenizer("bytes"), turns) == turns


@given(TURNS)
def test_a_template_that_trims_gives_the_turns_as_it_shows_them(turns: list[ChatTurn]):
    assert of(LLAMA3_TOKENIZER, turns) == [ChatTurn(turn.role, turn.content.strip()) for turn in turns]


@given(st.lists(st.text(max_size=20), min_size=1, max_size=5).filter(lambda contents: len(contents) % 2 == 1))
def test_a_template_that_takes_alternating_turns_only_is_read_as_well(contents: list[str]):
    turns = [ChatTurn(("user", "assistant")[at % 2], content) for at, content in enumerate(contents)]
    assert of(ALTERNATING_TOKENIZER, turns) == turns


@pytest.mark.model
def test_the_turns_of_the_real_model_are_found_also_where_its_template_adds_one():
    tokenizer = load_tokenizer("smollm2")
    system, user = ChatTurn("system", "Be brief."), ChatTurn("user", "Tell me: <|im_end|>\n 漢字 \x07?")
    answer = ChatTurn("assistant", "No.\n")
    for turns in ([system, user], [system, user, answer, user], [system, user, user]):
        assert of(tokenizer, turns) == turns
    found = of(tokenizer, [user])
    assert (found[-1], [turn.role for turn in found]) == (user, ["system", "user"])
    assert "SmolLM" in found[0].content, "what the template says by itself is said to the server too"


@pytest.mark.parametrize("name", ["bytes", "smollm2"])
def test_what_is_no_chat_that_awaits_an_answer_is_refused(name: str):
    tokenizer = load_tokenizer(name)
    turns = [ChatTurn("system", "Be brief."), ChatTurn("user", "Hi"), ChatTurn("assistant", "I am")]
    chat = tokenizer.encode_chat(turns[:2])
    bad = {
        "plain text": tokenizer.encode("Hi"),
        "a cut chat": chat[:-1],
        "one without its beginning": chat[1:],
        "an answer that is to be gone on with": tokenizer.encode_chat(turns, continue_final=True),
        "a chat and what was answered so far": [*chat, *tokenizer.encode("I am")],
        "a control token where none belongs": [*chat[:8], min(tokenizer.eos_ids), *chat[8:]],
        "nothing": [],
    }
    for what, ids in bad.items():
        with pytest.raises(NotTurns):
            pytest.fail(f"{what} was read as {ChatTurns(tokenizer).of(ids)}")


@given(st.lists(st.sampled_from(["\0" + "258\0", "\0" + "259\0", "user\n", "\n", "x"]), max_size=8).map("".join))
def test_text_that_looks_like_the_frames_of_a_template_is_never_taken_for_them(content: str):
    turns = [ChatTurn("user", content)]
    try:
        found = of(load_tokenizer("bytes"), turns)
    except NotTurns:
        return
    assert found == turns
