"""From a verdict to an accepted job: the record is created, then the job is published into its lane. Of attached jobs
without a key the record is left to their first claim (late_records).

Each step may fail in three ways: refused (nothing stored, or a record that says so), perhaps done (tried again with the
same identity until `publish_by`, which is what makes it safe), or too late. What is neither sure nor repeatable any
more is answered as OUTCOME_UNKNOWN with the job id.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import Struct

from laneway.core.clock import Clock
from laneway.core.errors import (
    InvalidRequest,
    LaneSaturated,
    LanewayError,
    ObjectStoreFull,
    OutcomeUnknown,
    StorageFull,
    Unavailable,
)
from laneway.core.job import (
    NOT_ACCEPTED,
    GenerateTask,
    IllegalTransition,
    JobRecord,
    LaneJob,
    ReferredJob,
    never_accepted,
    refuse,
    stored_late,
)
from laneway.core.lanes import JobState
from laneway.core.objects import ObjectRef
from laneway.policy.admit import Decision, Placement
from laneway.policy.grouping import group_of
from laneway.runtime.bus import (
    BusError,
    NoAnswer,
    NoStream,
    NotConnected,
    OutOfStorage,
    PublishUnknown,
    StreamFull,
    WrongSequence,
)
from laneway.runtime.bus_errors import PayloadTooLarge
from laneway.runtime.grpc_errors import job_error_of
from laneway.runtime.lanes import LaneStore
from laneway.runtime.logging import get_logger
from laneway.runtime.objects import ObjectTooLarge
from laneway.runtime.records import RecordExists, RecordStore, StoredRecord
from laneway.runtime.references import References
from laneway.runtime.wire.records import encode_lane_job, encode_record

RETRY_EVERY_S = 0.1
UNREACHABLE_RETRY_S = 1.0  # what a caller is told when NATS or a stream's leader is away

log = get_logger("laneway.admission.accept")


class Acceptance(Struct, frozen=True):
    """`existing`: an earlier request with the same key made this job; it was left as it is. `unstored`: the job is in
    its lane, and its record is left to its first claim."""

    record: JobRecord
    sequence: int
    existing: bool = False
    unstored: bool = False


class _Message:
    """A job as it is stored and as it is queued; each is encoded once. `task_object`: its task is there instead.
    `again`: an earlier try was given up, whose message may have come and gone since."""

    __slots__ = ("_data", "again", "job", "record_data", "task_object")

    def __init__(self, job: LaneJob, task_object: ObjectRef | None = None) -> None:
        self.job = job
        self.task_object = task_object
        self.record_data = encode_record(job.record)
        self.again = False
        self._data = b""

    def encode(self) -> bytes:
        if not self._data:
            job, stored = self.job, self.task_object
            queued = job if stored is None else ReferredJob(job.record, stored)
            self._data = encode_lane_job(queued, self.record_data)
        return self._data


class Acceptor:
    def __init__(
        self,
        records: RecordStore,
        lanes: LaneStore,
        clock: Clock,
        references: References | None = None,
        objects_full: Callable[[], bool] = lambda: False,
    ) -> None:
        """`references`: to where large tasks go; None: nowhere. `objects_full`: what room is left there is for the
        results of accepted jobs."""
        self._records = records
        self._lanes = lanes
        self._references = references
        self._objects_full = objects_full
        self._clock = clock

    def accept(
        self, record: JobRecord, task: GenerateTask, decision: Decision, full_retry_s: Callable[[], float]
    ) -> Coroutine[Any, Any, Acceptance]:
        """Stores the job. `full_retry_s` gives what the caller of a full lane is told to wait.

        A job whose record is left to its first claim is on its way to its lane when this returns.
        """
        large = self._references.large(task) if self._references is not None else b""
        if self._references is not None and large:
            return self._accept_large(self._references, LaneJob(record, task), large, decision, full_retry_s)
        message = _Message(LaneJob(record, task))
        if stored_late(record) and decision.placement is Placement.READY:
            sent = self._lanes.begin_put_ready(message.job, 0, message.encode())
            return self._accept_unstored(message, sent, decision, full_retry_s)
        return self._accept(message, decision, full_retry_s)

    async def _accept_unstored(
        self,
        message: _Message,
        sent: Coroutine[Any, Any, object],
        decision: Decision,
        full_retry_s: Callable[[], float],
    ) -> Acceptance:
        record = message.job.record
        stored = StoredRecord(record, 0)
        try:
            await self._publish(message, 0, decision, full_retry_s, sent)
        except (LaneSaturated, PayloadTooLarge, NotPublished) as refusal:
            await self._refuse(stored, refusal)
            raise
        return Acceptance(record, 0, unstored=True)

    async def _accept_large(
        self,
        references: References,
        job: LaneJob,
        task: bytes,
        decision: Decision,
        full_retry_s: Callable[[], float],
    ) -> Acceptance:
        """The task goes to the object store first, and the record is never left to the first claim: an object without a
        record is one that nobody refers to, and swept."""
        stored = await self._store_task(references, job.record, task)
        try:
            accepted = await self._accept(_Message(job, stored), decision, full_retry_s)
        except (LaneSaturated, PayloadTooLarge, NotPublished, NotCreated):  # after anything else it may be in its lane
            await _take_back(references, stored)
            raise
        if accepted.existing:
            await _take_back(references, stored)
        return accepted

    async def _store_task(self, references: References, record: JobRecord, task: bytes) -> ObjectRef:
        while True:
            trouble: BusError
            try:
                if self._objects_full():
                    raise ObjectStoreFull
                return await references.put_task(record, task, self._clock.now())
            except ObjectStoreFull as full:
                raise ObjectStoreFull(full.message, retry_after_s=UNREACHABLE_RETRY_S) from full
            except ObjectTooLarge as error:
                raise InvalidRequest(
                    f"the prompt is too large: {error.message}", field="spec.generate", reason="PROMPT_TOO_LARGE"
                ) from error
            except (NoStream, NotConnected, NoAnswer, WrongSequence, PublishUnknown) as error:
                trouble = error
            if self._clock.now() + RETRY_EVERY_S >= record.publish_by_s:
                raise NotPublished(
                    f"the prompt could not be stored: {trouble.message}",
                    reason=trouble.reason,
                    retry_after_s=UNREACHABLE_RETRY_S,
                ) from trouble
            await asyncio.sleep(RETRY_EVERY_S)

    async def _accept(self, message: _Message, decision: Decision, full_retry_s: Callable[[], float]) -> Acceptance:
        record = message.job.record
        # Made in a turn of the loop in which nothing else happens to this job: its record is on the way.
        asyncio.get_running_loop().call_soon(message.encode)
        stored = await self._create(message)
        if stored.record is not record:
            return Acceptance(stored.record, stored.sequence, existing=True)
        try:
            await self._publish(message, stored.sequence, decision, full_retry_s)
        except (LaneSaturated, PayloadTooLarge, NotPublished) as refusal:
            await self._refuse(stored, refusal)
            raise
        if self._clock.now() > record.publish_by_s:
            stored = await self._settled(stored)
        error = stored.record.error
        if error is not None and error.reason == NOT_ACCEPTED:
            raise NotPublished(
                error.message, reason=NOT_ACCEPTED, job_id=record.job_id, retry_after_s=UNREACHABLE_RETRY_S
            )
        return Acceptance(stored.record, stored.sequence)

    # --- the record ----------------------------------------------------------------------------------

    async def _create(self, message: _Message) -> StoredRecord:
        """Our record as stored, or the one that the same key made before."""
        record, unknown = message.job.record, False
        while True:
            trouble: BusError
            try:
                return await self._create_once(message)
            except (WrongSequence, PublishUnknown, NoAnswer) as error:
                # Somebody else with the same key, or no answer: the next try finds what is stored.
                unknown, trouble = True, error
            except (StreamFull, OutOfStorage) as full:  # before this door has noticed by its polls
                if not unknown:
                    raise StorageFull(full.message, retry_after_s=UNREACHABLE_RETRY_S) from full
                trouble = full
            except (NoStream, NotConnected) as error:
                if not unknown:
                    raise NotCreated(
                        f"the job could not be stored: {error.message}",
                        reason=error.reason,
                        retry_after_s=UNREACHABLE_RETRY_S,
                    ) from error
                trouble = error
            if self._clock.now() + RETRY_EVERY_S >= record.publish_by_s:
                raise OutcomeUnknown(job_id=record.job_id, retry_after_s=UNREACHABLE_RETRY_S) from trouble
            await asyncio.sleep(RETRY_EVERY_S)

    async def _create_once(self, message: _Message) -> StoredRecord:
        record = message.job.record
        try:
            return StoredRecord(record, await self._records.create(record, message.record_data))
        except RecordExists as exists:
            found = exists.stored
        if _same_write(found.record, record):
            return StoredRecord(record, found.sequence)  # an earlier try of ours arrived after all
        if await self._never_accepted(found.record, record):
            message.again = found.record.state.terminal
            return StoredRecord(record, await self._records.update(record, found.sequence))
        return found

    async def _never_accepted(self, found: JobRecord, ours: JobRecord) -> bool:
        """Whether the key, or a producer's message, is free for another try.

        REFUSED, when certainly nothing is in the lane; or its door died before the job was in its lane, and nobody else
        would put it there, or the scheduler has given it up since. Should that door live and be about to, there are two
        messages, and the claim takes one; so they must ask for the same.
        """
        if found.state is JobState.REFUSED:
            return True
        if found.body_digest != ours.body_digest:
            return False
        return never_accepted(found) or (_untouched(found) and not await self._lanes.holds(found))

    # --- the lane ------------------------------------------------------------------------------------

    async def _publish(
        self,
        message: _Message,
        sequence: int,
        decision: Decision,
        full_retry_s: Callable[[], float],
        sent: Coroutine[Any, Any, object] | None = None,
    ) -> None:
        """Raises LaneSaturated, StorageFull, PayloadTooLarge or NotPublished when it is certainly not in its lane."""
        job, data = message.job, message.encode()
        record = job.record
        unknown = False
        trouble: BusError
        more = {"again": True} if message.again else {}
        while True:
            try:
                if sent is not None:
                    first, sent = sent, None
                    await first
                elif decision.placement is Placement.PARKED:
                    group = group_of(record.pool, record.tenant, job.task)
                    await self._lanes.park(job, sequence, data, fire_at_s=decision.fire_at_s, group=group, **more)
                else:
                    await self._lanes.put_ready(job, sequence, data, **more)
                return
            except StreamFull as full:
                # Also after an unknown try: had that been stored, even a full lane would answer "duplicate".
                raise LaneSaturated("the lane is full", job_id=record.job_id, retry_after_s=full_retry_s()) from full
            except OutOfStorage as full:
                if not unknown:  # a cluster looks at its storage before it looks for a duplicate
                    raise StorageFull(full.message, job_id=record.job_id, retry_after_s=UNREACHABLE_RETRY_S) from full
                trouble = full
            except PublishUnknown as error:
                unknown, trouble = True, error
            except (NoStream, NotConnected) as error:
                trouble = error
            if self._clock.now() + RETRY_EVERY_S >= record.publish_by_s:
                raise _not_in_time(record, trouble, unknown=unknown)
            await asyncio.sleep(RETRY_EVERY_S)

    async def _refuse(self, stored: StoredRecord, refusal: LanewayError) -> None:
        record, error = stored.record, job_error_of(refusal)

        def refused(found: JobRecord) -> JobRecord:
            if not _same_write(found, record):
                raise IllegalTransition("another request with the same key made it its own", found)
            return refuse(found, error, self._clock.now())

        try:
            unstored = None if stored.sequence else record
            await self._records.change(
                record.region, record.tenant, record.job_id, refused, stored=stored, unstored=unstored
            )
        except IllegalTransition:
            return
        except LanewayError as trouble:  # the scheduler ends it after publish_by
            log.warning("refusal_not_recorded", job_id=record.job_id, error=trouble.message)

    async def _settled(self, stored: StoredRecord) -> StoredRecord:
        """The acknowledgement came after publish_by, when others may have taken the job for never accepted."""
        record = stored.record
        try:
            found = await self._records.get(record.region, record.tenant, record.job_id, leader=True)
        except (NoAnswer, NoStream, NotConnected) as error:
            raise OutcomeUnknown(job_id=record.job_id, retry_after_s=UNREACHABLE_RETRY_S) from error
        return found or stored


async def _take_back(references: References, stored: ObjectRef) -> None:
    with contextlib.suppress(BusError):  # it expires by itself
        await references.remove(stored)


def _same_write(found: JobRecord, ours: JobRecord) -> bool:
    """Whether a stored record is what this very request tried to store before, and nobody changed it since.

    A lane message carries the sequence of this write and may be claimed from it without a read, so it must not be that
    of a cancellation.
    """
    return _untouched(found) and (found.door, found.timings.created_s, found.body_digest) == (
        ours.door,
        ours.timings.created_s,
        ours.body_digest,
    )


def _untouched(record: JobRecord) -> bool:
    return record.state is JobState.WAITING and not record.attempt


class NotCreated(Unavailable):
    """The job's record could not be stored; nothing of the job was."""


class NotPublished(Unavailable):
    """The job's lane could not be reached in time; the job was not accepted."""


def _not_in_time(record: JobRecord, trouble: BusError, *, unknown: bool) -> LanewayError:
    if unknown:
        return OutcomeUnknown(job_id=record.job_id, retry_after_s=UNREACHABLE_RETRY_S)
    return NotPublished(
        f"the job could not be queued: {trouble.message}",
        reason=trouble.reason,
        job_id=record.job_id,
        retry_after_s=UNREACHABLE_RETRY_S,
    )
