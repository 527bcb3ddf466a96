"""Renders a model's chat template so that nothing a caller wrote can become a control token.

The template decides where control tokens stand; the contents do not. Wherever a content spells the name of a control
token, or one half of a name that the template's own text next to it could complete, a separator is put into it: a
character that no content holds. After rendering, the control tokens that are still whole are the template's own. The
text is cut at them, the separators are taken out, and the pieces are encoded as plain text.

Templates come from model files and run in a sandbox that cannot change what it is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from laneway.core.errors import ConfigError, InvalidRequest
from laneway.runtime.tokenizer import PLAIN_ROLES, ChatTurn, check_chat

# Private-use code points: the first two that no message holds become separator and end mark.
SPARE_CHARACTERS = tuple(chr(c) for c in range(0xE000, 0xF8FF))


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of plain text, or one control token by its name."""

    text: str
    control: bool


class ChatTemplate:
    """One model's template. Stateless after construction; usable from several threads."""

    def __init__(self, source: str, control_tokens: Sequence[str], *, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise_exception  # pyright: ignore[reportArgumentType]  # too narrow
        environment.filters["tojson"] = _tojson
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template cannot be read: {error}") from error
        self.roles = (*PLAIN_ROLES, "tool") if re.search(r"""['"]tool['"]""", source) else PLAIN_ROLES
        names = sorted((t for t in control_tokens if t), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names))) if names else None
        self._heads = tuple({name[:n] for name in names for n in range(1, len(name))})
        self._tails = tuple({name[n:] for name in names for n in range(1, len(name))})
        self._specials = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[ChatTurn], *, continue_final: bool = False) -> list[Piece]:
        """Raises InvalidRequest naming the field when the template cannot express the messages."""
        check_chat(messages, self.roles, continue_final=continue_final)
        separator, end_mark = _spare_characters(messages)
        turns = [{"role": m.role, "content": self._broken(m.content, separator)} for m in messages]
        if continue_final:
            turns[-1]["content"] += end_mark
        try:
            text = self._template.render(
                messages=turns, add_generation_prompt=not continue_final, tools=None, documents=None, **self._specials
            )
        except TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error.message or type(error).__name__}",
                field="spec.generate.chat.messages",
                reason="UNSUPPORTED_CHAT",
            ) from None
        if continue_final:
            text, mark, _ = text.partition(end_mark)
            if not mark:
                raise InvalidRequest(
                    "the model's chat template does not show the last message",
                    field="spec.generate.chat.continue_final_message",
                )
        return [Piece(p.text.replace(separator, ""), p.control) for p in self._pieces(text)]

    def _broken(self, content: str, separator: str) -> str:
        if self._control is None:
            return content
        # The search goes on right behind the first character of a name, so that overlapping names break as well.
        at = 0
        while match := self._control.search(content, at):
            at = match.start() + 1
            content = content[:at] + separator + content[at:]
        if content.endswith(self._heads):
            content += separator
        if content.startswith(self._tails):
            content = separator + content
        return content

    def _pieces(self, text: str) -> list[Piece]:
        if self._control is None:
            return [Piece(text, False)]
        pieces: list[Piece] = []
        at = 0
        for match in self._control.finditer(text):
            if match.start() > at:
                pieces.append(Piece(text[at : match.start()], False))
            pieces.append(Piece(match.group(), True))
            at = match.end()
        if at < len(text):
            pieces.append(Piece(text[at:], False))
        return pieces


def _spare_characters(messages: Sequence[ChatTurn]) -> tuple[str, str]:
    spare = (c for c in SPARE_CHARACTERS if not any(c in m.content for m in messages))
    separator, end_mark = next(spare, ""), next(spare, "")
    if not end_mark:
        raise InvalidRequest("the messages use every private-use character", field="spec.generate.chat.messages")
    return separator, end_mark


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
