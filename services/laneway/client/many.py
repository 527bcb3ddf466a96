"""Submitting many jobs over one call: keys, the service's window, lost calls taken up again, refused items sent again.

What has no outcome is kept until it has one, so a call that breaks costs a repetition and never a job: each item's key
makes the repetition safe. No more is taken from the caller than the service's window has room for.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from dataclasses import dataclass

import grpc
import grpc.aio

from laneway.client import decode
from laneway.client.channel import Retrier, Surroundings, failure_of
from laneway.client.request import RequestFields, build_spec
from laneway.client.stream import Outage
from laneway.client.values import Submitted
from laneway.core.errors import Code, InvalidRequest, LanewayError, Unavailable
from laneway.core.lanes import Lane
from laneway.policy.retry import Attempted
from laneway.runtime.grpc_errors import from_status
from laneway.runtime.settings import KIB
from laneway.v1 import admission_pb2 as pb

WINDOW = 64  # until the service has said its own
HELD_BYTES_MAX = 4096 * KIB  # of items without an outcome; one more is always taken
ITEM_BYTES_MAX = 8188 * KIB  # a service's default limit for a message is 8 MiB
MESSAGE_ITEMS_MAX = 32
MESSAGE_BYTES_MAX = 256 * KIB  # one larger item is sent alone

Call = grpc.aio.StreamStreamCall[pb.SubmitManyRequest, pb.SubmitManyResponse]


@dataclass(frozen=True, slots=True)
class ManyItem:
    """One request among many."""

    request: RequestFields
    ref: str = ""  # yours, unique, at most 128 characters; comes back with the outcome. Empty: its number, from 0
    idempotency_key: str = ""  # empty: made here


@dataclass(frozen=True, slots=True)
class ManyOutcome:
    """What became of one request: accepted, or refused with the error that submit() would raise."""

    ref: str
    submitted: Submitted | None = None
    error: LanewayError | None = None


@dataclass(slots=True)
class _Held:
    """An item from its being taken until its outcome is given."""

    message: pb.SubmitManyItem
    size: int
    taken_s: float
    waits: bool = False  # for the time at which it may be sent again
    settled: bool = False  # its outcome is on the way to the caller


class Submission:
    """One submit_many()."""

    def __init__(
        self,
        items: Iterable[ManyItem] | AsyncIterable[ManyItem],
        open_call: Callable[[], Call],
        address: str,
        retrier: Retrier,
        surroundings: Surroundings,
        retry_s_max: float,
    ) -> None:
        self._items = items
        self._open_call = open_call
        self._address = address
        self._retrier = retrier
        self._surroundings = surroundings
        self._retry_s_max = retry_s_max
        self._window = WINDOW
        self._held: dict[str, _Held] = {}
        self._held_bytes = 0
        self._open = 0  # items that are held and not settled
        self._to_send: deque[str] = deque()
        self._all_taken = False
        self._freed = asyncio.Event()
        self._work = asyncio.Event()  # something to send, or the end of it
        self._outcomes: asyncio.Queue[ManyOutcome | None] = asyncio.Queue()  # None: there are no more
        self._outage = Outage(surroundings.clock)
        self._connected = False  # at least once

    async def outcomes(self) -> AsyncGenerator[ManyOutcome, None]:
        running = asyncio.create_task(self._run(), name="submit many")
        try:
            while (outcome := await self._outcomes.get()) is not None:
                self._give_up_room(outcome.ref)
                yield outcome
            await running
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await running

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._take())
                group.create_task(self._send(group))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            self._outcomes.put_nowait(None)

    # --- what is taken from the caller ---------------------------------------------------------------

    async def _take(self) -> None:
        number = 0
        async for item in _each(self._items):
            while self._full:
                self._freed.clear()
                await self._freed.wait()
            self._hold(item, item.ref or str(number))
            number += 1
        self._all_taken = True
        self._work.set()

    @property
    def _full(self) -> bool:
        waiting = max(len(self._held), self._outcomes.qsize())  # those that cannot be sent have an outcome at once
        return waiting >= self._window or self._held_bytes >= HELD_BYTES_MAX

    def _hold(self, item: ManyItem, ref: str) -> None:
        now_s = self._surroundings.clock.now()
        try:
            if ref in self._held:
                raise InvalidRequest("ref is that of another item without an outcome", field="ref")
            key = item.idempotency_key or str(uuid.uuid4())
            spec = build_spec(item.request, now_s)
            message = pb.SubmitManyItem(client_ref=ref, spec=spec, idempotency_key=key)
            size = message.ByteSize()
            if size > ITEM_BYTES_MAX:
                raise InvalidRequest(
                    f"the request has {size} bytes, at most {ITEM_BYTES_MAX} are allowed", reason="MESSAGE_TOO_LARGE"
                )
        except LanewayError as error:
            self._outcomes.put_nowait(ManyOutcome(ref, error=error))
            return
        except (TypeError, ValueError) as error:  # text that is no Unicode
            refusal = InvalidRequest(f"the request cannot be sent: {error}")
            self._outcomes.put_nowait(ManyOutcome(ref, error=refusal))
            return
        self._held[ref] = _Held(message, size, self._surroundings.clock.monotonic())
        self._held_bytes += size
        self._open += 1
        self._to_send.append(ref)
        self._work.set()

    def _give_up_room(self, ref: str) -> None:
        held = self._held.get(ref)
        if held is not None and held.settled:
            del self._held[ref]
            self._held_bytes -= held.size
        self._freed.set()

    # --- what is sent and heard ----------------------------------------------------------------------

    @property
    def _done(self) -> bool:
        return self._all_taken and not self._open

    async def _send(self, group: asyncio.TaskGroup) -> None:
        """One call after the other until everything has its outcome."""
        self._retrier.first_attempt(Lane.BATCH)
        attempt = 1
        while not self._to_send and not self._done:
            await self._wait_for_work()
        while not self._done:
            self._outage.opened()
            error = await self._failure_of_call(group)
            if error is None:
                continue
            outage_s = self._outage.failed(error)
            tried = Attempted(error, attempt, lane=Lane.BATCH)
            if self._connected:
                tried = Attempted(error, self._outage.failures, lane=Lane.BATCH, outage_s=outage_s)
            await self._retrier.wait_or_raise(tried)
            attempt += 1
            again = [ref for ref, held in self._held.items() if not held.settled and not held.waits]
            self._to_send = deque(again)

    async def _failure_of_call(self, group: asyncio.TaskGroup) -> LanewayError | None:
        """Why a call ended before everything was settled; None if it ended after."""
        call = self._open_call()
        writing: asyncio.Task[None] | None = None
        try:
            while isinstance(response := await call.read(), pb.SubmitManyResponse):
                if response.window:
                    self._window = response.window
                    self._freed.set()
                if writing is None:
                    self._connected = True
                    writing = asyncio.create_task(self._write(call), name="write many")
                for outcome in response.outcomes:
                    self._hear(outcome, group)
        except grpc.aio.AioRpcError as failed:
            error = failure_of(failed, self._address)
            error.__cause__ = failed
            return error
        finally:
            call.cancel()
            if writing is not None:
                writing.cancel()
                await asyncio.wait({writing})
        return None if self._done else Unavailable("the service ended the call early", reason="CONNECTION_LOST")

    async def _write(self, call: Call) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # reading tells what happened
            while True:
                while not self._to_send and not self._done:
                    await self._wait_for_work()
                if not self._to_send:
                    await call.done_writing()
                    return
                await call.write(self._next_message())

    async def _wait_for_work(self) -> None:
        self._work.clear()
        await self._work.wait()

    def _next_message(self) -> pb.SubmitManyRequest:
        items: list[pb.SubmitManyItem] = []
        size = 0
        while self._to_send and len(items) < MESSAGE_ITEMS_MAX:
            held = self._held[self._to_send[0]]
            size += held.size
            if items and size > MESSAGE_BYTES_MAX:
                break
            items.append(held.message)
            self._to_send.popleft()
        return pb.SubmitManyRequest(items=items)

    def _hear(self, outcome: pb.SubmitManyOutcome, group: asyncio.TaskGroup) -> None:
        held = self._held.get(outcome.client_ref)
        if held is None or held.settled:  # of an earlier call, or of a service that names nothing of ours
            return
        self._outage.heard()
        if outcome.HasField("accepted"):
            self._settle(held, ManyOutcome(outcome.client_ref, decode.submitted_of(outcome.accepted)))
            return
        error = from_status(outcome.error)
        after_s = error.retry_after_s
        if after_s is not None and error.row.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED):
            waited_s = self._surroundings.clock.monotonic() - held.taken_s
            if waited_s + after_s <= self._retry_s_max:
                held.waits = True
                group.create_task(self._send_again(outcome.client_ref, held, after_s))
                return
        self._settle(held, ManyOutcome(outcome.client_ref, error=error))

    async def _send_again(self, ref: str, held: _Held, after_s: float) -> None:
        await self._surroundings.sleep(after_s)
        held.waits = False
        self._to_send.append(ref)
        self._work.set()

    def _settle(self, held: _Held, outcome: ManyOutcome) -> None:
        held.settled = True
        self._open -= 1
        self._outcomes.put_nowait(outcome)
        self._work.set()


async def _each(items: Iterable[ManyItem] | AsyncIterable[ManyItem]) -> AsyncIterator[ManyItem]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
        return
    for item in items:
        yield item
