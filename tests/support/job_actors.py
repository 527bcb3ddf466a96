"""The two sides of one job's life, as actors of `stepped`: its door and its workers.

They do what `laneway.admission.accept`, `laneway.admission.ending` and `laneway.workers.run` do, in the same order, and
use the real claims, the real changes of records and the real writes of workers.
"""

from __future__ import annotations

from collections.abc import Callable

from laneway.core import job as jobs
from laneway.core.clock import ManualClock
from laneway.core.errors import Code, LanewayError
from laneway.core.job import IllegalTransition, JobError, JobRecord, Result, Usage
from laneway.core.lanes import FinishReason, JobState
from laneway.runtime.bus import BusError, StreamFull
from laneway.runtime.records import RecordExists, StoredRecord
from laneway.workers.claims import Ack, Answer, Claims, Delivered, Nak, queue_deadline_error
from laneway.workers.endings import Endings
from tests.support.stepped import Actor, Alone, Message, Publish, Running, StepRecords, Tell, sleep

ACK_WAIT_S = 3.0
ERROR = JobError(Code.INTERNAL, "TEST", "")
RESULT = Result("a", (97,), (1,), FinishReason.STOP, Usage())

Change = Callable[[JobRecord], JobRecord]


class Door:
    """All doors: each coroutine is one task of one of them."""

    def __init__(self, record: JobRecord, clock: ManualClock, lane: list[Message]) -> None:
        self.accepted = False  # the caller was told so
        self._record = record
        self._clock = clock
        self._lane = lane
        self._unstored = record if jobs.stored_late(record) else None

    async def accept(self) -> None:
        records = StepRecords(self._clock)
        if self._unstored is None:
            sequence = await self._create(records)
            if sequence:
                await self._publish(sequence, records)
        elif await self._publish(0, records):
            await self._store_late(records)

    async def _create(self, records: StepRecords) -> int:
        """0: there is a record that is not as this door stored it; what it says is the answer."""
        while True:
            try:
                return await records.create(self._record)
            except RecordExists as exists:
                found = exists.stored
                return found.sequence if found.record.state is JobState.WAITING and not found.record.attempt else 0
            except BusError:
                await sleep(0.1)

    async def _store_late(self, records: StepRecords) -> None:
        while self._clock.now() < self._record.contract.deadline_s:
            try:
                await records.create(self._record)
            except RecordExists:
                return
            except BusError:
                await sleep(0.5)
            else:
                return

    async def _publish(self, sequence: int, records: StepRecords) -> bool:
        while True:
            try:
                await Publish(self._record, sequence)
            except StreamFull:
                await self._change(lambda found: jobs.refuse(found, ERROR, self._clock.now()), records)
                return False
            except BusError:
                await sleep(0.1)
            else:
                self.accepted = True
                return True

    async def cancel(self) -> None:
        await self._end(lambda found: jobs.cancel(found, ERROR, self._clock.now()))

    async def expire(self) -> None:
        await self._end(lambda found: jobs.expire(found, queue_deadline_error(), self._clock.now()))

    async def _end(self, change: Change) -> None:
        if await self._change(change, StepRecords(self._clock)):
            for message in self._lane:  # the purge
                message.gone = True

    async def _change(self, change: Change, records: StepRecords) -> bool:
        record = self._record
        try:
            await records.change(record.region, record.tenant, record.job_id, change, unstored=self._unstored)
        except (IllegalTransition, LanewayError):
            return False
        return True


class Worker:
    """One incarnation of a worker process. `holds` is told of each attempt that a run of it knows to be its own."""

    def __init__(
        self,
        name: str,
        clock: ManualClock,
        leases: dict[str, bool],
        holds: Callable[[int, Actor | None], None],
    ) -> None:
        self.name = name
        self.watching = True  # for long enough to say who is dead
        self.run: Actor | None = None
        self.message: Message | None = None  # of the run
        self._clock = clock
        self._holds = holds
        records = StepRecords(clock)
        self._claims = Claims(records, name, clock, lambda owner: leases[owner] if self.watching else None)
        self._endings = Endings(records, _tell_nobody, name, clock, 1 << 20)

    async def take(self, message: Message) -> None:
        """One run, from its delivery to the answer to it."""
        record = message.accepted.record
        redelivered = message.deliveries > 1
        delivered = Delivered(record.region, record.tenant, record.job_id, message.accepted, redelivered, ACK_WAIT_S)
        try:
            if not redelivered and self._clock.now() >= record.contract.deadline_s:
                await Tell(message, await self._claims.end(delivered, self._expired))
                return
            claimed = await self._claims.claim(delivered, _alone)
        except BusError:
            await self._give_up(record)
            await Tell(message, Nak(ACK_WAIT_S, "undecided"))
            return
        if isinstance(claimed, Answer):
            await Tell(message, claimed)
            return
        self._holds(claimed.record.attempt, self.run)
        stored = await self._run_to_end(claimed)
        if stored is not None:
            done = stored.record.state.terminal or (self._yielded(stored.record) and await self._parked(stored))
            await Tell(message, Ack() if done else Nak(0.0, "back"))

    def _yielded(self, record: JobRecord) -> bool:
        return record.state is JobState.WAITING and record.lineage[-1].yielded_s > 0.0

    async def _parked(self, stored: StoredRecord) -> bool:
        """Whether the job that yielded is among the parked again, so that its message may go."""
        try:
            await Publish(stored.record, stored.sequence)
        except BusError:
            return False
        return True

    def _expired(self, found: JobRecord) -> JobRecord:
        return jobs.expire(found, queue_deadline_error(), self._clock.now())

    async def _give_up(self, record: JobRecord) -> None:
        found = await self._endings.read(record)
        if found is not None and found.record.owner == self.name:
            await self._endings.write(found, lambda last: jobs.hand_back(last, self.name, last.attempt))

    async def _run_to_end(self, owned: StoredRecord) -> StoredRecord | None:
        me, attempt = self.name, owned.record.attempt
        while True:
            what = await Running()
            if what == "start":
                stored = await self._endings.write(owned, lambda found: jobs.set_start_index(found, me, attempt, 2))
                if stored is None or stored.record.owner != me:
                    return stored
                owned = stored
            elif what == "confirm":  # after a pause of the process
                found = await self._endings.read(owned.record)
                if found is None or found.sequence != owned.sequence:
                    return found if found is not None and found.record.state.terminal else None
            else:
                return await self._endings.write(owned, self._change(what, attempt))

    def _change(self, what: str, attempt: int) -> Change:
        me, now_s = self.name, self._clock.now
        changes: dict[str, Change] = {
            "succeed": lambda found: jobs.succeed(found, me, attempt, RESULT, found.timings),
            "fail": lambda found: jobs.fail(found, me, attempt, ERROR, now_s()),
            "hand_back": lambda found: jobs.hand_back(found, me, attempt),
            "give_way": lambda found: jobs.give_way(found, me, attempt, now_s()),
            "requeue": lambda found: jobs.requeue(found, me, attempt),
            "expire": lambda found: jobs.expire(found, ERROR, now_s()),
            "cancel": lambda found: jobs.cancel(found, ERROR, now_s()),
        }
        return changes[what]


async def _alone() -> bool:
    return await Alone()


async def _tell_nobody(subject: str, payload: bytes) -> None:
    return
