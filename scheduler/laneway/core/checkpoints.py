"""Checkpoints as values: what attempts wrote of their tokens, and the longest prefix of one run that this amounts to.

Deltas may be lost or repeated, and a worker that was taken for dead may go on writing. The lineage of the record says
what counts: of an attempt only what lies before the start of the next one that has begun. An attempt that goes on with
tokens which no delta holds, because a door handed them over, writes them itself before its own. What it says of tokens
before its start is what it went on from, and so it overrules older attempts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from msgspec import Struct

from laneway.core.job import Attempt, TokenLogprob, has_begun

UNKNOWN = TokenLogprob(math.nan)  # of a token whose log probability nobody can tell any more


class Delta(Struct, frozen=True):
    """One checkpoint message: tokens from_index .. of an attempt."""

    attempt: int
    from_index: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each id, or none


class Prefix(Struct, frozen=True):
    """The beginning of one run: ids 0 .. len."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each id, or none where none is known

    def __len__(self) -> int:
        return len(self.ids)


class Span(Struct, frozen=True):
    """The deltas that count of one attempt: those that begin before `end`."""

    attempt: int
    owner: str
    start: int
    end: float  # infinite for the last that has begun


def spans(lineage: Iterable[Attempt]) -> list[Span]:
    """Of the attempts that have begun, in order. One that has not begun wrote nothing that counts, and ends nothing."""
    begun = [each for each in lineage if has_begun(each)]
    return [
        Span(each.attempt, each.owner, each.start_index, following.start_index if following is not None else math.inf)
        for each, following in zip_longest(begun, begun[1:])
    ]


def longest_prefix(lineage: Iterable[Attempt], deltas: Iterable[Delta]) -> Prefix:
    """What the deltas hold of the run that the last begun attempt was in, without a gap from its first token on."""
    by_attempt: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_attempt.setdefault(delta.attempt, []).append(delta)
    prefix = _Growing()
    for span in spans(lineage):
        prefix.cut(span.start)
        for delta in sorted(by_attempt.get(span.attempt, ()), key=lambda delta: delta.from_index):
            if delta.from_index > len(prefix.ids):
                break
            prefix.lay(delta)
    return prefix.prefix()


class _Growing:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def cut(self, length: int) -> None:
        del self.ids[length:], self._logprobs[length:]

    def lay(self, delta: Delta) -> None:
        """Over what is there already: a repetition changes nothing, another run takes the place of what follows."""
        start = delta.from_index
        known = self.ids[start:]
        if known[: len(delta.ids)] != list(delta.ids[: len(known)]):
            self.cut(start)
            known = []
        logprobs: Sequence[TokenLogprob] = delta.logprobs or [UNKNOWN] * len(delta.ids)
        for at, logprob in enumerate(logprobs[: len(known)], start):
            if math.isnan(self._logprobs[at].logprob):
                self._logprobs[at] = logprob
        self.ids.extend(delta.ids[len(known) :])
        self._logprobs.extend(logprobs[len(known) :])

    def prefix(self) -> Prefix:
        known = any(not math.isnan(each.logprob) for each in self._logprobs)
        return Prefix(tuple(self.ids), tuple(self._logprobs) if known else ())
