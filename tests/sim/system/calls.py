"""A gRPC call without gRPC: the handler runs in the door's process, its caller elsewhere, and either may go away."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from laneway.core.errors import DeadlineExceeded
from laneway.runtime.auth import Caller, set_caller
from laneway.v1 import admission_pb2 as pb
from tests.sim.system.region import Gate


class Dropped(Exception):
    """The connection is gone, and nobody says why."""


class Gone(Dropped):
    """The process at the other end died."""


class Call:
    """What the handler has for its context, and what the caller reads from.

    `window`: messages that may be on their way unread; then the handler waits, as under flow control.
    """

    def __init__(self, gate: Gate, caller: Caller, *, window: int = 64, timeout_s: float | None = None) -> None:
        self._gate = gate
        self._caller = caller
        self._window = window
        self._loop = asyncio.get_running_loop()
        self._until_s = None if timeout_s is None else self._loop.time() + timeout_s
        self._messages: deque[Any] = deque()
        self._error: BaseException | None = None
        self._result: Any = None
        self._over = False
        self._news = asyncio.Event()  # for the caller
        self._room = asyncio.Event()  # for the handler
        self._task: asyncio.Task[None] | None = None

    def begin(self, handler: Callable[..., Awaitable[Any]], request: Any) -> Call:
        async def handle() -> None:
            set_caller(self._caller)
            self._result = await handler(request, self)

        self._task = task = self._gate.life.process.start(handle(), "call")
        self._gate.calls[task] = self.drop
        task.add_done_callback(self._ended)
        if self._until_s is not None:
            self._loop.call_at(self._until_s, self._late)
        return self

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._gate.calls.pop(task, None)
        error = Dropped("cancelled") if task.cancelled() else task.exception()
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if not self._over:
            self._over, self._error = True, error
            self._news.set()

    def _late(self) -> None:
        """As gRPC does at the deadline: both sides are told."""
        if not self._over:
            self.leave()
            self._end(DeadlineExceeded("the call's deadline passed", reason="CALL_DEADLINE"))

    def drop(self) -> None:
        """The process at the other end died."""
        self._end(Gone("the connection is gone"))

    # --- the handler's side --------------------------------------------------------------------------

    def time_remaining(self) -> float | None:
        return None if self._until_s is None else self._until_s - self._loop.time()

    async def write(self, message: Any) -> None:
        while len(self._messages) >= self._window:
            self._room.clear()
            await self._room.wait()
        self._messages.append(message)
        self._news.set()

    # --- the caller's side ---------------------------------------------------------------------------

    async def read(self) -> pb.GenerateResponse | None:
        """The next message; None at the end. Raises how it ended otherwise."""
        while not self._messages and not self._over:
            self._news.clear()
            await self._news.wait()
        if self._messages:
            message = self._messages.popleft()
            self._room.set()
            return message if isinstance(message, pb.GenerateResponse) else pb.GenerateResponse.FromString(message)
        if self._error is not None:
            raise self._error
        return None

    async def answer(self) -> Any:
        """Of a call with one answer."""
        while not self._over:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def leave(self) -> None:
        """The caller goes away; the door hears of it, if it hears anything."""
        if self._task is not None and not self._over:
            self._gate.life.process.call_soon(self._task.cancel)
            self._end(Dropped("left"))
