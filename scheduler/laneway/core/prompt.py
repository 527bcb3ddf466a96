"""What a caller may send as a prompt, before a tokenizer has turned it into ids. Pure values."""

from __future__ import annotations

from msgspec import Struct

ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")


class TextPrompt(Struct, frozen=True):
    """Completed as it is; control tokens in it count as plain text."""

    text: str


class ChatTurn(Struct, frozen=True):
    """One message of a conversation. The content is plain text: what looks like a control token in it is none."""

    role: str  # one of ROLES
    content: str


class ChatPrompt(Struct, frozen=True):
    """Rendered once with the model's chat template."""

    turns: tuple[ChatTurn, ...]  # at least 1
    continue_final: bool = False  # the last turn is an opening of the answer to go on with


class TokenPrompt(Struct, frozen=True):
    """Taken as it is."""

    ids: tuple[int, ...]  # at least 1


Prompt = TextPrompt | ChatPrompt | TokenPrompt
