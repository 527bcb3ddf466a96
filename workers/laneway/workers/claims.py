"""Who may run a job that was delivered here: the claim, by compare-and-set on its record.

`judge` is the rule, as a function of the record that the leader gave; `Claims` asks and writes until the rule is
satisfied. A claim after a failed start is a retry and paid for (retries). The lane message is answered by what comes
out: acknowledged or terminated only after a terminal record was
read or written, given back only when nobody's run can be harmed by that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from msgspec import Struct

from laneway.core import job as jobs
from laneway.core.clock import Clock
from laneway.core.dead_letters import POISON
from laneway.core.errors import Code
from laneway.core.job import Attempt, JobError, JobRecord, strikes
from laneway.core.lanes import JobState, Phase
from laneway.runtime.bus import PublishUnknown, WrongSequence
from laneway.runtime.records import RecordStore, StoredRecord
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.workers.retries import Retries, least_service_s

STRIKES_MAX = 3  # failed starts of a job after which it is not tried again
STRIKES_ALONE = 2  # failed starts after which it runs alone, so that it cannot take others with it
UNWATCHED_DELAY_S = 1.0  # until we have watched leases for long enough to say who is dead
NO_RECORD_DELAY_S = 2.0  # until a second look
NOT_BEFORE_DELAY_S_MAX = 3600.0
UNREADABLE_DELAY_S = 10.0  # a record of a later release: one of its workers may read it
CLAIM_TRIES_MAX = 8
CLAIM_TIME_TOLERANCE_S = 1e-5  # stored times are rounded

_log = structlog.get_logger(__name__)


class Write(Struct, frozen=True):
    """The record may be claimed, or ended, from here."""

    stored: StoredRecord
    takeover: bool = False  # of a dead owner

    @property
    def alone(self) -> bool:
        return strikes(self.stored.record) >= STRIKES_ALONE


class End(Struct, frozen=True):
    """The job must not be run any more; its record is to be ended so."""

    write: Write
    change: Callable[[JobRecord], JobRecord]


class Stands(Struct, frozen=True):
    """Our own write, whose acknowledgement was lost."""

    stored: StoredRecord


class Ack(Struct, frozen=True):
    stored: StoredRecord | None = None  # the terminal record


class Nak(Struct, frozen=True):
    delay_s: float
    reason: str


class Term(Struct, frozen=True):
    reason: str


Answer = Ack | Nak | Term


class Delivered(Struct, frozen=True):
    """What a delivery says before any record is read."""

    region: str
    tenant: str
    job_id: str
    accepted: StoredRecord | None  # as the lane message has it; None: it cannot be read, or does not say
    redelivered: bool
    ack_wait_s: float
    reason: str = ""  # why it is taken from its lane, or from another's home slot

    @property
    def claimable(self) -> StoredRecord | None:
        """The record that a first delivery may be claimed from without a read."""
        if self.redelivered or self.accepted is None:
            return None
        if self.accepted.sequence == 0:
            return self.unstored
        return self.accepted if self.accepted.record.attempt == 0 else None

    @property
    def unstored(self) -> StoredRecord | None:
        """The record that a claim may store, if there is none yet."""
        if self.accepted is None or self.accepted.sequence or not jobs.stored_late(self.accepted.record):
            return None
        return self.accepted


def judge(
    stored: StoredRecord | None,
    *,
    me: str,
    wrote: Attempt | None,
    owner_alive: bool | None,
    redelivered: bool,
    now_s: float,
    ack_wait_s: float,
) -> Write | End | Stands | Answer:
    """What to do with a delivery whose record the leader gave as `stored`.

    `wrote`: the claim that we tried to write for this delivery. The job does not run in this process otherwise.
    `owner_alive`: what the leases say of the record's owner; None: not watched for long enough.
    """
    if stored is None:
        # A leader that stood still for a while and lost its office answers from what it knew then, for a moment.
        return Term("NO_RECORD") if redelivered else Nak(NO_RECORD_DELAY_S, "no_record")
    record = stored.record
    if record.state.terminal:
        return Ack(stored)
    takeover = False
    if record.state is JobState.RUNNING:
        if record.owner == me:
            if wrote is not None and _same_claim(record, wrote):
                return Stands(stored)
        elif owner_alive is None:
            return Nak(UNWATCHED_DELAY_S, "owner_not_watched")
        elif owner_alive or not redelivered:
            return Nak(ack_wait_s, "owner_lives")
        takeover = True
    write = _in_time(Write(stored, takeover), now_s)
    if isinstance(write, End):
        return write
    if strikes(record) >= STRIKES_MAX:
        return End(write, lambda found: jobs.reject(found, poison_error(found), now_s))
    if record.contract.not_before_s > now_s:
        return Nak(min(NOT_BEFORE_DELAY_S_MAX, record.contract.not_before_s - now_s), "not_before")
    return write


def _in_time(write: Write, now_s: float) -> Write | End:
    """The claim, unless the deadline has passed: then nobody runs the job any more."""
    if now_s < write.stored.record.contract.deadline_s:
        return write
    return End(write, lambda found: jobs.expire(found, queue_deadline_error(), now_s))


def _same_claim(record: JobRecord, wrote: Attempt) -> bool:
    """Whether the record's claim is the one we wrote, and not an earlier one of ours that nobody runs any more."""
    last = record.lineage[-1]
    return last.attempt == wrote.attempt and abs(last.claimed_s - wrote.claimed_s) < CLAIM_TIME_TOLERANCE_S


def queue_deadline_error() -> JobError:
    return JobError(
        Code.DEADLINE_EXCEEDED,
        "DEADLINE_EXCEEDED",
        "the deadline passed while the job waited for a worker",
        Phase.QUEUE,
    )


