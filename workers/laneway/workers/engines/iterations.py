"""What an engine says of its iterations, where that comes apart from the ids they gave: how it is told of.

A worker takes the difference between two reports whose `steps` differ by one for what one step did with the batch that
the first of them told of (see EngineStats). So an iteration is counted as a step by itself only where it decoded as
many sequences as were told of last. Of any other the sums are told at once, and its step together with the next one:
nothing is told of twice, and nobody learns from what was no step of the batch he knew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SILENT_REPORTS = 8  # without an iteration; from then on they count as steps themselves


@dataclass(frozen=True, slots=True)
class Iteration:
    length_s: float
    decoding: int  # sequences that it decoded
    prompt_tokens: int  # that it computed


class Iterations:
    """Counts since the start, as told so far."""

    def __init__(self) -> None:
        self.steps = 0
        self.busy_s = 0.0
        self.prefilled_tokens = 0
        self.decoded_tokens = 0
        self._heard: list[Iteration] = []
        self._owed = 0
        self._silent = 0

    def hear(self, iterations: Iterable[Iteration]) -> None:
        self._heard += iterations

    def tell(self, decoding: int, new_tokens: int) -> None:
        """A report is made: `decoding` as the one before it said, `new_tokens` with this one."""
        heard, self._heard = self._heard, []
        self.decoded_tokens += new_tokens
        self.busy_s += sum(each.length_s for each in heard)
        self.prefilled_tokens += sum(each.prompt_tokens for each in heard)
        if not heard:  # old versions tell of none for a while: an engine whose steps stand still is taken for hung
            self._silent += 1
            self.steps += self._silent > SILENT_REPORTS
            return
        self._silent = 0
        self._owed += len(heard)
        if self._owed > 1 or heard[0].decoding == decoding:
            self.steps += self._owed
            self._owed = 0
