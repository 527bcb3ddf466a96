"""Log probabilities as OpenAI-compatible servers tell them: for tokens of theirs, which become ids of the pool's.

Two shapes are about: a list of entries with a token's text, bytes and perhaps id (chat; llama.cpp also in completions),
and lists side by side (completions of OpenAI and vLLM). Both are of the chosen tokens here; alternatives are not asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from laneway.runtime.tokenizer import Tokenizer
from laneway.workers.engines.remote import RemoteRefusal


class Told(Struct, frozen=True):
    token_id: int
    logprob: float


class Vocabulary:
    """Ids by what they spell. Making one reads the whole vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocabulary_size))}

    def bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def id_of(self, token: bytes, said: object) -> int | None:
        """The id that a server gives with it, where that spells it, or the one that spells it; None: there is none."""
        if isinstance(said, int) and 0 <= said < self._tokenizer.vocabulary_size:
            return said if self._tokenizer.token_bytes(said) == token else None
        return self._ids.get(token) if token else None


def told_of(said: object, vocabulary: Vocabulary) -> Iterator[Told]:
    """Of each token that has text. Raises RemoteRefusal."""
    for token, token_id, logprob in _entries(said):
        if not token:
            continue
        found = vocabulary.id_of(token, token_id)
        if found is None:
            raise RemoteRefusal(
                "the server gave a log probability of no token of the pool's: it gives none of parts of characters, "
                "or the pool's tokenizer is not that of its model"
            )
        if not isinstance(logprob, int | float) or not float("-inf") < logprob < 1.0:
            raise RemoteRefusal("the server gave no log probability of a chosen token")
        yield Told(found, min(0.0, float(logprob)))  # a rounding error above 0 is 0


def _entries(said: object) -> Iterator[tuple[bytes, object, object]]:
    if not isinstance(said, Mapping):
        return
    content = said.get("content")
    if isinstance(content, list):
        for each in content:
            if isinstance(each, Mapping):
                yield _bytes_of(each), each.get("id"), each.get("logprob")
        return
    tokens, logprobs = said.get("tokens"), said.get("token_logprobs")
    if isinstance(tokens, list) and isinstance(logprobs, list) and len(tokens) == len(logprobs):
        for token, logprob in zip(tokens, logprobs, strict=True):
            yield _text_bytes(token), None, logprob


def _bytes_of(entry: Mapping[str, Any]) -> bytes:
    raw = entry.get("bytes")
    if isinstance(raw, list) and all(isinstance(byte, int) and 0 <= byte < 256 for byte in raw):
        return bytes(raw)
    return _text_bytes(entry.get("token"))


def _text_bytes(token: object) -> bytes:
    return token.encode(errors="replace") if isinstance(token, str) else b""
