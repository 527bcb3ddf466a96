"""What the engine computes for one run: the sequence, its output so far, and what that means for the run.

Knows the engine and the task, but neither doors nor records.
"""

from __future__ import annotations

from msgspec.structs import replace

from laneway.core.job import LaneJob, Result, Usage
from laneway.core.lanes import FinishReason
from laneway.policy.single_flight import flight_key
from laneway.workers import metrics
from laneway.workers.bench import Bench
from laneway.workers.engine_requests import request_of
from laneway.workers.engines.protocol import EngineRequest, SequenceStep
from laneway.workers.outcomes import Kind, Outcome, Spans
from laneway.workers.prewarm import Entry
from laneway.workers.resume import Continue, Rerun
from laneway.workers.sequences import EngineDown, Flight, LiveSequence, SequenceOwner
from laneway.workers.transcript import Transcript


class Generation:
    """Owned by one run, which is told of each step and asks here what came of it."""

    def __init__(self, bench: Bench, job: LaneJob, owner: SequenceOwner) -> None:
        self._bench = bench
        self._job = job
        self._owner = owner
        self._sequence: LiveSequence | None = None
        self._entry: Entry | None = None  # from when it asks for the engine
        self._replayed = 0  # tokens taken over from an earlier attempt
        self._expected: tuple[int, ...] = ()  # of a rerun: what an earlier attempt delivered
        self.transcript = Transcript(bench.token_bytes, job.task)
        self.spans = Spans()

    @property
    def submitted(self) -> bool:
        """Whether it asked for the engine, which may take its prompt in slices."""
        return self._entry is not None

    @property
    def joined(self) -> bool:
        """Whether it has part in a sequence that was there before, for an identical job."""
        return self._sequence is not None and self._sequence.joined

    def same(self, other: Generation) -> bool:
        """Whether both have part in one sequence."""
        mine, theirs = self._sequence, other._sequence
        return mine is not None and theirs is not None and mine.work is theirs.work

    def submit(self, plan: Continue | Rerun) -> Outcome | None:
        """Asks the engine for what is still to come; the outcome where there is no engine. After any other fault
        nothing was asked, and it may be tried again."""
        done = plan.prefix.ids if isinstance(plan, Continue) else ()
        now_s = self.spans.submitted_s = self._bench.clock.monotonic()
        job, sequences = self._job, self._bench.sequences
        slack_s = job.record.latest_start_s - self._bench.clock.now()
        request = request_of(0, job.task, job.record.contract.lane, done, slack_s=slack_s)
        flight = self._flight(plan)
        self._entry = entry = self._bench.budget.enter(
            self._owner, job, request, lambda: self._submit_whole(request, flight)
        )
        try:
            if flight is not None and sequences.joinable(flight):
                entry.whole(now_s)
            else:
                entry.advance(now_s)
        except EngineDown:
            return Outcome(Kind.ENGINE_LOST, message="the engine is down")
        except BaseException:
            entry.cancel()
            self._entry = None
            raise
        return None if sequences.ready else Outcome(Kind.ENGINE_LOST, message="the engine is down")

    def _submit_whole(self, request: EngineRequest, flight: Flight | None) -> None:
        """The real request, once its entry may. Raises EngineDown."""
        assert self._entry is not None
        left_s = max(0.0, self._job.record.contract.deadline_s - self._bench.clock.now())
        self._sequence = self._bench.sequences.submit(
            self._owner, lambda request_id: replace(request, id=request_id, deadline_in_s=left_s), flight
        )
        if self._sequence.joined:
            self._entry.joined()
            metrics.SHARED.labels(self._bench.pool.name, self._job.record.contract.lane.value).inc()

    def _flight(self, plan: Continue | Rerun) -> Flight | None:
        job, bench = self._job, self._bench
        key = flight_key(job.record.tenant, job.task, exact=bench.exact) if bench.single_flight() else None
        if key is None:
            return None
        prefix = plan.prefix.ids if isinstance(plan, Continue) else plan.expected
        return Flight(key, job.record.contract.lane, prefix, plan.start_index if isinstance(plan, Continue) else 0)

    async def discard(self) -> None:
        """Forgets a sequence that began too early, with its output; returns when the engine is rid of it."""
        assert self._entry is not None, "there is one"
        self._entry.cancel()
        if self._sequence is not None:
            await self._bench.sequences.discard(self._sequence)
        await self._entry.gone()
        self._entry, self._sequence, self.spans = None, None, Spans()
        self.transcript = Transcript(self._bench.token_bytes, self._job.task)

    def abort(self) -> None:
        if self._entry is not None:
            self._entry.cancel()
        if self._sequence is not None:
            self._bench.sequences.abort(self._sequence)

    async def gone(self) -> None:
        """Returns when the engine is rid of the sequence, and of slices of its prompt."""
        if self._entry is not None:
            await self._entry.gone()
        if self._sequence is not None:
            await self._sequence.gone()

    def take_over(self, plan: Continue | Rerun) -> Outcome | None:
        """Takes what earlier attempts computed; the outcome when that was the whole answer already."""
        if isinstance(plan, Rerun):
            self._expected = plan.expected
            return None
        if not plan.start_index:
            return None
        self.transcript.replay(plan.prefix)
        self._replayed = len(self.transcript)
        if self.transcript.stopped:
            return self._finished(FinishReason.STOP_STRING)
        if plan.start_index >= self._job.task.sampling.max_tokens:
            return self._finished(FinishReason.LENGTH)
        return None

    def take(self, step: SequenceStep, now_s: float) -> Outcome | None:
        """Takes a step's output; the outcome when the run is over with it."""
        transcript = self.transcript
        if step.token_ids:
            spans = self.spans
            if not spans.first_s:
                spans.first_s, spans.first_wall_s = now_s, self._bench.clock.now()
            spans.last_s = now_s
            transcript.take(step)
            self._entry_took(step, now_s)
            if self._expected and not self._as_expected():
                message = "interrupted, and the answer could not be computed again as it was delivered"
                return Outcome(Kind.NOT_RESUMABLE, message=message)
        if transcript.stopped:
            return self._finished(FinishReason.STOP_STRING)
        if step.finish is None:
            return None
        if step.finish is FinishReason.ERROR:
            return Outcome(Kind.ENGINE_FAILED, message=step.message or "the engine failed on this request")
        if step.finish is FinishReason.CANCELLED:
            return Outcome(Kind.ENGINE_LOST, message="the engine ended the sequence by itself")
        return self._finished(step.finish)

    def _entry_took(self, step: SequenceStep, now_s: float) -> None:
        assert self._entry is not None, "tokens come of what was asked for"
        self._entry.took(step, now_s)
        if self._entry.slices:  # what these put into the cache was not there before
            self.transcript.cached_tokens = self._entry.found_tokens

    def _as_expected(self) -> bool:
        """Whether a rerun gives what was delivered before."""
        made = self.transcript.ids[: len(self._expected)]
        return tuple(made) == self._expected[: len(made)]

    def _finished(self, reason: FinishReason) -> Outcome:
        self.transcript.finish()
        return Outcome(Kind.FINISHED, FinishReason.STOP_STRING if self.transcript.stopped else reason)

    def result(self, reason: FinishReason) -> Result:
        prompt, made = len(self._job.task.prompt_ids), len(self.transcript)
        cached = prompt if self.joined else self.transcript.cached_tokens
        pool, spans = self._bench.pool, self.spans
        device_s = 0.0 if self.joined else (spans.prefill_s + spans.decode_s) / pool.slots  # of this attempt
        usage = Usage(prompt, cached, made, pool.cost(prompt, made, device_s))
        return self.transcript.result(reason, usage)

    def measure(self, began_s: float) -> None:
        """The answer is stored: tells what it took. `began_s`: of the run, monotonic.

        One that joined tells only of its answer: how fast the engine is was told by whom it joined.
        """
        bench, spans, transcript, record = self._bench, self.spans, self.transcript, self._job.record
        made = len(transcript) - self._replayed
        lane = record.contract.lane.value
        bench.lengths.observe(record.tenant, record.model, len(transcript), route=record.route)
        if self.joined:
            bench.rates.answered(made)
            metrics.TOKENS.labels(bench.pool.name, lane).inc(made)
            return
        uncached = len(self._job.task.prompt_ids) + self._replayed - transcript.cached_tokens
        if self._entry is not None:  # else earlier attempts had computed all of it
            bench.rates.prefilled(uncached, self._entry.engine_s)
            bench.budget.learn(self._entry, (*self._job.task.prompt_ids, *transcript.ids))
        bench.rates.decoded(made - 1, spans.decode_s)
        bench.rates.finished(made, bench.clock.monotonic() - began_s)
        metrics.TOKENS.labels(bench.pool.name, lane).inc(made)
        metrics.PREFILL.labels(bench.pool.name, lane).observe(spans.prefill_s)
