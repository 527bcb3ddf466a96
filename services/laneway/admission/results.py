"""Jobs as their callers see them: reading, listing and cancelling, each within the caller's own tenant.

Another tenant's job is not found. Operators may name any job; a list is always of one tenant.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from laneway.admission.ending import Ender
from laneway.core import ids, subjects
from laneway.core.errors import JobNotFound
from laneway.core.job import JobRecord
from laneway.core.lanes import JobState, Lane
from laneway.runtime.auth import Caller
from laneway.runtime.bus import Bus
from laneway.runtime.lanes import LaneStore
from laneway.runtime.logging import get_logger
from laneway.runtime.paging import make_token, page_size_of, read_token
from laneway.runtime.records import RecordHead, RecordStore, StoredRecord, head_of
from laneway.runtime.snapshots import snapshot
from laneway.runtime.wire.records import UnreadableMessage

SCAN_JOBS_MAX = 2000  # records read for one page; a filter that matches little gives shorter pages, not longer waits
READS_AT_ONCE = 32
_WAITING = frozenset({JobState.PARKED, JobState.READY})

log = get_logger("laneway.admission.results")


@dataclass(frozen=True, slots=True)
class JobFilter:
    lane: Lane | None = None
    state: JobState | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def key(self, tenant: str) -> str:
        return json.dumps(["ListJobs", tenant, self.lane, self.state, sorted(self.labels.items())])

    def matches_head(self, head: RecordHead) -> bool:
        """By what headers say; PARKED and READY are both stored as WAITING."""
        stored = JobState.WAITING if self.state in _WAITING else self.state
        return stored is None or head.state is stored

    def matches(self, record: JobRecord) -> bool:
        labels = record.contract.labels
        return (self.lane is None or record.contract.lane is self.lane) and all(
            labels.get(name) == value for name, value in self.labels.items()
        )


@dataclass(frozen=True, slots=True)
class JobView:
    """A record and the state to show."""

    record: JobRecord
    state: JobState


class JobBook:
    def __init__(self, bus: Bus, region: str, records: RecordStore, lanes: LaneStore, ender: Ender) -> None:
        self._bus = bus
        self._region = region
        self._records = records
        self._lanes = lanes
        self._ender = ender

    async def find(self, caller: Caller, job_id: str) -> StoredRecord:
        """The record of a job that the caller may see; JobNotFound for every other."""
        region = ids.job_region(job_id)
        if region == self._region:
            stored = await self._records.get(region, caller.tenant, job_id)
            if stored is None:  # a replica may be behind: only the leader can say that there is none
                stored = await self._records.get(region, caller.tenant, job_id, leader=True)
            if stored is None and caller.role == "operator":
                tenant = await self._records.find_tenant(region, job_id)
                stored = await self._records.get(region, tenant, job_id, leader=True) if tenant else None
            if stored is not None:
                return stored
        raise JobNotFound("there is no such job", job_id=job_id)

    async def earlier(self, tenant: str, job_id: str) -> JobRecord | None:
        """The job that an idempotency key made before; a refusal made none, nor a door that died too early."""
        stored = await self._records.get(self._region, tenant, job_id, leader=True)
        if stored is None or stored.record.state is JobState.REFUSED:
            return None
        record = stored.record
        unsure = record.state is JobState.WAITING and not record.attempt
        return None if unsure and not await self._lanes.holds(record) else record

    async def get(self, caller: Caller, job_id: str) -> JobView:
        return await self._view((await self.find(caller, job_id)).record)

    async def cancel(self, caller: Caller, job_id: str) -> JobRecord:
        """Cancels a job in any state; returns the record that results. Idempotent."""
        stored = await self.find(caller, job_id)
        if stored.record.state.terminal:
            return stored.record
        return await self._ender.cancel(stored.record, message="the caller cancelled the job", stored=stored)

    async def page(
        self, caller: Caller, wanted: JobFilter, page_size: int, page_token: str
    ) -> tuple[list[JobView], str]:
        """A page of the caller's jobs, newest first, and the token of the next page."""
        size = page_size_of(page_size)
        key = wanted.key(caller.tenant)
        heads = await self._heads(caller.tenant)
        start = 0
        if page_token:
            after = read_token(page_token, key)
            start = next((i for i, head in enumerate(heads) if _order(head) < after), len(heads))
        page: list[JobView] = []
        position = start
        scanned_max = start + SCAN_JOBS_MAX
        while len(page) < size and position < min(len(heads), scanned_max):
            batch = heads[position : position + min(READS_AT_ONCE, size)]
            views = await self._views(caller.tenant, [h for h in batch if wanted.matches_head(h)], wanted)
            for head in batch:
                position += 1
                view = views.get(head.job_id)
                if view is not None:
                    page.append(view)
                    if len(page) == size:
                        break
        more = position < len(heads)
        return page, make_token(_order(heads[position - 1]), key) if more else ""

    async def _heads(self, tenant: str) -> list[RecordHead]:
        stream = subjects.jobs_stream(self._region)
        found = await snapshot(self._bus, stream, subjects.records_of(self._region, tenant))
        heads = [head for msg in found if (head := head_of(msg)) is not None]
        return sorted(heads, key=_order, reverse=True)

    async def _views(self, tenant: str, heads: list[RecordHead], wanted: JobFilter) -> dict[str, JobView]:
        stored = await asyncio.gather(*(self._readable(tenant, head.job_id) for head in heads))
        records = [s.record for s in stored if s is not None and wanted.matches(s.record)]
        views = await asyncio.gather(*map(self._view, records))
        return {v.record.job_id: v for v in views if wanted.state in (None, JobState.WAITING, v.state)}

    async def _readable(self, tenant: str, job_id: str) -> StoredRecord | None:
        try:
            return await self._records.get(self._region, tenant, job_id)
        except UnreadableMessage as error:  # of a later release: the others must still be seen
            log.warning("record_unreadable", job_id=job_id, error=str(error))
            return None

    async def _view(self, record: JobRecord) -> JobView:
        if record.state is not JobState.WAITING:
            return JobView(record, record.state)
        parked = await self._lanes.is_parked(record)
        return JobView(record, JobState.PARKED if parked else JobState.READY)


def _order(head: RecordHead) -> str:
    """Sorts by creation; the job id makes it unique."""
    return f"{round(head.created_s * 1000):016d} {head.job_id}"
