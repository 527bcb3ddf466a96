"""One engine under virtual time, counted in steps: who shares them as in the simulated engine, without its tokens.

All sequences of an engine advance together. Between two changes every step is made of the same sequences, so a *run* of
equal steps is one closed form: the j-th step takes `first_s + j grow_s` (`laneway.runtime.step_price.Line`), and
n of them take n first_s + n (n - 1) / 2 grow_s. A run ends

- with the next answer that ends (a heap by the step in which it does),
- before the step that computes the last piece of a prompt and the begin of those behind it, and after that step,
- where paged KV runs out, and where the price is not the same straight line any more,
- with the step in which something is submitted that can join, or aborted.

So the work is a few runs for each request, whatever its length.

Who joins, when and in which order is that of the simulated engine of the workers: first come, first served, behind a
head that does not fit; KV reserved up front, or `paged`, with the newest evicted and computed again; chunked prefill in
what decoding leaves of a chunk; the first token at the end of the step that completes the prompt.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from laneway.runtime.step_price import FOREVER, LinePrice
from laneway.simulator.paged_kv import PagedKv
from laneway.simulator.prefix_cache import PrefixCache
from laneway.simulator.waiting import Waiting
from laneway.simulator.work import APART, DECODING, DONE, EVICTED, FIRST, PREFILLING, QUEUED, Event, Work

__all__ = ["DONE", "EVICTED", "FIRST", "Engine", "Event", "Work"]


class Engine:
    """Times that go in never decrease. What it shows is as of the last step that had ended at the last call.

    Submissions and aborts take effect at the end of the step that runs; at once where one ends at that very time. Where
    `advance` was asked about that time before, those who waited then have joined first.
    """

    __slots__ = (
        "_batch", "_begin_s", "_busy_before_s", "_changed", "_ends", "_events", "_first_s", "_free_tokens", "_grow_s",
        "_joined", "_leaving", "_line", "_paged_kv", "_passed", "_pieces", "_prefilling", "_prefixes", "_run_ends_s",
        "_run_steps", "_waiting", "block_tokens", "busy_s", "chunk_tokens", "context_tokens", "decoded_tokens",
        "decoding", "kv_tokens", "paged", "prefilled_tokens", "slots", "steps",
    )  # fmt: skip

    def __init__(
        self,
        price: LinePrice,
        *,
        slots: int,
        kv_tokens: int,
        chunk_tokens: int,
        block_tokens: int,
        paged: bool = False,
        prefix_blocks: int = 0,
    ) -> None:
        """`chunk_tokens`: most tokens of a step, a prompt's or one of each that decodes. `prefix_blocks`: that the
        prefix cache holds; 0: there is none."""
        self.slots = slots
        self.kv_tokens = kv_tokens
        self.chunk_tokens = chunk_tokens
        self.block_tokens = block_tokens
        self.paged = paged
        # Counted as they change: ten million requests leave no time to recount them.
        self.steps = 0
        self.busy_s = 0.0  # time in steps
        self.prefilled_tokens = 0  # computed, those found in the prefix cache left out
        self.decoded_tokens = 0  # given
        self.decoding = 0  # sequences that have their first token
        self.context_tokens = 0  # with KV, of those that decode
        self._line = price.line
        self._prefixes = PrefixCache(prefix_blocks) if prefix_blocks else None
        self._paged_kv = PagedKv(kv_tokens, block_tokens) if paged else None
        self._free_tokens = kv_tokens  # not reserved; not used where KV is paged
        self._waiting = Waiting()
        self._batch: dict[Work, None] = {}  # in the order in which they joined
        self._joined = 0
        self._prefilling: deque[Work] = deque()  # of these, in the same order
        self._ends: list[tuple[int, int, Work]] = []  # heap: step, joined; some have left meanwhile
        self._leaving: list[Work] = []
        self._events: list[Event] = []
        self._changed = False  # somebody may join before the next run
        # The run of equal steps that is under way; none: it ends at inf.
        self._begin_s = 0.0
        self._run_ends_s = math.inf
        self._run_steps = 0
        self._passed = 0  # of these
        self._first_s = self._grow_s = 0.0
        self._busy_before_s = 0.0
        self._pieces: list[tuple[Work, int]] = []  # prompt tokens that each of its steps computes

    # --- what is asked of it -----------------------------------------------------------------------------

    def submit(self, work: Work, now_s: float) -> None:
        """Raises ValueError where it could never run."""
        needed = max(work.reserve_tokens, work.prompt_tokens + work.output_tokens)
        if self._paged_kv is not None:
            needed = self._paged_kv.of_prompt(needed) * self.block_tokens
        if needed > self.kv_tokens:
            raise ValueError(f"request {work.request} may need {needed} tokens of KV; there are {self.kv_tokens}")
        self._pass_before(now_s)
        self._waiting.add(work)
        work.state = QUEUED
        if self._waiting.head is work and self._fits(work):
            self._cut_run(now_s)

    def abort(self, work: Work, now_s: float) -> None:
        """What it has made by now is in `made`; a token of the step that runs is added when that ends. One that has
        ended, or ends with that step, is not touched."""
        self._pass_to(now_s)
        if work.state == QUEUED:
            self._waiting.remove(work)
            work.state = APART
            if self._waiting and self._fits(self._waiting.head):
                self._cut_run(now_s)
        elif work.state in (PREFILLING, DECODING):
            if work.state == DECODING:
                work.made = work.made_by(self.steps)
            self._leaving.append(work)
            self._cut_run(now_s)

    def advance(self, now_s: float) -> list[Event]:
        """What happened in all whole steps that ended by now, and was not told before, in the order of time."""
        self._pass_to(now_s)
        events = self._events
        if events:
            self._events = []
        return events

    @property
    def next_s(self) -> float:
        """When to ask for events next, if nothing changes: none comes before, and now and then none at that time, where
        another kind of step begins. inf: it is idle."""
        return self._events[0].at_s if self._events else self._run_ends_s

    # --- what it shows -----------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def prefilling(self) -> int:
        return len(self._prefilling)

    @property
    def prompt_tokens_left(self) -> int:
        """Submitted and not computed."""
        left = sum(work.prefill_tokens - work.computed_tokens for work in self._prefilling)
        return left + sum(work.prefill_tokens for work in self._waiting)

    @property
    def kv_tokens_used(self) -> int:
        """With KV, of the whole batch."""
        return self.context_tokens + sum(work.computed_tokens for work in self._prefilling)

    @property
    def free_kv_tokens(self) -> int:
        """Not reserved; where KV is paged, not handed out, with what the next step takes."""
        if self._paged_kv is not None:
            return self._paged_kv.free_blocks * self.block_tokens
        return self._free_tokens

    # --- runs of equal steps -----------------------------------------------------------------------------

    def _pass_to(self, now_s: float) -> None:
        self._pass_before(now_s)
        while self._run_ends_s <= now_s:
            self._end_run()
            self._begin_run()

    def _pass_before(self, now_s: float) -> None:
        """Whoever else is submitted at this very time can still join the step that begins now."""
        while self._run_ends_s < now_s:
            self._end_run()
            self._begin_run()
        if self._begin_s < now_s < self._run_ends_s < math.inf:
            self._pass_steps(self._steps_by(now_s))

    def _cut_run(self, now_s: float) -> None:
        """The step that runs is the last of its run; where there is none, one begins now."""
        self._changed = True
        if self._run_ends_s == math.inf:
            self._begin_s = self._run_ends_s = now_s
        if self._run_ends_s <= now_s:
            return
        steps = self._passed
        if self._begin_s + self._span_s(steps) < now_s:
            steps += 1
        if steps < self._run_steps:
            self._run_steps = steps
            self._run_ends_s = self._begin_s + self._span_s(steps)

    def _begin_run(self) -> None:
        self._begin_s = self._run_ends_s
        if self._changed:
            self._changed = False
            self._admit()
        if self._paged_kv is not None:
            self._evict()
        decoding, ends = self.decoding, self._ends
        steps = self._next_pieces() if self._prefilling else FOREVER
        if decoding:
            steps = min(steps, ends[0][0] - self.steps)  # of one that has left, perhaps: then a run more is made
            if self._paged_kv is not None:
                steps = self._paged_kv.room_for(self.steps, steps)
        self._busy_before_s, self._passed = self.busy_s, 0
        if steps == FOREVER:  # nobody is left
            self._run_steps, self._run_ends_s = 0, math.inf
            return
        pieces = [(work.computed_tokens, tokens) for work, tokens in self._pieces]
        held, self._first_s, self._grow_s = self._line(pieces, decoding, self.context_tokens)
        self._run_steps = steps = min(steps, held)
        self._run_ends_s = self._begin_s + self._span_s(steps)

    def _next_pieces(self) -> int:
        """Of the prompts, what the next steps compute. For how many steps that is so."""
        budget = max(1, self.chunk_tokens - self.decoding)
        head = self._prefilling[0]
        left = head.prompt_tokens + head.again_tokens - head.computed_tokens
        if left >= budget:
            self._pieces = [(head, budget)]
            return left // budget
        self._pieces = pieces = []
        for work in self._prefilling:
            tokens = min(work.prompt_tokens + work.again_tokens - work.computed_tokens, budget)
            pieces.append((work, tokens))
            budget -= tokens
            if not budget:
                break
        return 1

    def _end_run(self) -> None:
        self._pass_steps(self._run_steps)
        at_s, steps, ends = self._run_ends_s, self.steps, self._ends
        while ends and ends[0][0] <= steps:
            entry = heapq.heappop(ends)
            if _holds(entry):
                self._end_decode(entry[2])
                self._finish(entry[2], at_s)
        if self._pieces:
            for work, _ in self._pieces:
                if work.computed_tokens == work.prompt_tokens + work.again_tokens:
                    self._end_prefill(work, at_s)
            self._pieces = []
        if self._leaving:
            self._let_go()

    def _pass_steps(self, passed: int) -> None:
        """So many steps of the run have ended."""
        more = passed - self._passed
        if more:
            if self._paged_kv is not None:
                self._paged_kv.pass_steps(self.steps, more)
            self._passed = passed
            self.steps += more
            self.busy_s = self._busy_before_s + self._span_s(passed)
            given = more * self.decoding
            self.context_tokens += given
            self.decoded_tokens += given
            for work, tokens in self._pieces:
                work.computed_tokens += more * tokens
                self.prefilled_tokens += more * tokens

    def _span_s(self, steps: int) -> float:
        return steps * (self._first_s + 0.5 * (steps - 1) * self._grow_s)

    def _steps_by(self, now_s: float) -> int:
        """Of the run, how many have ended: the root of `_span_s`, put right where it was rounded."""
        span_s, half_s = now_s - self._begin_s, self._first_s - 0.5 * self._grow_s
        root_s = half_s + math.sqrt(max(0.0, half_s * half_s + 2.0 * self._grow_s * span_s))
        most = self._run_steps - 1  # for it has not come to its end
        steps = min(most, max(self._passed, int(2.0 * span_s / root_s))) if root_s > 0.0 else most
        while steps < most and self._begin_s + self._span_s(steps + 1) <= now_s:
            steps += 1
        while steps > self._passed and self._begin_s + self._span_s(steps) > now_s:
            steps -= 1
        return steps

    # --- who shares them ---------------------------------------------------------------------------------

    def _fits(self, work: Work) -> bool:
        if len(self._batch) >= self.slots:
            return False
        if self._paged_kv is not None:
            return self._paged_kv.of_prompt(work.prefill_tokens) <= self._paged_kv.free_blocks
        return work.reserve_tokens <= self._free_tokens

    def _admit(self) -> None:
        """In order: one that does not fit yet holds back those behind it, so that it cannot starve."""
        waiting = self._waiting
        while waiting and self._fits(waiting.head):
            work = waiting.pop()
            prefill_tokens = work.prompt_tokens + work.again_tokens
            known = work.known_tokens
            if self._prefixes is not None and work.blocks is not None:
                block = self.block_tokens
                known = max(known, self._prefixes.found(work.blocks, prefill_tokens // block) * block)
            if known >= prefill_tokens:  # the last token is computed in any case: it gives the first of the answer
                known = (prefill_tokens - 1) // self.block_tokens * self.block_tokens
            work.computed_tokens = known
            if not work.made:
                work.cached_tokens = known
            if self._paged_kv is not None:
                self._paged_kv.prompt_joins(prefill_tokens)
            else:
                self._free_tokens -= work.reserve_tokens
            self._joined += 1
            work.joined = self._joined
            work.state = PREFILLING
            self._batch[work] = None
            self._prefilling.append(work)

    def _evict(self) -> None:
        """Makes room for what the batch adds in the next step."""
        kv = self._paged_kv
        assert kv is not None
        while kv.free_blocks < 0:
            newest = next(reversed(self._batch))
            self._leave(newest)
            newest.again_tokens, newest.computed_tokens = newest.made, 0
            newest.state = QUEUED
            self._waiting.put_back(newest)
            self._events.append(Event(self._begin_s, EVICTED, newest))

    def _leave(self, work: Work) -> None:
        """Out of the batch before its end."""
        if work.state == DECODING:
            work.made = work.made_by(self.steps)
            self._end_decode(work)
        else:
            self._prefilling.remove(work)
            if self._paged_kv is not None:
                self._paged_kv.prompt_leaves(work.prefill_tokens)
        del self._batch[work]

    def _let_go(self) -> None:
        """Who was aborted in the step that has ended."""
        for work in self._leaving:
            if work.state in (PREFILLING, DECODING):
                self._leave(work)
                work.state = APART
                self._free_tokens += work.reserve_tokens
        self._leaving.clear()

    def _end_prefill(self, work: Work, at_s: float) -> None:
        """The prompt is computed, and the next token is there."""
        self._prefilling.remove(work)
        prefill_tokens = work.prompt_tokens + work.again_tokens
        self._keep(work, prefill_tokens)
        if self._paged_kv is not None:
            self._paged_kv.prompt_leaves(prefill_tokens)
        work.made += 1
        self.decoded_tokens += 1
        if work.made == 1:
            work.first_s = at_s
            self._events.append(Event(at_s, FIRST, work))
        if work.made == work.output_tokens:
            self._finish(work, at_s)
            return
        work.state = DECODING
        work.base_step = self.steps - prefill_tokens
        self.decoding += 1
        self.context_tokens += prefill_tokens
        heapq.heappush(self._ends, (work.last_step, work.joined, work))
        if self._paged_kv is not None:
            self._paged_kv.decode_joins(work.base_step, self.steps)

    def _end_decode(self, work: Work) -> None:
        self.decoding -= 1
        self.context_tokens -= self.steps - work.base_step
        if self._paged_kv is not None:
            self._paged_kv.decode_leaves(work.base_step, self.steps)

    def _finish(self, work: Work, at_s: float) -> None:
        del self._batch[work]
        work.state = APART
        work.made = work.output_tokens
        self._keep(work, work.prompt_tokens + work.output_tokens - 1)
        self._free_tokens += work.reserve_tokens
        self._changed = True
        self._events.append(Event(at_s, DONE, work))

    def _keep(self, work: Work, computed_tokens: int) -> None:
        if self._prefixes is not None and work.blocks is not None:
            self._prefixes.keep(work.blocks, computed_tokens // self.block_tokens)


def _holds(entry: tuple[int, int, Work]) -> bool:
    """Whether it decodes still, and joined the batch as it did then."""
    _, joined, work = entry
    return work.state == DECODING and work.joined == joined
