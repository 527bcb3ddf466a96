"""Job records on JetStream: one subject for each job, every write a compare-and-set on it.

Owns how a record is written, read, listed and followed, how long it is kept, and how a write with an unknown outcome is
resolved. Which change is legal is core.job's business.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random

import msgspec
import structlog
from msgspec import Struct
from nats.aio.msg import Msg

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.errors import JobNotFound
from laneway.core.job import JobRecord, Usage
from laneway.core.lanes import JobState, Lane
from laneway.policy.calibration import outcome_of
from laneway.runtime.bus import Bus, BusError, NoAnswer, NoStream, NotConnected, PublishUnknown, WrongSequence
from laneway.runtime.clock import SYSTEM_RANDOM, SystemClock
from laneway.runtime.following import follow
from laneway.runtime.headers import (
    EXPECTED_SUBJECT_SEQUENCE,
    TTL,
    WRITE,
    AckSubject,
    ack_sequence,
)
from laneway.runtime.reading import last_from_leader, last_message, subject_list
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.runtime.wire.records import decode_record, encode_record

RETENTION_S = 86_400.0
REFUSED_RETENTION_S = 3_600.0
TTL_S_MAX = 90 * 86_400  # deadlines are at most 30 days away; a clock gone wrong must not make a record eternal
_log = structlog.get_logger(__name__)

CREATE_ATTEMPTS = 5
CHANGE_ATTEMPTS = 18  # about 9 s in all: a new stream leader takes 4 to 9 s

_LANES = {lane.value: lane for lane in Lane}
_KEYED_TAIL = re.compile(r"-[a-z2-7]{26}\Z")


class StoredRecord(Struct, frozen=True):
    record: JobRecord
    sequence: int


class RecordExists(BusError):
    """There is a record of this job already; `stored` is it."""

    def __init__(self, stored: StoredRecord) -> None:
        super().__init__(f"the record exists: {stored.record.job_id}", job_id=stored.record.job_id)
        self.stored = stored


class RecordHead(Struct, frozen=True):
    """What a record's headers say, for sweeps that need no body."""

    tenant: str
    job_id: str
    sequence: int
    state: JobState
    deadline_s: float
    created_s: float = 0.0
    lane: Lane | None = None  # None: written by a release that did not say
    pending: int = 0  # records that the same reading will give after this one
    outcome: str = ""  # of a job that ended: an Outcome of policy.calibration, as JSON
    usage: Usage | None = None  # of a job that has a result; without its cost


class _Read(Struct, frozen=True):
    """A stored record and the name of the write that stored it: two writers may well write equal records."""

    stored: StoredRecord
    write: str


