"""Job records on JetStream: one subject for each job, every write a compare-and-set on it.

Owns how a record is written, read, listed and followed, how long it is kept, and how a write with an unknown outcome is
resolved. Which change is legal is core.job's business.
"""

from __future__ import annotations

import asyncio
import base64
import math
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from nats.aio.msg import Msg

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.errors import NotFound
from laneway.core.job import JobRecord
from laneway.core.lanes import JobState
from laneway.runtime.bus import ApiError, Bus, BusError, NoAnswer, NoStream, NotConnected, PublishUnknown, WrongSequence
from laneway.runtime.bus_errors import ERR_MESSAGE_NOT_FOUND
from laneway.runtime.clock import SystemClock
from laneway.runtime.following import follow
from laneway.runtime.headers import (
    EXPECTED_SUBJECT_SEQUENCE,
    SEQUENCE,
    STATUS,
    TTL,
    ack_sequence,
)
from laneway.runtime.wire.records import decode_record, encode_record

RETENTION_S = 86_400.0
REFUSED_RETENTION_S = 3_600.0
TTL_S_MAX = 90 * 86_400  # deadlines are at most 30 days away; a clock gone wrong must not make a record eternal
CHANGE_ATTEMPTS = 8

_KEYED_TAIL = re.compile(r"-[a-z2-7]{26}\Z")


@dataclass(frozen=True, slots=True)
class StoredRecord:
    record: JobRecord
    sequence: int


class RecordExists(BusError):
    """There is a record of this job already; `stored` is it."""

    def __init__(self, stored: StoredRecord) -> None:
        super().__init__(f"the record exists: {stored.record.job_id}", job_id=stored.record.job_id)
        self.stored = stored


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What a record's headers say, for sweeps that need no body."""

    tenant: str
    job_id: str
    sequence: int
    state: JobState
    deadline_s: float


@dataclass(frozen=True, slots=True)
class _Raw:
    """A stored record with its bytes, to recognise one's own write."""

    data: bytes
    sequence: int

    def decoded(self) -> StoredRecord:
        return StoredRecord(decode_record(self.data), self.sequence)


