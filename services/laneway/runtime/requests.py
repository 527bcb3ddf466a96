"""Request and reply over one inbox subscription, and subscriptions that call a plain function.

nats-py hands a message to a callback subscription through a queue and a task: two more turns of the event loop for each
message. A subscription made with a `future` gets its messages straight from the read loop, so a future that forwards
instead of resolving makes a synchronous subscription. Handlers must be short and must not block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from laneway.runtime.bus_errors import BusError, NoAnswer, NoStream
from laneway.runtime.connecting import SafeClient

LOOK_EVERY_S = 0.1  # how exactly a timeout is kept

_log = structlog.get_logger(__name__)

Handler = Callable[[Msg], None]


class _Forwarder(asyncio.Future[Msg]):
    """A future that never resolves: each result set goes to the handler."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler

    def cancelled(self) -> bool:
        return False

    def set_result(self, result: Msg, /) -> None:
        try:
            self._handler(result)
        except Exception as error:  # noqa: BLE001 - raising here would end the connection's read loop for everybody
            _log.error("bus_handler_failed", subject=result.subject, error=repr(error), exc_info=error)


async def listen(client: SafeClient, subject: str, handler: Handler, queue: str = "") -> Subscription:
    """Subscribes with a synchronous handler that runs in the read loop."""
    return await client.subscribe(subject, queue=queue, future=_Forwarder(handler))


@dataclass(eq=False, slots=True)
class _Waiting:
    subject: str
    answer: asyncio.Future[Msg]
    until_s: float  # on the loop's clock
    timeout_s: float


class Requests:
    """Requests of one connection. `fail_all` ends those that can no longer be answered."""

    def __init__(self, client: SafeClient, inbox: str) -> None:
        self._client = client
        self.inbox = f"{inbox}.*"  # what it must be able to hear
        self._prefix = f"{inbox}."
        self._count = 0
        self._waiting: dict[str, _Waiting] = {}  # by reply subject
        self._look: asyncio.TimerHandle | None = None  # for those that wait too long

    async def start(self) -> None:
        await listen(self._client, self.inbox, self._answered)

    def _answered(self, msg: Msg) -> None:
        waiting = self._waiting.pop(msg.subject, None)
        if waiting is None or waiting.answer.done():
            return
        if msg.headers is not None and msg.headers.get("Status") == "503":
            waiting.answer.set_exception(NoStream(f"nothing serves {waiting.subject}"))
        else:
            waiting.answer.set_result(msg)

    def send(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
        patient: bool = False,
    ) -> asyncio.Future[Msg]:
        """Publishes a request; the future is its answer, NoStream when nobody serves the subject, NoAnswer at the
        timeout. It must be awaited, and may be cancelled. Raises what the client's `post` raises."""
        self._count += 1
        return self._send(subject, payload, f"{self._prefix}{self._count}", headers, timeout_s, patient)

    async def echo(self, timeout_s: float) -> None:
        """A message to ourselves: all that was sent before has reached the server, and what it sent before has come.

        Unlike nats-py's flush this may time out or be cancelled. Raises NoAnswer.
        """
        self._count += 1
        subject = f"{self._prefix}{self._count}"
        await self._send(subject, b"", subject, None, timeout_s)

    def _send(
        self,
        subject: str,
        payload: bytes,
        reply: str,
        headers: Mapping[str, str] | None,
        timeout_s: float,
        patient: bool = False,
    ) -> asyncio.Future[Msg]:
        """The answer is what comes to `reply`, which may be the subject itself."""
        patient = patient and bool(self._waiting)  # who is alone has nobody to wait for
        self._client.post(subject, payload, "" if reply == subject else reply, headers, patient=patient)
        loop = asyncio.get_running_loop()
        waiting = self._waiting[reply] = _Waiting(subject, loop.create_future(), loop.time() + timeout_s, timeout_s)
        if self._look is None or timeout_s < LOOK_EVERY_S:
            self._look_in(min(timeout_s, LOOK_EVERY_S))
        return waiting.answer

    def _look_in(self, after_s: float) -> None:
        """One timer for all: one each would cost as much as the rest of a request."""
        if self._look is not None:
            self._look.cancel()
        self._look = asyncio.get_running_loop().call_later(after_s, self._give_up)

    def _give_up(self) -> None:
        self._look = None
        now_s = asyncio.get_running_loop().time()
        for reply, waiting in tuple(self._waiting.items()):
            if waiting.until_s <= now_s and not waiting.answer.done():
                text = f"no answer on {waiting.subject} within {waiting.timeout_s} s"
                waiting.answer.set_exception(NoAnswer(text))
            if waiting.answer.done():  # also when nobody waits for it any more
                del self._waiting[reply]
        if self._waiting:
            self._look_in(LOOK_EVERY_S)

    async def drain(self, subscription: Subscription, timeout_s: float) -> None:
        """Ends a subscription without losing what is on its way. It is ended also where NoAnswer is raised."""
        client = self._client
        try:
            if client.is_connected:
                await client._send_unsubscribe(subscription._id)
                await self.echo(timeout_s)
        finally:
            # Also keeps a reconnect from making it anew.
            client._remove_sub(subscription._id)

    def fail_all(self, error: Callable[[], BusError]) -> None:
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.answer.done():
                each.answer.set_exception(error())

    def refuse(self, subject: str, error: Callable[[], BusError]) -> None:
        """Ends the requests to a subject that the server refused. `subject`: in lower case, as the client gives it."""
        for each in self._waiting.values():
            if each.subject.lower() == subject and not each.answer.done():
                each.answer.set_exception(error())
