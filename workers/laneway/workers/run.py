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
from laneway.core.job import JobRecord, LaneJob, Result, Usage
from laneway.core.lanes import FinishReason, OnDisconnect
from laneway.runtime.bus import BusError
from laneway.runtime.puller import Delivery
from laneway.runtime.records import StoredRecord
from laneway.workers import metrics
from laneway.workers.ackwait import AckWait
from laneway.workers.bench import Bench
from laneway.workers.claims import Ack, Answer, Nak
from laneway.workers.deliveries import answer, delivered_of, word_of
from laneway.workers.engine_requests import request_of
from laneway.workers.engines.protocol import SequenceStep
from laneway.workers.joining import Joiner
from laneway.workers.ledger import Seat
from laneway.workers.messages import Attachment
from laneway.workers.outcomes import Kind, Outcome, Spans, ended
from laneway.workers.outlets import Outlets
from laneway.workers.resume import Continue, Offer, Rerun, Unsound, plan_resume
from laneway.workers.sequences import EngineDown, LiveSequence
from laneway.workers.transcript import Transcript

ATTACH_WAIT_S = 0.2  # a taker waits so long for doors to say what they delivered
DOOR_SILENCE_S = 3.0  # a door not heard of for so long is dead: three beats

_log = structlog.get_logger(__name__)