def retry_deadline_error() -> JobError:
    return JobError(
        Code.DEADLINE_EXCEEDED,
        "DEADLINE_EXCEEDED",
        "an attempt failed, and another could not end before the deadline",
        Phase.QUEUE,
    )


def poison_error(record: JobRecord) -> JobError:
    return JobError(
        Code.INTERNAL, POISON, f"{strikes(record)} attempts ended without a result; the job is not tried again"
    )


class Claims:
    """Claims and ends jobs that this worker does not own yet."""

    def __init__(
        self,
        records: RecordStore,
        me: str,
        clock: Clock,
        owner_alive: Callable[[str], bool | None],
        retries: Retries | None = None,
    ) -> None:
        """`retries`: what further attempts are paid from; None: a budget of its own."""
        self._records = records
        self._me = me
        self._clock = clock
        self._owner_alive = owner_alive
        self._retries = Retries(clock) if retries is None else retries

    async def claim(self, delivered: Delivered, alone: Callable[[], Awaitable[bool]]) -> StoredRecord | Answer:
        """The record as we own it, or how to answer the delivery.

        A first delivery is claimed without a read. `alone` is awaited before a suspect job is claimed: it returns True
        once nothing else runs, or False when that cannot be had. Raises BusError when NATS does not let us know.
        """

        def claimed(write: Write) -> JobRecord:
            reason = jobs.TAKEOVER if write.takeover else delivered.reason
            return jobs.claim(
                write.stored.record, self._me, self._clock.now(), owner_is_dead=write.takeover, reason=reason
            )

        return await self._settle(delivered, claimed, alone)

    async def end(self, delivered: Delivered, change: Callable[[JobRecord], JobRecord]) -> Answer:
        """Ends a job that nobody may run, from where it waits. Raises BusError."""
        found = await self._settle(delivered, lambda write: change(write.stored.record), None)
        return Ack(found) if isinstance(found, StoredRecord) else found

    async def _settle(
        self,
        delivered: Delivered,
        change: Callable[[Write], JobRecord],
        alone: Callable[[], Awaitable[bool]] | None,
    ) -> StoredRecord | Answer:
        step: Write | End | Stands | Answer | None = None
        if delivered.claimable is not None:
            step = Write(delivered.claimable)
        wrote: Attempt | None = None
        paid = alone is None  # who ends a job does not run it
        for _ in range(CLAIM_TRIES_MAX):
            if step is None:
                step = await self._look(delivered, wrote)
            if isinstance(step, Stands):
                return step.stored
            if isinstance(step, Ack | Nak | Term):
                return step
            if isinstance(step, Write) and not paid:  # before anybody makes way: whoever cannot pay stops no others
                step = self._pay(step)
                if isinstance(step, Nak):
                    return step
                paid = isinstance(step, Write)
            if isinstance(step, Write) and step.alone and alone is not None and not await alone():
                if jobs.is_retry(step.stored.record):
                    self._retries.refund(step.stored.record)
                return Nak(delivered.ack_wait_s, "runs_alone")
            if isinstance(step, Write) and alone is not None:  # nobody may have looked yet, and waiting takes time
                step = _in_time(step, self._clock.now())
            ending = isinstance(step, End)
            write = step.write if isinstance(step, End) else step
            record = step.change(write.stored.record) if isinstance(step, End) else change(write)
            try:
                stored = StoredRecord(record, await self._records.update(record, write.stored.sequence))
            except (WrongSequence, PublishUnknown):
                wrote = record.lineage[-1] if record.state is JobState.RUNNING else wrote
                step = None
                continue
            if record.state is JobState.RUNNING and record.attempt == 1:
                self._retries.first_attempt(record)
            return Ack(stored) if ending else stored
        return Nak(delivered.ack_wait_s, "contended")

    def _pay(self, write: Write) -> Write | End | Nak:
        """The claim, once it is paid where it is a retry; what cannot end in time any more is not tried again."""
        record, now_s = write.stored.record, self._clock.now()
        if not jobs.is_retry(record):
            return write
        left_s = record.contract.deadline_s - now_s
        if least_service_s(record, now_s) > left_s:
            return End(write, lambda found: jobs.expire(found, retry_deadline_error(), now_s))
        delay_s = self._retries.pay(record)
        return Nak(min(delay_s, max(0.0, left_s)), "retry_budget_empty") if delay_s else write

    async def _look(self, delivered: Delivered, wrote: Attempt | None) -> Write | End | Stands | Answer:
        try:
            stored = await self._records.get(delivered.region, delivered.tenant, delivered.job_id, leader=True)
        except UnreadableMessage as error:  # it may be anything but ours, and nobody may end what he cannot read
            _log.error("record_unreadable", job_id=delivered.job_id, error=str(error))
            return Nak(max(UNREADABLE_DELAY_S, delivered.ack_wait_s), "record_unreadable")
        if stored is None:
            stored = self._unstored(delivered)
        return judge(
            stored,
            me=self._me,
            wrote=wrote,
            owner_alive=self._owner_alive(stored.record.owner) if stored is not None and stored.record.owner else False,
            redelivered=delivered.redelivered,
            now_s=self._clock.now(),
            ack_wait_s=delivered.ack_wait_s,
        )

    def _unstored(self, delivered: Delivered) -> StoredRecord | None:
        """The record of a job that nobody has stored yet. Later than records are kept, there may well have been one."""
        left = delivered.unstored
        if left is None or self._clock.now() >= left.record.contract.deadline_s + self._records.retention_s:
            return None
        return left
