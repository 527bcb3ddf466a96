"""How an owned job leaves its worker: the write of its end, told to whoever listens, whatever NATS does meanwhile.

Every write is a compare-and-set from our own last one. A write whose outcome is unknown is looked for and tried again
until it is known, since a job that was computed must not end twice or never. Somebody else's write ends our part:
terminal, and the lane message may be acknowledged; another owner's, and we say nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from random import Random

import structlog

from laneway.core import job as jobs
from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.errors import Code, LanewayError
from laneway.core.job import JobError, JobRecord, Result
from laneway.core.lanes import JobState
from laneway.core.objects import ObjectRef
from laneway.runtime.bus import BusError, PayloadTooLarge, WrongSequence
from laneway.runtime.clock import SYSTEM_RANDOM
from laneway.runtime.records import RecordStore, StoredRecord
from laneway.runtime.references import References
from laneway.runtime.wire.answers import answered
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.runtime.wire.records import encode_record
from laneway.workers import messages

BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 1.0
RESULT_TRY_S = 15.0  # until a result that the object store does not take is given up
EVENT_REST_BYTES = 1024  # of an event without its record, at most

_log = structlog.get_logger(__name__)

Change = Callable[[JobRecord], JobRecord]


class Endings:
    """Writes records that this worker owns, and announces states on `ev`."""

    def __init__(
        self,
        records: RecordStore,
        publish: Callable[[str, bytes], Awaitable[None]],
        me: str,
        clock: Clock,
        payload_bytes_max: int,
        random: Random = SYSTEM_RANDOM,
        references: References | None = None,
    ) -> None:
        self._records = records
        self._publish = publish
        self._me = me
        self._clock = clock
        self._payload_bytes_max = payload_bytes_max
        self._random = random
        self._references = references

    async def write(self, owned: StoredRecord, change: Change) -> StoredRecord | None:
        """The record after `change`, or the terminal one that somebody else wrote; None: another owns the job, or it
        is gone. Goes on until the outcome is known; `change` may be called again on our own unchanged write. A result
        that makes the record too large goes to the object store.
        """
        placed: list[ObjectRef] = []
        found = await self._write(owned, change, placed)
        for stored in placed:
            if found is None or found.record.result_object != stored:
                await self._take_back(stored)
        return found

    async def _write(self, owned: StoredRecord, change: Change, placed: list[ObjectRef]) -> StoredRecord | None:
        attempt = owned.record.attempt
        stored = owned
        backoff_s = BACKOFF_S_MIN
        while True:
            record = change(stored.record)
            try:
                return StoredRecord(record, await self._records.update(record, stored.sequence))
            except PayloadTooLarge as error:
                if record.result is None:  # nothing is left to be made smaller, and nobody must wait for a busy loop
                    backoff_s = await _back_off(backoff_s, self._random)
                change = await self._smaller(change, record, error, placed)
                continue
            except WrongSequence:
                pass
            except BusError as error:
                _log.warning("record_write_failed", job_id=owned.record.job_id, reason=error.reason)
                backoff_s = await _back_off(backoff_s, self._random)
            found = await self.read(owned.record)
            if found is None or found.record.state.terminal:
                return found
            if found.sequence == stored.sequence:
                continue  # nothing was written
            record = found.record
            if record.state is JobState.RUNNING and record.owner == self._me and record.attempt == attempt:
                stored = found
                continue
            if record.state is JobState.WAITING and record.attempt == attempt and found.sequence > owned.sequence:
                return found  # our own hand-back, whose acknowledgement was lost
            return None

    async def read(self, record: JobRecord) -> StoredRecord | None:
        """What the leader has; asks until it answers. A record that we cannot read is another's: as if it were gone."""
        backoff_s = BACKOFF_S_MIN
        while True:
            try:
                return await self._records.get(record.region, record.tenant, record.job_id, leader=True)
            except BusError as error:
                _log.warning("record_read_failed", job_id=record.job_id, reason=error.reason)
                backoff_s = await _back_off(backoff_s, self._random)
            except UnreadableMessage as error:
                _log.error("record_unreadable", job_id=record.job_id, error=str(error))
                return None

    async def announce(self, record: JobRecord, *, with_record: bool = False) -> None:
        """Tells the state on `ev`. A hint: who misses it reads the record."""
        payload = encode_record(record) if with_record else b""
        if len(payload) > self._payload_bytes_max - EVENT_REST_BYTES:
            payload = b""
        message = messages.event(record.job_id, record.state, record.attempt, self._me, payload, answered(record))
        try:
            await self._publish(subjects.event(record.region, record.job_id), message)
        except BusError:
            _log.warning("event_not_sent", job_id=record.job_id, state=record.state.value)

    async def _smaller(
        self, change: Change, record: JobRecord, error: PayloadTooLarge, placed: list[ObjectRef]
    ) -> Change:
        """What to write instead of a record that is too large."""
        if self._references is None or record.result is None or record.result_object is not None:
            return self._too_large(record.attempt, error)
        try:
            stored = await self._place(self._references, record, record.result)
        except LanewayError as refusal:
            _log.error("result_not_stored", job_id=record.job_id, reason=refusal.reason, error=refusal.message)
            return self._too_large(record.attempt, error, refusal.message)
        placed.append(stored)
        return lambda found: jobs.by_reference(change(found), stored)

    async def _place(self, references: References, record: JobRecord, result: Result) -> ObjectRef:
        """Raises a LanewayError when it is refused, or has not succeeded for RESULT_TRY_S."""
        until_s = self._clock.monotonic() + RESULT_TRY_S
        backoff_s = BACKOFF_S_MIN
        while True:
            try:
                return await references.put_result(record, result, self._clock.now())
            except BusError:
                if self._clock.monotonic() >= until_s:
                    raise
            backoff_s = await _back_off(backoff_s, self._random)

    async def _take_back(self, stored: ObjectRef) -> None:
        assert self._references is not None
        with contextlib.suppress(BusError):  # it expires by itself
            await self._references.remove(stored)

    def _too_large(self, attempt: int, error: PayloadTooLarge, store_says: str = "") -> Change:
        message = (
            f"the answer and its record have {error.size_bytes} bytes, the limit is {error.limit_bytes}; "
            "ask for fewer tokens or no log probabilities"
        )
        if store_says:
            message = f"{message} ({store_says})"
        why = JobError(Code.RESOURCE_EXHAUSTED, "RESULT_TOO_LARGE", message)
        return lambda record: jobs.fail(record, self._me, attempt, why, self._clock.now())


async def _back_off(delay_s: float, random: Random) -> float:
    await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
    return min(BACKOFF_S_MAX, delay_s * 2)