class RecordStore:
    """Reads and writes job records. Safe to share; any number of processes may work on the same records."""

    def __init__(
        self,
        bus: Bus,
        *,
        retention_s: float = RETENTION_S,
        clock: Clock | None = None,
        random: Random = SYSTEM_RANDOM,
    ) -> None:
        self._bus = bus
        self.retention_s = retention_s  # of a record, beyond its deadline
        self._clock = clock or SystemClock()
        self._random = random
        self._writer = random.randbytes(6).hex()
        self._writes = 0

    # --- writes --------------------------------------------------------------------------------------

    async def create(self, record: JobRecord, data: bytes = b"") -> int:
        """Stores a new record and returns its sequence.

        RecordExists: the job has one, perhaps by an earlier try of the same request. PublishUnknown: try again with the
        same record, and see by RecordExists whether it was stored. `data`: the record as it was encoded already.
        """
        for attempt in range(CREATE_ATTEMPTS):
            try:
                patient = record.contract.lane.may_park
                return await self._put(record, 0, self._next_write(), data, patient=patient)
            except WrongSequence:
                stored = await self.get(record.region, record.tenant, record.job_id, leader=True)
                if stored is not None:
                    raise RecordExists(stored) from None
                # It expired in between, or the other write is still on its way through the replicas.
                if attempt == CREATE_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(0.05)
        raise AssertionError("unreachable")

    async def update(self, record: JobRecord, expected_sequence: int) -> int:
        """Writes the record if its last write has the expected sequence. Raises WrongSequence, PublishUnknown."""
        return await self._put(record, expected_sequence, self._next_write())

    def _next_write(self) -> str:
        self._writes += 1
        return f"{self._writer}-{self._writes}"

    async def _put(
        self, record: JobRecord, expected_sequence: int, write: str, data: bytes = b"", *, patient: bool = False
    ) -> int:
        headers = {
            WRITE: write,
            EXPECTED_SUBJECT_SEQUENCE: str(expected_sequence),
            TTL: f"{self._ttl_s(record)}s",
            subjects.H_RECORD_STATE: record.state.value,
            subjects.H_RECORD_DEADLINE: str(round(record.contract.deadline_s * 1000)),
            subjects.H_RECORD_CREATED: str(round(record.timings.created_s * 1000)),
            subjects.H_RECORD_LANE: record.contract.lane.value,
        }
        if record.state.terminal and (outcome := outcome_of(record)) is not None:
            headers[subjects.H_RECORD_OUTCOME] = msgspec.json.encode(outcome).decode()
        if record.result is not None:
            headers[subjects.H_RECORD_USAGE] = usage_text(record.result.usage)
        subject = subjects.record(record.region, record.tenant, record.job_id)
        return await self._bus.store(subject, data or encode_record(record), headers, patient=patient)

    def _ttl_s(self, record: JobRecord) -> int:
        """Whole seconds, rounded up. A refusal is kept for an hour; all else beyond its deadline."""
        if record.state is JobState.REFUSED:
            return math.ceil(REFUSED_RETENTION_S)
        left_s = max(0.0, record.contract.deadline_s - self._clock.now())
        return max(1, min(TTL_S_MAX, math.ceil(left_s + self.retention_s)))

    async def change(
        self,
        region: str,
        tenant: str,
        job_id: str,
        transition: Callable[[JobRecord], JobRecord],
        *,
        stored: StoredRecord | None = None,
        unstored: JobRecord | None = None,
    ) -> StoredRecord:
        """Applies a transition by compare-and-set, again on whatever another writer left, a bounded number of times.

        `stored` saves the first read; `unstored` is the record of a job that may have none yet. A write whose outcome
        is unknown is looked for before it is tried again, so the transition takes place once. Raises JobNotFound, what
        the transition raises (IllegalTransition), and at last the bus error that kept it from succeeding.
        """
        write = self._next_write()
        unknown = False
        trouble: BusError | None = None
        for attempt in range(CHANGE_ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._random.uniform(0.5, 1.0) * min(1.0, 0.01 * 2**attempt))
            try:
                if stored is None:
                    found = await self._read(region, tenant, job_id, leader=attempt > 0)
                    if found is None and attempt == 0:  # a replica may be behind
                        found = await self._read(region, tenant, job_id, leader=True)
                    if found is not None:
                        stored = found.stored
                        if unknown and found.write == write:
                            return stored
                    elif unstored is not None:
                        stored = StoredRecord(unstored, 0)
                    else:
                        raise JobNotFound("there is no such job", job_id=job_id)
                record = transition(stored.record)
                return StoredRecord(record, await self._put(record, stored.sequence, write))
            except (WrongSequence, PublishUnknown, NoStream, NotConnected, NoAnswer) as error:
                stored, trouble = None, error
                unknown = unknown or isinstance(error, PublishUnknown)
        assert trouble is not None
        raise trouble

    # --- reads ---------------------------------------------------------------------------------------

    async def get(self, region: str, tenant: str, job_id: str, *, leader: bool = False) -> StoredRecord | None:
        """The record, or None. A replica may be behind; with `leader` the stream's leader answers."""
        found = await self._read(region, tenant, job_id, leader=leader)
        return found.stored if found else None

    async def _read(self, region: str, tenant: str, job_id: str, *, leader: bool) -> _Read | None:
        stream, subject = subjects.jobs_stream(region), subjects.record(region, tenant, job_id)
        last = await (last_from_leader if leader else last_message)(self._bus, stream, subject)
        if last is None:
            return None
        return _Read(StoredRecord(decode_record(last.data), last.sequence), last.headers.get(WRITE, ""))

    async def list_ids(self, region: str, tenant: str) -> list[str]:
        """All job ids of a tenant, newest first; ids made from idempotency keys carry no time and come last."""
        found = await subject_list(self._bus, subjects.jobs_stream(region), subjects.records_of(region, tenant))
        ids = [subjects.record_parts(subject)[2] for subject in found]
        return sorted(ids, key=lambda job_id: (_KEYED_TAIL.search(job_id) is None, job_id), reverse=True)

    async def find_tenant(self, region: str, job_id: str) -> str | None:
        """Whose job it is. For operators and the scheduler; callers name their own tenant."""
        wanted = subjects.record(region, "*", job_id)
        found = await subject_list(self._bus, subjects.jobs_stream(region), wanted)
        return subjects.record_parts(found[0])[1] if found else None

    def follow(self, region: str, tenant: str) -> AbstractAsyncContextManager[AsyncIterator[StoredRecord]]:
        """The present record of each job of a tenant, then each later one, without an end.

        Only the last write of a job is kept, so states in between may be skipped; a terminal record never is.
        """
        return self._follow(region, tenant)

    @asynccontextmanager
    async def _follow(self, region: str, tenant: str) -> AsyncIterator[AsyncIterator[StoredRecord]]:
        stream, wanted = subjects.jobs_stream(region), subjects.records_of(region, tenant)
        async with follow(self._bus, stream, wanted) as messages:

            async def records() -> AsyncIterator[StoredRecord]:
                async for msg in messages:
                    try:
                        record = decode_record(msg.data)
                    except UnreadableMessage as error:  # of a later release: the others must still be seen
                        _log.warning("record_unreadable", subject=msg.subject, error=str(error))
                        continue
                    yield StoredRecord(record, ack_sequence(msg.reply))

            yield records()

    @asynccontextmanager
    async def follow_heads(self, region: str, tenant: str = "*") -> AsyncIterator[AsyncIterator[RecordHead]]:
        """As `follow`, for the headers alone and of all tenants: bodies do not leave the server."""
        stream, wanted = subjects.jobs_stream(region), subjects.records_of(region, tenant)
        async with follow(self._bus, stream, wanted, headers_only=True) as messages:

            async def heads() -> AsyncIterator[RecordHead]:
                async for msg in messages:
                    head = head_of(msg)
                    if head is not None:
                        yield head

            yield heads()


