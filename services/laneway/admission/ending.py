"""Ending a job from outside: its record first, then its messages, then hints to the worker that runs it.

The order is what makes it sound: once the record is terminal no claim can succeed, so that a message which fires or is
delivered meanwhile does nothing. Purging alone misses such messages, and nobody tells the worker of a purged one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from laneway.admission.chores import Chores
from laneway.admission.signals import encode_cancel_hint, encode_event
from laneway.core import job as jobs
from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.errors import Code
from laneway.core.job import IllegalTransition, JobError, JobRecord
from laneway.core.lanes import Phase
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.lanes import LaneStore
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.logging import get_logger
from laneway.runtime.records import RecordStore, StoredRecord

HINT_EVERY_S = 0.2
HINT_S_MAX = 10.0  # three leases: by then the owner has answered or is known to be dead

log = get_logger("laneway.admission.ending")


class Ender:
    def __init__(
        self, bus: Bus, records: RecordStore, lanes: LaneStore, leases: LeaseWatcher, chores: Chores, clock: Clock
    ) -> None:
        self._bus = bus
        self._records = records
        self._lanes = lanes
        self._leases = leases
        self._chores = chores
        self._clock = clock
        self._unanswered: dict[str, tuple[str, asyncio.Event]] = {}  # by job: the owner hinted at, and its answer

    async def cancel(self, record: JobRecord, *, message: str, stored: StoredRecord | None = None) -> JobRecord:
        """Cancels a job in any state; returns the record that results, which a race may have made another end."""
        error = JobError(Code.CANCELLED, "CANCELLED", message)
        return await self._end(record, lambda found: jobs.cancel(found, error, self._clock.now()), stored)

    async def expire(self, record: JobRecord, phase: Phase, *, stored: StoredRecord | None = None) -> JobRecord:
        """Ends a job whose deadline has passed."""
        error = JobError(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", _EXPIRED[phase], phase)
        return await self._end(record, lambda found: jobs.expire(found, error, self._clock.now()), stored)

    async def _end(
        self, record: JobRecord, end: Callable[[JobRecord], JobRecord], stored: StoredRecord | None
    ) -> JobRecord:
        owner = ""

        def transition(found: JobRecord) -> JobRecord:
            nonlocal owner
            owner = found.owner
            return end(found)

        try:
            ended = await self._records.change(
                record.region,
                record.tenant,
                record.job_id,
                transition,
                stored=stored,
                unstored=record if jobs.stored_late(record) else None,
            )
        except IllegalTransition as illegal:
            return illegal.record
        await self._announce(ended.record)
        await self._purge(ended.record)
        if owner:
            self._chores.start(self._hint(record.job_id, owner), f"hint {record.job_id}")
        return ended.record

    async def _announce(self, record: JobRecord) -> None:
        try:
            await self._bus.emit(subjects.event(record.region, record.job_id), encode_event(record, with_record=True))
        except BusError as error:  # a hint: other doors read the record by themselves
            log.warning("end_not_announced", job_id=record.job_id, error=error.message)

    async def _purge(self, record: JobRecord) -> None:
        try:
            await self._lanes.purge(record)
        except BusError as error:  # whoever pulls it finds a terminal record and acknowledges it
            log.warning("job_not_purged", job_id=record.job_id, error=error.message)

    async def _hint(self, job_id: str, owner: str) -> None:
        """Tells the owner until it answers, its lease ends, or HINT_S_MAX have passed."""
        answer = asyncio.Event()
        self._unanswered[job_id] = (owner, answer)
        hint = encode_cancel_hint(job_id)
        until_s = self._clock.monotonic() + HINT_S_MAX
        try:
            while self._clock.monotonic() < until_s and self._leases.alive(owner) is not False:
                try:
                    await self._bus.emit(subjects.control(owner), hint)
                except BusError as error:
                    log.warning("cancel_not_hinted", job_id=job_id, error=error.message)
                try:
                    async with asyncio.timeout(HINT_EVERY_S):
                        await answer.wait()
                        return
                except TimeoutError:
                    continue
        finally:
            del self._unanswered[job_id]

    def awaits(self, job_id: str) -> bool:
        return job_id in self._unanswered

    def answered(self, job_id: str, worker_id: str) -> None:
        """A worker said something of a job that has ended."""
        waiting = self._unanswered.get(job_id)
        if waiting is not None and waiting[0] == worker_id:
            waiting[1].set()


_EXPIRED = {
    Phase.QUEUE: "the deadline passed before a worker took the job",
    Phase.PREFILL: "the deadline passed before the first token",
    Phase.DECODE: "the deadline passed before the answer was complete",
}
