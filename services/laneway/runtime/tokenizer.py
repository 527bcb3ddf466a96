"""Text to token ids and back, at the door and in the workers: one port, one loader, and the tokenizer of bytes.

Two promises hold for every tokenizer here. Nothing is ever cut: the number of ids is the number the engine will see.
And text of callers stays text: the names of control tokens inside it become ordinary ids; only the chat template puts
control tokens into a prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from laneway.core.errors import ConfigError, InvalidRequest

PLAIN_ROLES = ("system", "user", "assistant")


class ChatTurn(Protocol):
    """One message of a chat prompt, its text parts already joined."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


class Tokenizer(Protocol):
    """Methods are pure and may be called from several threads at once."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        ...

    @property
    def control_names(self) -> Mapping[int, str]:
        """Control tokens and what they are called, as a tokenizer that reads them in a text knows them."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. No control token in it is recognised; a begin mark is added where the model wants one."""
        ...

    def encode_chat(self, messages: Sequence[ChatTurn], *, continue_final: bool = False) -> list[int]:
        """Ids of the rendered chat, ready for the answer.

        With `continue_final` the last message is the opening of the answer. Raises InvalidRequest naming the field
        when the template cannot express the messages.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for; empty for control tokens. ValueError outside the vocabulary."""
        ...


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that a pool names: "bytes", "smollm2", or the path of a GGUF or tokenizer.json file.

    Raises ConfigError saying how to mend it. The same spec gives the same object for the life of the process.
    """
    return _load(spec)


@functools.cache
def _load(spec: str) -> Tokenizer:
    if spec == "bytes":
        return ByteTokenizer()
    from laneway.runtime import gguf_tokenizer, model_files

    if spec == model_files.SMOLLM2.name:
        return gguf_tokenizer.from_gguf(model_files.find(model_files.SMOLLM2))
    if spec.endswith(".gguf"):
        return gguf_tokenizer.from_gguf(Path(spec))
    if spec.endswith(".json"):
        return gguf_tokenizer.from_json(Path(spec))
    raise ConfigError(f'tokenizer = "{spec}": give "bytes", "smollm2", or the path of a .gguf or tokenizer.json file')


BOS, EOS, TURN_START, TURN_END = 256, 257, 258, 259


class ByteTokenizer:
    """One id a byte, then four control ids. For simulated pools: no file, no surprises."""

    vocabulary_size = 260
    eos_ids = frozenset({EOS, TURN_END})
    control_names: Mapping[int, str] = {}  # no text means one

    def encode(self, text: str) -> list[int]:
        return list(utf8(text, "spec.generate.text"))

    def encode_chat(self, messages: Sequence[ChatTurn], *, continue_final: bool = False) -> list[int]:
        check_chat(messages, PLAIN_ROLES, continue_final=continue_final)
        ids: list[int] = []
        for turn in messages:
            ids += [TURN_START, *turn.role.encode(), 0x0A, *turn.content.encode(), TURN_END, 0x0A]
        if continue_final:
            return ids[:-2]
        return [*ids, TURN_START, *b"assistant\n"]

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocabulary_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocabulary_size}")
        return bytes((token_id,)) if token_id < BOS else b""


def utf8(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the text holds half a surrogate pair, which is no character", field=field) from None


def check_chat(messages: Sequence[ChatTurn], roles: Sequence[str], *, continue_final: bool) -> None:
    """Raises InvalidRequest unless there are messages, all of known roles and real text, and the last may go on."""
    if not messages:
        raise InvalidRequest("a chat prompt needs at least one message", field="spec.generate.chat.messages")
    for index, turn in enumerate(messages):
        if turn.role not in roles:
            raise InvalidRequest(
                f"the model's chat template has no such role; it knows {', '.join(roles)}",
                field=message_field(index, "role"),
                reason="UNSUPPORTED_ROLE",
            )
        utf8(turn.content, message_field(index, "parts"))
    if continue_final and messages[-1].role != "assistant":
        raise InvalidRequest(
            "only a last message of the role assistant can be continued",
            field="spec.generate.chat.continue_final_message",
        )


def message_field(index: int, name: str) -> str:
    return f"spec.generate.chat.messages[{index}].{name}"
