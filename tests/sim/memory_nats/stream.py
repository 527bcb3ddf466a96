"""One stream: what it takes, keeps, gives and drops. Consumers are told what comes and goes; see consumer.py."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from laneway.runtime import headers as names
from tests.sim.memory_nats.consumer import Consumer
from tests.sim.memory_nats.matching import literal, matches
from tests.sim.memory_nats.messages import Headers, Refused, Stored, rfc3339, ttl_s

if TYPE_CHECKING:
    from tests.sim.memory_nats.server import MemoryNats

NS = 1_000_000_000
DUPLICATE_WINDOW_S = 120.0
# Not carried over when a schedule fires.
_STRIPPED = ("Nats-Msg-Id", "Nats-TTL", "Nats-Expected-", "Nats-Schedule")


class Stream:
    def __init__(self, nats: MemoryNats, config: dict[str, Any]) -> None:
        self._nats = nats
        self.config: dict[str, Any] = {}
        self.messages: OrderedDict[int, Stored] = OrderedDict()
        self.by_subject: dict[str, dict[int, None]] = {}
        self.consumers: dict[str, Consumer] = {}
        self.created_s = nats.now()
        self.last_sequence = 0
        self.size_bytes = 0
        self.stranded: list[int] = []  # schedules that found the storage full; a restart fires them
        self._order: list[int] = []  # sequences in order; those that are gone are passed over
        self._ids: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self.configure(config)

    @property
    def name(self) -> str:
        return str(self.config["name"])

    def configure(self, config: dict[str, Any]) -> None:
        if config.get("allow_msg_schedules") and config.get("discard") == "new":
            raise Refused(400, 10052, "message scheduling cannot use discard new")
        self.config = {"duplicate_window": round(DUPLICATE_WINDOW_S * NS)} | config

    def takes(self, subject: str) -> bool:
        return any(matches(pattern, subject) for pattern in self.config["subjects"])

    # --- in ------------------------------------------------------------------------------------------

    def publish(self, subject: str, data: bytes, headers: Headers) -> dict[str, object]:
        """Stores a message; returns the acknowledgement. Raises Refused."""
        lives_s = self._lives_s(headers)
        fires_s = self._fires_s(subject, headers)
        self._check_scheduler(subject, headers)
        known = self._known(headers.get(names.MSG_ID, ""))
        if known:
            return {"stream": self.name, "seq": known, "duplicate": True}
        self._check_expected(subject, headers)
        message = Stored(self.last_sequence + 1, subject, data, dict(headers), self._nats.now())
        self._check_room(message)
        self._keep(message, lives_s, fires_s)
        return {"stream": self.name, "seq": message.sequence}

    def _lives_s(self, headers: Headers) -> float:
        age_s = self.config.get("max_age", 0) / NS or math.inf
        text = headers.get(names.TTL)
        if text is None:
            return age_s
        if not self.config.get("allow_msg_ttl"):
            raise Refused(400, 10166, "per-message TTL is disabled")
        own_s = ttl_s(text)
        return math.inf if own_s is None else own_s

    def _fires_s(self, subject: str, headers: Headers) -> float | None:
        text = headers.get(names.SCHEDULE)
        if text is None:
            return None
        if not self.config.get("allow_msg_schedules"):
            raise Refused(400, 10188, "message schedules is disabled")
        target = headers.get(names.SCHEDULE_TARGET, "")
        if not literal(target) or target == subject or not self.takes(target):
            raise Refused(400, 10190, "message schedules target is invalid")
        try:
            return datetime.fromisoformat(text.removeprefix("@at ")).timestamp()
        except ValueError:
            raise Refused(400, 10189, "message schedules pattern is invalid") from None

    def _check_scheduler(self, subject: str, headers: Headers) -> None:
        """Of an early release: what is named as its schedule may be gone, but must not be anything else."""
        if headers.get(names.SCHEDULE_NEXT) != "purge":
            return
        scheduler = headers.get(names.SCHEDULER, "")
        last = self.last_of(scheduler)
        if scheduler in ("", subject) or (last is not None and names.SCHEDULE not in last.headers):
            raise Refused(400, 10212, "message schedules invalid scheduler")

    def _known(self, message_id: str) -> int:
        """The sequence of an earlier message with this id, whether the stream still has it or not."""
        since_s = self._nats.now() - self.config["duplicate_window"] / NS
        while self._ids and next(iter(self._ids.values()))[1] < since_s:
            self._ids.popitem(last=False)
        return self._ids.get(message_id, (0, 0.0))[0]

    def _check_expected(self, subject: str, headers: Headers) -> None:
        text = headers.get(names.EXPECTED_SUBJECT_SEQUENCE)
        if text is None:
            return
        last = self.last_of(headers.get(names.EXPECTED_SUBJECT_SEQUENCE_SUBJECT, subject))
        present = last.sequence if last else 0
        if int(text) != present:
            raise Refused(400, 10071, f"wrong last sequence: {present}")

    def _check_room(self, message: Stored) -> None:
        if self._nats.storage_used() + message.size_bytes > self._nats.storage_bytes_max:
            raise Refused(400, 10002, "resource limits exceeded for account")
        if self.config.get("discard") != "new":
            return
        per_subject = self.config.get("max_msgs_per_subject", -1)
        own = self.by_subject.get(message.subject, {})
        replaces = 0 < per_subject <= len(own)
        if 0 < self.config.get("max_msgs", -1) <= len(self.messages) and not replaces:
            raise Refused(503, 10077, "maximum messages exceeded")
        if 0 < self.config.get("max_bytes", -1) <= self.size_bytes + message.size_bytes:
            gone = self.messages[next(iter(own))].size_bytes if replaces else 0
            if gone < message.size_bytes:
                raise Refused(503, 10077, "maximum bytes exceeded")

    def _keep(self, message: Stored, lives_s: float, fires_s: float | None) -> None:
        self.last_sequence = message.sequence
        self.messages[message.sequence] = message
        self._order.append(message.sequence)
        self.size_bytes += message.size_bytes
        own = self.by_subject.setdefault(message.subject, {})
        own[message.sequence] = None
        if message_id := message.headers.get(names.MSG_ID):
            self._ids[message_id] = message.sequence, message.time_s
        self._drop_beyond_limits(message, one_only=fires_s is not None)
        if lives_s < math.inf:
            message.timers.append(self._nats.timers.at(message.time_s + lives_s, lambda: self.remove(message.sequence)))
        if fires_s is not None:
            message.timers.append(self._nats.timers.at(fires_s, lambda: self._fire(message.sequence)))
        if message.headers.get(names.SCHEDULE_NEXT) == "purge":
            self.purge(message.headers.get(names.SCHEDULER, ""))
        self._republish(message)
        self._nats.on_stored(message)
        for consumer in tuple(self.consumers.values()):
            consumer.arrived(message)

    def _drop_beyond_limits(self, message: Stored, *, one_only: bool) -> None:
        """Of a subject there is one schedule; of other messages as many as the limits allow, oldest first."""
        own = self.by_subject[message.subject]
        most = 1 if one_only else self.config.get("max_msgs_per_subject", -1)
        while 0 < most < len(own):
            self.remove(next(iter(own)))
        if self.config.get("discard") != "new":
            while 0 < self.config.get("max_msgs", -1) < len(self.messages):
                self.remove(next(iter(self.messages)))
            while 0 < self.config.get("max_bytes", -1) < self.size_bytes and len(self.messages) > 1:
                self.remove(next(iter(self.messages)))

    def _republish(self, message: Stored) -> None:
        plan = self.config.get("republish")
        if not plan or not matches(plan["src"] or ">", message.subject):
            return
        headers = message.headers | self.position_headers(message)
        data = message.data
        if plan.get("headers_only"):
            headers["Nats-Msg-Size"] = str(len(data))
            data = b""
        self._nats.emit(plan["dest"].replace(">", message.subject), data, headers)

    def position_headers(self, message: Stored) -> Headers:
        return {
            "Nats-Stream": self.name,
            names.SUBJECT: message.subject,
            names.SEQUENCE: str(message.sequence),
            names.TIME_STAMP: rfc3339(message.time_s),
        }

    # --- schedules -----------------------------------------------------------------------------------

    def _fire(self, sequence: int) -> None:
        """Its target gets a copy, and the schedule goes. Core subscribers of the target are not told."""
        message = self.messages.get(sequence)
        if message is None:
            return
        headers = {name: value for name, value in message.headers.items() if not name.startswith(_STRIPPED)}
        headers |= {names.SCHEDULER: message.subject, names.SCHEDULE_NEXT: "purge"}
        try:
            self.publish(message.headers[names.SCHEDULE_TARGET], message.data, headers)
        except Refused:
            self.stranded.append(sequence)

    def fire_stranded(self) -> None:
        stranded, self.stranded = self.stranded, []
        for sequence in stranded:
            self._fire(sequence)

    # --- out -----------------------------------------------------------------------------------------

    def remove(self, sequence: int) -> None:
        message = self.messages.pop(sequence, None)
        if message is None:
            return
        for timer in message.timers:
            timer.cancel()
        self._nats.on_removed(message)
        self.size_bytes -= message.size_bytes
        own = self.by_subject[message.subject]
        del own[sequence]
        if not own:
            del self.by_subject[message.subject]
        if len(self._order) > 64 and len(self._order) > 2 * len(self.messages):
            self._order = list(self.messages)
        for consumer in tuple(self.consumers.values()):
            consumer.forget(sequence)

    def acknowledged(self, sequence: int) -> None:
        if self.config.get("retention") == "workqueue":
            self.remove(sequence)

    def purge(self, subject_filter: str = ">") -> int:
        gone = [sequence for subject in self.subjects(subject_filter) for sequence in self.by_subject[subject]]
        for sequence in gone:
            self.remove(sequence)
        return len(gone)

    # --- reading -------------------------------------------------------------------------------------

    def last_of(self, subject: str) -> Stored | None:
        if literal(subject):
            own = self.by_subject.get(subject)
            return self.messages[next(reversed(own))] if own else None
        lasts = [next(reversed(self.by_subject[found])) for found in self.subjects(subject)]
        return self.messages[max(lasts)] if lasts else None

    def next_of(self, subject_filter: str, sequence: int) -> Stored | None:
        return next(self.since(sequence, lambda message: matches(subject_filter, message.subject)), None)

    def since(self, sequence: int, wanted: Callable[[Stored], bool] = lambda message: True) -> Iterator[Stored]:
        order = self._order
        for at in range(bisect_left(order, sequence), len(order)):
            message = self.messages.get(order[at])
            if message is not None and wanted(message):
                yield message

    def subjects(self, subject_filter: str) -> list[str]:
        """Those with messages, in order."""
        if literal(subject_filter):
            return [subject_filter] if subject_filter in self.by_subject else []
        return sorted(subject for subject in self.by_subject if matches(subject_filter, subject))

    def state(self) -> dict[str, object]:
        return {
            "messages": len(self.messages),
            "bytes": self.size_bytes,
            "first_seq": next(iter(self.messages), self.last_sequence + 1),
            "last_seq": self.last_sequence,
            "num_subjects": len(self.by_subject),
            "consumer_count": len(self.consumers),
        }
