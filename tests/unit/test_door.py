"""What a door makes of what it reads."""

import asyncio
from typing import Any

from msgspec.structs import replace

from laneway.admission.door import Door, DoorLimits
from laneway.core import job
from laneway.core.clock import ManualClock
from laneway.core.errors import Code
from laneway.core.job import JobError
from laneway.runtime.records import StoredRecord
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
        door = Door("door-a", nobody, "local", records, nobody, nobody, nobody, nobody, clock, DoorLimits())  # type: ignore[arg-type] # answers as a RecordStore does
        record = replace(make_record(), attached=True)
        stream = door.open(record)
        reading = asyncio.ensure_future(door._read_record(stream))
        await asyncio.sleep(0)
        ended = job.cancel(record, JobError(Code.CANCELLED, "CANCELLED", "cancelled"), clock.now())
        door._end(stream, ended)
        records.answer.set_result(None if late else StoredRecord(record, 1))
        await reading
        assert stream.record is ended
