"""Which sequences the engine was given, and the KV that they hold and may come to hold: the worker's own ledger.

A seat is one request in the engine. It is taken before the job is submitted and given back only when the engine has
said that the sequence ended, so an abort frees room when the engine is really rid of it. Slots count sequences, KV is
counted in whole blocks, and policy.kv says what fits. All numbers equal a recount of the live seats.

What a job needs depends on who runs beside it: `need` is what the predicted peak rises by when it joins the present
seats, so that `need(ask) <= kv_tokens_free` says whether it fits, and neither number means anything at another moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from laneway.core.job import LaneJob, QueuedJob
from laneway.core.lanes import LANES, Lane
from laneway.policy.kv import (
    Drift,
    Growth,
    KvParams,
    blocks_of,
    limit_blocks,
    overrun_blocks,
    peak_blocks,
    rest_tokens,
)
from laneway.workers.engines.protocol import EngineCapacity, EngineStats


class KvAsk(Struct, frozen=True):
    """What a request asks room for."""

    prompt_tokens: int
    max_tokens: int  # of an answer
    predicted_tokens: int = 0  # of an answer, at most max_tokens; 0: max_tokens
    sequences: int = 1  # answers
    prefix: tuple[int, ...] = ()  # a hash of everything up to the end of each whole block of its prompt; empty: unknown

    @property
    def tokens(self) -> int:
        """At most, of one sequence."""
        return self.prompt_tokens + self.max_tokens


@dataclass(eq=False, slots=True)
class Seat:
    """A request in the engine. Compared by identity."""

    lane: Lane
    ask: KvAsk
    whole_blocks: int  # prompt and limit of all its sequences
    made: Callable[[], int] = lambda: 0  # tokens of its answer so far


class Seats:
    """Owns the seats of one engine."""

    def __init__(
        self,
        capacity: EngineCapacity,
        slots: int = 0,
        *,
        predict: Callable[[QueuedJob], int] | None = None,
        params: Callable[[], KvParams] = KvParams,
        prefix_cache: bool = False,
    ) -> None:
        """`slots`: fewer than the engine has, where the worker is set so; 0: all. `predict`: tokens of an answer.

        `prefix_cache`: the engine keeps one copy of what live sequences begin with in common.
        """
        self._capacity = capacity
        self._predict = predict
        self._params = params
        self._prefix_cache = prefix_cache and capacity.paged
        self.slots = min(capacity.slots, slots) if slots else capacity.slots
        self._live: set[Seat] = set()
        self._sequences = 0  # of the live seats
        self._whole = 0  # blocks of their prompts and limits
        self._holders: Counter[int] = Counter()  # of each block of the live seats' prompts
        self._shared_blocks = 0  # of them, those with several holders
        self._drift = Drift()

    def __len__(self) -> int:
        return self._sequences

    # --- what jobs ask -------------------------------------------------------------------------------

    def ask(self, job: QueuedJob) -> KvAsk:
        """What a job asks room for."""
        predicted = self._predict(job) if self._predict is not None else 0
        if not isinstance(job, LaneJob):  # its task is not here yet
            return KvAsk(job.record.prompt_tokens, job.record.max_tokens, predicted)
        task = job.task
        prefix: tuple[int, ...] = ()
        if self._prefix_cache:
            prefix = prefix_hashes(task.prompt_ids, self.block_tokens, task.cache_salt, task.adapter)
        return KvAsk(len(task.prompt_ids), task.sampling.max_tokens, predicted, task.sampling.n, prefix)

    def need(self, ask: KvAsk) -> int:
        """KV tokens by which the peak rises when it joins what runs now. With too few slots for its sequences, one more
        than there are: a request with several answers lacks room in another way."""
        need = self._more_with(self._seat(Lane.PRIORITY, ask))
        return need if ask.sequences <= max(1, self.slots_free) else max(need, self.kv_tokens_free + 1)

    def can_ever_fit(self, ask: KvAsk) -> bool:
        return (
            ask.tokens <= self._capacity.context_length
            and ask.sequences <= self.slots
            and self._whole_blocks(ask) <= self._capacity_blocks
        )

    def fits(self, ask: KvAsk) -> bool:
        """Whether it may start now. On an empty engine, what fits at all does."""
        return ask.sequences <= self.slots_free and self.need(ask) <= self.kv_tokens_free

    def take(self, lane: Lane, ask: KvAsk) -> Seat:
        """A seat. The caller has asked `fits`, and sets `made` once there is something to count."""
        assert self.fits(ask), f"no room for {ask}"
        seat = self._seat(lane, ask)
        self._add(seat)
        return seat

    def give_back(self, seat: Seat) -> None:
        """Idempotent."""
        if seat in self._live:
            self._remove(seat)

    # --- what there is -------------------------------------------------------------------------------

    @property
    def block_tokens(self) -> int:
        return self._capacity.block_tokens

    @property
    def kv_tokens(self) -> int:
        """Of the engine."""
        return self._capacity_blocks * self.block_tokens

    @property
    def kv_tokens_used(self) -> int:
        """That the live seats have set aside, or are predicted to hold at their peak."""
        return min(self._capacity_blocks, self._peak()) * self.block_tokens

    @property
    def kv_tokens_free(self) -> int:
        """What `need` may be; at most 0 where nothing more fits."""
        if not self._live:
            return self.kv_tokens
        drift_blocks = self._drift.tokens / self.block_tokens
        limit = limit_blocks(self._capacity_blocks, drift_blocks, self._params(), paged=self._capacity.paged)
        return (limit - self._peak()) * self.block_tokens

    @property
    def slots_free(self) -> int:
        return self.slots - len(self)

    @property
    def context_length(self) -> int:
        return self._capacity.context_length

    @property
    def largest(self) -> int:
        """KV tokens of the largest job that can run here."""
        return blocks_of(min(self._capacity.context_length, self.kv_tokens), self.block_tokens) * self.block_tokens

    def frees(self, seat: Seat) -> int:
        """KV tokens by which the peak falls when it leaves."""
        if seat not in self._live:
            return 0
        if not self._predicts:
            return seat.whole_blocks * self.block_tokens
        self._remove(seat)
        try:
            return self._more_with(seat)
        finally:
            self._add(seat)

    def holds(self, seat: Seat) -> int:
        """KV tokens that only it holds now."""
        return self._growth(seat).held_blocks * self.block_tokens

    def grows_to(self, seat: Seat) -> int:
        """KV tokens that only it will hold at its end, as far as is predicted."""
        growth = self._growth(seat)
        return (growth.held_blocks + growth.sequences * growth.rest_blocks) * self.block_tokens

    def by_lane(self) -> dict[Lane, int]:
        return {lane: sum(seat.ask.sequences for seat in self._live if seat.lane is lane) for lane in LANES}

    # --- what the engine shows -----------------------------------------------------------------------

    def observe(self, stats: EngineStats) -> None:
        """After each step of the engine: what it holds beyond what it was given here counts as taken."""
        self._drift.observe(stats.kv_tokens_used + stats.prefilling_tokens, self._given_tokens())

    def overrun_tokens(self) -> int:
        """KV tokens that must be freed lest the engine evict a sequence; 0 as long as all can go on."""
        if not self._predicts or not self._live:
            return 0
        most = self._given_tokens() + self._drift.tokens + 3 * len(self) * self.block_tokens
        if most <= self.kv_tokens:  # as nearly always, and far cheaper to see
            return 0
        certain = sum(self._growth(seat).held_blocks for seat in self._live) + self._shared_blocks
        drift_blocks = self._drift.tokens / self.block_tokens
        return overrun_blocks(certain, len(self), self._capacity_blocks, drift_blocks) * self.block_tokens

    # --- helpers -------------------------------------------------------------------------------------

    @property
    def _predicts(self) -> bool:
        return self._capacity.paged and self._params().prediction

    def _given_tokens(self) -> int:
        """Of all prompts and answers so far."""
        return sum(seat.ask.prompt_tokens + seat.made() * seat.ask.sequences for seat in self._live)

    @property
    def _capacity_blocks(self) -> int:
        return self._capacity.kv_tokens // self.block_tokens

    def _seat(self, lane: Lane, ask: KvAsk) -> Seat:
        return Seat(lane, ask, self._whole_blocks(ask))

    def _peak(self) -> int:
        if not self._predicts:  # asked a dozen times a job: nothing grows, so there is nothing to order
            return self._whole + self._shared_blocks
        return peak_blocks(map(self._growth, self._live), self._shared_blocks)

    def _more_with(self, seat: Seat) -> int:
        before = self._peak()
        self._add(seat)
        try:
            return (self._peak() - before) * self.block_tokens
        finally:
            self._remove(seat)

    def _growth(self, seat: Seat) -> Growth:
        ask, made, block = seat.ask, seat.made(), self.block_tokens
        whole = seat.whole_blocks
        if not self._predicts:
            return Growth(whole, 0, ask.sequences)
        if ask.sequences == 1:
            now = min(whole, blocks_of(ask.prompt_tokens + made, block))
        else:  # one prompt for all of them
            now = min(whole, blocks_of(ask.prompt_tokens, block) + ask.sequences * blocks_of(made, block))
        rest = blocks_of(rest_tokens(made, ask.predicted_tokens or ask.max_tokens, ask.max_tokens), block)
        return Growth(now - self._shared_of(ask), min(rest, blocks_of(whole - now, ask.sequences)), ask.sequences)

    def _whole_blocks(self, ask: KvAsk) -> int:
        return ask.sequences * blocks_of(ask.tokens, self.block_tokens)

    def _shared_of(self, ask: KvAsk) -> int:
        """Blocks of its prompt that others hold as well: those up to where it goes its own way."""
        return bisect_left(ask.prefix, True, key=lambda block: self._holders[block] < 2)

    def _add(self, seat: Seat) -> None:
        self._live.add(seat)
        self._sequences += seat.ask.sequences
        self._whole += seat.whole_blocks
        for block in seat.ask.prefix:
            self._holders[block] += 1
            self._shared_blocks += self._holders[block] == 2

    def _remove(self, seat: Seat) -> None:
        self._live.discard(seat)
        self._sequences -= seat.ask.sequences
        self._whole -= seat.whole_blocks
        for block in seat.ask.prefix:
            self._holders[block] -= 1
            self._shared_blocks -= self._holders[block] == 1
            if not self._holders[block]:
                del self._holders[block]


def prefix_hashes(prompt_ids: Sequence[int], block_tokens: int, salt: str = "", adapter: str = "") -> tuple[int, ...]:
    """A hash of everything up to the end of each whole block: equal ones mean equal beginnings, here and now."""
    hashes: list[int] = []
    so_far = hash((adapter, salt))
    for start in range(0, len(prompt_ids) - block_tokens + 1, block_tokens):
        so_far = hash((so_far, *prompt_ids[start : start + block_tokens]))
        hashes.append(so_far)
    return tuple(hashes)
