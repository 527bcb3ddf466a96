"""Ends what nobody else will: records past their deadline, and records whose lane message was never stored.

Follows the headers of all records (state and deadline), so that no body leaves NATS for a job that goes its way: of the
open jobs it keeps a line each, and reads a record only when that job looks overdue or unaccepted. Doors and workers
expire jobs too, at the deadline itself; this comes a moment later and catches the jobs that have neither.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import structlog

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.errors import Code, NotFound
from laneway.core.fleet import Plan, TenantDepth
from laneway.core.job import NOT_ACCEPTED, IllegalTransition, JobError, JobRecord, Usage, cancel, expire, stage
from laneway.core.lanes import JobState, Lane, Phase
from laneway.core.subjects import ParkSubject
from laneway.policy.tenants import named_from, near_limit
from laneway.runtime import metrics
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.lanes import LaneStore
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.records import RecordHead, RecordStore, StoredRecord
from laneway.runtime.wire.enums import JOB_STATE_TO_WIRE
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.runtime.wire.records import encode_record
from laneway.v1 import bus_pb2

EXPIRE_GRACE_S = 1.0  # after the deadline, for the door and the worker to do it themselves
EXPIRE_OWNED_GRACE_S = 10.0  # where a living worker owns the job
ACCEPT_GRACE_S = 5.0  # after publish_by
LOOK_AFTER_S = 16.0  # a waiting job is looked at this long after it was first seen: publish_by is usually over then
SWEEP_MAX = 500  # jobs taken up together; a sweep goes on while there are more
CONCURRENT_MAX = 32
FIRST_READING_S_MAX = 60.0  # until then a plan says of tenants what the one before said
STALE_MIN = 1_000  # entries of ended jobs that a list may hold beside as many as there are open jobs

_log = structlog.get_logger(__name__)
_swept = metrics.counter("laneway_jobs_swept_total", "Jobs that the scheduler had to end.", ("reason",))


_Bucket = tuple[int, str, str]  # deadline in whole Unix seconds, rounded up; tenant; lane, empty where unknown


class OpenJobs:
    """The jobs that have not ended, from record heads, with the times at which to look at them, and how many there are
    of each tenant and lane. Pure.

    Sized for a million: jobs of a tenant and lane with the same second of their deadline share a bucket, and of each
    job there is no more than its name in two places.
    """

    def __init__(self) -> None:
        self.sequence = 0  # of the last write seen
        self._counts: dict[tuple[str, str], int] = {}  # tenant and lane: jobs in `_open`; without zeros
        self._open: dict[str, _Bucket] = {}
        self._buckets: dict[_Bucket, list[str]] = {}  # names of ended jobs in them are skipped
        self._deadlines: list[_Bucket] = []  # heap of the buckets
        self._filed = 0  # names in all buckets
        self._unwritten: dict[str, int] = {}  # job: sequence of its last write; those that await a look
        self._looks: list[tuple[float, str, int]] = []  # heap: monotonic seconds, job, sequence

    def __len__(self) -> int:
        return len(self._open)

    def see(self, head: RecordHead, monotonic_s: float, *, parked: ParkSubject | None = None) -> None:
        """`parked`: the job is known to be in its lane, so that nobody needs to look; its name is held once."""
        job = parked.job if parked else head.job_id
        self.sequence = max(self.sequence, head.sequence)
        if head.state.terminal:
            self.drop(job)
            return
        known = self._open.get(job)
        lane = head.lane.value if head.lane else known[2] if known else ""  # claimed by an older release, perhaps
        bucket = (math.ceil(head.deadline_s), head.tenant, lane)
        if known != bucket:
            self._file(job, bucket)
        self._unwritten.pop(job, None)
        if head.state is JobState.WAITING and parked is None:
            self._await_look(job, monotonic_s + LOOK_AFTER_S, head.sequence)

    def drop(self, job_id: str) -> None:
        bucket = self._open.pop(job_id, None)
        if bucket is not None:
            self._count(bucket, -1)
        self._unwritten.pop(job_id, None)
        # A deadline may be weeks away: without this, every job of that time would be remembered.
        if self._filed > 2 * len(self._open) + STALE_MIN:
            self._buckets, self._filed = {}, len(self._open)
            for job, bucket in self._open.items():
                self._buckets.setdefault(bucket, []).append(job)
            self._deadlines = list(self._buckets)
            heapq.heapify(self._deadlines)
        if len(self._looks) > 2 * len(self._unwritten) + STALE_MIN:
            self._looks = [each for each in self._looks if self._awaits_look(*each[1:])]
            heapq.heapify(self._looks)

    def _file(self, job: str, bucket: _Bucket) -> None:
        jobs = self._buckets.get(bucket)
        if jobs is None:
            jobs = self._buckets[bucket] = []
            heapq.heappush(self._deadlines, bucket)
        elif jobs:
            shared = self._open.get(jobs[-1], bucket)
            bucket = shared if shared == bucket else bucket  # one object for all
        jobs.append(job)
        self._filed += 1
        before = self._open.get(job)
        if before is None or before[1:] != bucket[1:]:
            if before is not None:
                self._count(before, -1)
            self._count(bucket, 1)
        self._open[job] = bucket

    def _count(self, bucket: _Bucket, change: int) -> None:
        key = bucket[1:]
        count = self._counts.get(key, 0) + change
        if count:
            self._counts[key] = count
        else:
            del self._counts[key]

    def by_tenant(self, least: Mapping[Lane, float] | None = None) -> dict[tuple[str, Lane], int]:
        """Open jobs by tenant and lane. Those of unknown lane, which older releases wrote, are in none. `least`: of its
        lanes alone, and so many at least; a plan is made several times a second, and tenants may be many."""
        least = least if least is not None else dict.fromkeys(Lane, 0.0)
        wanted = {lane.value: count for lane, count in least.items()}
        return {
            (tenant, Lane(lane)): count
            for (tenant, lane), count in self._counts.items()
            if lane in wanted and count >= wanted[lane]
        }

    def recount(self) -> dict[tuple[str, Lane], int]:
        """As `by_tenant`, counted from the jobs themselves: for those who check it."""
        counted = Counter(bucket[1:] for bucket in self._open.values())
        return {(tenant, Lane(lane)): count for (tenant, lane), count in counted.items() if lane}

    def _await_look(self, job: str, at_s: float, sequence: int) -> None:
        self._unwritten[job] = sequence
        heapq.heappush(self._looks, (at_s, job, sequence))

    def _awaits_look(self, job: str, sequence: int) -> bool:
        """Whether an entry of the looks still counts."""
        return self._unwritten.get(job) == sequence

    @property
    def remembered(self) -> int:
        """Entries of all lists, for those who watch that memory is bounded."""
        return len(self._open) + self._filed + len(self._unwritten) + len(self._looks)

    def overdue(self, now_s: float) -> list[tuple[str, str]]:
        """(tenant, job) of open jobs whose deadline is over, SWEEP_MAX at most, each once; `again` puts one back."""
        out: list[tuple[str, str]] = []
        while self._deadlines and self._deadlines[0][0] <= now_s and len(out) < SWEEP_MAX:
            bucket = self._deadlines[0]
            jobs = self._buckets[bucket]
            while jobs and len(out) < SWEEP_MAX:
                job = jobs.pop()
                self._filed -= 1
                if self._open.get(job) == bucket:
                    out.append((bucket[1], job))
            if not jobs:
                del self._buckets[heapq.heappop(self._deadlines)]
        return out

    def unclaimed(self, monotonic_s: float) -> list[tuple[str, str]]:
        """(tenant, job) of jobs that are to be looked at now, SWEEP_MAX at most: waiting, and not written since they
        were first seen."""
        out: list[tuple[str, str]] = []
        while self._looks and self._looks[0][0] <= monotonic_s and len(out) < SWEEP_MAX:
            _, job, sequence = heapq.heappop(self._looks)
            if self._awaits_look(job, sequence):
                del self._unwritten[job]
                out.append((self._open[job][1], job))
        return out

    def again(self, job_id: str) -> None:
        """Looks at the deadline again at the next sweep."""
        bucket = self._open.get(job_id)
        if bucket is not None:
            self._file(job_id, bucket)

    def look_again(self, job_id: str, monotonic_s: float) -> None:
        if job_id in self._open:
            self._await_look(job_id, monotonic_s, 0)


class Sweeper:
    """Runs while its scheduler leads. `parked` gives a job that is known to be parked, without asking NATS; `ended` is
    told of each job that ended (a cancelled job leaves its lane without a bell), `outcome` of each that ended since the
    first reading (those of a day would be long, and of loads that are gone), `spent` of each
    with what it used. `before` is the plan of the last term,
    if one was seen. `lists` is the connection on which the records are followed: a first reading sends tens of MB, and
    what comes after them on one connection, such as the answer to the renewal of a term, waits for all of it."""

    def __init__(
        self,
        bus: Bus,
        region: str,
        records: RecordStore,
        lanes: LaneStore,
        leases: LeaseWatcher,
        clock: Clock,
        *,
        parked: Callable[[str], ParkSubject | None],
        ended: Callable[[str], object],
        may_act: Callable[[], bool],
        interval_s: float,
        lists: Bus | None = None,
        before: Plan | None = None,
        outcome: Callable[[RecordHead], object] = lambda head: None,
        spent: Callable[[str, Usage | None], object] = lambda job, usage: None,
    ) -> None:
        self.open = OpenJobs()
        self._bus = bus
        self._region = region
        self._records = records
        self._lanes = lanes
        self._leases = leases
        self._clock = clock
        self._parked = parked
        self._ended = ended
        self._outcome = outcome
        self._spent = spent
        self._may_act = may_act
        self._interval_s = interval_s
        self._followed = RecordStore(lists or bus)
        self._free = asyncio.Semaphore(CONCURRENT_MAX)
        self._said = (before.tenants, max(1, before.counted_before)) if before else ((), 1)  # when all was last known
        self._reading_since_s: float | None = None  # monotonic; None: all records were read

    def near_limit(self, limits: Mapping[Lane, int]) -> tuple[tuple[TenantDepth, ...], int]:
        """Tenants near their limits, and the sequence below which writes are counted. While the records are read for
        the first time, what was said last stays: else a change of the leader would lift all limits."""
        since_s = self._reading_since_s
        if since_s is None or self._clock.monotonic() - since_s > FIRST_READING_S_MAX:
            least = {lane: named_from(limit) for lane, limit in limits.items() if limit}
            self._said = near_limit(self.open.by_tenant(least), limits), self.open.sequence + 1
        return self._said

    async def follow(self) -> None:
        """Learns of every record, without an end. Raises a BusError where following could not begin."""
        self.open = OpenJobs()
        self._reading_since_s = self._clock.monotonic()
        async with self._followed.follow_heads(self._region) as heads:
            async for head in heads:
                if not head.pending:
                    self._reading_since_s = None
                if head.state.terminal:
                    self.open.see(head, self._clock.monotonic())  # a plan counts up to its write too
                    self._ended(head.job_id)
                    self._spent(head.job_id, head.usage)
                    if self._reading_since_s is None:
                        self._outcome(head)
                    continue
                self.open.see(head, self._clock.monotonic(), parked=self._parked(head.job_id))

    async def run(self) -> None:
        """Sweeps at intervals, without an end."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.sweep()

    async def sweep(self) -> None:
        """Ends all that is to be ended now, however many."""
        overdue_s = self._clock.now() - EXPIRE_GRACE_S
        for job_id in await self._sweep(lambda: self.open.overdue(overdue_s), self._expire):
            self.open.again(job_id)
        look_s = self._clock.monotonic()
        for job_id in await self._sweep(lambda: self._not_parked(look_s), self._check_accepted):
            self.open.look_again(job_id, self._clock.monotonic() + ACCEPT_GRACE_S)

    def _not_parked(self, monotonic_s: float) -> list[tuple[str, str]]:
        while found := self.open.unclaimed(monotonic_s):
            if wanted := [each for each in found if self._parked(each[1]) is None]:
                return wanted
        return []

    async def _sweep(
        self, take: Callable[[], list[tuple[str, str]]], act: Callable[[StoredRecord], Awaitable[bool]]
    ) -> list[str]:
        """Acts on what there is to take; the jobs that need another look later."""
        later: list[str] = []
        while found := take():
            settled = await asyncio.gather(*(self._guarded(act, tenant, job_id) for tenant, job_id in found))
            later += [job_id for (_, job_id), done in zip(found, settled, strict=True) if not done]
            if not any(settled):  # trouble with NATS, perhaps: the rest keeps until the next sweep
                break
        return later

    async def _guarded(self, act: Callable[[StoredRecord], Awaitable[bool]], tenant: str, job_id: str) -> bool:
        async with self._free:
            return await self._settle(act, tenant, job_id)

    async def _settle(self, act: Callable[[StoredRecord], Awaitable[bool]], tenant: str, job_id: str) -> bool:
        """Whether the job needs no further look; trouble with one job or with NATS ends no sweep."""
        if not self._may_act():
            return False
        try:
            stored = await self._records.get(self._region, tenant, job_id, leader=True)
            if stored is None or stored.record.state.terminal:
                self.open.drop(job_id)
                return True
            return await act(stored)
        except (NotFound, IllegalTransition):
            return True  # it ended by itself
        except BusError as error:
            _log.warning("sweep_failed", job_id=job_id, error=error.message)
            return False
        except UnreadableMessage as error:
            _log.error("record_unreadable", job_id=job_id, error=str(error))
            self.open.drop(job_id)
            return True

    async def _expire(self, stored: StoredRecord) -> bool:
        record, now_s = stored.record, self._clock.now()
        running = record.state is JobState.RUNNING
        grace_s = EXPIRE_GRACE_S
        if running and self._leases.alive(record.owner) is not False:
            grace_s = EXPIRE_OWNED_GRACE_S
        if now_s < record.contract.deadline_s + grace_s:
            return False
        where = "it ran, and its worker did not end it" if running else "it waited for a worker"
        message = f"the deadline passed while {where}"
        error = JobError(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", message, stage(record))
        await self._end(stored, lambda found: expire(found, error, now_s), owner=record.owner)
        _swept.labels(reason=error.reason).inc()
        return True

    async def _check_accepted(self, stored: StoredRecord) -> bool:
        record = stored.record
        if record.state is not JobState.WAITING or record.attempt:
            return True
        if self._clock.now() < record.publish_by_s + ACCEPT_GRACE_S:
            return False
        if await self._lanes.holds(record):
            return True
        error = JobError(
            Code.UNAVAILABLE, NOT_ACCEPTED, "the job was never stored in its lane; nothing ran", Phase.QUEUE
        )

        def not_accepted(found: JobRecord) -> JobRecord:
            if found.state is not JobState.WAITING or found.attempt:
                raise IllegalTransition("the job was claimed", found)
            return cancel(found, error, self._clock.now())

        await self._end(stored, not_accepted)
        _swept.labels(reason=error.reason).inc()
        return True

    async def _end(
        self, stored: StoredRecord, transition: Callable[[JobRecord], JobRecord], *, owner: str = ""
    ) -> None:
        """Terminal write, then the lane messages, then the hints. The write alone decides."""
        record = stored.record
        ended = await self._records.change(record.region, record.tenant, record.job_id, transition, stored=stored)
        final = ended.record
        self.open.drop(final.job_id)
        reason = final.error.reason if final.error else ""
        _log.info("job_ended", job_id=final.job_id, state=final.state.value, reason=reason)
        try:
            await self._lanes.purge(final)
        finally:
            event = bus_pb2.JobEvent(
                job_id=final.job_id,
                state=JOB_STATE_TO_WIRE[final.state],
                attempt=final.attempt,
                record=encode_record(final),
            )
            await self._bus.emit(subjects.event(self._region, final.job_id), event.SerializeToString())
            if owner:
                hint = bus_pb2.WorkerControl(cancel=bus_pb2.CancelHint(job_id=final.job_id))
                await self._bus.emit(subjects.control(owner), hint.SerializeToString())
