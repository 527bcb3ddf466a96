"""Records of attached jobs that are stored late: by the first claim, or here when nobody has claimed in time.

An attached job without a key is most often claimed within a millisecond, and its claim stores the record as a whole;
storing it before would only keep its caller waiting (docs/adr/0008). What waits longer than LATE_S is stored from here,
so that every job that waits can be found, listed and cancelled through any door.
"""

from __future__ import annotations

import asyncio

from laneway.admission.chores import Chores
from laneway.admission.streams import Stream
from laneway.core.clock import Clock
from laneway.core.errors import LanewayError
from laneway.core.job import JobRecord
from laneway.runtime.logging import get_logger
from laneway.runtime.records import RecordExists, RecordStore

LATE_S = 0.1
RETRY_S = 0.5

log = get_logger("laneway.admission.late_records")


class LateRecords:
    def __init__(self, records: RecordStore, chores: Chores, clock: Clock) -> None:
        self._records = records
        self._chores = chores
        self._clock = clock
        self._timers: dict[Stream, asyncio.TimerHandle] = {}
        self._closed = False

    def watch(self, stream: Stream) -> None:
        """The stream of a job that was put into its lane just now, and has no record yet."""
        self._timers[stream] = asyncio.get_running_loop().call_later(LATE_S, self._look, stream)
        if self._closed:
            self._look(stream)

    def _look(self, stream: Stream) -> None:
        self._timers.pop(stream).cancel()
        if not (stream.record.state.terminal or stream.worker_id or stream.next_index):
            self.store(stream.record)

    def store(self, record: JobRecord) -> None:
        """Stores the record of a job that is in its lane, or perhaps, as soon as that can be done."""
        self._chores.start(self._store(record), f"late record of {record.job_id}")

    async def _store(self, record: JobRecord) -> None:
        while self._clock.now() < record.contract.deadline_s:
            try:
                await self._records.create(record)
            except RecordExists:  # claimed, or ended, meanwhile
                return
            except LanewayError as error:
                log.warning("record_not_stored", job_id=record.job_id, error=error.message)
                await asyncio.sleep(RETRY_S)
            else:
                return

    def close(self) -> None:
        """Stores at once, as chores, what still waits and what comes after."""
        self._closed = True
        for stream in tuple(self._timers):
            self._look(stream)
