"""The live streams of one admission process: what workers send goes to readers in order, whatever happens meanwhile.

Owns who is told what: each worker hears each second, and at once to attach, which jobs this door streams from it and
from which token on. Events are hints; whenever a job stays silent, its owner's lease ends, the connection was lost or
its deadline passes, the record is read, and the record decides.

Tokens and events arrive on subscriptions whose handlers run in the connection's read loop, so what one worker sent
keeps its order. Workers know one place a door: streams of jobs accepted here share this door's name; a stream that
joins a job later has an outlet of its own, so that what is sent again for it does not disturb the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from msgspec import Struct, field
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from laneway.admission.deadlines import Deadlines
from laneway.admission.ending import Ender
from laneway.admission.holding import Flusher, HoldLimits
from laneway.admission.ledger import Ledger
from laneway.admission.signals import Attachment, decode_answer, decode_event, decode_tokens, encode_beats
from laneway.admission.streams import Offer, Stream, StreamLimits, beyond_end, spliced
from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.errors import DeadlineExceeded, JobNotFound, LanewayError, ObjectLost
from laneway.core.job import JobRecord, answer_tokens, stage, stored_late
from laneway.core.lanes import JobState, Phase
from laneway.policy.lengths import LengthBook
from laneway.runtime.bus import Bus
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.logging import get_logger
from laneway.runtime.records import RecordStore
from laneway.runtime.references import References, is_whole
from laneway.runtime.wire.answers import Answered
from laneway.runtime.wire.chunks import rest_of
from laneway.runtime.wire.reading import UnreadableMessage

SILENCE_S_MAX = 30.0  # a waiting job's record is read ever less often, down to this
REPLAY_EVERY_S = 0.25  # least time between two requests of one stream for the same gap
WORKER_GRACE_S = 0.5  # a running job's worker ends it at its deadline; after this the door does
UNREADABLE_S_MAX = 5.0  # beyond the deadline; then the stream ends without having seen the record
CHECKS_AT_ONCE = 16
LEARN_GAP_S = 0.005  # between two lengths learned from other doors' jobs

log = get_logger("laneway.admission.door")


class DoorLimits(Struct, frozen=True):
    beat_s: float = 1.0
    silence_s: float = 3.0
    stream: StreamLimits = field(default_factory=StreamLimits)
    hold: HoldLimits = field(default_factory=HoldLimits)


class Door:
    """Start it, run it in a task, open streams for jobs *before* their messages are published."""

    def __init__(
        self,
        door_id: str,
        bus: Bus,
        region: str,
        records: RecordStore,
        references: References,
        ender: Ender,
        leases: LeaseWatcher,
        ledger: Ledger,
        lengths: LengthBook,
        clock: Clock,
        limits: DoorLimits,
    ) -> None:
        self.id = door_id
        self._bus = bus
        self._region = region
        self._records = records
        self._references = references
        self._ender = ender
        self._leases = leases
        self._ledger = ledger
        self._lengths = lengths
        self._learns_at_s = float("-inf")  # monotonic: from then on from another door's job again
        self._clock = clock
        self._limits = limits
        self._streams: dict[str, list[Stream]] = {}
        self._deadlines = Deadlines(clock, self.check)
        self._attach: dict[Stream, bool] = {}  # to attach at once; whether to replay
        self._flusher = Flusher(limits.hold, clock, self.__len__)
        self._due: dict[Stream, None] = {}  # whose record is to be read now, in order
        self._attach_wake = asyncio.Event()
        self._due_wake = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._outlets: dict[Stream, Subscription] = {}
        self._outlets_made = 0
        self._unregister: Callable[[], None] = lambda: None

    # --- life ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        # One subscription for all events of the region: subscribing for each job would cost each job two messages and
        # a race between its publish and the subscription.
        self._subscriptions = [
            await self._bus.listen(subjects.tokens(self.id), lambda msg: self._on_tokens(msg, self.id)),
            await self._bus.listen(subjects.events(self._region), self._on_event),
        ]
        self._unregister = self._bus.on_reconnect(self._reconnected)

    async def run(self) -> None:
        """Beats, attaches and reads records until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_attached(), name="door beats")
            group.create_task(self._keep_checking(), name="door checks")

    async def _keep_attached(self) -> None:
        beat_at_s = self._clock.monotonic() + self._limits.beat_s
        while True:
            if not self._attach:
                self._attach_wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, beat_at_s - self._clock.monotonic())):
                        await self._attach_wake.wait()
            await self._send_attachments()
            if self._clock.monotonic() >= beat_at_s:
                beat_at_s = self._clock.monotonic() + self._limits.beat_s
                await self._send_beats()
                self._find_silent()

    async def _keep_checking(self) -> None:
        while True:
            self._due_wake.clear()
            if not self._due:
                await self._due_wake.wait()
            await self._check_due()

    async def close(self) -> None:
        self._unregister()
        for subscription in (*self._subscriptions, *self._outlets.values()):
            await self._bus.unsubscribe(subscription)
        self._flusher.close()
        self._deadlines.close()

    def fail_all(self, error: LanewayError) -> None:
        """Ends every stream, for a door that closes; the jobs go on or end by their contracts."""
        for stream in self.streams():
            stream.fail(error)

    # --- streams -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Jobs that are streamed now."""
        return len(self._streams)

    def streams(self) -> list[Stream]:
        return [stream for streams in self._streams.values() for stream in streams]

    def streams_of(self, job_id: str) -> int:
        return len(self._streams.get(job_id, ()))

    def open(self, record: JobRecord) -> Stream:
        """The stream of a job that is about to be accepted here. Its caller reads it and closes it."""
        return self._register(Stream(record, self._limits.stream, now_s=self._clock.monotonic(), outlet=self.id))

    async def follow(self, record: JobRecord, from_index: int = 0, given: Sequence[int] = ()) -> Stream:
        """A stream of a job that others may be working on: what happened since its record was read is looked up."""
        if record.state.terminal:
            stream = Stream(record, self._limits.stream, from_index=from_index, given=given)
            await self._end_whole(stream, record)
            return stream
        self._outlets_made += 1
        outlet = f"{self.id}-{self._outlets_made}"
        now_s = self._clock.monotonic()
        stream = Stream(record, self._limits.stream, from_index=from_index, given=given, now_s=now_s, outlet=outlet)
        self._register(stream)
        try:
            subject = subjects.tokens(outlet)
            self._outlets[stream] = await self._bus.listen(subject, lambda msg: self._on_tokens(msg, outlet))
        except BaseException:
            await self.close_stream(stream)
            raise
        if stream.worker_id:
            self._attach_soon(stream, replay=True)
        self.check(stream)
        return stream

    def _register(self, stream: Stream) -> Stream:
        stream.on_caught_up = self._caught_up
        self._streams.setdefault(stream.record.job_id, []).append(stream)
        self._deadlines.watch(stream)
        return stream

    async def close_stream(self, stream: Stream) -> None:
        """No reader is left. Everything but the subscription is gone when this first waits."""
        siblings = self._streams.get(stream.record.job_id, [])
        if stream in siblings:
            siblings.remove(stream)
        if not siblings:
            self._streams.pop(stream.record.job_id, None)
        self._attach.pop(stream, None)
        self._flusher.forget(stream)
        self._due.pop(stream, None)
        self._deadlines.forget(stream)
        await self._bus.unsubscribe(self._outlets.pop(stream, None))

    def check(self, stream: Stream) -> None:
        """Has the record read, now."""
        if not stream.ended and stream in self._streams.get(stream.record.job_id, ()):
            self._due[stream] = None
            self._due_wake.set()

    def _attach_soon(self, stream: Stream, *, replay: bool) -> None:
        self._attach[stream] = self._attach.get(stream, False) or replay
        self._attach_wake.set()

    def _caught_up(self, stream: Stream) -> None:
        if not stream.ended:
            self._attach_soon(stream, replay=True)

    def _reconnected(self) -> None:
        for stream in self.streams():
            self.check(stream)

    # --- what arrives --------------------------------------------------------------------------------

    def _on_tokens(self, msg: Msg, outlet: str) -> None:
        try:
            batch = decode_tokens(msg.data)
        except UnreadableMessage as error:
            log.warning("tokens_unreadable", error=str(error))
            return
        worker_id, now_s, live = batch.worker_id, self._clock.monotonic(), self._streams
        touched: list[Stream] = []
        for delta in batch.deltas:
            for stream in live.get(delta.job_id, ()):
                if stream.outlet != outlet:
                    continue
                stream.heard_at_s = now_s
                offer = stream.offer(worker_id, delta.attempt, delta.first_index, delta.count, delta.response)
                if offer is Offer.TAKEN:
                    touched.append(stream)
                elif offer is Offer.GAP:
                    self._ask_replay(stream, now_s)
                elif offer is Offer.BROKEN:
                    stream.fail(spliced(delta.job_id, stream.next_index))
        for stream in touched:
            self._flusher.flush(stream, now_s)

    def _ask_replay(self, stream: Stream, now_s: float) -> None:
        if now_s - stream.replay_asked_s >= REPLAY_EVERY_S:
            stream.replay_asked_s = now_s
            self._attach_soon(stream, replay=True)

    def _on_event(self, msg: Msg) -> None:
        job_id = msg.subject.rsplit(".", 1)[1]
        streams = self._streams.get(job_id)
        if streams is None and not self._ender.awaits(job_id) and not self._ledger.awaits(job_id):
            return self._learn_from(msg.data)  # another door's
        try:
            event = decode_event(msg.data)
        except UnreadableMessage as error:
            log.warning("event_unreadable", error=str(error))
            return
        if event.state.terminal and event.worker_id:
            self._ender.answered(job_id, event.worker_id)
        if event.state.terminal:
            self._ledger.ended(job_id)
            self._learn(event.answer)
        now_s = self._clock.monotonic()
        for stream in tuple(streams or ()):
            stream.heard_at_s = now_s
            stream.checks = 0
            if event.state.terminal:
                if event.record is not None and event.record.state.terminal and not _wants_more(stream, event.record):
                    self._end(stream, event.record)
                else:
                    self.check(stream)
            elif event.state is JobState.RUNNING:
                self._adopt(stream, event.attempt, event.worker_id)
            elif event.attempt >= stream.attempt:
                stream.worker_id = ""  # handed back: nobody to stream from until the next claim
        return None

    def _learn_from(self, data: bytes) -> None:
        """Of the region's other ends as many as tell enough: reading all would cost a door as much as its own jobs."""
        now_s = self._clock.monotonic()
        if now_s >= self._learns_at_s and self._learn(decode_answer(data)):
            self._learns_at_s = now_s + LEARN_GAP_S

    def _learn(self, answer: Answered | None) -> bool:
        if answer is not None:
            self._lengths.observe(answer.tenant, answer.model, answer.tokens, route=answer.route)
        return answer is not None

    def _adopt(self, stream: Stream, attempt: int, worker_id: str) -> None:
        """Attaches to the owner of the present attempt."""
        if attempt < stream.attempt or (attempt == stream.attempt and worker_id == stream.worker_id):
            return
        if attempt > stream.attempt:
            stream.adopt(attempt, worker_id)
        stream.worker_id = worker_id
        # What the first attempt of a job accepted here sends comes by itself; the next beat names it.
        if attempt > 1 or stream.next_index or stream.record.door != stream.outlet:
            self._attach_soon(stream, replay=True)
        elif stream.record.idempotency_key:  # unless another door has put its name into the record at the same time
            self._attach_soon(stream, replay=False)

    def _end(self, stream: Stream, record: JobRecord) -> None:
        if stream.ended:
            return
        self._deadlines.forget(stream)
        if stream.contradicts(record):
            stream.fail(spliced(record.job_id, stream.next_index))
        elif record.result is not None and stream.from_index > answer_tokens(record):
            stream.fail(beyond_end(stream.from_index, answer_tokens(record)))
        else:
            stream.end(record, *(rest_of(record.result, stream.next_index) if record.result else ()))

    async def _end_whole(self, stream: Stream, record: JobRecord) -> None:
        """As `_end`, with what the record refers to, if the stream needs it. Raises ObjectLost, or a BusError."""
        if not _wants_more(stream, record):
            return self._end(stream, record)
        self._end(stream, await self._references.record(record))
        if stream.record.state.terminal:
            stream.record = record  # a reader takes his time with the pieces; nobody needs the whole result beside them
        return None

    # --- what workers hear ---------------------------------------------------------------------------

    async def _send_attachments(self) -> None:
        wanted, self._attach = self._attach, {}
        await self._tell([_attachment(s, replay) for s, replay in wanted.items() if _streaming(s)])

    async def _send_beats(self) -> None:
        # No ids: only a worker that takes over asks for them, and it is attached to at once.
        live = [stream for stream in self.streams() if _streaming(stream)]
        await self._tell([(s, Attachment(s.record.job_id, s.attempt, s.next_index)) for s in live])

    async def _tell(self, attachments: Sequence[tuple[Stream, Attachment]]) -> None:
        beats: dict[tuple[str, str], list[Attachment]] = {}
        for stream, attachment in attachments:
            beats.setdefault((stream.worker_id, stream.outlet), []).append(attachment)
        for (worker_id, outlet), named in beats.items():
            for beat in encode_beats(outlet, named):
                try:
                    await self._bus.emit(subjects.control(worker_id), beat)
                except LanewayError as error:  # NATS is away, or its limit is lower than it should be
                    log.warning("beat_not_sent", worker_id=worker_id, error=error.message)

    # --- what the records say ------------------------------------------------------------------------

    def _find_silent(self) -> None:
        """Streams that heard nothing for a while: soon where a worker should be sending or the deadline is over, ever
        later where none is."""
        now_s, time_s = self._clock.monotonic(), self._clock.now()
        for stream in self.streams():
            if stream.ended:
                continue
            patience_s = self._limits.silence_s
            if time_s >= stream.record.contract.deadline_s + WORKER_GRACE_S:  # it came sooner than it was awaited
                patience_s = self._limits.beat_s
            elif not stream.worker_id:
                patience_s = min(SILENCE_S_MAX, patience_s * 2 ** min(stream.checks, 8))
            elif self._leases.alive(stream.worker_id) is False:
                patience_s = self._limits.beat_s
            if now_s - max(stream.heard_at_s, stream.checked_at_s) >= patience_s:
                self.check(stream)

    async def _check_due(self) -> None:
        due, self._due = self._due, {}
        now_s = self._clock.monotonic()
        for stream in due:
            stream.checked_at_s = now_s
            stream.checks += 1
        slots = asyncio.Semaphore(CHECKS_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for stream in due:
                group.create_task(self._check_within(slots, stream))

    async def _check_within(self, slots: asyncio.Semaphore, stream: Stream) -> None:
        async with slots:
            try:
                await self._read_record(stream)
            except ObjectLost as lost:
                stream.fail(lost)
            except (LanewayError, UnreadableMessage) as error:
                self._record_unread(stream, error)

    async def _read_record(self, stream: Stream) -> None:
        seen = stream.record
        over_s = self._clock.now() - seen.contract.deadline_s
        stored = await self._records.get(seen.region, seen.tenant, seen.job_id, leader=over_s >= 0.0)
        if stream.ended:  # meanwhile; what was read may be older
            return None
        if stored is None and not stored_late(seen):
            raise JobNotFound("the job's record is gone", job_id=seen.job_id)
        record = stored.record if stored is not None else seen
        if record.state.terminal:
            return await self._end_whole(stream, record)
        stream.record = record
        if over_s >= (WORKER_GRACE_S if record.state is JobState.RUNNING else 0.0):
            ended = await self._ender.expire(record, self._phase(stream, record), stored=stored)
            return await self._end_whole(stream, ended)
        if over_s >= 0.0:
            asyncio.get_running_loop().call_later(WORKER_GRACE_S, self.check, stream)
        if record.state is JobState.RUNNING:
            if record.attempt > stream.attempt or record.owner != stream.worker_id:
                self._adopt(stream, record.attempt, record.owner)
            else:  # silent: perhaps messages were lost
                self._attach_soon(stream, replay=True)
        return None

    def _phase(self, stream: Stream, record: JobRecord) -> Phase:
        running = record.state is JobState.RUNNING
        return Phase.DECODE if running and stream.next_index > stream.from_index else stage(record)

    def _record_unread(self, stream: Stream, error: Exception) -> None:
        """Tries again soon; a caller does not wait for ever on a record that cannot be read."""
        log.warning("record_not_read", job_id=stream.record.job_id, error=str(error))
        over_s = self._clock.now() - stream.record.contract.deadline_s
        if over_s > UNREADABLE_S_MAX:
            begun = stream.next_index > stream.from_index
            phase = Phase.DECODE if begun else Phase.PREFILL if stream.worker_id else Phase.QUEUE
            message = "the deadline passed, and the job's record cannot be read"
            stream.fail(DeadlineExceeded(message, phase=phase, job_id=stream.record.job_id))
        else:
            asyncio.get_running_loop().call_later(self._limits.beat_s / 2, self.check, stream)


def _wants_more(stream: Stream, record: JobRecord) -> bool:
    """Whether the end of a stream takes more of the result than its record has."""
    return not is_whole(record) and (record.attempt > 1 or stream.next_index < answer_tokens(record))


def _streaming(stream: Stream) -> bool:
    return not stream.ended and bool(stream.worker_id)


def _attachment(stream: Stream, replay: bool) -> tuple[Stream, Attachment]:
    ids = stream.offered_ids() if stream.next_index and stream.attempt > 1 else None
    return stream, Attachment(stream.record.job_id, stream.attempt, stream.next_index, ids or (), replay)
