"""A prompt's ids as the text that spells them, for engines whose server takes text.

Such a server reads the names of control tokens in the text as control tokens, the chat template's and a caller's alike.
So a prompt whose plain text holds such a name is refused: it would mean something else there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from laneway.runtime.tokenizer import Tokenizer


class NotText(ValueError):
    """No text means to a server what these ids mean; the message says why."""


def prompt_text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Without the begin mark that the server's tokenizer adds by itself, as the pool's does. Raises NotText."""
    names = tokenizer.control_names
    begin = tokenizer.encode("")
    rest = ids[len(begin) :] if list(ids[: len(begin)]) == begin else ids
    parts: list[str] = []
    plain = bytearray()
    for token_id in rest:
        name = names.get(token_id)
        if name is None:
            plain += tokenizer.token_bytes(token_id)
        else:
            parts += (_checked(plain, names.values()), name)
            plain.clear()
    return "".join((*parts, _checked(plain, names.values())))


def _checked(plain: bytes | bytearray, names: Iterable[str]) -> str:
    try:
        text = plain.decode()
    except UnicodeDecodeError:
        raise NotText("the prompt ends or breaks within a character, and the engine's server takes text") from None
    if any(name in text for name in names):
        raise NotText("the prompt's text holds the name of a control token, which the engine's server would obey")
    return text
