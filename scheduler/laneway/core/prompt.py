"""What a caller may send as a prompt, before a tokenizer has turned it into ids. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Completed as it is; control tokens in it count as plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation. The content is plain text: what looks like a control token in it is none."""

    role: str  # one of ROLES
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Rendered once with the model's chat template."""

    turns: tuple[ChatTurn, ...]  # at least 1
    continue_final: bool = False  # the last turn is an opening of the answer to go on with


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Taken as it is."""

    ids: tuple[int, ...]  # at least 1


Prompt = TextPrompt | ChatPrompt | TokenPrompt
