"""Log probabilities of a server's tokens for the ids that were made of its text, where the two cut it differently.

The log probability of a token goes to the id in which its text begins; an id in which none begins was certain by then,
and has 0. So the sum over an answer is the server's, up to the end of the ids that were taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class LogprobSpread:
    """Places are bytes of the answer."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[int, float]] = deque()  # where each begins, not laid onto an id yet
        self._text_end = 0
        self._ids_end = 0

    def begin(self, logprobs: Iterable[float]) -> None:
        """Tokens that begin where the text ends now; their text follows, if they have any."""
        self._tokens += [(self._text_end, logprob) for logprob in logprobs]

    def lengthen(self, text_bytes: int) -> None:
        self._text_end += text_bytes

    def take(self, id_bytes: int) -> float:
        """Of the next id."""
        self._ids_end += id_bytes
        total = 0.0
        while self._tokens and self._tokens[0][0] < self._ids_end:
            total += self._tokens.popleft()[1]
        return total
