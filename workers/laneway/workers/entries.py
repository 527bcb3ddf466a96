"""The runs that asked for the engine, and what they come to: how many, how much KV, whose contracts are the tightest.

Counted as it changes: the budget asks several times a step, with as many runs here as the engine has slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from msgspec import Struct

from laneway.core.lanes import Lane
from laneway.workers.prewarm import Entry


class Near(Struct, frozen=True):
    """The tightest contracts of some priority jobs."""

    tpot_target_s: float
    ttft_target_s: float
    strict: bool = False


class Entries:
    """Owned by the budget, told by it of every change."""

    def __init__(self) -> None:
        self.unsent: dict[Entry, None] = {}  # whose real request the engine does not have, in the order of arrival
        self.prefilling: dict[Entry, None] = {}  # without their first token: these too
        self.decoding: dict[Entry, None] = {}
        self.context_tokens = 0  # of those that decode
        self.priority = 0  # jobs
        self.priority_decoding = 0
        self.priority_context = 0
        self.near: Near | None = None  # of priority; None: there is none
        self._contracts: Counter[Near] = Counter()  # of priority

    def __iter__(self) -> Iterator[Entry]:
        return chain(self.prefilling, self.decoding)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self.prefilling or entry in self.decoding

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    # --- changes -------------------------------------------------------------------------------------

    def enter(self, entry: Entry) -> None:
        self.unsent[entry] = self.prefilling[entry] = None
        if entry.lane is Lane.PRIORITY:
            self.priority += 1
            self._contracts[_contract(entry)] += 1
            self._look_near()

    def sent(self, entry: Entry) -> None:
        """The engine was asked for the whole."""
        self.unsent.pop(entry, None)

    def gave(self, entry: Entry, tokens: int) -> None:
        """Tokens of its answer came, and are counted in `entry.made`."""
        if entry in self.decoding:
            self._hold(entry, tokens)
        elif entry in self.prefilling:
            del self.prefilling[entry]
            self.decoding[entry] = None
            self.priority_decoding += entry.lane is Lane.PRIORITY
            self._hold(entry, entry.prompt_tokens + entry.made)

    def leave(self, entry: Entry) -> None:
        self.unsent.pop(entry, None)
        if entry in self.decoding:
            del self.decoding[entry]
            self.priority_decoding -= entry.lane is Lane.PRIORITY
            self._hold(entry, -entry.prompt_tokens - entry.made)
        else:
            del self.prefilling[entry]
        if entry.lane is Lane.PRIORITY:
            self.priority -= 1
            contract = _contract(entry)
            self._contracts[contract] -= 1
            if not self._contracts[contract]:
                del self._contracts[contract]
            self._look_near()

    def _hold(self, entry: Entry, tokens: int) -> None:
        self.context_tokens += tokens
        if entry.lane is Lane.PRIORITY:
            self.priority_context += tokens

    def _look_near(self) -> None:
        each = self._contracts
        self.near = (
            Near(
                min(near.tpot_target_s for near in each),
                min(near.ttft_target_s for near in each),
                any(n.strict for n in each),
            )
            if each
            else None
        )

    # --- what there is -------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether one can go on as soon as it gets a grant."""
        return any(entry.waiting for entry in self.unsent)

    @property
    def next_lower(self) -> Entry | None:
        """Lower-lane prompts go one after the other, whole or in slices, in the order in which they came."""
        return next((entry for entry in self.unsent if entry.lane is not Lane.PRIORITY), None)

    def in_slices(self, but: Entry) -> int:
        """How many others are between their first slice and their real request."""
        return sum(1 for each in self.unsent if each.slices and each is not but)

    def lower_in_flight(self) -> list[Entry]:
        """Lower-lane runs of whose prompt the engine has something to compute."""
        return [entry for entry in self.prefilling if entry.in_flight_tokens and entry.lane is not Lane.PRIORITY]

    def priority_prompt_tokens(self) -> int:
        """Of priority, submitted and not yet computed."""
        return sum(entry.in_flight_tokens for entry in self.prefilling if entry.lane is Lane.PRIORITY)

    def last_slices(self, chunk: int) -> int:
        """Lower-lane runs in slices of which less than a chunk is to come after what is in flight."""
        return sum(
            entry.last_tokens < chunk for entry in self.prefilling if entry.slices and entry.lane is not Lane.PRIORITY
        )


def _contract(entry: Entry) -> Near:
    return Near(entry.tpot_target_s, entry.ttft_target_s, entry.strict)
