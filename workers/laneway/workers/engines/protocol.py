"""The contract between a worker and an inference engine. `laneway.workers.conformance` holds an engine to it.

Who calls. A worker makes an engine, calls `start` once and waits for it; nothing else but `capabilities` and `close` is
called before that returns. All calls come from one event loop, one at a time; `submit`, `abort` and `stats` are plain
calls that never block it, and may come at any time: while a step runs, and from within the sink's calls. `drain` and
`close` are awaited, perhaps several at once, while other calls go on. The engine calls the worker back through the
`StepSink` that `start` was given, always on that event loop and never from within a call of the worker's.

What holds for a sequence. Its sink sees, in order: zero or more deltas without a finish, then exactly one delta with a
finish; nothing after it. Ids arrive each once and in order, the last with the finish or before it. At LENGTH there are
exactly `max_tokens` of them, or fewer where the engine gives text (`token_ids_out`), of which other ids were made than
its model had. At STOP the token that stopped the run is not among them. CANCELLED answers an abort; unasked, it says
that the engine lost this sequence alone, and that others may go on with it. A request that the engine cannot run, or
fails on, ends with ERROR and a message of ours that names no library, file or path; it harms no other. A prompt is
computed whole or refused, never cut.

What holds for the engine. All sequences of a step come in one call of the sink, each once. `stats` are a recount of the
live sequences; those since the start only grow, `steps` in any case while tokens come, if only by reports: an engine
that stands still with work is taken for hung. Greedy answers, and seeded ones, are the same alone, in a batch and
resumed from their ids where the engine is `exact`; else they may differ as its arithmetic does.

What holds after its death. `on_closed` is called once with the reason, and no `on_step` after it. Every sequence that
was live has ended as far as the worker is concerned; `submit` raises EngineGone, `abort` does nothing, `stats` say that
nothing is live, `drain` is true. `close` is called as ever, and a new engine made: one is started once.

Engines know nothing of jobs, lanes, NATS, text or stop strings: ids in, ids out. The worker turns ids into text.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

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
    deadline_in_s: float | None = None  # from its submission; the worker enforces it, engines may choose a server by it


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
    """A recount, sent with steps and on change; never counted by hand.

    `steps`, `busy_s`, `prefilled_tokens` and `decoded_tokens` count since the start and only grow: their difference
    between two reports whose `steps` differ by one is what that step did, and that of `busy_s` how long it took. An
    engine that does not know them leaves them 0 for good; then step times are not measured (see policy.step_fit). One
    that hears of its steps apart from their ids may count them a moment later, `decoded_tokens` never.
    """

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
    """The worker's side. Calls are short and synchronous, on the worker's event loop, and raise nothing."""

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        """What a step gave, with **all** its sequences, each at most once.

        Called once for each step that has something to say, in the order of steps; with no sequences where only the
        statistics changed. `stats` counts as of the end of this step, what is still on its way to the engine included:
        `running + queued` is the number of submitted sequences that have not had their finish, this call's taken in.
        The worker may submit and abort from within it.
        """
        ...

    def on_closed(self, reason: str) -> None:
        """The engine died, in our words. Called once, at no call of `close`, and last of all calls."""
        ...


class Engine(Protocol):
    """An engine as the worker sees it."""

    async def start(self, sink: StepSink) -> EngineCapacity:
        """Loads the model and returns when requests can be served: the first one pays for no warm-up.

        Called once. Raises EngineStartError with a way to mend it; cancelled or failed, it leaves nothing running.
        Until it returns, and where it raises, the sink is not called.
        """
        ...

    def capabilities(self) -> Capabilities:
        """What the engine offers; the same before and after the start. What it lacks is refused, never ignored."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Hands over a sequence; returns at once. It counts as queued from now on.

        What is wrong with it is told by its finish, not raised here. Raises EngineGone before the start, after the
        death and after `close`. How many wait is the worker's business: the engine takes them all.
        """
        ...

    def together(self) -> AbstractContextManager[None]:
        """What is submitted within it reaches the engine at once: no step begins with a part of it. Not to be nested.

        An engine elsewhere, which orders its steps itself, sends them at once and promises no more.
        """
        ...

    def abort(self, request_id: int) -> None:
        """Asks for the end of a sequence; returns at once, and the end comes through the sink like any other.

        The engine stops computing it within one step (or one prefill chunk) of the abort's arrival, whether it is
        queued, prefilling or decoding, and gives back what it held. It ends CANCELLED, with the ids of steps that were
        under way, or as it ended by itself if that came first. An id that is unknown or has ended is ignored.
        """
        ...

    def stats(self) -> EngineStats:
        """The last step's recount, and what was submitted since. Never blocks, never asks the engine."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Waits until no sequence is live, that is until the sink knows the end of each; False if some still are after
        timeout_s. It ends nothing and refuses nothing: who drains has stopped submitting."""
        ...

    async def close(self) -> None:
        """Ends the engine and what it started, in a bounded time. Live sequences end without a further word.

        The sink is not called from now on, `on_closed` neither. Idempotent; also before the start and after the death.
        """
        ...


@runtime_checkable
class TellsStart(Protocol):
    """An engine that can say more of its start."""

    @property
    def loading(self) -> str:
        """What it is at. Asked at any time until `start` returns."""
        ...

    @property
    def gave_token(self) -> bool:
        """Whether `start` returns with a token of it seen; else whoever started it asks for one."""
        ...


class EngineStartError(Exception):
    """The engine could not start; the message says what to do."""


class EngineGone(RuntimeError):
    """The engine is not running: it was not started, it has died (`on_closed` has said why), or it was closed."""


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
