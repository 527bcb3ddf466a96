"""One answer as it arrives: opening it (with retries), its chunks in order, its end and what it took.

Before the first token a failed attempt may be repeated. After it, only what is sound goes on: following the same job
from the next index, which runs nothing again and is tried for as long as an outage may last. Leaving the block ends
the call, which frees the engine unless the contract says keep.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from laneway.client import decode
from laneway.client.channel import NO_SERVICE, Deadline, Retrier, failure_of, least
from laneway.client.values import Chunk, Finished
from laneway.core.clock import Clock
from laneway.core.errors import Code, LanewayError
from laneway.core.job import Verdict
from laneway.core.lanes import Lane
from laneway.policy.retry import Attempted
from laneway.runtime.wire import jobs
from laneway.v1 import admission_pb2

DELIVERED_IDS_MAX = 65_536  # told when a stream is taken up again: a request has its limit
STATUS_S_MAX = 2.0  # wait for the status after the last event
STOOD_S = 5.0  # a connection that lived this long had ended the outage, though the job had nothing to say meanwhile

Event = admission_pb2.GenerateResponse | admission_pb2.WatchResponse  # same fields and numbers
Call = (
    grpc.aio.UnaryStreamCall[admission_pb2.GenerateRequest, admission_pb2.GenerateResponse]
    | grpc.aio.UnaryStreamCall[admission_pb2.WatchRequest, admission_pb2.WatchResponse]
)


# (job, next index, the tokens before it or none, seconds left)
Follow = Callable[[str, int, Sequence[int], float | None], Call]


class BrokenStream(LanewayError):
    """The service broke the protocol: a chunk out of order, or an end without a result."""

    default_reason = "BROKEN_STREAM"


@dataclass(frozen=True, slots=True)
class Opening:
    """How a stream is begun, and what may be done about a failure."""

    address: str  # of the service, for words
    open: Callable[[LanewayError | None, float | None], Call]  # (failure of the attempt before, seconds left)
    follow: Follow | None  # None: not sound
    accepts: bool  # the first event is Accepted or a refusal, soon: entering waits for it
    lane: Lane
    idempotent: bool
    timeout_s: float | None
    retry_s_max: float | None  # no attempt to run the job begins later than this


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


class Outage:
    """How long a stream has heard nothing because of failures, and how often it tried. Ends when something is heard."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._opened_s = clock.monotonic()
        self._began_s: float | None = None
        self.failures = 0

    def opened(self) -> None:
        """An attempt begins."""
        self._opened_s = self._clock.monotonic()

    def heard(self) -> None:
        self._began_s, self.failures = None, 0

    def failed(self, error: LanewayError) -> float:
        """An attempt failed: how long the outage has lasted."""
        now_s = self._clock.monotonic()
        if now_s - self._opened_s >= STOOD_S and error.reason != NO_SERVICE:
            self.heard()
        self._began_s = now_s if self._began_s is None else self._began_s
        self.failures += 1
        return now_s - self._began_s


class TokenStream:
    """`async with client.generate(...) as stream`, then `async for chunk in stream`, once. For one task at a time."""

    def __init__(
        self,
        opening: Opening,
        retrier: Retrier,
        clock: Clock,
        *,
        job_id: str = "",
        from_index: int = 0,
        delivered_ids: Sequence[int] = (),
    ) -> None:
        self.job_id = job_id
        self.verdict: Verdict | None = None  # None when watching a job
        self.outlasted = False  # the service was away for longer than is waited for
        self._opening = opening
        self._retrier = retrier
        self._clock = clock
        self._from_index = from_index
        self._next_index: dict[int, int] = {}  # by output
        self._delivered = array("I", delivered_ids)  # of the first output, as far as they are known from token 0 on
        self._output_started = False
        self._attempt = 1
        self._outage = Outage(clock)
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
        if not chunk.output and len(self._delivered) == expected:
            self._delivered.extend(chunk.token_ids)
        self._output_started = True
        self._meter.chunk(len(chunk.token_ids))
        return chunk

    async def _read(self) -> Event:
        """The next event, through as many attempts as the policy allows."""
        while True:
            if self._call is None:
                raise RuntimeError("a stream is read inside its with-block")
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as rpc_error:
                error = failure_of(rpc_error, self._opening.address)
                error.__cause__ = rpc_error
                await self._reopen(error)
                continue
            if isinstance(message, admission_pb2.GenerateResponse | admission_pb2.WatchResponse):
                self._outage.heard()
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
        outage_s = self._outage.failed(error)
        follow = self._followable(error)
        error.job_id = error.job_id or self.job_id
        if follow is None and not opening.accepts:
            raise error
        self.outlasted = follow is not None
        await self._retrier.wait_or_raise(
            Attempted(
                error,
                self._attempt if follow is None else self._outage.failures,
                lane=opening.lane,
                idempotent=opening.idempotent,
                output_started=self._output_started and follow is None,
                deadline_s=self._give_up.at_s if follow is None else self._deadline.at_s,
                outage_s=None if follow is None else outage_s,
            )
        )
        self.outlasted = False
        self._outage.opened()
        if follow is not None:
            next_index = self._next_index.get(0, self._from_index)
            known = self._delivered if len(self._delivered) == next_index <= DELIVERED_IDS_MAX else ()
            self._call = follow(self.job_id, next_index, known, self._deadline.left_s())
        else:
            self._attempt += 1
            self._call = opening.open(error, self._deadline.left_s())

    def _followable(self, error: LanewayError) -> Follow | None:
        """How to go on with the same job after this failure; None where that is not sound or the job has ended.

        Several outputs that have begun cannot be taken up at one index. What a service says of a job by name is the
        job's own end; its other refusals, and the connection's failures, pass.
        """
        known = self.job_id and set(self._next_index) <= {0}
        ended = error.row.code is not Code.UNAVAILABLE or error.job_id
        return self._opening.follow if known and not ended else None

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()
