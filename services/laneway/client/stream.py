"""One answer as it arrives: opening it (with retries), its chunks in order, its end and what it took.

Before the first token a failed attempt may be repeated. After it, only what is sound goes on: following the same job
from the next index. Leaving the block ends the call, which frees the engine unless the contract says keep.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from laneway.client import decode
from laneway.client.channel import Deadline, Retrier, failure_of, least
from laneway.client.values import Chunk, Finished
from laneway.core.clock import Clock
from laneway.core.errors import LanewayError
from laneway.core.job import Verdict
from laneway.core.lanes import Lane
from laneway.policy.retry import Attempted
from laneway.runtime.wire import jobs
from laneway.v1 import admission_pb2

STATUS_S_MAX = 2.0  # wait for the status after the last event

Event = admission_pb2.GenerateResponse | admission_pb2.WatchResponse  # same fields and numbers
Call = (
    grpc.aio.UnaryStreamCall[admission_pb2.GenerateRequest, admission_pb2.GenerateResponse]
    | grpc.aio.UnaryStreamCall[admission_pb2.WatchRequest, admission_pb2.WatchResponse]
)


class BrokenStream(LanewayError):
    """The service broke the protocol: a chunk out of order, or an end without a result."""

    default_reason = "BROKEN_STREAM"


@dataclass(frozen=True, slots=True)
class Opening:
    """How a stream is begun, and what may be done about a failure."""

    address: str  # of the service, for words
    open: Callable[[LanewayError | None, float | None], Call]  # (failure of the attempt before, seconds left)
    follow: Callable[[str, int, float | None], Call] | None  # (job, next index, seconds left); None: not sound
    accepts: bool  # the first event is Accepted or a refusal, soon: entering waits for it
    lane: Lane
    idempotent: bool
    timeout_s: float | None
    retry_s_max: float | None  # no attempt begins later than this


class Meter:
    """Times of one stream at the caller."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.start_s = clock.monotonic()
        self._first_s: float | None = None
        self._last_s = self.start_s
        self._tokens = 0
        self._stall_s = 0.0

    def chunk(self, tokens: int) -> None:
        now_s = self._clock.monotonic()
        if self._first_s is None:
            self._first_s = now_s
        else:
            self._stall_s = max(self._stall_s, now_s - self._last_s)
        self._last_s = now_s
        self._tokens += tokens

    def finished(self, message: admission_pb2.Finished) -> Finished:
        span_s = self._last_s - self._first_s if self._first_s is not None else 0.0
        return Finished(
            job_id=message.job_id,
            state=decode.state_of(message.state),
            finish_reason=decode.finish_reason_of(message.finish_reason),
            usage=jobs.usage_from_proto(message.usage),
            timings=jobs.timings_from_proto(message.timings),
            attempt=message.attempt,
            ttft_s=None if self._first_s is None else self._first_s - self.start_s,
            tpot_s=span_s / (self._tokens - 1) if self._tokens > 1 else None,
            stall_s=self._stall_s,
            total_s=self._clock.monotonic() - self.start_s,
        )


