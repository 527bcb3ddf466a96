"""An engine that lives in another server, or behind streams of its own: what all adapters to such have in common.

Owns one task for each live request, and the set of them. What comes in one go is told in one call of the sink. What a
protocol says on the wire is the business of its adapter, a `RemoteServer`.

Nothing is known of the server's batch. A sequence counts as running once it has a token and as queued until then;
`kv_tokens_used` are its prompt and its answer. `steps` are the reports, so that a worker sees that the engine goes on;
how long steps take and what they compute stays 0: it is not measured, unless the server tells of its iterations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Protocol

import structlog

from laneway.core.catalogue import Capabilities
from laneway.core.lanes import FinishReason
from laneway.workers.engines.checks import check_abilities, check_request
from laneway.workers.engines.iterations import Iteration, Iterations
from laneway.workers.engines.protocol import (
    EngineCapacity,
    EngineGone,
    EngineRequest,
    EngineStartError,
    EngineStats,
    SequenceStep,
    StepSink,
)

# The streams of one engine step arrive over many turns of the event loop. Told after each turn, 80 tokens of 8
# sequences came in 60 calls, told after this time in 17; every call costs a message to each door.
GATHER_S = 0.001
WITHOUT_IDS_S = 0.01  # what a server says of its iterations waits so long for ids to go with

log = structlog.get_logger(__name__)


class RemoteRefusal(Exception):
    """This request cannot be run, or failed; the others go on. The message reaches the caller: our words."""


class RemoteLost(Exception):
    """This request came to nothing through no fault of its own; the server goes on. The message is for our log."""


class RemoteGone(Exception):
    """The server serves no more; the message says why."""


class RemoteServer(Protocol):
    """One server. `open` is called first and once; `generate` at any time after it, also concurrently."""

    @property
    def name(self) -> str:
        """What and where it is, for messages."""
        ...

    @property
    def trouble(self) -> str:
        """What `open` waits for, said when its time is up."""
        ...

    async def open(self) -> EngineCapacity:
        """Returns once the server takes requests, however long that takes. Raises EngineStartError if it never will."""
        ...

    def able(self, offered: Capabilities) -> Capabilities:
        """What this server keeps of what the adapter offers; asked after `open`."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[SequenceStep, None]:
        """The answer as it comes; the last step has a finish. Closing it gives the connection up and is no word to the
        server that it may stop. Raises RemoteRefusal, RemoteLost or RemoteGone."""
        ...

    async def stop(self, request_id: int) -> None:
        """Tells the server that nobody wants the rest; returns in bounded time, whatever it says. An end of the answer,
        of whatever kind, may follow from it."""
        ...

    async def lost(self) -> str:
        """Returns when the server is known to be gone, also while no request runs, and says why."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...


@dataclass(slots=True)
class _Live:
    """A request that the sink awaits the end of."""

    prompt_tokens: int
    given: int = 0  # tokens that the sink was told of
    sent: bool = False
    aborted: bool = False
    ended: bool = False  # its finish is heard, and told next
    task: asyncio.Task[None] | None = None


class RemoteEngine:
    """The Engine port to a RemoteServer. Started once; a new one is made when the server was gone."""

    def __init__(
        self,
        server: RemoteServer,
        capabilities: Capabilities,
        start_timeout_s: float,
        *,
        gather_s: float = GATHER_S,
        iterations: Iterations | None = None,
        gave_token: bool = False,
    ) -> None:
        """`iterations`: of a server that tells of them, by `hear_iterations`.
        `gave_token`: `open` returns only once the server has given a token.
        """
        self._server = server
        self._gather_s = gather_s
        self._iterations = iterations
        self._gave_token = gave_token
        self._capabilities = capabilities
        self._able = capabilities
        self._start_timeout_s = start_timeout_s
        self._sink: StepSink | None = None
        self._capacity: EngineCapacity | None = None
        self._watch: asyncio.Task[None] | None = None
        self._live: dict[int, _Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # of requests and of aborts, until they have ended
        self._heard: dict[int, SequenceStep] = {}  # and not told yet
        self._telling: asyncio.TimerHandle | None = None
        self._steps = 0
        self._decoding = 0  # as told last
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving = asyncio.Lock()  # a second close waits for the first
        self._closing = False
        self._gone = False

    async def start(self, sink: StepSink) -> EngineCapacity:
        if self._sink is not None or self._closing:
            raise RuntimeError("an engine is started once")
        self._sink = sink
        try:
            async with asyncio.timeout(self._start_timeout_s):
                capacity = await self._server.open()
        except TimeoutError:
            raise EngineStartError(
                f"{self._server.name} was not ready after {self._start_timeout_s:g} s: {self._server.trouble}; start "
                "it, or raise start_timeout_s in engine_options if it takes longer to load"
            ) from None
        else:
            self._able = self._server.able(self._capabilities)
            self._capacity = capacity
            self._watch = asyncio.create_task(self._watch_server(), name="engine-watch")
            return capacity
        finally:
            if self._capacity is None:
                await self.close()

    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def loading(self) -> str:
        """What its start waits for."""
        return f"waiting for {self._server.name}: {self._server.trouble}"

    @property
    def gave_token(self) -> bool:
        return self._gave_token

    def submit(self, request: EngineRequest) -> None:
        """Raises EngineGone once the sink has been told of the server's end."""
        if self._capacity is None or self._gone or self._closing:
            raise EngineGone("the engine is not running")
        live = self._live[request.id] = _Live(len(request.prompt_ids))
        self._idle.clear()
        try:
            check_abilities(request, self._able)
            check_request(request, self._capacity)
        except ValueError as error:
            self._hear(SequenceStep(request.id, [], finish=FinishReason.ERROR, message=str(error)))
            return
        live.task = asyncio.create_task(self._follow(request), name=f"engine-request-{request.id}")
        self._tasks.add(live.task)
        live.task.add_done_callback(lambda task: self._followed(request.id, task))

    def together(self) -> AbstractContextManager[None]:
        """All requests of one turn of the loop are sent together; what the server makes of it is not known."""
        return nullcontext()

    def abort(self, request_id: int) -> None:
        live = self._live.get(request_id)
        if live is None or live.task is None or live.aborted or live.ended:
            return
        live.aborted = True
        if not live.sent:
            live.task.cancel()
            return
        stopping = asyncio.create_task(self._stop(request_id, live.task), name=f"engine-abort-{request_id}")
        self._tasks.add(stopping)
        stopping.add_done_callback(self._tasks.discard)

    def stats(self) -> EngineStats:
        begun = [live for live in self._live.values() if live.given]
        told = self._iterations or Iterations()
        return EngineStats(
            running=len(begun),
            queued=len(self._live) - len(begun),
            prefilling_tokens=sum(live.prompt_tokens for live in self._live.values() if not live.given),
            kv_tokens_used=sum(live.prompt_tokens + live.given for live in begun),
            steps=told.steps if self._iterations is not None else self._steps,
            busy_s=told.busy_s,
            prefilled_tokens=told.prefilled_tokens,
            decoded_tokens=told.decoded_tokens,
            decoding=len(begun),
        )

    async def drain(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return not self._live
        return True

    async def close(self) -> None:
        """Stops what is live, without a further word, and leaves the server. May be called again, also at once."""
        self._closing = True
        for request_id in self._live:
            self.abort(request_id)
        if self._watch is not None:
            self._watch.cancel()
        async with self._leaving:
            ending = self._tasks if self._watch is None else {*self._tasks, self._watch}
            await asyncio.gather(*ending, return_exceptions=True)
            self._end_all()
            await self._server.close()

    # --- requests ------------------------------------------------------------------------------------

    async def _follow(self, request: EngineRequest) -> None:
        self._live[request.id].sent = True
        async with aclosing(self._server.generate(request)) as answer:
            async for step in answer:
                self._hear(step)
                if step.finish is not None:
                    return

    async def _stop(self, request_id: int, following: asyncio.Task[None]) -> None:
        """First the word, then the connection: a server may not notice in the middle of a write that it was cut."""
        await self._server.stop(request_id)
        following.cancel()

    def _followed(self, request_id: int, task: asyncio.Task[None]) -> None:
        """However its task ended, the sink hears of an end."""
        self._tasks.discard(task)
        if task.cancelled():
            self._hear(SequenceStep(request_id, [], finish=FinishReason.CANCELLED))
            return
        error = task.exception()
        match error:
            case None:
                message = "the server ended the answer without a word"
            case RemoteGone():
                self._lose(str(error))
                return
            case RemoteLost():
                log.warning("remote_request_lost", server=self._server.name, reason=str(error))
                self._hear(SequenceStep(request_id, [], finish=FinishReason.CANCELLED))
                return
            case RemoteRefusal():
                message = str(error)
            case _:
                log.error("remote_answer_not_read", server=self._server.name, error=repr(error), exc_info=error)
                message = "the server's answer could not be read"
        self._hear(SequenceStep(request_id, [], finish=FinishReason.ERROR, message=message))

    def _hear(self, step: SequenceStep) -> None:
        live = self._live.get(step.id)
        if live is None or live.ended:
            return
        live.ended = step.finish is not None
        if live.aborted and step.finish is FinishReason.ERROR:  # what the server makes of an abort
            step.finish, step.message = FinishReason.CANCELLED, ""
        self._tell_in(self._gather_s)
        heard = self._heard.get(step.id)
        self._heard[step.id] = step if heard is None else _joined(heard, step)

    def hear_iterations(self, iterations: Iterable[Iteration]) -> None:
        """Told of with the next ids, or soon by themselves: a long prompt gives no ids, and yet something goes on."""
        assert self._iterations is not None
        self._iterations.hear(iterations)
        self._tell_in(WITHOUT_IDS_S)

    def _tell_in(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._telling is not None:
            if self._telling.when() <= loop.time() + delay_s:
                return
            self._telling.cancel()
        self._telling = loop.call_later(delay_s, self._tell)

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        steps, self._heard = list(self._heard.values()), {}
        if self._sink is None or self._closing or self._gone:
            return
        if self._iterations is not None:
            self._iterations.tell(self._decoding, sum(len(step.token_ids) for step in steps))
        elif not steps:
            return
        for step in steps:
            self._live[step.id].given += len(step.token_ids)
            if step.finish is not None:
                del self._live[step.id]
        if not self._live:
            self._idle.set()
        self._steps += 1
        stats = self.stats()
        self._decoding = stats.decoding
        self._sink.on_step(steps, stats)

    # --- the server ----------------------------------------------------------------------------------

    async def _watch_server(self) -> None:
        self._lose(await self._server.lost())

    def _lose(self, reason: str) -> None:
        """The server is gone: what it gave before is told, everything live has ended."""
        if self._gone or self._closing or self._sink is None:
            return
        self._tell()
        self._end_all()
        for task in self._tasks:
            task.cancel()
        log.warning("remote_engine_lost", server=self._server.name, reason=reason)
        self._sink.on_closed(reason)

    def _end_all(self) -> None:
        self._gone = True
        self._live.clear()
        self._heard.clear()
        self._idle.set()


def _joined(first: SequenceStep, then: SequenceStep) -> SequenceStep:
    """Two deltas of one sequence as one."""
    return SequenceStep(
        first.id,
        first.token_ids + then.token_ids,
        None if first.logprobs is None and then.logprobs is None else (first.logprobs or []) + (then.logprobs or []),
        None if first.top is None and then.top is None else (first.top or []) + (then.top or []),
        then.finish,
        then.message,
        first.cached_tokens,
    )