class JobRun:
    """See the module."""

    def __init__(self, bench: Bench, job: LaneJob, delivery: Delivery, seat: Seat) -> None:
        now_s = bench.clock.monotonic()
        self._bench = bench
        self.job = job
        self.job_id = job.record.job_id
        self.lane = job.record.contract.lane
        self.delivery = delivery
        self._delivered = delivered_of(delivery, job, bench.ack_wait_s[self.lane])
        self.seat = seat
        self.ack_wait = AckWait.begin(bench.ack_wait_s[self.lane], now_s, bench.sequences.stats().steps)
        self.outcome: Outcome | None = None
        self.attempt = 0  # 0: not claimed yet
        self._owned: StoredRecord | None = None
        self._began_s = now_s
        self._spans = Spans()
        self._transcript = Transcript(bench.token_bytes, job.task)
        self._replayed = 0  # tokens taken over from an earlier attempt
        self._expected: tuple[int, ...] = ()  # of a rerun: what an earlier attempt delivered
        self._outlets = Outlets(bench.emitter, self.job_id, now_s)
        self._offers: dict[str, Offer] = {}
        self._sequence: LiveSequence | None = None
        self._joiner = Joiner()
        self._open = False  # output may leave
        self._doubts = 0  # times since the last look at the record at which others may have taken the job over
        self._wake = asyncio.Event()

    @property
    def prefilling(self) -> bool:
        """Whether it is on its way to a first token."""
        return self.outcome is None and not self._spans.first_s

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
        try:
            word = await self._live(alone)
        except BusError as error:  # whether we own the job could not be learned
            _log.warning("claim_undecided", job_id=self.job_id, reason=error.reason)
            word = await self._give_up("undecided", jobs.hand_back)
        except Exception as error:  # noqa: BLE001 - one job's fault must not end the others
            _log.error("run_failed", job_id=self.job_id, error=repr(error), exc_info=error)
            word = await self._give_up("fault", jobs.requeue)
        if self._sequence is not None:
            self._bench.sequences.abort(self._sequence)
            await self._sequence.gone()
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
        if self.attempt == 1 and self._sequence is None:
            self._submit(Continue())
        return None

    async def _go_on(self) -> None:
        """Begins after an earlier attempt: from what was delivered, where that is sound."""
        if self._sequence is not None:  # submitted before we knew of the earlier attempt
            await self._bench.sequences.discard(self._sequence)
            self._sequence, self._spans = None, Spans()
            self._transcript = Transcript(self._bench.token_bytes, self.job.task)
            if self.outcome is not None and self.outcome.kind in (Kind.FINISHED, Kind.ENGINE_FAILED):
                self.outcome = None  # that of the sequence we discarded
        await self._hear_offers()
        plan = plan_resume(self.job.task, self._offers.values(), exact=self._bench.exact)
        if isinstance(plan, Unsound):
            message = f"interrupted after {plan.start_index} tokens, and this request cannot be resumed"
            self._end(Outcome(Kind.NOT_RESUMABLE, message=message))
            return
        if isinstance(plan, Rerun):
            self._expected = plan.expected
        if not self._replay(plan):
            self._submit(plan)
        if plan.start_index and not await self._write_start(plan.start_index):
            return
        self._open_output()

    async def _hear_offers(self) -> None:
        """Waits until the caller's door has attached, but not long; not at all where nobody is attached."""
        record = self.job.record
        if not record.attached:
            return
        try:
            async with asyncio.timeout(ATTACH_WAIT_S):
                while record.door not in self._offers and self.outcome is None:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            _log.info("door_not_attached", job_id=self.job_id, attempt=self.attempt)

    def _replay(self, plan: Continue | Rerun) -> bool:
        """Takes over what was delivered; True when that was the whole answer already."""
        if isinstance(plan, Rerun) or not plan.ids:
            return False
        self._transcript.replay(plan.ids)
        self._replayed = len(self._transcript)
        if self._transcript.stopped:
            self._finish(FinishReason.STOP_STRING)
        elif len(plan.ids) >= self.job.task.sampling.max_tokens:
            self._finish(FinishReason.LENGTH)
        return self.outcome is not None

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
            left_s = self.job.record.contract.deadline_s - self._bench.clock.now()
            try:
                async with asyncio.timeout(max(0.0, left_s)):
                    await self._wake.wait()
            except TimeoutError:
                self._end(Outcome(Kind.EXPIRED))
            self._wake.clear()

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
        result = self._result(outcome.finish) if outcome.finish is not None else None
        stored = await bench.endings.write(
            self._owned,
            lambda record: ended(record, outcome, bench.worker_id, self._spans, bench.clock.now(), result),
        )
        if stored is None:
            _log.warning("ownership_lost", job_id=self.job_id, attempt=self.attempt)
            return "lost"
        if stored.record.state.terminal:
            return await self._ended(stored)
        await bench.endings.announce(stored.record)
        delay_s = bench.retries.backoff_s(stored.record) if outcome.kind is Kind.ENGINE_LOST else 0.0
        await answer(self.delivery, Nak(delay_s, outcome.kind.value))
        return outcome.kind.value

    async def _ended(self, stored: StoredRecord) -> str:
        """The record is terminal: tells it and lets the lane message go."""
        await self._bench.endings.announce(stored.record, with_record=len(self._outlets) > 0)
        await answer(self.delivery, Ack())
        self._measure(stored)
        return stored.record.state.value

    async def _dismiss(self, what: Answer) -> str:
        """The job is not ours to run."""
        if isinstance(what, Ack) and what.stored is not None:
            await self._bench.endings.announce(what.stored.record, with_record=True)
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
        if step.token_ids:
            spans = self._spans
            if not spans.first_s:
                spans.first_s, spans.first_wall_s = now_s, self._bench.clock.now()
            spans.last_s = now_s
            self._transcript.take(step)
            if self._expected and not self._as_expected():
                return
        if self._transcript.stopped:
            self._finish(FinishReason.STOP_STRING)
        elif step.finish is FinishReason.ERROR:
            self._end(Outcome(Kind.ENGINE_FAILED, message=step.message or "the engine failed on this request"))
        elif step.finish is FinishReason.CANCELLED:
            self._end(Outcome(Kind.ENGINE_LOST, message="the engine ended the sequence by itself"))
        elif step.finish is not None:
            self._finish(step.finish)
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
        if not self._open:
            self._offers[door] = Offer(attachment.next_index, attachment.delivered_ids)
        self._outlets.open(door, attachment.next_index, now_s)
        self._wake.set()
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

    def confirm_ownership(self) -> None:
        self._doubts += 1
        self._wake.set()

    # --- output --------------------------------------------------------------------------------------

    def _submit(self, plan: Continue | Rerun) -> None:
        done = plan.ids if isinstance(plan, Continue) else ()
        self._spans.submitted_s = self._bench.clock.monotonic()
        try:
            self._sequence = self._bench.sequences.submit(
                self, lambda request_id: request_of(request_id, self.job.task, self.lane, done)
            )
        except EngineDown:
            self._end(Outcome(Kind.ENGINE_LOST, message="the engine is down"))

    def _open_output(self) -> None:
        self._open = True
        self._send()
        self._bench.emitter.flush()

    def _send(self) -> None:
        if self._doubts or not (self._open and self._outlets and self._bench.emitter.may_emit):
            return
        if self.outcome is None or self.outcome.kind is Kind.FINISHED:
            self._outlets.send(self._transcript, self.attempt)

    def _as_expected(self) -> bool:
        """Whether a rerun gives what was delivered before; ends it when it does not."""
        made = self._transcript.ids[: len(self._expected)]
        if tuple(made) == self._expected[: len(made)]:
            return True
        message = "interrupted, and the answer could not be computed again as it was delivered"
        self._end(Outcome(Kind.NOT_RESUMABLE, message=message))
        return False

    def _finish(self, reason: FinishReason) -> None:
        self._transcript.finish()
        if self._transcript.stopped:
            reason = FinishReason.STOP_STRING
        self._end(Outcome(Kind.FINISHED, reason))

    def _end(self, outcome: Outcome) -> None:
        """The first outcome stands. The engine is told at once."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        if self._sequence is not None:
            self._bench.sequences.abort(self._sequence)
        self._wake.set()

    def _result(self, reason: FinishReason) -> Result:
        prompt, made = len(self.job.task.prompt_ids), len(self._transcript)
        usage = Usage(prompt, self._transcript.cached_tokens, made, self._bench.pool.cost(prompt, made))
        return self._transcript.result(reason, usage)

    def _measure(self, stored: StoredRecord) -> None:
        if stored.record.result is None:
            return
        bench, spans, transcript = self._bench, self._spans, self._transcript
        made = len(transcript) - self._replayed
        uncached = len(self.job.task.prompt_ids) + self._replayed - transcript.cached_tokens
        bench.rates.prefilled(uncached, spans.prefill_s)
        bench.rates.decoded(made - 1, spans.decode_s)
        bench.rates.finished(made, bench.clock.monotonic() - self._began_s)
        metrics.TOKENS.labels(bench.pool.name, self.lane.value).inc(made)
        metrics.PREFILL.labels(bench.pool.name, self.lane.value).observe(spans.prefill_s)
