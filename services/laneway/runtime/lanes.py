"""Jobs in their lanes on JetStream: ready for workers to pull, or parked until a scheduler or their fire time.

Owns the headers of lane messages and the guards without which an early release makes a second copy of a job or revives
a cancelled one. A parked job is a scheduled message whose target is its ready subject: with every scheduler dead, the
server fires it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any

import structlog
from msgspec import Struct

from laneway.core import subjects
from laneway.core.job import JobRecord, QueuedJob
from laneway.core.lanes import Lane
from laneway.core.subjects import ParkSubject
from laneway.runtime.bus import Bus, NoAnswer, PublishUnknown, WrongSequence
from laneway.runtime.headers import (
    EXPECTED_SUBJECT_SEQUENCE,
    EXPECTED_SUBJECT_SEQUENCE_SUBJECT,
    MSG_ID,
    SCHEDULE,
    SCHEDULE_NEXT,
    SCHEDULE_TARGET,
    SCHEDULER,
)
from laneway.runtime.reading import StoredMessage, last_from_leader, last_message, subject_list
from laneway.runtime.wire.records import encode_lane_job

_log = structlog.get_logger(__name__)

# A schedule this close fires by itself; a release now would race with it.
SCHEDULE_GUARD_S = 2.0
# All that a release or re-stagger carries over. A copied Nats-Rollup would delete messages in flight.
KEPT_HEADERS = (subjects.H_RECORD_SEQUENCE, subjects.H_KEY)


class ReleaseOutcome(StrEnum):
    RELEASED = "released"  # done as asked: the job is ready, or has its new fire time
    GONE = "gone"  # not parked any more
    TOO_CLOSE = "too_close"  # within SCHEDULE_GUARD_S of its fire time: left to fire
    LOST = "lost"  # somebody else acted on it first


class LaneDepth(Struct, frozen=True):
    ready: int
    running: int  # delivered and not acknowledged; delayed redeliveries count


class _Parked(Struct, frozen=True):
    data: bytes
    sequence: int
    fire_at_s: float
    target: str  # the ready subject that it is released to, with its home
    kept: dict[str, str]


class LaneStore:
    """Puts jobs into the lanes of one region and moves or removes them. Safe to share."""

    def __init__(self, bus: Bus, region: str) -> None:
        self._bus = bus
        self._region = region

    # --- into the lanes ------------------------------------------------------------------------------

    async def put_ready(self, job: QueuedJob, record_sequence: int, data: bytes = b"", *, again: bool = False) -> None:
        """Publishes a job for workers to pull now. Raises StreamFull, OutOfStorage, NoStream, PublishUnknown.

        `data`: the job as it was encoded already. `again`: an earlier message of this attempt may have come and gone;
        NATS must not take this one for it.
        """
        record = job.record
        headers = _lane_headers(record, record_sequence, "ready", again=again)
        subject, patient = _ready_subject(self._region, record), record.contract.lane.may_park
        await self._bus.store(subject, data or encode_lane_job(job), headers, patient=patient)

    def begin_put_ready(self, job: QueuedJob, record_sequence: int, data: bytes) -> Coroutine[Any, Any, object]:
        """As `put_ready`; where it can be, the message is on its way when this returns."""
        headers = _lane_headers(job.record, record_sequence, "ready")
        return self._bus.begin_store(_ready_subject(self._region, job.record), data, headers)

    async def park(
        self,
        job: QueuedJob,
        record_sequence: int,
        data: bytes = b"",
        *,
        fire_at_s: float,
        group: str,
        again: bool = False,
    ) -> ParkSubject:
        """Publishes a job that becomes ready at `fire_at_s` (NATS time), or when it is released before. `again`: as
        for `put_ready`."""
        record = job.record
        if not record.contract.lane.may_park:
            raise ValueError(f"the {record.contract.lane} lane does not park")
        park = _park_subject(self._region, record, group)
        schedule = _schedule_headers(_ready_subject(self._region, record), fire_at_s)
        headers = _lane_headers(record, record_sequence, "park", again=again) | schedule
        await self._bus.store(str(park), data or encode_lane_job(job), headers, patient=True)
        return park

    # --- early release -------------------------------------------------------------------------------

    async def release(self, park: ParkSubject, *, now_s: float, reason: str) -> ReleaseOutcome:
        """Makes a parked job ready before its time. `now_s` is NATS time. Safe to repeat, and against other releasers.

        PublishUnknown: the release may still take place; asking again is safe.
        """
        parked = await self._parked_message(park)
        if parked is None:
            return ReleaseOutcome.GONE
        if abs(parked.fire_at_s - now_s) <= SCHEDULE_GUARD_S:
            return ReleaseOutcome.TOO_CLOSE
        return await self._act(park, parked, parked.target, self._release_headers(park, parked, reason))

    @staticmethod
    def _release_headers(park: ParkSubject, parked: _Parked, reason: str) -> dict[str, str]:
        return {
            **parked.kept,
            subjects.H_RELEASED_BY: reason,
            SCHEDULER: str(park),
            SCHEDULE_NEXT: "purge",
            EXPECTED_SUBJECT_SEQUENCE: str(parked.sequence),
            EXPECTED_SUBJECT_SEQUENCE_SUBJECT: str(park),
        }

    async def restagger(self, park: ParkSubject, fire_at_s: float, *, now_s: float) -> ReleaseOutcome:
        """Gives a parked job another fire time; its subject stays the same."""
        parked = await self._parked_message(park)
        if parked is None:
            return ReleaseOutcome.GONE
        if abs(parked.fire_at_s - now_s) <= SCHEDULE_GUARD_S:
            return ReleaseOutcome.TOO_CLOSE
        # No Nats-Msg-Id: the server would take it for the first park and drop it.
        headers = {
            **parked.kept,
            **_schedule_headers(parked.target, fire_at_s),
            EXPECTED_SUBJECT_SEQUENCE: str(parked.sequence),
        }
        return await self._act(park, parked, str(park), headers)

    async def _act(
        self, park: ParkSubject, parked: _Parked, subject: str, headers: Mapping[str, str]
    ) -> ReleaseOutcome:
        try:
            await self._bus.store(subject, parked.data, headers)
        except WrongSequence:
            return ReleaseOutcome.LOST
        except PublishUnknown:
            found = await self._parked_message(park)
            if found is not None and found.sequence == parked.sequence:
                raise
        return ReleaseOutcome.RELEASED

    async def fires_at_s(self, park: ParkSubject) -> float | None:
        """When NATS is to fire a parked job, in its time; None if it is not parked any more."""
        parked = await self._parked_message(park)
        return parked.fire_at_s if parked is not None else None

    async def _parked_message(self, park: ParkSubject) -> _Parked | None:
        stream = subjects.lane_stream(self._region, park.lane)
        found = await last_message(self._bus, stream, str(park))
        if found is None:  # a replica may be behind: only the leader can say that there is none
            found = await last_from_leader(self._bus, stream, str(park))
        return _parked(found, park) if found else None

    # --- out of the lanes, and what is in them -------------------------------------------------------

    async def purge(self, record: JobRecord) -> int:
        """Removes a job's lane messages, parked, ready or in flight, and returns how many there were.

        The record must be terminal before: a message that fires in between is stopped by the claim.
        """
        lane, stream = record.contract.lane, subjects.lane_stream(self._region, record.contract.lane)
        wanted = [subjects.ready(self._region, lane, record.pool, record.tenant, record.job_id, home="*")]
        if lane.may_park:
            # First the park subject: what fires after its purge began is caught by the second.
            wanted.insert(0, self._park_filter(record))
        purged = 0
        for subject in wanted:
            answer = await self._bus.api(f"STREAM.PURGE.{stream}", {"filter": subject})
            purged += answer["purged"]
        return purged

    async def is_parked(self, record: JobRecord) -> bool:
        if not record.contract.lane.may_park:
            return False
        stream = subjects.lane_stream(self._region, record.contract.lane)
        return bool(await subject_list(self._bus, stream, self._park_filter(record)))

    async def holds(self, record: JobRecord) -> bool:
        """Whether the job's message is in its lane: parked, ready, or with a worker."""
        if await self.is_parked(record):
            return True
        # In this order: a job that is released meanwhile is seen at least once.
        lane = record.contract.lane
        ready = subjects.ready(self._region, lane, record.pool, record.tenant, record.job_id, home="*")
        return await last_from_leader(self._bus, subjects.lane_stream(self._region, lane), ready) is not None

    def _park_filter(self, record: JobRecord) -> str:
        return subjects.parked_in_any_group(_park_subject(self._region, record, "-"))

    async def parked(self, lane: Lane) -> list[ParkSubject]:
        """All parked jobs of a lane. Pages are not one snapshot: jobs that come or go meanwhile may be missed."""
        stream = subjects.lane_stream(self._region, lane)
        found = await subject_list(self._bus, stream, subjects.park_filter(self._region, lane))
        parked = []
        for subject in found:
            try:
                parked.append(ParkSubject.parse(subject))
            except ValueError:  # not ours; one stray message must not hide all jobs from a scheduler
                _log.warning("park_subject_unreadable", subject=subject)
        return parked

    async def depths(self, lane: Lane, pool: str, home: str = subjects.HOME_ANY) -> LaneDepth:
        stream = subjects.lane_stream(self._region, lane)
        info = await self._bus.api(f"CONSUMER.INFO.{stream}.{subjects.consumer(lane, pool, home)}", {})
        return LaneDepth(info["num_pending"], info["num_ack_pending"])

    async def all_depths(self, lane: Lane) -> dict[tuple[str, str], LaneDepth]:
        """By pool and home, of all consumers of a lane. Pages of 256: one request in all but the largest regions, which
        takes a quarter of the time that asking for each of 21 does. Raises NoAnswer where one has no leader now."""
        stream = subjects.lane_stream(self._region, lane)
        depths: dict[tuple[str, str], LaneDepth] = {}
        offset, total = 0, 1
        while offset < total:
            answer = await self._bus.api(f"CONSUMER.LIST.{stream}", {"offset": offset} if offset else {})
            if answer.get("missing"):
                raise NoAnswer(f"of the consumers of {stream}, {answer['missing']} did not answer")
            page = answer["consumers"]
            for info in page:
                key = subjects.ready_filter_parts(info["config"].get("filter_subject", ""))
                if key is not None:
                    depths[key] = LaneDepth(info["num_pending"], info["num_ack_pending"])
            offset, total = offset + len(page), answer["total"] if page else 0
        return depths

    async def storage_used(self) -> float:
        """How full the storage is, 0 to 1: the account's, or that of the records where it is fuller.

        An account without a limit says nothing of the disk beneath it; then only the records' own limit counts.
        """
        account, jobs = await asyncio.gather(
            self._bus.api("INFO", {}), self._bus.api(f"STREAM.INFO.{subjects.jobs_stream(self._region)}", {})
        )
        return max(
            _share(account["storage"], account["limits"]["max_storage"]),
            _share(jobs["state"]["bytes"], jobs["config"]["max_bytes"]),
        )


