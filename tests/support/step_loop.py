"""An event loop whose time stands still until the test moves it, and a bus for pullers that says what the test wants.

Only what a Puller uses is there: posts, listeners, drains, the news of a lost connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import nats.errors
from nats.aio.msg import Msg

from laneway.runtime.bus import Bus, NotConnected
from laneway.runtime.headers import STATUS

T = TypeVar("T")

TURNS = 12  # more than anything here needs to come to rest


class StepLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.faults: list[dict[str, Any]] = []  # of callbacks that nobody waits for
        super().__init__()
        self.set_exception_handler(lambda loop, fault: self.faults.append(fault))

    def time(self) -> float:
        return self.now_s

    def act(self, act: Callable[[], T]) -> T:
        """Does something inside the loop, and lets everything come to rest."""

        async def run() -> T:
            result = act()
            for _ in range(TURNS):
                await asyncio.sleep(0)
            return result

        return self.run_until_complete(run())

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.act(lambda: None)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.act(lambda: self.create_task(coroutine))

    def shut(self) -> None:
        """Cancels what is under way, and closes."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.act(lambda: None)
        self.close()


class Listener:
    """A subscription, until it is drained."""

    def __init__(self, subject: str, receive: Callable[[Msg], None]) -> None:
        self.inbox = subject.removesuffix(".*")
        self.receive = receive
        self.open = True
        self.drained = asyncio.Event()  # all that was on its way has come


class ScriptedBus:
    """A bus and its client in one. It does nothing by itself."""

    def __init__(self) -> None:
        self.connected = True
        self.post_fails = False
        self.listeners: list[Listener] = []
        self.pulls: list[tuple[bytes, str]] = []  # body and reply subject
        self.emitted: list[tuple[str, bytes]] = []
        self.on_lost: list[Callable[[], None]] = []
        self._inboxes = itertools.count(1)

    @property
    def nc(self) -> ScriptedBus:
        return self

    def as_bus(self) -> Bus:
        return cast(Bus, self)

    def new_inbox(self) -> str:
        return f"_INBOX.{next(self._inboxes)}"

    async def listen(self, client: object, subject: str, receive: Callable[[Msg], None]) -> Listener:
        """In place of laneway.runtime.requests.listen."""
        self.listeners.append(Listener(subject, receive))
        return self.listeners[-1]

    def post(self, subject: str, payload: bytes, reply: str = "") -> None:
        if self.post_fails:
            raise nats.errors.OutboundBufferLimitError
        self.pulls.append((payload, reply))

    async def emit(self, subject: str, payload: bytes) -> None:
        if not self.connected:
            raise NotConnected
        self.emitted.append((subject, payload))

    async def drain(self, listener: Listener, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            if self.connected:
                async with asyncio.timeout(timeout_s):
                    await listener.drained.wait()
        listener.open = False

    def on_disconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.on_lost.append(callback)
        return lambda: self.on_lost.remove(callback) if callback in self.on_lost else None

    def set_connected(self, connected: bool) -> None:
        lost, self.connected = self.connected and not connected, connected
        if lost:
            for callback in tuple(self.on_lost):
                callback()

    def open(self) -> list[Listener]:
        return [listener for listener in self.listeners if listener.open]


def message(deliveries: int, stream_sequence: int, number: int) -> Msg:
    reply = f"$JS.ACK.STREAM.consumer.{deliveries}.{stream_sequence}.{number}.1.0"
    return Msg(cast(Any, None), subject="lane", reply=reply, data=b"job")


def status(code: str, reply: str) -> Msg:
    return Msg(cast(Any, None), subject=reply, headers={STATUS: code})
