"""Which sequences the engine was given, and the KV each may grow to: the worker's own ledger.

A seat is one sequence in the engine. It is taken before the job is submitted and given back only when the engine has
said that the sequence ended, so an abort frees room when the engine is really rid of it. KV is reserved for prompt and
max_tokens at once, in whole blocks, because an engine that runs out of it stops or evicts what already runs. All
numbers are recounts of the live seats.
"""

from __future__ import annotations

from dataclasses import dataclass

from laneway.core.lanes import LANES, Lane
from laneway.workers.engines.protocol import EngineCapacity


@dataclass(eq=False, slots=True)
class Seat:
    """One sequence's slot and KV. Compared by identity."""

    lane: Lane
    kv_tokens: int  # reserved, rounded up to blocks


class Seats:
    """Owns the seats of one engine."""

    def __init__(self, capacity: EngineCapacity, slots: int = 0) -> None:
        """`slots`: fewer than the engine has, where the worker is set so; 0: all."""
        self._capacity = capacity
        self.slots = min(capacity.slots, slots) if slots else capacity.slots
        self._live: set[Seat] = set()

    def __len__(self) -> int:
        return len(self._live)

    def need(self, tokens: int) -> int:
        """KV tokens that a sequence of at most `tokens` reserves."""
        block = self._capacity.block_tokens
        return -(-tokens // block) * block

    @property
    def kv_tokens(self) -> int:
        block = self._capacity.block_tokens
        return self._capacity.kv_tokens // block * block

    @property
    def kv_tokens_used(self) -> int:
        return sum(seat.kv_tokens for seat in self._live)

    @property
    def kv_tokens_free(self) -> int:
        return self.kv_tokens - self.kv_tokens_used

    @property
    def slots_free(self) -> int:
        return self.slots - len(self._live)

    @property
    def context_length(self) -> int:
        return self._capacity.context_length

    @property
    def largest(self) -> int:
        """KV tokens of the largest job that can run here."""
        return self.need(min(self._capacity.context_length, self.kv_tokens))

    def can_ever_fit(self, tokens: int) -> bool:
        return tokens <= self._capacity.context_length and self.need(tokens) <= self.kv_tokens

    def fits(self, tokens: int) -> bool:
        return self.slots_free > 0 and self.need(tokens) <= self.kv_tokens_free

    def take(self, lane: Lane, tokens: int) -> Seat:
        """A seat for a sequence of at most `tokens`. The caller has asked `fits`."""
        assert self.fits(tokens), f"no room for {tokens} tokens"
        seat = Seat(lane, self.need(tokens))
        self._live.add(seat)
        return seat

    def give_back(self, seat: Seat) -> None:
        """Idempotent."""
        self._live.discard(seat)

    def by_lane(self) -> dict[Lane, int]:
        return {lane: sum(seat.lane is lane for seat in self._live) for lane in LANES}