def _ready_subject(region: str, record: JobRecord) -> str:
    home = record.home or subjects.HOME_ANY
    return subjects.ready(region, record.contract.lane, record.pool, record.tenant, record.job_id, home)


def _park_subject(region: str, record: JobRecord, group: str) -> ParkSubject:
    """All but the group is in the record, and survives its storage exactly."""
    return ParkSubject(
        region=region,
        lane=record.contract.lane,
        pool=record.pool,
        tenant=record.tenant,
        not_before_ms=round(record.contract.not_before_s * 1000),
        due_ms=round(record.latest_start_s * 1000),
        cost_ms=record.device_ms,
        group=group,
        job=record.job_id,
    )


def _share(used: int, limit: int) -> float:
    return used / limit if limit > 0 else 0.0


def _lane_headers(record: JobRecord, record_sequence: int, kind: str, *, again: bool = False) -> dict[str, str]:
    # The id saves work when a publish is repeated. It holds the attempt: a job handed back is not taken for the first.
    message_id = f"{record.job_id}:{record.attempt}:{kind}"
    return {
        subjects.H_RECORD_SEQUENCE: str(record_sequence),
        MSG_ID: f"{message_id}:{record_sequence}" if again else message_id,
    }


def _schedule_headers(target: str, fire_at_s: float) -> dict[str, str]:
    return {SCHEDULE: f"@at {_rfc3339(fire_at_s)}", SCHEDULE_TARGET: target}


@lru_cache(64)  # of jobs that wait for one time
def _rfc3339(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _parked(message: StoredMessage, park: ParkSubject) -> _Parked | None:
    stamp = message.headers.get(SCHEDULE, "").removeprefix("@at ").strip()
    try:
        fire_at_s = datetime.fromisoformat(stamp).timestamp()
    except ValueError:  # no schedule, so not parked by us, and the server refuses to release it
        _log.warning("parked_message_without_schedule", subject=str(park))
        return None
    kept = {name: message.headers[name] for name in KEPT_HEADERS if name in message.headers}
    return _Parked(message.data, message.sequence, fire_at_s, message.headers.get(SCHEDULE_TARGET) or park.ready, kept)
