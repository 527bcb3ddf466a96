"""What the server stored, as somebody sees it who misses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from laneway.core.job import JobRecord, QueuedJob
from laneway.runtime.wire.records import decode_lane_job, decode_record
from tests.sim.memory_nats import LoopClock
from tests.sim.memory_nats.messages import Stored


@dataclass(slots=True)
class Write:
    time_s: float  # the server's
    data: bytes

    @property
    def record(self) -> JobRecord:
        return decode_record(self.data)


@dataclass(slots=True)
class LaneMessage:
    subject: str
    data: bytes
    put_s: float
    gone_s: float | None = None

    @property
    def job(self) -> QueuedJob:
        return decode_lane_job(self.data)


@dataclass(slots=True)
class JobHistory:
    writes: list[Write] = field(default_factory=list)
    queued: dict[int, LaneMessage] = field(default_factory=dict)  # all that ever were, ready or parked, by number


class History:
    def __init__(self, clock: LoopClock) -> None:
        self.jobs: dict[str, JobHistory] = {}
        self._clock = clock
        self._at: dict[int, tuple[str, int]] = {}  # of messages that are there now: job and number
        self._count = 0

    def stored(self, message: Stored) -> None:
        kind, _, rest = message.subject.partition(".")
        if kind == "job":
            job_id = rest.rsplit(".", 1)[1]
            self._of(job_id).writes.append(Write(message.time_s, message.data))
        elif kind in ("lane", "park"):
            job_id = rest.rsplit(".", 1)[1]
            self._count += 1
            self._of(job_id).queued[self._count] = LaneMessage(message.subject, message.data, message.time_s)
            self._at[id(message)] = job_id, self._count

    def removed(self, message: Stored) -> None:
        where = self._at.pop(id(message), None)
        if where is not None:
            self.jobs[where[0]].queued[where[1]].gone_s = self._clock.now()

    def _of(self, job_id: str) -> JobHistory:
        found = self.jobs.get(job_id)
        if found is None:
            found = self.jobs[job_id] = JobHistory()
        return found

    def final(self, job_id: str) -> JobRecord | None:
        writes = self.jobs[job_id].writes if job_id in self.jobs else ()
        return writes[-1].record if writes else None

    def open(self) -> Iterator[str]:
        """Jobs that have not ended: by the last write of each, or by the lane where there was none."""
        for job_id, job in self.jobs.items():
            record = self.final(job_id)
            if record is None:
                if any(message.gone_s is None for message in job.queued.values()):
                    yield job_id
            elif not record.state.terminal:
                yield job_id


def parked(message: LaneMessage) -> bool:
    return message.subject.startswith("park.")
