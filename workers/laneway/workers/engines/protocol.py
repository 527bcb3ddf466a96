"""The contract between a worker and an inference engine.

Who calls what, when. The worker calls `start` once and waits for it; nothing else is called before it returns.
`submit` and `abort` may then be called at any time, also while a step runs; they return at once and never block the
event loop. The engine calls the worker back through the `StepSink` it was started with, always on the worker's event
loop, once for each engine step that has something to say, with **all** sequences of that step in one call.

What holds after. For every submitted sequence the sink sees, in order: zero or more deltas without a finish, then
exactly one delta with a finish; nothing after it. Token ids arrive each once and in order. After `abort(id)` the
engine stops computing that sequence within one step (or one prefill chunk) of the abort's arrival and reports it
with finish CANCELLED, unless it had just finished by itself; an unknown id is ignored. A request that an engine
cannot run ends with finish ERROR and a message of ours, harming no other. When the engine dies, `closed` of the sink
is called once with the reason, and every sequence that was live has ended as far as the worker is concerned.
`stats` counts equal a recount of the live sequences. Those since the start only grow, and come with each step: their
difference between two reports whose `steps` differ by one is what that step did, and that of `busy_s` how long it took.
An engine that does not know them leaves them 0 for good; then step times are not measured (see policy.step_fit).

Engines know nothing of jobs, lanes, NATS, text or stop strings: ids in, ids out. The worker turns ids into text.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from laneway.core.catalogue import Capabilities
from laneway.core.lanes import FinishReason


class EngineRequest(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to generate. Unset fields are None; what the engine cannot do was refused at the door."""

    id: int  # unique for the engine's life; chosen by the worker
    prompt_ids: tuple[int, ...]  # prompt, followed by ids already generated when resuming; at least 1
    max_tokens: int  # still to generate, at least 1
    temperature: float = 1.0  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    ignore_eos: bool = False
    json_schema: str = ""
    adapter: str = ""
    cache_salt: str = ""
    priority: float = 0.5  # 0 .. 1, higher first, for engines that order inside


class SequenceStep(msgspec.Struct, array_like=True):
    """What one engine step gave to one sequence."""

    id: int
    token_ids: list[int]  # new ids, usually one; an end-of-turn id is not among them
    logprobs: list[float] | None = None  # one for each id, where asked for
    top: list[list[tuple[int, float]]] | None = None
    finish: FinishReason | None = None
    message: str = ""  # finish ERROR: why, in our words
    cached_tokens: int = 0  # with the first ids: prompt tokens found in the prefix cache


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """A recount, sent with steps and on change; never counted by hand."""

    running: int = 0  # sequences in the batch
    queued: int = 0  # submitted, not yet in the batch
    prefilling_tokens: int = 0  # prompt tokens submitted and not yet computed
    kv_tokens_used: int = 0
    steps: int = 0
    busy_s: float = 0.0  # time spent in steps
    prefilled_tokens: int = 0  # prompt tokens computed since the start, those found in the prefix cache left out
    decoded_tokens: int = 0  # tokens given since the start
    decoding: int = 0  # sequences in the batch that have their first token


class EngineCapacity(msgspec.Struct, frozen=True, array_like=True):
    """What the engine can hold, known once it has started."""

    slots: int  # sequences at once
    kv_tokens: int  # tokens of KV cache for all of them
    context_length: int  # prompt + output of one sequence
    vocabulary_size: int
    block_tokens: int = 1  # KV is taken in blocks of this size
    chunk_tokens: int = 0  # most prompt tokens of one step; 0: not known
    paged: bool = False  # KV is taken as sequences grow, and one is evicted where it runs out; else reserved up front


class StepSink(Protocol):
    """The worker's side. Calls are short and synchronous, on the worker's event loop."""

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None: ...

    def on_closed(self, reason: str) -> None: ...


class Engine(Protocol):
    """An engine as the worker sees it."""

    async def start(self, sink: StepSink) -> EngineCapacity:
        """Loads the model and returns when requests can be served. Raises EngineStartError with a way to mend it."""
        ...

    def capabilities(self) -> Capabilities: ...

    def submit(self, request: EngineRequest) -> None: ...

    def together(self) -> AbstractContextManager[None]:
        """What is submitted within it reaches the engine at once: no step begins with a part of it."""
        ...

    def abort(self, request_id: int) -> None: ...

    def stats(self) -> EngineStats: ...

    async def drain(self, timeout_s: float) -> bool:
        """Waits until no sequence is live; False if some still are after timeout_s."""
        ...

    async def close(self) -> None:
        """Ends the engine and what it started. Idempotent."""
        ...


class EngineStartError(Exception):
    """The engine could not start; the message says what to do."""


class StepEngine(Protocol):
    """An engine core that computes step by step in a process of its own, driven by `host.py`.

    All calls come from one thread. `step` may hold the GIL for its whole length.
    """

    def load(self) -> EngineCapacity: ...

    def add(self, request: EngineRequest) -> None:
        """Takes a sequence. Raises ValueError when it cannot be run; the message reaches the caller."""
        ...

    def abort(self, request_id: int) -> None:
        """Ends a sequence before the next step; it is reported CANCELLED by that step."""
        ...

    def busy(self) -> bool:
        """Whether a step would do anything."""
        ...

    def step(self) -> tuple[list[SequenceStep], EngineStats]:
        """Computes one step."""
        ...

    def close(self) -> None: ...
