"""Token ids to text, as they come: whole characters only, and stop strings found across token borders.

The text of a run does not depend on how its bytes were cut into tokens, nor on how the tokens were cut into steps: the
chunks joined equal the whole output decoded at once and cut at its first stop string. *First* is the match that ends
first, and of those ending at the same character the longest, since that is the one a stream can honour.

What is held back: the bytes of an unfinished character, and a tail that may still become a stop string; nothing else.
Bytes that can be no UTF-8 become U+FFFD, an unfinished character does so only when the output ends with it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from msgspec import Struct


class Assembled(Struct, frozen=True):
    """What some tokens made final."""

    text: str
    lengths: list[int]  # characters that became final with each token taken, in order
    stopped: bool  # a stop string is complete; the text ends before it and nothing more is taken
    used: int  # tokens taken: all, or those up to and including the one that completed the stop string


class TextAssembler:
    """The text of one output. Fed with every id of it once, in order; `flush` at its end."""

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        if not all(stop):
            raise ValueError("a stop string is empty")
        self._token_bytes = token_bytes
        self._stop = tuple(stop)
        self._hold_length_max = max((len(s) for s in self._stop), default=1) - 1
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = False  # the decoder holds the beginning of a character
        self._held = ""
        self._stopped = False

    def feed(self, ids: Sequence[int]) -> Assembled:
        if self._stopped:
            return Assembled("", [], True, 0)
        parts: list[str] = []
        for token_id in ids:
            parts.append(self.feed_one(token_id))
            if self._stopped:
                break
        return Assembled("".join(parts), [len(part) for part in parts], self._stopped, len(parts))

    def feed_one(self, token_id: int) -> str:
        """What one more token made final; for the usual step. Not called after a stop."""
        data = self._token_bytes(token_id)
        if not self._partial and data.isascii():  # most tokens
            text = data.decode("ascii")
        else:
            text = self._decoder.decode(data)
            self._partial = bool(self._decoder.getstate()[0])
        return self._until_stop(text) if self._stop and text else text

    def flush(self) -> str:
        """The rest of the output; it became final with the last token. Empty after a stop."""
        if self._stopped:
            return ""
        text = self._decoder.decode(b"", True)
        if self._stop:
            text = self._until_stop(text)
        if not self._stopped:
            text += self._held
            self._held = ""
        return text

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete; also true when `flush` completed it."""
        return self._stopped

    @property
    def holding(self) -> bool:
        """Whether some of what was fed is not final text yet."""
        return self._partial or self._held != ""

    def _until_stop(self, text: str) -> str:
        """What of the held text and `text` is final now; keeps the rest."""
        text = self._held + text
        start = _first_match(text, self._stop)
        if start is not None:
            self._stopped = True
            self._held = ""
            return text[:start]
        keep_from = self._unfinished_stop(text)
        self._held = text[keep_from:]
        return text[:keep_from]

    def _unfinished_stop(self, text: str) -> int:
        """Where the longest tail begins that is the beginning of a stop string; the length of text if none."""
        for start in range(max(0, len(text) - self._hold_length_max), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                return start
        return len(text)


def _first_match(text: str, stop: Sequence[str]) -> int | None:
    """Start of the match that ends first; of several ending there, of the longest."""
    found = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    return min(found)[1] if found else None
