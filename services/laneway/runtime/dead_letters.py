"""Dead letters on JetStream, one subject for each job: stored by workers, read and removed by admission.

The stream keeps so many bytes and days (layout); the oldest go first. Who may see which letters is not decided here.
"""

from __future__ import annotations

import structlog
from msgspec import Struct

from laneway.core import subjects
from laneway.core.dead_letters import DeadLetter
from laneway.core.job import JobRecord
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus
from laneway.runtime.bus_errors import PayloadTooLarge
from laneway.runtime.headers import MSG_ID
from laneway.runtime.reading import StoredMessage, next_from_leader
from laneway.runtime.walking import Place, Walk
from laneway.runtime.wire.dead_letters import decode_dead_letter, encode_dead_letter
from laneway.runtime.wire.reading import UnreadableMessage

SCAN_MAX = 1000  # letters read for one page; a filter that matches little gives shorter pages, not longer waits
READ_AT_ONCE = 16  # letters that a list or purge holds whole; each may be as large as a message

_log = structlog.get_logger(__name__)


class DeadLetterFilter(Struct, frozen=True):
    """Which letters are meant; what is not given is any."""

    lane: Lane | None = None
    reason: str = ""
    tenant: str = ""
    before_s: float = 0.0  # given up before this time, Unix seconds; 0: any time

    def matches(self, letter: DeadLetter) -> bool:
        """What the subject cannot say. Lane and reason are part of it."""
        return (not self.tenant or letter.record.tenant == self.tenant) and (
            not self.before_s or letter.died_s < self.before_s
        )

    @property
    def by_subject(self) -> bool:
        """Whether the subject says all that is asked for."""
        return not self.tenant and not self.before_s


class DeadLetterDepth(Struct, frozen=True):
    letters: int
    size_bytes: int


class DeadLetterStore:
    """Of one region. Safe to share."""

    def __init__(self, bus: Bus, region: str) -> None:
        self._bus = bus
        self._region = region
        self._stream = subjects.dead_stream(region)

    # --- in ------------------------------------------------------------------------------------------

    async def store(self, record: JobRecord, message: bytes) -> bool:
        """Stores the letter of a job that was given up; False if it had been stored before. Raises BusError.

        `message` is the lane message as it was delivered; where both together are more than NATS takes, the letter is
        stored without it, and can be seen but not requeued.
        """
        assert record.error is not None, "a job that was given up says why"
        subject = subjects.dead_letter(self._region, record.contract.lane, record.error.reason, record.job_id)
        # By the same id a second writer is a duplicate for some minutes, so that a letter which was dealt with in
        # between does not come again; later it replaces the first, of which the subject keeps one.
        headers = {MSG_ID: f"dead:{record.job_id}"}
        died_s = record.timings.ended_s
        try:
            stored = await self._bus.store_checked(subject, encode_dead_letter(record, message, died_s), headers)
        except PayloadTooLarge as error:
            _log.warning("dead_letter_without_job", job_id=record.job_id, error=error.message)
            stored = await self._bus.store_checked(subject, encode_dead_letter(record, b"", died_s), headers)
        return not stored.duplicate

    # --- out -----------------------------------------------------------------------------------------

    async def get(self, job_id: str, *, listed: bool = False) -> DeadLetter | None:
        """The letter of a job; `listed`: without the job itself. Raises UnreadableMessage where a later release wrote
        it."""
        wanted = subjects.dead_letters(self._region, job=job_id)
        found = await next_from_leader(self._bus, self._stream, wanted, 1)
        return decode_dead_letter(found.data, listed=listed) if found is not None else None

    async def page(
        self, wanted: DeadLetterFilter, place: Place | None, size: int
    ) -> tuple[list[DeadLetter], Place | None]:
        """At most `size` letters without their jobs, those stored last first, and the place where the next page begins;
        None: the end."""
        walk = self._walk(wanted)
        place = place or await walk.start()
        page: list[DeadLetter] = []
        scanned = 0
        while len(page) < size and scanned < SCAN_MAX:
            found, place = await walk.step(place, min(size - len(page), SCAN_MAX - scanned, READ_AT_ONCE))
            if not found:
                return page, None
            scanned += len(found)
            page += [letter for message in found if (letter := _readable(message)) and wanted.matches(letter)]
        return page, None if await walk.at_end(place) else place

    async def depth(self) -> DeadLetterDepth:
        state = (await self._bus.api(f"STREAM.INFO.{self._stream}", {}))["state"]
        return DeadLetterDepth(int(state["messages"]), int(state["bytes"]))

    # --- gone ----------------------------------------------------------------------------------------

    async def remove(self, job_id: str) -> int:
        """How many letters of the job there were: none or one."""
        return await self._purge(subjects.dead_letters(self._region, job=job_id))

    async def purge(self, wanted: DeadLetterFilter) -> int:
        """Removes all that match and were there at the beginning; says how many went. Safe to repeat."""
        if wanted.by_subject:
            return await self._purge(subjects.dead_letters(self._region, wanted.lane, wanted.reason))
        walk = self._walk(wanted)
        place = await walk.start()
        last, purged = place.up, 0
        while True:
            found, place = await walk.step(place, READ_AT_ONCE)
            due = [message for message in found if message.sequence <= last]
            if not due:
                return purged
            for letter in filter(None, map(_readable, due)):
                if wanted.matches(letter):
                    purged += await self.remove(letter.record.job_id)

    async def _purge(self, subject_filter: str) -> int:
        answer = await self._bus.api(f"STREAM.PURGE.{self._stream}", {"filter": subject_filter})
        return int(answer["purged"])

    def _walk(self, wanted: DeadLetterFilter) -> Walk:
        return Walk(self._bus, self._stream, subjects.dead_letters(self._region, wanted.lane, wanted.reason))


def _readable(message: StoredMessage) -> DeadLetter | None:
    try:
        return decode_dead_letter(message.data, listed=True)
    except UnreadableMessage as error:  # of a later release: the others must still be seen
        _log.warning("dead_letter_unreadable", sequence=message.sequence, error=str(error))
        return None
