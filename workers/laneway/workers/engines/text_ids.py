"""Text into ids of a pool's tokenizer, as it comes: for engines whose server gives text and no ids.

The ids spell exactly the text that came, byte for byte, and do not depend on how it was cut into pieces. For that it is
taken in segments that are a matter of the text alone: each ends before a space between two other characters, where the
tokenizers that we read split text before they encode it, so that the ids are those of the whole text; or after
`SEGMENT_CHARACTERS`, as in Chinese, where they may be others. What is not yet a segment is held back.
"""

from __future__ import annotations

from laneway.core.errors import InvalidRequest
from laneway.runtime.tokenizer import Tokenizer

# Few words are longer; so much is seen in one go of a text without spaces, where ten to twenty tokens come together.
SEGMENT_CHARACTERS = 24


class NotSpelled(ValueError):
    """The tokenizer has no ids for a character; the message names it."""


class Spelling:
    """The ids of a text in one tokenizer. Its texts are whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._by_byte: dict[int, int] | None = None

    def ids(self, text: str) -> list[int]:
        """Ids whose bytes are those of the text. Raises NotSpelled."""
        return self._encoded(text) or [token_id for character in text for token_id in self._character(character)]

    def _encoded(self, text: str) -> list[int]:
        """As the tokenizer has them; empty if it would change the text (to composed characters, say)."""
        try:
            ids = self._tokenizer.encode(text)
        except InvalidRequest:
            return []
        pieces = [(token_id, self._tokenizer.token_bytes(token_id)) for token_id in ids]
        if b"".join(piece for _, piece in pieces) != text.encode():
            return []
        return [token_id for token_id, piece in pieces if piece]  # without a begin mark

    def _character(self, character: str) -> list[int]:
        ids = self._encoded(character)
        if ids:
            return ids
        by_byte = self._bytes()
        try:
            return [by_byte[byte] for byte in character.encode()]
        except KeyError:
            raise NotSpelled(f"U+{ord(character):04X}") from None

    def _bytes(self) -> dict[int, int]:
        """The ids of single bytes."""
        if self._by_byte is None:
            pieces = ((i, self._tokenizer.token_bytes(i)) for i in range(self._tokenizer.vocabulary_size))
            self._by_byte = {piece[0]: i for i, piece in pieces if len(piece) == 1}
        return self._by_byte


class TextIds:
    """The ids of one text that comes in pieces. `end` after the last one."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._held = ""
        self._half = ""  # the first half of a surrogate pair, as JSON may cut one

    def feed(self, piece: str) -> list[int]:
        """What one more piece made certain. Raises NotSpelled."""
        self._held += self._whole(piece)
        ids: list[int] = []
        while end := segment_end(self._held):
            ids += self._spelling.ids(self._held[:end])
            self._held = self._held[end:]
        return ids

    def end(self) -> list[int]:
        """The rest. Raises NotSpelled."""
        rest = self._held + ("\ufffd" if self._half else "")
        self._held = self._half = ""
        return self._spelling.ids(rest)

    def _whole(self, piece: str) -> str:
        """Its whole characters; half a pair that has no other half becomes U+FFFD."""
        piece = self._half + piece
        self._half = piece[-1] if piece and "\ud800" <= piece[-1] <= "\udbff" else ""
        whole = piece[:-1] if self._half else piece
        return whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def segment_end(text: str) -> int:
    """Where the first segment of a text ends, whatever follows the text; 0 where that is not certain yet."""
    for at in range(1, min(len(text) - 1, SEGMENT_CHARACTERS)):
        if text[at] == " " and not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return SEGMENT_CHARACTERS if len(text) > SEGMENT_CHARACTERS else 0
