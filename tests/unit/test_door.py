"""What a door makes of what it reads."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.admission.door import WORKER_GRACE_S, Door, DoorLimits
from laneway.core import job
from laneway.core.clock import ManualClock
from laneway.core.errors import Code
from laneway.core.job import JobError, JobRecord, Result, Usage
from laneway.core.lanes import FinishReason, JobState
from laneway.core.objects import ObjectRef
from laneway.runtime.records import StoredRecord
from laneway.runtime.wire.responses import finished_of
from tests.support.nats import make_record


class Slow:
    """A store that answers when told to."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[StoredRecord | None] = asyncio.get_running_loop().create_future()

    async def get(self, region: str, tenant: str, job_id: str, *, leader: bool) -> StoredRecord | None:
        return await self.answer


async def test_a_read_that_is_answered_after_the_end_changes_nothing():
    nobody: Any = None
    for late in (False, True):
        clock, records = ManualClock(), Slow()
        door = Door("door-a", nobody, "local", records, nobody, nobody, nobody, nobody, nobody, clock, DoorLimits())  # type: ignore[arg-type] # answers as a RecordStore does
        record = replace(make_record(), attached=True)
        stream = door.open(record)
        reading = asyncio.ensure_future(door._read_record(stream))
        await asyncio.sleep(0)
        ended = job.cancel(record, JobError(Code.CANCELLED, "CANCELLED", "cancelled"), clock.now())
        door._end(stream, ended)
        records.answer.set_result(None if late else StoredRecord(record, 1))
        await reading
        assert stream.record is ended


class Corrected:
    """The loop's time, and a time of jobs that is now and then put right."""

    def __init__(self) -> None:
        self.by_s = 1_800_000_000.0

    def now(self) -> float:
        return self.monotonic() + self.by_s

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


@pytest.mark.looptime
@pytest.mark.parametrize("step_s", [-0.0002, -2.0, 3.0])
async def test_a_deadline_is_looked_at_when_it_is_there_however_the_time_was_corrected(step_s: float):
    """By a quarter of a millisecond at each measurement, or by a server that tells another time."""
    nobody: Any = None
    clock, beat_s = Corrected(), DoorLimits().beat_s
    door = Door("door-a", nobody, "local", nobody, nobody, nobody, nobody, nobody, nobody, clock, DoorLimits())
    record = make_record()
    contract = replace(record.contract, deadline_s=clock.now() + 10.0)
    stream = door.open(replace(record, attached=True, contract=contract))
    stream.checks = 8  # it has waited long, and is read seldom
    await asyncio.sleep(5.0)
    clock.by_s += step_s
    while stream not in door._due:
        await asyncio.sleep(beat_s / 4)
        door._find_silent()
    late_s = clock.now() - contract.deadline_s
    assert 0.0 <= late_s <= WORKER_GRACE_S + beat_s
    door._deadlines.forget(stream)


async def test_a_stream_of_a_large_result_holds_its_pieces_and_not_the_result_as_well():
    class Resolver:
        async def record(self, record: JobRecord) -> JobRecord:
            return replace(record, result=result)

    nobody: Any = None
    resolver: Any = Resolver()
    door = Door(
        "door-a", nobody, "local", nobody, resolver, nobody, nobody, nobody, nobody, ManualClock(), DoorLimits()
    )
    result = Result("abc", (97, 98, 99), (1, 1, 1), FinishReason.STOP, Usage(5, 0, 3))
    ended = replace(make_record(), state=JobState.SUCCEEDED, attempt=1, result=result)
    stored = job.by_reference(ended, ObjectRef("a/b/result-1/1-2-3", 100, b""))
    stream = await door.follow(stored)
    assert stream.record is stored
    assert b"abc" in b"".join(await stream.read())
    assert await stream.read() == []
    assert finished_of(stream.record).usage.completion_tokens == 3
