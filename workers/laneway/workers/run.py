"""One job in this worker, from its delivery to the answer to its lane message.

Owns the order of events: the claim (overlapped with the engine's prefill), going on after an earlier attempt, output to
the doors that follow, and the end. Nothing leaves before the claim is acknowledged, and nothing once the run has ended
or lost its job. One task runs `run`; everything else is called on the event loop and never waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from laneway.core import job as jobs
from laneway.core.job import JobRecord, LaneJob
from laneway.core.lanes import OnDisconnect
from laneway.runtime.bus import BusError
from laneway.runtime.puller import Delivery
from laneway.runtime.records import StoredRecord
from laneway.workers import metrics
from laneway.workers.ackwait import AckWait
from laneway.workers.bench import Bench
from laneway.workers.checkpointing import Tail, kept_while_running, worth_keeping
from laneway.workers.claims import Ack, Answer, Nak
from laneway.workers.deliveries import answer, delivered_of, word_of
from laneway.workers.engines.protocol import SequenceStep
from laneway.workers.generation import Generation
from laneway.workers.joining import Joiner
from laneway.workers.ledger import Seat
from laneway.workers.messages import Attachment
from laneway.workers.outcomes import Kind, Outcome, ended
from laneway.workers.outlets import Outlets
from laneway.workers.resume import Continue, Offer, Rerun, Unsound
from laneway.workers.seating import Seating
from laneway.workers.takeover import Takeover

DOOR_SILENCE_S = 3.0  # a door not heard of for so long is dead: three beats

_log = structlog.get_logger(__name__)


class JobRun:
    """See the module."""

    def __init__(
        self,
        bench: Bench,
        job: LaneJob,
        delivery: Delivery,
        seat: Seat,
        seating: Seating,
        *,
        kept: bool = False,
    ) -> None:
        """`kept`: it does not yield to priority."""
        now_s = bench.clock.monotonic()
        self._bench = bench
        self.job = job
        self.job_id = job.record.job_id
        self.lane = job.record.contract.lane
        self.delivery = delivery
        self._delivered = delivered_of(delivery, job, bench.ack_wait_s[self.lane])
        self.seat = seat
        self._seating = seating
        self._kept = kept
        self.ack_wait = AckWait.begin(bench.ack_wait_s[self.lane], now_s, bench.sequences.stats().steps)
        self.outcome: Outcome | None = None
        self.attempt = 0  # 0: not claimed yet
        self._owned: StoredRecord | None = None
        self.began_s = now_s
        self._generation = Generation(bench, job, self)
        self._outlets = Outlets(bench.emitter, self.job_id, now_s)
        self._takeover = Takeover(job, bench.checkpointing.store, lambda: self.outcome is not None, bench.pool.name)
        self._tail: Tail | None = None  # from when it may emit, where others could go on from its tokens
        self._joiner = Joiner()
        self._open = False  # output may leave
        self._deadline: asyncio.TimerHandle | None = None
        self._doubts = 0  # times since the last look at the record at which others may have taken the job over
        self._wake = asyncio.Event()

    @property
    def prefilling(self) -> bool:
        """Whether it is on its way to a first token."""
        return self.outcome is None and not self._generation.spans.first_s

    @property
    def generated(self) -> int:
        """Tokens of its answer so far, those of earlier attempts among them."""
        return len(self._generation.transcript)

    def beside(self, other: JobRun) -> bool:
        """Whether both have part in one sequence of the engine."""
        return self._generation.same(other._generation)

    @property
    def kept(self) -> bool:
        """Whether it does not yield to priority: the floor started it, or its sequence would go on for others."""
        return self._kept or self._seating.shared(self)

    @property
    def preemptions(self) -> int:
        """How often the job yielded to priority before."""
        return (self._owned.record if self._owned is not None else self.job.record).preemptions

    def begin(self) -> None:
        """Before the task has its first turn: the engine need not wait for the claim of a first delivery."""
        try:
            if self._delivered.claimable is not None:
                self._submit(Continue())
        except Exception as error:  # noqa: BLE001 - tried again once claimed, where a fault counts as a start
            _log.warning("not_begun", job_id=self.job_id, error=repr(error))

    # --- the task ------------------------------------------------------------------------------------

    async def run(self, alone: Callable[[], Awaitable[bool]]) -> str:
        """Runs the job to its end and returns what became of it, as a word for metrics.

        Returns when the engine is rid of the sequence. `alone` is for suspect jobs: see Claims.claim.
        """
        self._watch_deadline()
        try:
            word = await self._live(alone)
        except BusError as error:  # whether we own the job could not be learned
            _log.warning("claim_undecided", job_id=self.job_id, reason=error.reason)
            word = await self._give_up("undecided", jobs.hand_back)
        except Exception as error:  # noqa: BLE001 - one job's fault must not end the others
            _log.error("run_failed", job_id=self.job_id, error=repr(error), exc_info=error)
            word = await self._give_up("fault", jobs.requeue)
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
        self._generation.abort()
        await self._generation.gone()
        return word

    async def _live(self, alone: Callable[[], Awaitable[bool]]) -> str:
        refused = await self._claim(alone)
        if refused is not None:
            return await self._dismiss(refused)
        assert self._owned is not None
        record = self._owned.record
        if record.attempt == 1:
            if record.attached and record.door not in self._outlets:
                self._outlets.open(record.door, 0, self._bench.clock.monotonic())
            self._open_output()  # first: nobody's tokens wait for the news of a first attempt
            await self._bench.endings.announce(record)
        else:
            await self._bench.endings.announce(record)
            await self._go_on()
        await self._until_outcome()
        return await self._conclude()

    async def _claim(self, alone: Callable[[], Awaitable[bool]]) -> Answer | None:
        found = await self._bench.claims.claim(self._delivered, alone)
        if not isinstance(found, StoredRecord):
            self._end(Outcome(Kind.LOST))
            return found
        self._owned = found
        self.attempt = found.record.attempt
        metrics.count_claim(self._bench.pool.name, self.lane, found.record.lineage[-1].reason)
        if self.attempt == 1 and not self._generation.submitted:
            self._submit(Continue())
        return None

    async def _go_on(self) -> None:
        """Begins after an earlier attempt: from what it computed, where that is known and sound."""
        assert self._owned is not None
        if self._generation.submitted:  # before we knew of the earlier attempt
            await self._generation.discard()
            if self.outcome is not None and self.outcome.kind in (Kind.FINISHED, Kind.ENGINE_FAILED):
                self.outcome = None  # that of the sequence we discarded
            if not self._seating.alone(self):
                self._end(Outcome(Kind.HANDED_BACK))
        plan = await self._takeover.plan(self._owned.record, self._bench.pool.capabilities)
        if self.outcome is not None:
            return
        if isinstance(plan, Unsound):
            message = f"interrupted after {plan.start_index} tokens, and this request cannot be resumed"
            self._end(Outcome(Kind.NOT_RESUMABLE, message=message))
            return
        outcome = self._generation.take_over(plan)
        if outcome is not None:
            self._end(outcome)
        self._submit(plan)
        if await self._write_start(plan.start_index):
            self._outlets.begin(plan.start_index)
            self._open_output(plan.kept if isinstance(plan, Continue) else 0)

    async def _write_start(self, start_index: int) -> bool:
        """Writes from which index this attempt goes on; False when the job is not ours any more."""
        assert self._owned is not None
        me, attempt = self._bench.worker_id, self.attempt
        stored = await self._bench.endings.write(
            self._owned, lambda record: jobs.set_start_index(record, me, attempt, start_index)
        )
        if stored is None or stored.record.owner != me:
            self._end(Outcome(Kind.LOST if stored is None else Kind.STOPPED))
            return False
        self._owned = stored
        return True

    async def _until_outcome(self) -> None:
        while self.outcome is None:
            if self._doubts:
                await self._confirm_ownership()
                continue
            await self._wake.wait()
            self._wake.clear()

    def _watch_deadline(self) -> None:
        """Ends the run at its deadline, whatever it waits for: the engine computes nothing beyond it, also where NATS
        answers nobody."""
        left_s = self.job.record.contract.deadline_s - self._bench.clock.now()
        if left_s > 0.0:
            self._deadline = asyncio.get_running_loop().call_later(left_s, self._watch_deadline)
        else:
            self._end(Outcome(Kind.EXPIRED))

    async def _confirm_ownership(self) -> None:
        """After a time in which others may have taken us for dead. Nothing leaves until it is known."""
        assert self._owned is not None
        doubts = self._doubts
        found = await self._bench.endings.read(self._owned.record)
        if found is None or found.sequence != self._owned.sequence:
            terminal = found is not None and found.record.state.terminal
            self._end(Outcome(Kind.STOPPED if terminal else Kind.LOST))
        self._doubts -= doubts
        self._send()
        self._bench.emitter.flush()

    async def _conclude(self) -> str:
        assert self._owned is not None
        assert self.outcome is not None
        outcome, bench = self.outcome, self._bench
        if outcome.kind is Kind.LOST:
            return "lost"
        if outcome.kind is Kind.STOPPED:
            found = await bench.endings.read(self._owned.record)
            if found is not None and found.record.state.terminal:
                return await self._ended(found)
        spans = self._generation.spans
        result = self._generation.result(outcome.finish) if outcome.finish is not None else None
        kept = None
        if outcome.kind.gives_back and self._tail is not None:  # before anybody can go on with it
            kept = await bench.checkpointing.keep(self._tail)
        stored = await bench.endings.write(
            self._owned,
            lambda record: ended(record, outcome, bench.worker_id, spans, bench.clock.now(), result, kept),
        )
        if stored is None:
            _log.warning("ownership_lost", job_id=self.job_id, attempt=self.attempt)
            return "lost"
        if stored.record.state.terminal:
            return await self._ended(stored)
        await bench.endings.announce(stored.record)
        delay_s = bench.retries.backoff_s(stored.record) if outcome.kind is Kind.ENGINE_LOST else 0.0
        parked = outcome.kind is Kind.PREEMPTED and await bench.reparking.park(stored, self.job.task, self.delivery)
        if not parked:
            await self._generation.gone()  # its next delivery may come at once, and must not find this run in its place
        await answer(self.delivery, Ack() if parked else Nak(delay_s, outcome.kind.value))
        return outcome.kind.value

    async def _ended(self, stored: StoredRecord) -> str:
        """The record is terminal: tells it and lets the lane message go."""
        await self._bench.endings.announce(stored.record, with_record=len(self._outlets) > 0)
        await answer(self.delivery, await self._bench.dead_letters.before(Ack(stored), self.delivery))
        # An earlier owner's last checkpoint may have come after this attempt looked for it.
        if stored.record.checkpoint_index or self.attempt > 1 or (self._tail is not None and self._tail.touched):
            self._bench.checkpointing.forget(stored.record)
        if stored.record.result is not None:
            self._generation.measure(self.began_s)
            if self.delivery.home and not self.delivery.steal:
                self._bench.rates.saved.heard(self._generation.transcript.cached_tokens)
        return stored.record.state.value

    async def _dismiss(self, what: Answer) -> str:
        """The job is not ours to run."""
        if isinstance(what, Ack) and what.stored is not None:
            await self._bench.endings.announce(what.stored.record, with_record=True)
        what = await self._bench.dead_letters.before(what, self.delivery)
        await answer(self.delivery, what)
        return word_of(what)

    async def _give_up(self, word: str, give_back: Callable[[JobRecord, str, int], JobRecord]) -> str:
        """After a fault, ours or of NATS: lets somebody else try. A claim of ours must not outlive this run."""
        self._end(Outcome(Kind.LOST))
        me = self._bench.worker_id
        found = await self._bench.endings.read(self.job.record)
        if found is not None and found.record.owner == me:
            await self._bench.endings.write(found, lambda record: give_back(record, me, record.attempt))
        await answer(self.delivery, Nak(self._bench.ack_wait_s[self.lane], word))
        return word

    # --- called by the engine's side -----------------------------------------------------------------

    def on_step(self, step: SequenceStep, now_s: float) -> None:
        if self.outcome is not None:
            return
        outcome = self._generation.take(step, now_s)
        if outcome is not None:
            self._end(outcome)
        elif self._tail is not None and len(self._generation.transcript.ids) >= self._tail.due_at:
            self._bench.checkpointing.due(self._tail)
        if not self._may_wait(now_s):
            self._send()

    def _may_wait(self, now_s: float) -> bool:
        return self.outcome is None and self._joiner.may_wait(now_s, len(self._bench.sequences))

    def on_engine_lost(self, reason: str) -> None:
        self._end(Outcome(Kind.ENGINE_LOST, message=reason))

    def on_fault(self, error: Exception) -> None:
        self._end(Outcome(Kind.ENGINE_FAILED, message="the worker could not take the engine's output"))

    # --- called by the worker ------------------------------------------------------------------------

    def attach(self, door: str, attachment: Attachment, now_s: float) -> None:
        """A door named this job in its beat: it follows, and perhaps wants something again."""
        if attachment.attempt not in (0, self.attempt):
            return
        if door in self._outlets and not attachment.replay:
            self._outlets.heard(door, now_s)
            return
        offer = Offer(attachment.next_index, attachment.delivered_ids)
        if not self._open:
            self._takeover.offer(door, offer)
        ours = self._generation.transcript.ids[: offer.next_index]
        agreed = offer.whole and len(ours) == offer.next_index and tuple(ours) == offer.ids
        self._outlets.open(door, offer.next_index, now_s, agreed=self._open and agreed)
        self._send()

    def check_doors(self, now_s: float, heard_s: Callable[[str], float]) -> None:
        """Closes silent outlets. An attached job is cancelled, if its contract says so, when nobody follows and its own
        door is dead. `heard_s`: when a door was last heard of, whatever it said.
        """
        self._outlets.close_silent(now_s, DOOR_SILENCE_S)
        record = self.job.record
        if self._outlets or not (self._open and record.attached):
            return
        last_s = max(self._outlets.heard_s, heard_s(record.door))
        if now_s - last_s > DOOR_SILENCE_S and record.contract.on_disconnect is OnDisconnect.CANCEL:
            self._end(Outcome(Kind.CALLER_GONE))

    def excuse_doors(self, now_s: float) -> None:
        """Until now we could hear nobody."""
        self._outlets.excuse(now_s)

    def stop(self) -> None:
        """Somebody says that the record is terminal."""
        self._end(Outcome(Kind.STOPPED))

    def hand_back(self) -> None:
        self._end(Outcome(Kind.HANDED_BACK))

    def preempt(self, reason: str) -> None:
        """It yields to priority work, unless it has ended. `reason`: as the attempt is to say it."""
        self._end(Outcome(Kind.PREEMPTED, message=reason))

    async def rid(self) -> None:
        """Returns when the engine is rid of a run that has its outcome."""
        await self._generation.gone()

    def confirm_ownership(self) -> None:
        self._doubts += 1
        self._wake.set()

    # --- output --------------------------------------------------------------------------------------

    def _submit(self, plan: Continue | Rerun) -> None:
        if self.outcome is not None:  # nothing more is asked of the engine
            return
        outcome = self._generation.submit(plan)
        if outcome is not None:
            self._end(outcome)
        elif self._generation.joined:
            self._seating.joined(self)

    def _open_output(self, checkpointed: int = 0) -> None:
        """`checkpointed`: tokens of what it goes on from that checkpoints hold."""
        self._open = True
        self._send()
        self._bench.emitter.flush()
        assert self._owned is not None
        record, task, checkpointing = self._owned.record, self.job.task, self._bench.checkpointing
        can = self._bench.pool.capabilities
        if worth_keeping(task, can):
            self._tail = Tail(record, self._generation.transcript, self._ours, known=checkpointed)
            if self.outcome is None and kept_while_running(record, task, can):
                checkpointing.follow(self._tail)

    def _ours(self) -> bool:
        """Whether nobody else can have taken the job over."""
        return self.outcome is None and not self._doubts and self._bench.emitter.may_emit

    def _send(self) -> None:
        if self._doubts or not (self._open and self._outlets and self._bench.emitter.may_emit):
            return
        if self.outcome is None or self.outcome.kind is Kind.FINISHED:
            self._outlets.send(self._generation.transcript, self.attempt)

    def _end(self, outcome: Outcome) -> None:
        """The first outcome stands. The engine is told at once."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        self._generation.abort()
        if self._tail is not None:
            self._bench.checkpointing.leave(self._tail)
        self._takeover.heard()
        self._wake.set()