def head_of(msg: Msg) -> RecordHead | None:
    """What the headers of a delivered record say; None for a message that is not one."""
    headers = msg.headers or {}
    state = headers.get(subjects.H_RECORD_STATE)
    if state is None:  # not written by us
        return None
    _, tenant, job_id = subjects.record_parts(msg.subject)
    deadline_s = int(headers.get(subjects.H_RECORD_DEADLINE, "0")) / 1000
    created_s = int(headers.get(subjects.H_RECORD_CREATED, "0")) / 1000
    lane = _LANES.get(headers.get(subjects.H_RECORD_LANE, ""))
    at = AckSubject.parse(msg.reply)
    outcome = headers.get(subjects.H_RECORD_OUTCOME, "")
    return RecordHead(
        tenant, job_id, at.stream_sequence, JobState(state), deadline_s, created_s, lane, at.pending, outcome,
        usage_of(headers.get(subjects.H_RECORD_USAGE, "")),
    )  # fmt: skip


def usage_text(usage: Usage) -> str:
    return f"{usage.prompt_tokens} {usage.cached_tokens} {usage.completion_tokens}"


def usage_of(text: str) -> Usage | None:
    """None where it was not said, or not in this way."""
    parts = text.split()
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return None
    return Usage(*map(int, parts))
