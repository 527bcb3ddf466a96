"""Jobs as their callers see them: reading, listing and cancelling, each within the caller's own tenant.

Another tenant's job is not found. Operators may name any job; a list is always of one tenant.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from msgspec import Struct, field

from laneway.admission.ending import Ender
from laneway.admission.late_records import LATE_S
from laneway.core import ids, subjects
from laneway.core.clock import Clock
from laneway.core.errors import InvalidRequest, JobNotFound, ResultTooLarge
from laneway.core.job import JobRecord, never_accepted, without_answer
from laneway.core.lanes import JobState, Lane
from laneway.core.subjects import H_RECORD_STATE
from laneway.runtime.auth import Caller
from laneway.runtime.bus import Bus
from laneway.runtime.lanes import LaneStore
from laneway.runtime.logging import get_logger
from laneway.runtime.paging import make_token, page_size_of, read_token
from laneway.runtime.reading import StoredMessage
from laneway.runtime.records import RecordStore, StoredRecord
from laneway.runtime.references import References
from laneway.runtime.walking import Place, Walk
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.runtime.wire.records import decode_record

SCAN_JOBS_MAX = 2000  # records read for one page; a filter that matches little gives shorter pages, not longer waits
READS_AT_ONCE = 32
RECORDS_AT_ONCE = 64  # that a list holds whole, with results as large as a message
REST_BYTES_MAX = 64 * 1024  # of a job without its result
YOUNG_S = 2.0  # since an id was made, by two clocks: its record may still be on its way (late_records)
_WAITING = frozenset({JobState.PARKED, JobState.READY})

log = get_logger("laneway.admission.results")


class JobFilter(Struct, frozen=True):
    lane: Lane | None = None
    state: JobState | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def key(self, tenant: str) -> str:
        return json.dumps(["ListJobs", tenant, self.lane, self.state, sorted(self.labels.items())])

    def may_match(self, stored: str) -> bool:
        """By the state that the headers of a record say; PARKED and READY are both stored as WAITING."""
        wanted = JobState.WAITING if self.state in _WAITING else self.state
        return wanted is None or stored == wanted.value

    def matches(self, record: JobRecord) -> bool:
        labels = record.contract.labels
        return (self.lane is None or record.contract.lane is self.lane) and all(
            labels.get(name) == value for name, value in self.labels.items()
        )


class JobView(Struct, frozen=True):
    """A record and the state to show."""

    record: JobRecord
    state: JobState


class JobBook:
    def __init__(
        self,
        bus: Bus,
        region: str,
        records: RecordStore,
        references: References,
        lanes: LaneStore,
        ender: Ender,
        clock: Clock,
        answer_bytes_max: int,
    ) -> None:
        self._bus = bus
        self._region = region
        self._records = records
        self._references = references
        self._lanes = lanes
        self._ender = ender
        self._clock = clock
        self._answer_bytes_max = answer_bytes_max  # of a job with its result, as one message

    async def find(self, caller: Caller, job_id: str) -> StoredRecord:
        """The record of a job that the caller may see; JobNotFound for every other."""
        stored = None
        if ids.job_region(job_id) == self._region:
            stored = await self._look(caller, job_id)
            if stored is None and abs(self._clock.now() - ids.made_s(job_id)) < YOUNG_S:
                await asyncio.sleep(2 * LATE_S)  # its record may be on its way
                stored = await self._look(caller, job_id)
        if stored is None:
            raise JobNotFound("there is no such job", job_id=job_id)
        return stored

    async def _look(self, caller: Caller, job_id: str) -> StoredRecord | None:
        stored = await self._records.get(self._region, caller.tenant, job_id)
        if stored is None:  # a replica may be behind: only the leader can say that there is none
            stored = await self._records.get(self._region, caller.tenant, job_id, leader=True)
        if stored is None and caller.role == "operator":
            tenant = await self._records.find_tenant(self._region, job_id)
            stored = await self._records.get(self._region, tenant, job_id, leader=True) if tenant else None
        return stored

    async def earlier(self, tenant: str, job_id: str) -> JobRecord | None:
        """The job that an idempotency key made before; a refusal made none, nor a door that died too early."""
        stored = await self._records.get(self._region, tenant, job_id, leader=True)
        if stored is None or never_accepted(stored.record):
            return None
        record = stored.record
        unsure = record.state is JobState.WAITING and not record.attempt
        return None if unsure and not await self._lanes.holds(record) else record

    async def get(self, caller: Caller, job_id: str) -> JobView:
        """The job with its whole result. Raises ResultTooLarge where that is no answer to one call; ObjectLost."""
        record = (await self.find(caller, job_id)).record
        stored = record.result_object
        if stored is not None and stored.size_bytes + REST_BYTES_MAX > self._answer_bytes_max:
            raise ResultTooLarge(
                f"the result has {stored.size_bytes} bytes, and a response at most {self._answer_bytes_max} "
                "(grpc.response_bytes_max): Watch the job from index 0, which streams it",
                job_id=job_id,
                facts={"size_bytes": str(stored.size_bytes), "limit_bytes": str(self._answer_bytes_max)},
            )
        return await self._view(await self._references.record(record))

    async def cancel(self, caller: Caller, job_id: str) -> JobRecord:
        """Cancels a job in any state; returns the record that results. Idempotent."""
        stored = await self.find(caller, job_id)
        if stored.record.state.terminal:
            return stored.record
        return await self._ender.cancel(stored.record, message="the caller cancelled the job", stored=stored)

    async def page(
        self, caller: Caller, wanted: JobFilter, page_size: int, page_token: str
    ) -> tuple[list[JobView], str]:
        """A page of the caller's jobs, those written last first, and the token of the next page. A job that changes
        while its caller pages is given again at the end."""
        size = page_size_of(page_size)
        key = wanted.key(caller.tenant)
        walk = Walk(self._bus, subjects.jobs_stream(self._region), subjects.records_of(self._region, caller.tenant))
        place = _place(read_token(page_token, key)) if page_token else await walk.start()
        page: list[JobView] = []
        scanned = 0
        while len(page) < size and scanned < SCAN_JOBS_MAX:
            found, place = await walk.step(place, min(size - len(page), RECORDS_AT_ONCE))
            if not found:
                return page, ""
            scanned += len(found)
            page += await self._views([m for m in found if wanted.may_match(m.headers.get(H_RECORD_STATE, ""))], wanted)
        return page, "" if await walk.at_end(place) else make_token(str(place), key)

    async def _views(self, found: list[StoredMessage], wanted: JobFilter) -> list[JobView]:
        records = [record for message in found if (record := _readable(message)) and wanted.matches(record)]
        limit = asyncio.Semaphore(READS_AT_ONCE)

        async def view(record: JobRecord) -> JobView:
            async with limit:
                return await self._view(record)

        views = await asyncio.gather(*map(view, records))
        return [v for v in views if wanted.state in (None, JobState.WAITING, v.state)]

    async def _view(self, record: JobRecord) -> JobView:
        if record.state is not JobState.WAITING:
            return JobView(record, record.state)
        parked = await self._lanes.is_parked(record)
        return JobView(record, JobState.PARKED if parked else JobState.READY)


def _readable(message: StoredMessage) -> JobRecord | None:
    """The record, of whose result a list shows the usage alone."""
    try:
        record = decode_record(message.data)
        return without_answer(record) if record.result is not None else record
    except UnreadableMessage as error:  # of a later release: the others must still be seen
        log.warning("record_unreadable", sequence=message.sequence, error=str(error))
        return None


def _place(after: str) -> Place:
    try:
        return Place.parse(after)
    except ValueError:  # of a release that listed in another order
        raise InvalidRequest("page_token was not given by this service", field="page_token") from None
