"""Consumers of a stream: which message goes to whom, when again, and what an acknowledgement does.

A pull consumer gives messages to the pulls that wait, in turn; a push consumer gives them to its subject at once.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from laneway.runtime import headers as names
from tests.sim.memory_nats.matching import matches
from tests.sim.memory_nats.messages import Stored
from tests.sim.memory_nats.timers import Timer

if TYPE_CHECKING:
    from tests.sim.memory_nats.server import MemoryNats
    from tests.sim.memory_nats.stream import Stream

NS = 1_000_000_000


@dataclass(slots=True, eq=False)
class _Pull:
    reply: str
    left: int
    no_wait: bool
    expires: Timer | None
    came: int = 0


@dataclass(slots=True)
class _Pending:
    deliveries: int
    given_s: float
    again: Timer  # when nothing is heard of it


class Consumer:
    def __init__(self, nats: MemoryNats, stream: Stream, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.config = config
        self._nats = nats
        self._stream = stream
        self._fresh: OrderedDict[int, None] = OrderedDict()  # never delivered
        self._again: OrderedDict[int, None] = OrderedDict()  # to be delivered again, before all that is fresh
        self._pending: dict[int, _Pending] = {}  # delivered and not acknowledged
        self._deliveries: dict[int, int] = {}
        self._pulls: deque[_Pull] = deque()
        self._delivered = 0
        self._beat: Timer | None = None
        self._heard_s = nats.now()  # when a push consumer's subject last had a subscriber
        self._choose_first()
        if config.get("idle_heartbeat"):
            self._rest()

    def _choose_first(self) -> None:
        policy, messages = self.config.get("deliver_policy", "all"), self._stream.since(1)
        if policy == "by_start_sequence":
            messages = self._stream.since(self.config["opt_start_seq"])
        if policy != "new":
            self._fresh.update(dict.fromkeys(message.sequence for message in messages if self._wants(message)))
        if policy == "last_per_subject":
            lasts = {self._stream.messages[sequence].subject: sequence for sequence in self._fresh}
            self._fresh = OrderedDict.fromkeys(sorted(lasts.values()))

    def _wants(self, message: Stored) -> bool:
        filters = self.config.get("filter_subjects") or [self.config.get("filter_subject") or ">"]
        return any(matches(pattern, message.subject) for pattern in filters)

    @property
    def _pushes_to(self) -> str:
        return str(self.config.get("deliver_subject", ""))

    @property
    def _explicit(self) -> bool:
        return self.config.get("ack_policy") == "explicit"

    # --- what comes and goes in the stream -----------------------------------------------------------

    def arrived(self, message: Stored) -> None:
        if self._wants(message):
            self._fresh[message.sequence] = None
            self.deliver()

    def forget(self, sequence: int) -> None:
        """The stream has it no longer: it is neither delivered again nor waited for."""
        self._fresh.pop(sequence, None)
        self._again.pop(sequence, None)
        self._deliveries.pop(sequence, None)
        self._settle(sequence)

    def _settle(self, sequence: int) -> None:
        pending = self._pending.pop(sequence, None)
        if pending is not None:
            pending.again.cancel()
            self.deliver()  # there is room now

    # --- out -----------------------------------------------------------------------------------------

    def pull(self, body: dict[str, Any], reply: str) -> None:
        expires_s = body.get("expires", 0) / NS
        no_wait = bool(body.get("no_wait"))
        self._drop_deaf()
        if no_wait and not expires_s and not self._fresh and not self._again:
            self._nats.emit(reply, b"", {names.STATUS: "404", names.DESCRIPTION: "No Messages"})
            return
        if len(self._pulls) >= self.config.get("max_waiting", 512):
            self._nats.emit(reply, b"", {names.STATUS: "409", names.DESCRIPTION: "Exceeded MaxWaiting"})
            return
        pull = _Pull(reply, body.get("batch", 1), no_wait, None)
        if expires_s:
            pull.expires = self._nats.timers.at(self._nats.now() + expires_s, lambda: self._end(pull))
        self._pulls.append(pull)
        self.deliver()

    def deliver(self) -> None:
        """Gives out all that may be given now."""
        if self._pushes_to:
            self._push()
            return
        while self._pulls and (self._fresh or self._again):
            self._drop_deaf()
            if not self._pulls:
                return
            if not self._again and 0 < self.config.get("max_ack_pending", 1000) <= len(self._pending):
                return  # without a word, to pulls that do not wait as well
            pull = self._pulls.popleft()
            pull.left -= 1
            pull.came += 1
            if pull.left:
                self._pulls.append(pull)
            elif pull.expires:
                pull.expires.cancel()
            self._give(pull.reply)
        for pull in [pull for pull in self._pulls if pull.no_wait and pull.came]:
            self._end(pull)

    def _give(self, to: str) -> None:
        sequence, _ = (self._again or self._fresh).popitem(last=False)
        message = self._stream.messages[sequence]
        self._delivered += 1
        deliveries = self._deliveries[sequence] = self._deliveries.get(sequence, 0) + 1
        if self._explicit:
            self._wait_for(sequence, self.config.get("ack_wait", 30 * NS) / NS)
        headers, data = message.headers, message.data
        if self.config.get("headers_only"):
            headers, data = headers | {"Nats-Msg-Size": str(len(data))}, b""
        position = f"{deliveries}.{sequence}.{self._delivered}.{round(message.time_s * NS)}.{len(self._fresh)}"
        reply = f"$JS.ACK.{self._stream.name}.{self.name}.{position}"
        self._nats.emit(to, data, headers, reply, subject=message.subject)

    def _wait_for(self, sequence: int, wait_s: float) -> None:
        pending = self._pending.get(sequence)
        if pending is not None:
            pending.again.cancel()
        now_s, deliveries = self._nats.now(), self._deliveries[sequence]
        given_s = pending.given_s if pending is not None and pending.deliveries == deliveries else now_s
        timer = self._nats.timers.at(now_s + wait_s, lambda: self._redeliver(sequence))
        self._pending[sequence] = _Pending(deliveries, given_s, timer)

    def _redeliver(self, sequence: int) -> None:
        """It stays pending: only an acknowledgement, or its removal, makes room for another."""
        self._again[sequence] = None
        self.deliver()

    def _drop_deaf(self) -> None:
        """Pulls whose inbox has no subscriber any more."""
        for pull in [pull for pull in self._pulls if not self._nats.has_interest(pull.reply)]:
            self._remove(pull)

    def _remove(self, pull: _Pull) -> None:
        self._pulls.remove(pull)
        if pull.expires:
            pull.expires.cancel()

    def _end(self, pull: _Pull) -> None:
        self._remove(pull)
        headers = {
            names.STATUS: "408",
            names.DESCRIPTION: "Request Timeout",
            "Nats-Pending-Messages": str(pull.left),
            "Nats-Pending-Bytes": "0",
        }
        self._nats.emit(pull.reply, b"", headers)

    def end_all_pulls(self) -> None:
        """The consumer is deleted."""
        for pull in tuple(self._pulls):
            self._remove(pull)
            self._nats.emit(pull.reply, b"", {names.STATUS: "409", names.DESCRIPTION: "Consumer Deleted"})
        if self._beat is not None:
            self._beat.cancel()

    def led_anew(self, *, given_again: bool) -> None:
        """Another server leads the consumer: who waited is told to ask again.

        A leader that steps down hands over what it knows of deliveries. After one that died, what healthy owners hold
        may be given out again at once (`given_again`).
        """
        for pull in tuple(self._pulls):
            self._remove(pull)
            self._nats.emit(pull.reply, b"", {names.STATUS: "409", names.DESCRIPTION: "Leadership Change"})
        for sequence, pending in self._pending.items() if given_again else ():
            pending.again.cancel()
            self._again[sequence] = None
        self.deliver()

    def crashed(self, saved_until_s: float) -> None:
        """The server died: who waited is forgotten, and so are deliveries that were later than that."""
        for pull in tuple(self._pulls):
            self._remove(pull)
        for sequence, pending in tuple(self._pending.items()):
            if pending.given_s > saved_until_s:
                pending.again.cancel()
                del self._pending[sequence]
                self._again.pop(sequence, None)
                self._deliveries[sequence] -= 1
                if self._deliveries[sequence]:
                    self._again[sequence] = None
                else:
                    self._fresh[sequence] = None
        self._fresh = OrderedDict.fromkeys(sorted(self._fresh))

    # --- push ----------------------------------------------------------------------------------------

    def _push(self) -> None:
        if self._fresh and self._nats.has_interest(self._pushes_to):
            while self._fresh:
                self._give(self._pushes_to)
            self._rest()

    def _rest(self) -> None:
        """A heartbeat is due that long after the last delivery."""
        if self._beat is not None:
            self._beat.cancel()
        beat_s = self.config.get("idle_heartbeat", 0) / NS
        self._beat = self._nats.timers.at(self._nats.now() + beat_s, self._idle) if beat_s else None

    def _idle(self) -> None:
        now_s = self._nats.now()
        if self._nats.has_interest(self._pushes_to):
            self._heard_s = now_s
            self._push()
            headers = {
                names.STATUS: "100",
                names.DESCRIPTION: "Idle Heartbeat",
                "Nats-Last-Consumer": str(self._delivered),
                "Nats-Last-Stream": str(self._stream.last_sequence),
            }
            self._nats.emit(self._pushes_to, b"", headers)
        elif now_s - self._heard_s >= self.config.get("inactive_threshold", 5 * NS) / NS:
            self._stream.consumers.pop(self.name, None)
            return
        self._rest()

    # --- acknowledgements ----------------------------------------------------------------------------

    def answered(self, sequence: int, payload: bytes) -> None:
        if not self._explicit or sequence not in self._pending:
            return
        word, _, rest = payload.partition(b" ")
        if word in (b"", b"+ACK", b"+TERM"):
            self._again.pop(sequence, None)
            self._stream.acknowledged(sequence)
            self._deliveries.pop(sequence, None)
            self._settle(sequence)
        elif word == b"+WPI":
            self._wait_for(sequence, self.config.get("ack_wait", 30 * NS) / NS)
        elif word == b"-NAK":
            delay_s = json.loads(rest).get("delay", 0) / NS if rest.strip() else 0.0
            if delay_s > 0.0:
                self._wait_for(sequence, delay_s)
            else:
                self._pending[sequence].again.cancel()
                self._redeliver(sequence)

    def info(self) -> dict[str, object]:
        self._drop_deaf()
        return {
            "stream_name": self._stream.name,
            "name": self.name,
            "config": self.config,
            "delivered": {"consumer_seq": self._delivered},
            "num_ack_pending": len(self._pending),
            "num_redelivered": sum(pending.deliveries > 1 for pending in self._pending.values()),
            "num_waiting": len(self._pulls),
            "num_pending": len(self._fresh),
        }
