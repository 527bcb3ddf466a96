"""The kit's side of an engine: notes what it hears, and looks in every call for what must never be.

A breach belongs to the case that states what was broken, whichever case was running: what holds always is judged by
all that the kit hears.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from laneway.core.lanes import FinishReason
from laneway.workers.engines.protocol import EngineRequest, EngineStats, SequenceStep

# Cases that own what is looked for here.
ENDS_ONCE = "ends-once"
LENGTH_EXACT = "length-exact"
ONE_CALL_PER_STEP = "one-call-per-step"
LOGPROB_PER_ID = "logprob-per-id"
TOP_LOGPROBS = "top-logprobs"
CACHED_WITHIN_PROMPT = "cached-within-prompt"
OUR_WORDS = "errors-in-our-words"
RECOUNT = "recount"
COUNTS_GROW = "counts-grow"
COUNTS_TRUE = "counts-true"
DEATH_TOLD_ONCE = "death-told-once"

GROWING = ("steps", "busy_s", "prefilled_tokens", "decoded_tokens")
NOT_OUR_WORDS = ("/", ".cpp", ".py", "Check", "Traceback", "Error:")  # of a library, not of ours


@dataclass(frozen=True, slots=True)
class Breach:
    """Something that must never be, and was."""

    case: str
    message: str


@dataclass(slots=True)
class Heard:
    """What was heard of one sequence."""

    request: EngineRequest
    chunks: list[list[int]] = field(default_factory=list)  # ids of each call that had some
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    cached_tokens: int = 0
    finish: FinishReason | None = None
    message: str = ""

    @property
    def ids(self) -> list[int]:
        return [i for chunk in self.chunks for i in chunk]


class Listener:
    """The StepSink of one engine, from its start to its end."""

    def __init__(self, breaches: list[Breach], *, own_ids: bool = True) -> None:
        self._breaches = breaches
        self._own_ids = own_ids  # the engine gives ids, and not text that becomes some
        self._ids_told = 0
        self.heard: dict[int, Heard] = {}
        self.live: set[int] = set()
        self.calls = 0
        self.stats = EngineStats()
        self.closed: str | None = None  # the reason, once it was told
        self.changed = asyncio.Event()  # set by every call
        self.on_end: Callable[[int], None] | None = None  # called with the id of a sequence within the call it ends in

    def expect(self, request: EngineRequest) -> None:
        """A request that is about to be submitted."""
        self.heard[request.id] = Heard(request)
        self.live.add(request.id)

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        self.calls += 1
        if self.closed is not None:
            self._note(DEATH_TOLD_ONCE, "a step was told of after the engine's end")
        if len({step.id for step in steps}) < len(steps):
            self._note(ONE_CALL_PER_STEP, "a sequence is twice in one call")
        ended = [step.id for step in steps if self._take(step)]
        self._look_at_stats(stats)
        self.stats = stats
        self.changed.set()
        for request_id in ended:
            if self.on_end is not None:
                self.on_end(request_id)

    def on_closed(self, reason: str) -> None:
        if self.closed is not None:
            self._note(DEATH_TOLD_ONCE, "the engine's end was told of twice")
        if not reason:
            self._note(DEATH_TOLD_ONCE, "the engine's end was told of without a reason")
        self.closed = reason
        self.live.clear()
        self.changed.set()

    def _take(self, step: SequenceStep) -> bool:
        """Notes a delta; whether it ended its sequence."""
        heard = self.heard.get(step.id)
        if heard is None:
            self._note(ENDS_ONCE, f"a delta of {step.id}, which was never submitted")
            return False
        if heard.finish is not None:
            again = f"a second end, {step.finish}," if step.finish is not None else "a delta"
            self._note(ENDS_ONCE, f"{again} of a sequence that had ended with {heard.finish}")
            return False
        self._look_at_delta(heard, step)
        self._ids_told += len(step.token_ids)
        if step.token_ids:
            heard.chunks.append(list(step.token_ids))
        heard.logprobs += step.logprobs or []
        heard.top += step.top or []
        heard.cached_tokens += step.cached_tokens
        heard.message = step.message
        heard.finish = step.finish
        if step.finish is None:
            return False
        self.live.discard(step.id)
        self._look_at_end(heard)
        return True

    def _look_at_delta(self, heard: Heard, step: SequenceStep) -> None:
        request, new = heard.request, len(step.token_ids)
        if request.logprobs:
            if len(step.logprobs or []) != new:
                self._note(LOGPROB_PER_ID, f"{len(step.logprobs or [])} log probabilities for {new} ids of a call")
            if not all(float("-inf") < p <= 0.0 for p in step.logprobs or []):
                self._note(LOGPROB_PER_ID, "a log probability is above 0 or no number")
        if request.top_logprobs:
            counts = [len(top) for top in step.top or []]
            if counts != [request.top_logprobs] * new:
                self._note(TOP_LOGPROBS, f"{counts} alternatives for {new} ids; asked for {request.top_logprobs} each")
        prompt = len(request.prompt_ids)
        if not 0 <= step.cached_tokens <= prompt:
            self._note(CACHED_WITHIN_PROMPT, f"{step.cached_tokens} cached tokens of a prompt of {prompt}")
        if step.cached_tokens and heard.chunks:
            self._note(CACHED_WITHIN_PROMPT, "cached tokens were told of after the first ids")

    def _look_at_end(self, heard: Heard) -> None:
        made, asked = len(heard.ids), heard.request.max_tokens
        if made > max(0, asked) or (self._own_ids and heard.finish is FinishReason.LENGTH and made != asked):
            self._note(LENGTH_EXACT, f"{made} ids at finish {heard.finish} of max_tokens {asked}")
        if heard.finish is FinishReason.ERROR and not in_our_words(heard.message):
            self._note(OUR_WORDS, f"a request failed with the message {heard.message!r}")

    def _look_at_stats(self, stats: EngineStats) -> None:
        if stats.running + stats.queued != len(self.live):
            counts = f"{stats.running} running and {stats.queued} queued"
            self._note(RECOUNT, f"{counts} were told; a recount gives {len(self.live)} live sequences")
        for name in GROWING:
            before, now = getattr(self.stats, name), getattr(stats, name)
            if now < before:
                self._note(COUNTS_GROW, f"{name} fell from {before} to {now}")
        if (stats.decoded_tokens or self.stats.decoded_tokens) and stats.decoded_tokens != self._ids_told:
            self._note(COUNTS_TRUE, f"{stats.decoded_tokens} decoded tokens were told; {self._ids_told} ids came")

    def _note(self, case: str, message: str) -> None:
        breach = Breach(case, message)
        if breach not in self._breaches:
            self._breaches.append(breach)


def in_our_words(message: str) -> bool:
    """Whether a caller may read it: it says something, and nothing of a library's insides."""
    return bool(message) and not any(word in message for word in NOT_OUR_WORDS)
