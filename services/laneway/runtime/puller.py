"""Pulling jobs from one lane: one outstanding `no_wait` pull, and nothing delivered is ever lost.

A delivery does not say which pull it answers, only a status does (its subject is the pull's reply subject). So there is
one pull at a time, and whatever arrives outside of one, late or after a timeout, is kept and given by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property
from types import TracebackType
from typing import Self

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from laneway.core import subjects
from laneway.core.job import QueuedJob
from laneway.core.lanes import Lane
from laneway.runtime.bells import Bell
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.headers import DESCRIPTION, SCHEDULER, STATUS, AckSubject
from laneway.runtime.requests import listen
from laneway.runtime.wire.records import decode_lane_job

__all__ = ["Bell", "Delivery", "LanePuller"]

PULL_TIMEOUT_S = 2.0
# Once something came, a pause this long ends the pull: at max_ack_pending the server stops without a word, and what
# came must not wait for what does not.
QUIET_S = 0.05
DRAIN_TIMEOUT_S = 0.5
# Why a job is taken from its lane that was not parked there, and one that NATS fired at its time.
LANE = "LANE"
FIRED = "FIRED"
_NS = 1_000_000_000

_log = structlog.get_logger(__name__)


class Delivery:
    """One delivery of a lane message. Acknowledgements are core messages: a lost one means a redelivery."""

    def __init__(self, bus: Bus, msg: Msg) -> None:
        position = AckSubject.parse(msg.reply)
        self.data: bytes = msg.data
        self.subject: str = msg.subject
        self.headers: Mapping[str, str] = msg.headers or {}
        self.stream_sequence = position.stream_sequence
        self.deliveries = position.deliveries  # 1 the first time
        self.stored_s = position.stored_s  # Unix seconds: since when it has been in its lane
        self.pending = position.pending  # messages behind it in the consumer
        self.steal = ""  # why it was taken from a home slot that is not ours; empty: it was not
        self._bus = bus
        self._reply = msg.reply

    @cached_property
    def job(self) -> QueuedJob:
        """The job; raises UnreadableMessage."""
        return decode_lane_job(self.data)

    @property
    def record_sequence(self) -> int:
        """Sequence of the record as it was accepted; 0 when the message does not say."""
        text = self.headers.get(subjects.H_RECORD_SEQUENCE, "")
        return int(text) if text.isdecimal() else 0

    @property
    def home(self) -> str:
        """The home slot that it was sent to; empty: any worker's."""
        parts = self.subject.split(".", 5)
        return parts[4] if len(parts) > 5 and parts[4] != subjects.HOME_ANY else ""

    @property
    def reason(self) -> str:
        """Why it comes to us: a steal's reason, or why its scheduler released it, or that it waited in the lane."""
        if self.steal:
            return self.steal
        return self.headers.get(subjects.H_RELEASED_BY) or (FIRED if SCHEDULER in self.headers else LANE)

    async def ack(self) -> None:
        await self._answer(b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        """Gives the message back, to be delivered again after the delay."""
        delay = b" " + msgspec.json.encode({"delay": round(delay_s * _NS)}) if delay_s > 0.0 else b""
        await self._answer(b"-NAK" + delay)

    async def term(self, reason: str) -> None:
        """Removes the message for good; the reason shows in the server's advisory."""
        await self._answer(b"+TERM " + " ".join(reason.split()).encode())

    async def progress(self) -> None:
        """Starts the message's ack wait anew."""
        await self._answer(b"+WPI")

    async def _answer(self, payload: bytes) -> None:
        await self._bus.emit(self._reply, payload)


class Puller:
    """Pulls from one durable consumer. Start, pull from one task at a time, close."""

    def __init__(self, bus: Bus, stream: str, consumer: str) -> None:
        self.trouble = ""  # why the last pull ended early; empty when it did not
        self._bus = bus
        self._name = consumer
        self._request_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._arrived: deque[Msg] = deque()
        self._count = 0
        self._current = ""  # reply subject of the pull under way
        self._ended = False
        self._heard: Callable[[], None] | None = None  # of a held pull
        self._offer: Callable[[Delivery], bool] = _nobody  # of the same
        self._late: asyncio.TimerHandle | None = None
        self._abandoned = False  # a held pull that was never answered is still known to the server
        self._changed = asyncio.Event()
        self._unregister = bus.on_disconnect(self._disconnected)

    async def start(self) -> None:
        await self._listen()

    async def _listen(self) -> None:
        self._inbox = self._bus.nc.new_inbox()
        # The pull itself goes the same way, after the subscription: no need to wait for the server.
        self._subscription = await listen(self._bus.nc, f"{self._inbox}.*", self._receive)

    def _receive(self, msg: Msg) -> None:
        status = msg.headers.get(STATUS) if msg.headers is not None and not msg.data else None
        if status is None:
            self._arrived.append(msg)
            self._changed.set()
            if self._heard is not None:
                self._let_go()
        elif msg.subject == self._current and status != "100":
            self._end("" if status in ("404", "408") else _trouble(status, msg))

    def _disconnected(self) -> None:
        self._end("the connection to NATS was lost")

    def _end(self, trouble: str) -> None:
        self._ended = True
        self.trouble = trouble
        self._changed.set()
        if self._heard is not None:
            self._let_go()

    async def pull(self, batch: int, *, timeout_s: float = PULL_TIMEOUT_S, wait_s: float = 0.0) -> list[Delivery]:
        """At most `batch` messages that are there now. Never raises for what NATS does: see `trouble`.

        While there is none, the server waits up to `wait_s` for the first. Without a wait, a pull right after a bell
        finds nothing about once in 800: the bell's copy may be ahead of the consumer's count. Deliveries that came
        after an earlier pull had given up are given first.
        """
        assert batch > 0
        if self._subscription is None:
            raise RuntimeError("the puller is not started, or closed")
        assert not self._current, "one pull at a time"
        self.trouble = ""
        if len(self._arrived) < batch:
            await self._request(batch - len(self._arrived), batch, timeout_s + wait_s, wait_s)
        return self._take(batch)

    def hold(self, wait_s: float, heard: Callable[[], None], offer: Callable[[Delivery], bool] | None = None) -> None:
        """Asks for one message, for which the server waits up to `wait_s`, and returns at once.

        `heard` is called when the pull has ended, with a message or without; `collect` gives what came. Until then
        there is no other pull. Before, the message is offered to `offer`, straight from the connection's read loop:
        True means that it was taken.
        """
        if self._subscription is None:
            raise RuntimeError("the puller is not started, or closed")
        assert not self._current, "one pull at a time"
        self.trouble = ""
        self._heard, self._offer = heard, offer or _nobody
        if self._arrived or not self._ask(1, wait_s):
            self._let_go()
        else:
            self._late = asyncio.get_running_loop().call_later(PULL_TIMEOUT_S + wait_s, self._unanswered)

    def let_go(self) -> None:
        """Ends a held pull before its time. `collect` takes it off the server, and gives what it brought meanwhile."""
        if self._heard is not None:
            self._abandoned = True
            self._end("")

    @property
    def held(self) -> bool:
        """Whether a pull made by `hold` is still open."""
        return self._heard is not None

    async def collect(self) -> list[Delivery]:
        """What `hold` brought: one message, or none, for the reason in `trouble` if there is one."""
        assert not self.held
        if self._abandoned:
            self._abandoned = False
            await self._abandon()
        return self._take(1)

    def _let_go(self) -> None:
        heard, self._heard = self._heard, None
        self._current = ""
        if self._late is not None:
            self._late.cancel()
        if heard is None:
            return
        try:
            if self._arrived and self._offer(Delivery(self._bus, self._arrived[0])):
                self._arrived.popleft()
        finally:
            heard()

    def _unanswered(self) -> None:
        self._abandoned = True
        self._end(_no_end(1, 0))

    def _ask(self, batch: int, wait_s: float) -> bool:
        """Sends a pull; False and `trouble` when that cannot be done."""
        self._ended, self.trouble = False, ""
        if not self._bus.connected:
            self.trouble = "there is no connection to NATS"
            return False
        self._count += 1
        current = f"{self._inbox}.{self._count}"
        expires = b',"expires":%d' % round(wait_s * _NS) if wait_s > 0.0 else b""
        body = b'{"batch":%d,"no_wait":true%b}' % (batch, expires)
        try:
            self._bus.nc.post(self._request_subject, body, current)
        except nats.errors.Error as error:
            self.trouble = repr(error)
            return False
        self._current = current
        return True

    async def _request(self, missing: int, batch: int, timeout_s: float, wait_s: float) -> None:
        before, timed_out = len(self._arrived), False
        if not self._ask(missing, wait_s):
            return
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                while not self._ended and len(self._arrived) < batch:
                    self._changed.clear()
                    await self._changed.wait()
                    if len(self._arrived) > before:
                        limit.reschedule(loop.time() + QUIET_S)
        except TimeoutError:
            timed_out = True
            self.trouble = _no_end(missing, len(self._arrived) - before)
        finally:
            self._current = ""
        if timed_out:
            await self._abandon()

    async def _abandon(self) -> None:
        """Takes a pull that was not answered off the server, so that it cannot claim jobs that nobody asks for.

        The server drops pulls whose inbox has no subscriber. What is already on its way is still received: the old
        subscription is drained, not cut.
        """
        if self.trouble:
            _log.warning("pull_abandoned", consumer=self._name, trouble=self.trouble)
        old = self._subscription
        await self._listen()
        if old is not None:
            await self._bus.drain(old, DRAIN_TIMEOUT_S)

    def _take(self, batch: int) -> list[Delivery]:
        """The oldest of what arrived. Of several deliveries of one message only the newest can be acknowledged."""
        newest: dict[int, Delivery] = {}
        while self._arrived and len(newest) < batch:
            delivery = Delivery(self._bus, self._arrived.popleft())
            newest[delivery.stream_sequence] = delivery
        return list(newest.values())

    async def close(self) -> None:
        """Stops listening. What arrived and was not taken is given back at once."""
        self._unregister()
        self._heard = None
        self._let_go()
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._bus.drain(subscription, DRAIN_TIMEOUT_S)
        for delivery in self._take(len(self._arrived)):
            with contextlib.suppress(BusError):
                await delivery.nak()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class LanePuller(Puller):
    """Pulls from the durable consumer of one (lane, pool, home)."""

    def __init__(self, bus: Bus, region: str, lane: Lane, pool: str, home: str = subjects.HOME_ANY) -> None:
        super().__init__(bus, subjects.lane_stream(region, lane), subjects.consumer(lane, pool, home))
        self.lane = lane
        self.pool = pool
        self.home = home


def _nobody(delivery: Delivery) -> bool:
    return False


def _no_end(wanted: int, came: int) -> str:
    return f"a pull for {wanted} got {came} and no end; is max_ack_pending reached?"


def _trouble(status: str, msg: Msg) -> str:
    headers = msg.headers or {}
    if status == "503":
        return "the consumer does not exist or has no leader: was the region provisioned?"
    return f"{status} {headers.get(DESCRIPTION, '')}".strip()
