"""Text of a wanted number of tokens for each request of a trace; requests that share blocks share text.

A prompt is made of pieces that are one token each: letters for a tokenizer of bytes, common words elsewhere. Which of
the two, and how many tokens the tokenizer puts before a text by itself, is found out by asking the door for quotes; it
is the door that counts, so no tokenizer is loaded here. What the answers say of the prompts' lengths is compared with
the trace all the same (see `notes.py`).

The text of a block follows from its id and a salt, that of the rest of a prompt from the request's number and another:
the shared part is known to the caches from an earlier pass where the salt is the same, a request's own part never is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache

from laneway.simulator.trace import Trace

LETTERS = "abcdefghijklmnopqrstuvwxyz012345"  # no two join to one token where a token is a byte
# 64 words, each one token with the space before it in the usual vocabularies of words; find_pieces looks.
WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said "
    "what its about than into them can only other time new some"
)
WARM_SALT = "laneway replay"
QUOTED_TWICE = (16, 64)  # pieces of the two texts whose lengths are compared; the longer has all of them

Quote = Callable[[str], Awaitable[int]]  # tokens of a text, as the door counts them


@dataclass(frozen=True, slots=True)
class Pieces:
    """What prompts are made of."""

    of_byte: tuple[str, ...]  # 256: what each value of a byte is written as
    before_tokens: int = 0  # that the tokenizer puts before every text
    exact: bool = True  # every piece was counted as one token

    def text(self, drawn: bytes) -> str:
        return "".join(map(self.of_byte.__getitem__, drawn))


def letters() -> Pieces:
    return Pieces(tuple(LETTERS[i % len(LETTERS)] for i in range(256)))


def words() -> Pieces:
    known = WORDS.split()
    return Pieces(tuple(" " + known[i % len(known)] for i in range(256)))


async def find_pieces(quote: Quote) -> Pieces:
    """Pieces that the pool's tokenizer counts as one token each; `exact` is False where neither kind is."""
    fewer, more = QUOTED_TWICE
    found = words()
    for pieces in (letters(), found):
        less_tokens = await quote(pieces.text(bytes(range(fewer))))
        more_tokens = await quote(pieces.text(bytes(range(more))))
        if more_tokens - less_tokens == more - fewer:
            return Pieces(pieces.of_byte, before_tokens=less_tokens - fewer)
    return Pieces(found.of_byte, exact=False)


class Prompts:
    """The prompts of one pass over a trace."""

    def __init__(self, trace: Trace, pieces: Pieces, *, block_salt: str, own_salt: str) -> None:
        self._trace = trace
        self._pieces = pieces
        self._block_salt, self._own_salt = block_salt, own_salt
        self.text = lru_cache(8)(self._text)  # it is made before its time comes, and asked for again then

    def _text(self, request: int) -> str:
        """Of as many tokens as the trace says, at least one of its own."""
        wanted = max(1, int(self._trace.prompt_tokens[request]) - self._pieces.before_tokens)
        prefixes = self._trace.prefixes
        drawn: list[bytes] = []
        if prefixes is not None:
            blocks = prefixes.of(request)[: -(-wanted // prefixes.block_tokens)]
            drawn = [_draw(f"{self._block_salt}/block/{block}", prefixes.block_tokens) for block in blocks.tolist()]
        own = wanted - sum(map(len, drawn))
        if own > 0:
            drawn.append(_draw(f"{self._own_salt}/request/{request}", own))
        return self._pieces.text(b"".join(drawn)[:wanted])


def _draw(seed: str, pieces: int) -> bytes:
    return hashlib.shake_128(seed.encode()).digest(pieces)
