"""Following a stream: what is there now, then what comes, in order, across reconnects and lost messages.

An ephemeral push consumer with flow control, made anew from the last sequence seen whenever a delivery is missing, the
heartbeat stops or the connection was lost. Nothing is acknowledged: any number of followers may read the same stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from laneway.runtime.bus import ApiError, Bus, BusError
from laneway.runtime.headers import CONSUMER_STALLED, STATUS, AckSubject

HEARTBEAT_S = 2.0
RETRY_S = 0.5
_NS = 1_000_000_000

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def follow(
    bus: Bus, stream: str, subject_filter: str, *, headers_only: bool = False
) -> AsyncIterator[AsyncIterator[Msg]]:
    """The last message of each matching subject, then every later one, without an end."""
    follower = _Follower(bus, stream, subject_filter, headers_only)
    unregister = bus.on_reconnect(follower.reset)
    try:
        await follower.open()
        yield follower.messages()
    finally:
        unregister()
        await follower.close()


class _Follower:
    def __init__(self, bus: Bus, stream: str, subject_filter: str, headers_only: bool) -> None:
        self._bus = bus
        self._stream = stream
        self._filter = subject_filter
        self._headers_only = headers_only
        self._queue: deque[Msg | None] = deque()  # bounded by the server's flow control; None: reset
        self._filled = asyncio.Event()  # whenever there is something to take
        self._subscription: Subscription | None = None
        self._consumer = ""
        self._stream_sequence = 0
        self._consumer_sequence = 0

    def reset(self) -> None:
        self._queue.append(None)
        self._filled.set()

    async def _wait(self) -> None:
        """Until there is a message, or for as long as the server may be silent; then there is a reset."""
        self._filled.clear()
        try:
            async with asyncio.timeout(2.5 * HEARTBEAT_S):
                await self._filled.wait()
        except TimeoutError:
            self._queue.append(None)

    async def open(self) -> None:
        """A new consumer behind the last message seen; what an older one still sends is not listened to."""
        await self._bus.unsubscribe(self._subscription)
        self._queue = queue = deque[Msg | None]()
        self._consumer_sequence = 0
        inbox = self._bus.nc.new_inbox()

        def take(msg: Msg) -> None:
            queue.append(msg)
            self._filled.set()

        self._subscription = await self._bus.listen(inbox, take)
        config: dict[str, object] = {
            "deliver_policy": "last_per_subject",
            "ack_policy": "none",
            "max_deliver": 1,
            "deliver_subject": inbox,
            "filter_subject": self._filter,
            "flow_control": True,
            "idle_heartbeat": round(HEARTBEAT_S * _NS),
            "headers_only": self._headers_only,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": 30 * _NS,
        }
        if self._stream_sequence:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self._stream_sequence + 1}
        answer = await self._bus.api(f"CONSUMER.CREATE.{self._stream}", {"stream_name": self._stream, "config": config})
        self._consumer = answer["name"]

    async def messages(self) -> AsyncIterator[Msg]:
        while True:
            if not self._queue:  # a first reading brings a thousand at once, which need no clock each
                await self._wait()
            msg = self._queue.popleft()
            if msg is None:
                await self._reopen()
                continue
            if msg.headers is not None and msg.headers.get(STATUS) == "100":
                # Flow control is answered once all before it has been taken; a heartbeat repeats a lost question.
                question = msg.reply or msg.headers.get(CONSUMER_STALLED, "")
                if question:
                    with contextlib.suppress(BusError):
                        await self._bus.emit(question, b"")
                continue
            position = AckSubject.parse(msg.reply)
            if position.consumer_sequence != self._consumer_sequence + 1:
                _log.warning("follower_missed_messages", stream=self._stream, consumer=self._consumer)
                await self._reopen()
                continue
            self._consumer_sequence = position.consumer_sequence
            self._stream_sequence = position.stream_sequence
            yield msg

    async def _reopen(self) -> None:
        while True:
            try:
                return await self.open()
            except BusError as error:
                _log.warning("follower_reopen_failed", stream=self._stream, error=error.message)
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        await self._bus.unsubscribe(self._subscription)
        if self._consumer and self._bus.connected:
            with contextlib.suppress(ApiError, BusError):
                await self._bus.api(f"CONSUMER.DELETE.{self._stream}.{self._consumer}", {}, timeout_s=1.0)
