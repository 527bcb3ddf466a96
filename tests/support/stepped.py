"""Writers of one job's record whose every step is the test's to choose: the real code, with the bus cut out.

A `StepRecords` is the real RecordStore whose reads and writes are questions to the test. An `Actor` runs a coroutine up
to its next question, without an event loop. `History` answers: it stores by compare-and-set on the sequence, as the
stream of records does.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, cast

from laneway.core.clock import Clock
from laneway.core.job import JobRecord
from laneway.runtime.bus import Bus, WrongSequence
from laneway.runtime.records import RecordStore, StoredRecord, _Read
from laneway.runtime.wire.records import decode_record, encode_record
from laneway.workers.claims import Ack, Nak, Term


class Fate(enum.Enum):
    """What becomes of a step."""

    DONE = "done"
    UNHEARD = "it took place, and its answer was lost"
    LATE = "it takes place later, or never, and its answer is lost"
    REFUSED = "nothing was sent, or nothing answers"


class Question:
    """Awaited by an actor; what the test gives, or raises, comes back."""

    def __await__(self) -> Generator[Question, Any, Any]:
        return (yield self)


@dataclass(eq=False)
class Put(Question):
    record: JobRecord
    expected: int
    write: str


@dataclass(eq=False)
class Read(Question):
    leader: bool


@dataclass(eq=False)
class Publish(Question):
    """The lane message; the answer comes when it is stored."""

    record: JobRecord
    sequence: int  # of the record; 0: left to the first claim


@dataclass(eq=False)
class Tell(Question):
    """The answer to a delivery of the lane message."""

    message: Message
    what: Ack | Nak | Term


class Sleep(Question):
    """A pause of the code's own; how long does not matter here."""


class Alone(Question):
    """Whether a suspect job may run alone now."""


class Running(Question):
    """The engine runs; the answer is the word for what becomes of the run."""


async def sleep(delay_s: float) -> None:
    """In place of asyncio.sleep."""
    await Sleep()


@dataclass(eq=False)
class Message:
    """A lane message as its stream and consumer know it."""

    accepted: StoredRecord  # with sequence 0 where the record is left to the first claim
    deliveries: int = 0
    in_flight: bool = False
    gone: bool = False


@dataclass(eq=False)
class Actor:
    """Somebody who reads and writes; `worker` is empty for doors and schedulers."""

    name: str
    worker: str
    coroutine: Coroutine[Question, Any, None]
    question: Question | None = None
    saw_end: bool = False  # a terminal record was read or written
    parked: bool = False  # another message of its job was stored

    def start(self) -> None:
        self._resume(lambda: self.coroutine.send(None))

    def answer(self, value: object) -> None:
        self._resume(lambda: self.coroutine.send(value))

    def fail(self, error: Exception) -> None:
        self._resume(lambda: self.coroutine.throw(error))

    def _resume(self, resume: Callable[[], Question]) -> None:
        self.question = None  # while it runs, and once it ended
        with contextlib.suppress(StopIteration):
            self.question = resume()

    def stop(self) -> None:
        """Its process died."""
        self.question = None
        self.coroutine.close()


class StepRecords(RecordStore):
    """The record store of one process."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(cast(Bus, None), clock=clock)

    async def _put(
        self, record: JobRecord, expected_sequence: int, write: str, data: bytes = b"", *, patient: bool = False
    ) -> int:
        return await Put(decode_record(data or encode_record(record)), expected_sequence, write)

    async def _read(self, region: str, tenant: str, job_id: str, *, leader: bool) -> _Read | None:
        return await Read(leader)


@dataclass
class History:
    """All that was stored of one job, oldest first. `check` sees each write before it is stored."""

    check: Callable[[JobRecord | None, JobRecord, Actor], None]
    writes: list[_Read] = field(default_factory=list)
    sequence: int = 100

    def put(self, put: Put, writer: Actor) -> int:
        """Raises WrongSequence."""
        last = self.writes[-1] if self.writes else None
        if put.expected != (last.stored.sequence if last is not None else 0):
            raise WrongSequence("another wrote first")
        self.check(last.stored.record if last is not None else None, put.record, writer)
        self.sequence += 3  # the stream is shared with other jobs
        self.writes.append(_Read(StoredRecord(put.record, self.sequence), put.write))
        return self.sequence

    def read(self, *, behind: bool = False) -> _Read | None:
        """The last write; `behind`: the one before, as a replica may have it."""
        known = self.writes[:-1] if behind else self.writes
        return known[-1] if known else None

    @property
    def record(self) -> JobRecord | None:
        return self.writes[-1].stored.record if self.writes else None

    @property
    def ended(self) -> bool:
        return self.record is not None and self.record.state.terminal