class RecordStore:
    """Reads and writes job records. Safe to share; any number of processes may work on the same records."""

    def __init__(self, bus: Bus, *, retention_s: float = RETENTION_S, clock: Clock | None = None) -> None:
        self._bus = bus
        self._retention_s = retention_s
        self._clock = clock or SystemClock()

    # --- writes --------------------------------------------------------------------------------------

    async def create(self, record: JobRecord) -> int:
        """Stores a new record and returns its sequence.

        RecordExists: the job has one, perhaps by an earlier try of the same request. PublishUnknown: try again with the
        same record, and see by RecordExists whether it was stored.
        """
        try:
            return await self.update(record, 0)
        except WrongSequence:
            stored = await self.get(record.region, record.tenant, record.job_id, leader=True)
            if stored is None:  # it expired in between, or the other write is still on its way
                raise
            raise RecordExists(stored) from None

    async def update(self, record: JobRecord, expected_sequence: int) -> int:
        """Writes the record if its last write has the expected sequence. Raises WrongSequence, PublishUnknown."""
        return await self._put(record, encode_record(record), expected_sequence)

    async def _put(self, record: JobRecord, payload: bytes, expected_sequence: int) -> int:
        headers = {
            EXPECTED_SUBJECT_SEQUENCE: str(expected_sequence),
            TTL: f"{self._ttl_s(record)}s",
            subjects.H_RECORD_STATE: record.state.value,
            subjects.H_RECORD_DEADLINE: str(round(record.contract.deadline_s * 1000)),
        }
        return await self._bus.store(subjects.record(record.region, record.tenant, record.job_id), payload, headers)

    def _ttl_s(self, record: JobRecord) -> int:
        """Whole seconds, rounded up. A refusal is kept for an hour; all else beyond its deadline."""
        if record.state is JobState.REFUSED:
            return math.ceil(REFUSED_RETENTION_S)
        left_s = max(0.0, record.contract.deadline_s - self._clock.now())
        return min(TTL_S_MAX, math.ceil(left_s + self._retention_s))

    async def change(
        self,
        region: str,
        tenant: str,
        job_id: str,
        transition: Callable[[JobRecord], JobRecord],
        *,
        stored: StoredRecord | None = None,
    ) -> StoredRecord:
        """Applies a transition by compare-and-set, again on whatever another writer left, a bounded number of times.

        `stored` saves the first read. A write whose outcome is unknown is looked for before it is tried again, so the
        transition takes place once. Raises NotFound, what the transition raises (IllegalTransition), and at last the
        bus error that kept it from succeeding.
        """
        sent: list[bytes] = []
        trouble: BusError | None = None
        for attempt in range(CHANGE_ATTEMPTS):
            if attempt:
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(1.0, 0.01 * 2**attempt))
            try:
                if stored is None:
                    raw = await self._read(region, tenant, job_id, leader=attempt > 0)
                    if raw is None:
                        raise NotFound("there is no such job", job_id=job_id)
                    stored = raw.decoded()
                    if raw.data in sent:
                        return stored
                record = transition(stored.record)
                payload = encode_record(record)
                sent.append(payload)
                return StoredRecord(record, await self._put(record, payload, stored.sequence))
            except (WrongSequence, PublishUnknown, NoStream, NotConnected, NoAnswer) as error:
                stored, trouble = None, error
        assert trouble is not None
        raise trouble

    # --- reads ---------------------------------------------------------------------------------------

    async def get(self, region: str, tenant: str, job_id: str, *, leader: bool = False) -> StoredRecord | None:
        """The record, or None. A replica may be behind; with `leader` the stream's leader answers."""
        raw = await self._read(region, tenant, job_id, leader=leader)
        return raw.decoded() if raw else None

    async def _read(self, region: str, tenant: str, job_id: str, *, leader: bool) -> _Raw | None:
        stream, subject = subjects.jobs_stream(region), subjects.record(region, tenant, job_id)
        if leader:
            try:
                answer = await self._bus.api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
            except ApiError as error:
                if error.err_code == ERR_MESSAGE_NOT_FOUND:
                    return None
                raise
            message = answer["message"]
            return _Raw(base64.b64decode(message.get("data", "")), message["seq"])
        msg = await self._bus.request(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"")
        headers = msg.headers or {}
        if headers.get(STATUS) == "404":
            return None
        return _Raw(msg.data, int(headers[SEQUENCE]))

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
                    yield StoredRecord(decode_record(msg.data), ack_sequence(msg.reply))

            yield records()

    @asynccontextmanager
    async def follow_heads(self, region: str, tenant: str = "*") -> AsyncIterator[AsyncIterator[RecordHead]]:
        """As `follow`, for the headers alone and of all tenants: bodies do not leave the server."""
        stream, wanted = subjects.jobs_stream(region), subjects.records_of(region, tenant)
        async with follow(self._bus, stream, wanted, headers_only=True) as messages:

            async def heads() -> AsyncIterator[RecordHead]:
                async for msg in messages:
                    head = _head(msg)
                    if head is not None:
                        yield head

            yield heads()


def _head(msg: Msg) -> RecordHead | None:
    headers = msg.headers or {}
    state = headers.get(subjects.H_RECORD_STATE)
    if state is None:  # not written by us
        return None
    _, tenant, job_id = subjects.record_parts(msg.subject)
    deadline_s = int(headers.get(subjects.H_RECORD_DEADLINE, "0")) / 1000
    return RecordHead(tenant, job_id, ack_sequence(msg.reply), JobState(state), deadline_s)


async def subject_list(bus: Bus, stream: str, subject_filter: str) -> list[str]:
    """All subjects of a stream that match the filter and hold a message, in pages as the server gives them."""
    found: dict[str, None] = {}
    offset = 0
    while True:
        answer = await bus.api(f"STREAM.INFO.{stream}", {"subjects_filter": subject_filter, "offset": offset})
        page = answer["state"].get("subjects") or {}
        found.update(dict.fromkeys(page))
        offset += len(page)
        if not page or offset >= answer.get("total", 0):
            return list(found)
