"""How a prompt gets into the engine: whole, or in slices through the engine's prefix cache.

A submitted prompt cannot be paused. So a long one is computed as requests for one token with growing beginnings of it,
one at a time, as the budget grants them; then the real request finds all but its end in the cache. What slices give is
dropped, and callers see none of them: `found_tokens` is what was in the cache before the first.

An Entry is also what the budget knows of a run: made when the run asks for the engine, gone with its outcome. To the
rest of the worker a run in slices is a run that is prefilling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog

from laneway.core.job import LaneJob
from laneway.core.lanes import FinishReason, Isolation, Lane
from laneway.workers.engines.protocol import EngineRequest, SequenceStep
from laneway.workers.sequences import EngineDown, LiveSequence, SequenceOwner, Sequences

_log = structlog.get_logger(__name__)


class Grants(Protocol):
    """Who says how much of a prompt may go on its way. Calls return at once."""

    def grant(self, entry: Entry) -> int:
        """How many of its next tokens may be submitted now: all that are left, whole blocks of them, or 0: later, when
        `Entry.advance` is called again."""
        ...

    def sent(self, entry: Entry) -> None:
        """Its real request is on its way."""
        ...

    def gave(self, entry: Entry, tokens: int) -> None:
        """It has so many more tokens of its answer, counted already."""
        ...

    def computed(self, entry: Entry, sent_tokens: int, tokens: int) -> None:
        """What it had submitted is computed, and in flight no more; so many `tokens` of it were not in the cache."""
        ...

    def leave(self, entry: Entry) -> None:
        """The run has its outcome."""
        ...


class Entry:
    """One run in the engine, or on its way there. Made by Budget.enter."""

    def __init__(
        self, grants: Grants, sequences: Sequences, owner: SequenceOwner, job: LaneJob, request: EngineRequest,
        submit: Callable[[], None], *, now_s: float, waited_s: float, known_tokens: int,
    ) -> None:  # fmt: skip
        """`request`: the whole, as `submit` submits it. `waited_s`: since the job was made. `known_tokens`: of its
        prompt, what the engine probably has."""
        contract = job.record.contract
        self._grants = grants
        self._sequences = sequences
        self._owner = owner
        self.request = request
        self._submit = submit
        self.lane: Lane = contract.lane
        self.strict = contract.isolation is Isolation.STRICT
        self.ttft_target_s = contract.ttft_target_s
        self.tpot_target_s = contract.tpot_target_s
        self.entered_s = now_s
        self.waited_s = waited_s
        self.prompt_tokens = len(request.prompt_ids)
        self.max_tokens = request.max_tokens
        self.done_tokens = known_tokens  # of the prompt: computed, or supposed to be in the cache
        self.in_flight_tokens = 0  # of the prompt: submitted and not yet computed
        self.cost_tokens = 0.0  # what the steps with them took, in prompt tokens
        self.found_tokens = 0  # in the cache before any slice
        self.engine_s = 0.0  # that the engine had something of the prompt, until its first token
        self.slices = 0
        self.next_slice_s = 0.0  # monotonic: not before
        self.submitted = False  # the real request
        self.left = False  # it has its outcome
        self.first_s = 0.0
        self.last_s = 0.0
        self.made = 0  # tokens
        self._ended_tokens = 0  # of the prompt: up to the end of the last slice
        self._slice: LiveSequence | None = None
        self._sent_s = 0.0

    @property
    def left_tokens(self) -> int:
        """Of the prompt, not submitted yet."""
        return self.prompt_tokens - self.done_tokens

    @property
    def last_tokens(self) -> int:
        """What is to come after the slice that is in flight; of the real request, what it has in flight."""
        return self.left_tokens - (0 if self.submitted else self.in_flight_tokens)

    @property
    def waiting(self) -> bool:
        """Whether it can go on as soon as it gets a grant."""
        return not (self.submitted or self.left or self.in_flight_tokens)

    @property
    def tpot_s(self) -> float:
        """Mean time of its tokens so far; 0: not known."""
        return (self.last_s - self.first_s) / (self.made - 1) if self.made > 1 else 0.0

    def advance(self, now_s: float) -> None:
        """Submits what is granted. Raises EngineDown."""
        if self.waiting and (tokens := self._grants.grant(self)):
            self._send(tokens, now_s)

    def retry(self, now_s: float) -> None:
        """The same when something changed: tells its owner when there is no engine, or it cannot be asked."""
        try:
            self.advance(now_s)
        except EngineDown:
            self.lost("the engine is down")
        except Exception as error:  # noqa: BLE001 - a fault with one must not keep others from the engine
            _log.error("not_submitted", error=repr(error), exc_info=error)
            self._owner.on_fault(error)

    def whole(self, now_s: float) -> None:
        """Submits all of it, whatever the budget says: it costs nothing, or fails anyway. Raises EngineDown."""
        if not (self.submitted or self.left):
            self._send(self.left_tokens, now_s)

    def joined(self) -> None:
        """Its real request had part in a sequence that was there: it computes nothing of its own."""
        self.in_flight_tokens = 0

    def took(self, step: SequenceStep, now_s: float) -> None:
        """The real request gave tokens."""
        first = not self.first_s
        if first:
            self.first_s = now_s
        self.last_s = now_s
        tokens = len(step.token_ids)
        self.made += tokens
        self._grants.gave(self, tokens)
        if first:
            self._count(step, now_s)

    def lost(self, reason: str) -> None:
        """The engine died while nothing of it was there."""
        if not self.left:
            self._owner.on_engine_lost(reason)

    def cancel(self) -> None:
        """The run has its outcome, or begins anew: nothing more is submitted, and a slice in flight is aborted."""
        if self.left:
            return
        self.left = True
        if self._slice is not None:
            self._sequences.abort(self._slice)
        self._grants.leave(self)

    async def gone(self) -> None:
        """Returns when the engine is rid of its slices."""
        if self._slice is not None:
            await self._slice.gone()

    def _send(self, tokens: int, now_s: float) -> None:
        end = self.done_tokens + tokens
        assert end <= self.prompt_tokens, "no more is granted than is left"
        self.in_flight_tokens, self.cost_tokens, self._sent_s = tokens, 0.0, now_s
        if end == self.prompt_tokens:
            self.submitted = True
            self._grants.sent(self)
            self._submit()
            return
        self.slices += 1
        whole = self.request
        self._slice = self._sequences.submit(
            _Slice(self, self._owner, end),
            lambda request_id: EngineRequest(
                request_id,
                whole.prompt_ids[:end],
                1,
                temperature=0.0,
                ignore_eos=True,
                adapter=whole.adapter,
                cache_salt=whole.cache_salt,
                priority=whole.priority,
            ),
        )

    def _count(self, step: SequenceStep, now_s: float) -> None:
        """What was in flight is computed: tells what of it the cache had, and what it took."""
        self.engine_s += now_s - self._sent_s
        self.found_tokens += max(0, step.cached_tokens - self._ended_tokens)
        sent, self.in_flight_tokens = self.in_flight_tokens, 0
        self.done_tokens += sent
        self._grants.computed(self, sent, max(0, self.done_tokens - max(step.cached_tokens, self._ended_tokens)))

    def slice_ended(self, step: SequenceStep, end: int, now_s: float) -> None:
        """A slice has its one token, or another end."""
        self._slice = None
        if self.left:
            return
        if step.finish is FinishReason.CANCELLED:
            self._owner.on_engine_lost("the engine ended a slice by itself")
            return
        self._count(step, now_s)
        self._ended_tokens = end
        if step.finish is FinishReason.ERROR:  # the whole says why
            try:
                self.whole(now_s)
            except EngineDown:
                self.lost("the engine is down")


class _Slice:
    """The owner of a slice."""

    def __init__(self, entry: Entry, owner: SequenceOwner, end: int) -> None:
        self._entry = entry
        self._owner = owner
        self._end = end

    def on_step(self, step: SequenceStep, now_s: float) -> None:
        if step.finish is not None:
            self._entry.slice_ended(step, self._end, now_s)

    def on_engine_lost(self, reason: str) -> None:
        self._owner.on_engine_lost(reason)

    def on_fault(self, error: Exception) -> None:
        self._owner.on_fault(error)
