"""The server: who subscribes to what, where a message goes, and the streams. Knows nothing of event loops."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from laneway.runtime import headers as names
from tests.sim.memory_nats.api import Api
from tests.sim.memory_nats.matching import literal, matches
from tests.sim.memory_nats.messages import Headers, Refused, Stored, rfc3339
from tests.sim.memory_nats.stream import Stream
from tests.sim.memory_nats.timers import LoopDriver, Timers, WallClock

if TYPE_CHECKING:
    from tests.sim.memory_nats.client import MemoryClient


class Subscribed:
    """One client's subscription, as the server knows it."""

    __slots__ = ("client", "pattern", "queue", "sid")

    def __init__(self, client: MemoryClient, sid: int, pattern: str, queue: str) -> None:
        self.client = client
        self.sid = sid
        self.pattern = pattern
        self.queue = queue


class MemoryNats:
    """The state of one server. Its owner advances the clock and calls `run_due`.

    `storage_bytes_max` may be changed at any time: what does not fit is refused, and schedules that fire then are
    stranded until a restart, as on the real server.
    """

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock
        self.timers = Timers(clock)
        self.streams: dict[str, Stream] = {}
        self.clients: list[MemoryClient] = []
        self.storage_bytes_max = math.inf
        self.running = True
        self.paused = False
        self._api = Api(self)
        self._exact: dict[str, list[Subscribed]] = {}
        self._below: dict[str, list[Subscribed]] = {}  # `a.b.*` and `a.b.>`, by `a.b`
        self._wild: list[Subscribed] = []  # all others with a wildcard
        self._turn = 0  # of the members of a queue group
        self._numbers = 0  # of clients
        self.on_stored: Callable[[Stored], None] = lambda message: None  # for whoever looks on
        self.on_removed: Callable[[Stored], None] = lambda message: None

    # --- time and life -------------------------------------------------------------------------------

    def now(self) -> float:
        return self._clock.now()

    def run_due(self) -> int:
        """Makes happen what is due by the clock; nothing while the server is paused or dead."""
        return self.timers.run_due() if self.running and not self.paused else 0

    def drive(self) -> LoopDriver:
        """Lets the running event loop do that, on its time."""
        return LoopDriver(self.timers, self._clock, self.run_due)

    def pause(self) -> None:
        """As SIGSTOP: connections stay open, and nothing is read or sent."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        for client in tuple(self.clients):
            client.to_server.flow()
        self.run_due()
        self.timers.on_earlier()

    def kill(self, *, unsaved_s: float = 0.0) -> None:
        """Connections are lost, with what is on its way in them; streams and durable consumers stay.

        Consumers forget whom they gave a message in the last `unsaved_s`: the real server (2.15.1, kill -9) saves that
        up to some 0.3 s later.
        """
        self.running = False
        for client in tuple(self.clients):
            client.cut()
        for stream in self.streams.values():
            for consumer in tuple(stream.consumers.values()):
                consumer.crashed(self.now() - unsaved_s)
                if "durable_name" not in consumer.config:
                    consumer.end_all_pulls()
                    del stream.consumers[consumer.name]

    def start(self) -> None:
        self.running, self.paused = True, False
        for client in tuple(self.clients):
            client.mend()
        for stream in self.streams.values():
            stream.fire_stranded()
        self.run_due()
        self.timers.on_earlier()

    def change_leaders(self, *, given_again: bool = True) -> None:
        """Every durable consumer gets another leader, as in a cluster: see Consumer.led_anew."""
        for stream in self.streams.values():
            for consumer in tuple(stream.consumers.values()):
                if "durable_name" in consumer.config:
                    consumer.led_anew(given_again=given_again)

    def storage_used(self) -> int:
        return sum(stream.size_bytes for stream in self.streams.values())

    # --- subscriptions -------------------------------------------------------------------------------

    def next_client(self) -> int:
        self._numbers += 1
        return self._numbers

    def subscribe(self, client: MemoryClient, sid: int, pattern: str, queue: str) -> None:
        subscribed = Subscribed(client, sid, pattern, queue)
        if literal(pattern):
            self._exact.setdefault(pattern, []).append(subscribed)
        elif (stem := pattern.rpartition(".")[0]) and literal(stem):
            self._below.setdefault(stem, []).append(subscribed)
        else:
            self._wild.append(subscribed)

    def unsubscribe(self, client: MemoryClient, sid: int | None = None) -> None:
        """Ends one subscription of a client, or all."""

        def stays(subscribed: Subscribed) -> bool:
            return subscribed.client is not client or sid not in (None, subscribed.sid)

        self._wild = [subscribed for subscribed in self._wild if stays(subscribed)]
        for index in (self._exact, self._below):
            for key, found in tuple(index.items()):
                if any(each.client is client for each in found):
                    index[key] = [each for each in found if stays(each)]
                    if not index[key]:
                        del index[key]

    def has_interest(self, subject: str) -> bool:
        return any(self._listeners(subject))

    def _listeners(self, subject: str) -> Iterator[Subscribed]:
        yield from self._exact.get(subject, ())
        at = subject.find(".")
        while at >= 0:
            for subscribed in self._below.get(subject[:at], ()):
                if matches(subscribed.pattern, subject):
                    yield subscribed
            at = subject.find(".", at + 1)
        for subscribed in self._wild:
            if matches(subscribed.pattern, subject):
                yield subscribed

    # --- messages ------------------------------------------------------------------------------------

    def publish(self, client: MemoryClient, subject: str, data: bytes, headers: Headers, reply: str) -> None:
        """A client's message: to core subscribers, and to whoever of JetStream it is for."""
        heard = self.emit(subject, data, headers, reply)
        if subject.startswith("$JS."):
            heard = self._jetstream(subject, data, reply) or heard
        elif subject == "$SYS.REQ.USER.INFO":
            self.emit(reply, json.dumps({"server": {"time": rfc3339(self.now())}}).encode())
            heard = True
        for stream in tuple(self.streams.values()):
            if stream.takes(subject):
                heard = True
                try:
                    answer = stream.publish(subject, data, headers)
                except Refused as refusal:
                    answer = {"stream": stream.name, "seq": 0, "error": refusal.answer}
                if reply:
                    self.emit(reply, json.dumps(answer).encode())
        if reply and not heard:
            self.emit(reply, b"", {names.STATUS: "503"}, only=client)

    def _jetstream(self, subject: str, data: bytes, reply: str) -> bool:
        if subject.startswith("$JS.API."):
            return self._api.serve(subject.removeprefix("$JS.API."), data, reply)
        if subject.startswith("$JS.ACK."):
            tokens = subject.split(".")
            stream = self.streams.get(tokens[2])
            consumer = stream.consumers.get(tokens[3]) if stream else None
            if consumer is not None:
                consumer.answered(int(tokens[5]), data)
            return consumer is not None
        return False

    def emit(
        self,
        to: str,
        data: bytes,
        headers: Headers | None = None,
        reply: str = "",
        *,
        subject: str = "",
        only: MemoryClient | None = None,
    ) -> bool:
        """A core message; True if somebody listens. `subject`: what the message says of itself, where that differs."""
        if not to:
            return False
        groups: dict[str, list[Subscribed]] = {}
        heard = False
        for listener in tuple(self._listeners(to)):
            if only is not None and listener.client is not only:
                continue
            heard = True
            if listener.queue:
                groups.setdefault(listener.queue, []).append(listener)
            else:
                listener.client.receive(listener.sid, subject or to, reply, data, headers)
        for members in groups.values():
            self._turn += 1
            chosen = members[self._turn % len(members)]
            chosen.client.receive(chosen.sid, subject or to, reply, data, headers)
        return heard
