"""The product's Bus over a wire of two queues, and the faults that a wire may have."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from laneway.core.clock import Clock
from laneway.runtime.bus import Bus
from laneway.runtime.bus_errors import PayloadTooLarge
from laneway.runtime.connecting import SafeClient
from laneway.runtime.requests import Requests
from tests.sim.memory_nats.messages import Headers, header_block
from tests.sim.memory_nats.server import MemoryNats

MAX_PAYLOAD_BYTES = 1024 * 1024  # the real server's default
REQUEST_TIMEOUT_S = 2.0


class Pipe:
    """One direction of a connection: in order, and never in the turn of the loop in which something was sent.

    The faults: `hold` keeps what comes until `free`; `copies` says how often each frame arrives (0: it is lost);
    `delay_s` how long it is on its way, behind what was sent before it. What arrives is handled in `context`: whoever
    sent it may be dead or stopped by then.
    """

    def __init__(self, carry: Callable[..., None], ready: Callable[[], bool], context: contextvars.Context) -> None:
        self._carry = carry
        self._ready = ready
        self._context = context
        self._frames: deque[tuple[float, tuple[Any, ...]]] = deque()  # with the loop's time at which each arrives
        self._held = False
        self._handle: asyncio.Handle | None = None
        self.copies: Callable[..., int] = lambda *frame: 1
        self.delay_s: Callable[[], float] = lambda: 0.0

    def put(self, *frame: Any) -> None:
        now_s = asyncio.get_running_loop().time()
        for _ in range(self.copies(*frame)):
            before_s = self._frames[-1][0] if self._frames else now_s
            self._frames.append((max(before_s, now_s + self.delay_s()), frame))
        self.flow()

    def hold(self) -> None:
        self._held = True

    def free(self) -> None:
        self._held = False
        self.flow()

    def clear(self) -> None:
        self._frames.clear()

    def flow(self) -> None:
        if self._frames and self._handle is None:
            loop = asyncio.get_running_loop()
            after_s = self._frames[0][0] - loop.time()
            if after_s > 0.0:
                self._handle = loop.call_later(after_s, self._arrive, context=self._context)
            else:
                self._handle = loop.call_soon(self._arrive, context=self._context)

    def _arrive(self) -> None:
        self._handle = None
        loop = asyncio.get_running_loop()
        for _ in range(len(self._frames)):  # what comes of it waits for a turn of its own
            if self._held or not self._ready() or not self._frames or self._frames[0][0] > loop.time():
                break
            self._carry(*self._frames.popleft()[1])
        if not self._held and self._ready():
            self.flow()


class MemoryClient(SafeClient):
    """nats-py's client with its subscriptions, whose commands go to a MemoryNats instead of a socket."""

    def __init__(self, server: MemoryNats) -> None:
        super().__init__()
        self._server = server
        self._inboxes = itertools.count(1)
        self._number = server.next_client()
        self._unsent: list[tuple[str, bytes, Headers, str]] = []  # published while there was no connection
        self.lost: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.regained: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._losing: asyncio.Task[None] | None = None
        self._max_payload = MAX_PAYLOAD_BYTES
        self._status = SafeClient.CONNECTED
        self.to_server = Pipe(self._at_server, lambda: server.running and not server.paused, contextvars.Context())
        self.to_client = Pipe(self._at_client, lambda: True, contextvars.copy_context())
        server.clients.append(self)

    def new_inbox(self) -> str:
        return f"_INBOX.c{self._number}.{next(self._inboxes)}"

    # --- to the server -------------------------------------------------------------------------------

    @property
    def buffered(self) -> tuple[int, int]:
        return len(self._unsent), sum(len(payload) for _, payload, _, _ in self._unsent)

    def post(
        self,
        subject: str,
        payload: bytes,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
        *,
        patient: bool = False,
    ) -> None:
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        own = dict(headers or {})
        block = header_block(own)
        if block.count(b"\n") != (len(own) + 2 if own else 0):
            raise nats.errors.BadHeaderError("a header has a line break in it")
        if len(block) + len(payload) > self.payload_bytes_max:
            raise PayloadTooLarge(len(block) + len(payload), self.payload_bytes_max)
        if self.is_connected:
            self.to_server.put("PUB", subject, payload, own, reply)
        else:
            self._unsent.append((subject, payload, own, reply))

    async def _send_subscribe(self, sub: Subscription) -> None:
        if self.is_connected:
            self.to_server.put("SUB", sub._id, sub.subject, sub.queue)

    async def _send_unsubscribe(self, sid: int, limit: int = 0) -> None:
        if self.is_connected:
            self.to_server.put("UNSUB", sid)

    def _at_server(self, command: str, *rest: Any) -> None:
        if command == "PUB":
            self._server.publish(self, *rest)
        elif command == "SUB":
            self._server.subscribe(self, *rest)
        else:
            self._server.unsubscribe(self, *rest)

    # --- from the server -----------------------------------------------------------------------------

    def receive(self, sid: int, subject: str, reply: str, data: bytes, headers: Headers | None) -> None:
        self.to_client.put(sid, subject, reply, data, dict(headers) if headers else None)

    def _at_client(self, sid: int, subject: str, reply: str, data: bytes, headers: Headers | None) -> None:
        subscription = self._subs.get(sid)
        if subscription is None:
            return
        msg = Msg(self, subject, reply, data, headers, _sid=sid)
        if subscription._future is not None:
            subscription._future.set_result(msg)
        else:
            subscription._pending_size += len(data)
            subscription._pending_queue.put_nowait(msg)

    # --- the connection ------------------------------------------------------------------------------

    def cut(self) -> None:
        """The connection is lost, with what is on its way."""
        if self.is_connected:
            self._status = SafeClient.RECONNECTING
            self.to_server.clear()
            self.to_client.clear()
            self._server.unsubscribe(self)
            self._losing = self._tell(self.lost)

    def vanish(self, *, unsent: bool) -> None:
        """The process was killed: nothing more leaves it, and it hears nothing. `unsent`: what it sent last is lost."""
        self._status = SafeClient.CLOSED
        self.to_client.clear()
        self.to_client.hold()
        if unsent:
            self.to_server.clear()
        self.to_server.free()
        self.to_server.put("UNSUB")
        if self in self._server.clients:
            self._server.clients.remove(self)

    def mend(self) -> None:
        """Connected again: subscriptions first, then what was published meanwhile."""
        if self._status != SafeClient.RECONNECTING or not self._server.running:
            return
        if self._losing is not None and not self._losing.done():  # as nats-py, which dials after it has told
            self._losing.add_done_callback(lambda _: self.mend())
            return
        self._status = SafeClient.CONNECTED
        for sid, subscription in self._subs.items():
            self.to_server.put("SUB", sid, subscription.subject, subscription.queue)
        unsent, self._unsent = self._unsent, []
        for subject, payload, headers, reply in unsent:
            self.to_server.put("PUB", subject, payload, headers, reply)
        self._tell(self.regained)

    def _tell(self, whom: Callable[[], Coroutine[Any, Any, None]] | None) -> asyncio.Task[None] | None:
        if whom is None:
            return None
        task = asyncio.get_running_loop().create_task(whom())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        return task

    async def close(self) -> None:
        if self.is_closed:
            return
        if self in self._server.clients:
            self._server.clients.remove(self)
        # What was published before goes first.
        self.to_server.put("UNSUB")
        await self._close(SafeClient.CLOSED, do_cbs=False)

    async def _flush_pending(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to flush."""


class MemoryBus(Bus):
    """A Bus on a MemoryNats."""

    nc: MemoryClient

    @classmethod
    async def to(
        cls, server: MemoryNats, clock: Clock, *, name: str = "test", request_timeout_s: float = REQUEST_TIMEOUT_S
    ) -> Self:
        client = MemoryClient(server)
        bus = cls(client, name, request_timeout_s)
        client.lost, client.regained = bus._disconnected, bus._reconnected
        bus._requests = Requests(client, client.new_inbox())
        bus._up.set()
        bus._connecting = False
        await bus._requests.start()
        return bus