class TokenStream:
    """`async with client.generate(...) as stream`, then `async for chunk in stream`, once. For one task at a time."""

    def __init__(
        self, opening: Opening, retrier: Retrier, clock: Clock, *, job_id: str = "", from_index: int = 0
    ) -> None:
        self.job_id = job_id
        self.verdict: Verdict | None = None  # None when watching a job
        self._opening = opening
        self._retrier = retrier
        self._clock = clock
        self._from_index = from_index
        self._next_index: dict[int, int] = {}  # by output
        self._output_started = False
        self._attempt = 1
        self._meter = Meter(clock)
        self._deadline = Deadline(clock, opening.timeout_s)
        self._give_up = Deadline(clock, least(opening.timeout_s, opening.retry_s_max))
        self._call: Call | None = None
        self._unused: Event | None = None
        self._finished: Finished | None = None

    async def __aenter__(self) -> Self:
        """Returns once the job is accepted; raises the refusal."""
        if self._call is not None:
            raise RuntimeError("a stream is entered once")
        self._retrier.first_attempt(self._opening.lane)
        try:
            self._call = self._opening.open(None, self._deadline.left_s())
            if self._opening.accepts:
                event = await self._read()
                self._unused = event if event.WhichOneof("event") != "accepted" else None
                if self._unused is None:
                    self._take(event)
        except BaseException:
            self._cancel()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    @property
    def ended(self) -> bool:
        """Whether the whole answer was read."""
        return self._finished is not None

    @property
    def finished(self) -> Finished:
        """How the answer ended; RuntimeError before its end was read."""
        if self._finished is None:
            raise RuntimeError("the stream has not ended")
        return self._finished

    @property
    def started_s(self) -> float:
        """When generate() was called, on the monotonic clock."""
        return self._meter.start_s

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while self._finished is None:
            event, self._unused = self._unused, None
            chunk = self._take(event or await self._read())
            if chunk is not None:
                return chunk
            if self._finished is not None:
                await self._read_status()
        raise StopAsyncIteration

    async def text(self) -> str:
        """The rest of the answer as text. With n > 1 this is the first answer; see texts()."""
        return (await self.texts()).get(0, "")

    async def texts(self) -> dict[int, str]:
        """The rest of each of n answers."""
        parts: dict[int, list[str]] = {}
        async for chunk in self:
            parts.setdefault(chunk.output, []).append(chunk.text)
        return {output: "".join(found) for output, found in parts.items()}

    def _take(self, event: Event) -> Chunk | None:
        """Applies one event; gives the chunk if it was one."""
        match event.WhichOneof("event"):
            case "accepted":
                self.job_id = event.accepted.job_id
                self.verdict = decode.verdict_of(event.accepted.verdict)
            case "finished":
                self._finished = self._meter.finished(event.finished)
                self.job_id = self.job_id or event.finished.job_id
            case "chunk":
                return self._in_order(decode.chunk_of(event.chunk))
            case _:  # a newer service's event
                pass
        return None

    def _in_order(self, chunk: Chunk) -> Chunk:
        expected = self._next_index.get(chunk.output, self._from_index)
        if chunk.first_index != expected:
            raise BrokenStream(
                f"expected token {expected} and got {chunk.first_index}", job_id=self.job_id, reason="OUT_OF_ORDER"
            )
        self._next_index[chunk.output] = expected + len(chunk.token_ids)
        self._output_started = True
        self._meter.chunk(len(chunk.token_ids))
        return chunk

    async def _read(self) -> Event:
        """The next event, through as many attempts as the policy allows."""
        while True:
            assert self._call is not None
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as rpc_error:
                error = failure_of(rpc_error, self._opening.address)
                error.job_id = error.job_id or self.job_id
                error.__cause__ = rpc_error
                await self._reopen(error)
                continue
            if isinstance(message, admission_pb2.GenerateResponse | admission_pb2.WatchResponse):
                return message
            raise BrokenStream("the stream ended without a result", job_id=self.job_id, reason="NO_RESULT")

    async def _read_status(self) -> None:
        """Lets the call end by itself: a cancellation now would look like a caller that left."""
        assert self._call is not None
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
            async with asyncio.timeout(STATUS_S_MAX):
                await self._call.read()

    async def _reopen(self, error: LanewayError) -> None:
        """Begins the next attempt when it is due; raises the error if there is to be none."""
        opening = self._opening
        # Going on with the same job is not a second run. It needs one answer, and a failure of the connection: a
        # service that refuses names a time.
        follow = opening.follow if self._output_started and set(self._next_index) == {0} else None
        if error.retry_after_s is not None:
            follow = None
        await self._retrier.wait_or_raise(
            Attempted(
                error,
                self._attempt,
                lane=opening.lane,
                idempotent=opening.idempotent,
                output_started=self._output_started and follow is None,
                deadline_s=self._give_up.at_s,
            )
        )
        self._attempt += 1
        if follow is not None:
            self._call = follow(self.job_id, self._next_index[0], self._deadline.left_s())
        else:
            self._call = opening.open(error, self._deadline.left_s())

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()
