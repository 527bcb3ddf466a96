"""The jobs that run in this worker: the one set from which slots, gauges and the lease are counted.

Gives every run its seat and its task, and takes both away together when the run has ended and the engine is rid of it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from laneway.core.errors import ObjectLost
from laneway.core.job import LaneJob, QueuedJob
from laneway.core.lanes import LANES, Lane
from laneway.runtime.puller import Delivery
from laneway.runtime.references import References
from laneway.workers import metrics
from laneway.workers.ackwait import AckWait
from laneway.workers.bench import Bench
from laneway.workers.claims import Nak
from laneway.workers.deliveries import answer, delivered_of, unreadable_of
from laneway.workers.disposal import Disposal
from laneway.workers.fetching import RETRY_S, STOPPED, Fetch
from laneway.workers.ledger import Seats
from laneway.workers.run import JobRun
from laneway.workers.suspects import Suspects

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Runs:
    """Where the pull loop puts deliveries (its Floor)."""

    def __init__(
        self,
        bench: Bench,
        seats: Seats,
        disposal: Disposal,
        references: References,
        spawn: Spawn,
        on_change: Callable[[], None],
    ) -> None:
        self._bench = bench
        self._references = references
        self._seats = seats
        self._disposal = disposal
        self._spawn = spawn
        self._on_change = on_change  # room was freed, or a lane may do more
        self._live: dict[str, JobRun] = {}
        self._fetches: dict[str, Fetch] = {}  # what is to become a run once its task is here
        self._suspects = Suspects(lambda run: sum(other is not run for other in self._live.values()))

    def __len__(self) -> int:
        return len(self._live) + len(self._fetches)

    def __iter__(self) -> Iterator[JobRun]:
        return iter(tuple(self._live.values()))

    def running(self, job_id: str) -> JobRun | Fetch | None:
        return self._live.get(job_id) or self._fetches.get(job_id)

    def holders(self) -> list[JobRun | Fetch]:
        """All that hold a delivery."""
        return [*self._live.values(), *self._fetches.values()]

    def by_lane(self) -> Mapping[Lane, int]:
        runs = tuple(self._live.values())
        return {lane: sum(run.lane is lane for run in runs) for lane in LANES}

    def may_start(self) -> bool:
        return self._bench.sequences.ready and not self._suspects.any

    def lower_prefills(self) -> int:
        prefilling = [run for run in self._live.values() if run.prefilling and run.lane is not Lane.PRIORITY]
        sequences = len({id(run.seat) for run in prefilling})  # those of identical jobs have one
        return sequences + sum(fetch.lane is not Lane.PRIORITY for fetch in self._fetches.values())

    def launch(self, delivery: Delivery, job: QueuedJob, *, kept: bool = False) -> None:
        assert self.running(job.record.job_id) is None, "a job runs once"
        lane = job.record.contract.lane
        seat = self._seats.take(lane, self._seats.ask(job))
        if isinstance(job, LaneJob):
            self._start(JobRun(self._bench, job, delivery, seat, self, kept=kept))
            return
        bench = self._bench
        steps = bench.sequences.stats().steps
        wait = AckWait.begin(bench.ack_wait_s[lane], bench.clock.monotonic(), steps)
        fetch = self._fetches[job.record.job_id] = Fetch(job, delivery, seat, wait, kept=kept)
        self._spawn(self._fetch(fetch))

    def _start(self, run: JobRun) -> None:
        self._live[run.job_id] = run
        self._bench.hot_prefixes.met(run.job.record.affinity_key)
        run.seat.made = lambda: run.generated
        run.begin()
        self._spawn(self._run(run))

    async def _fetch(self, fetch: Fetch) -> None:
        got: LaneJob | Nak | ObjectLost = Nak(RETRY_S, "task_not_fetched")
        late = False
        try:
            got = await fetch.get(self._references)
            late = got != STOPPED and self._bench.clock.now() >= fetch.job.record.contract.deadline_s
        finally:
            del self._fetches[fetch.job_id]
            if isinstance(got, LaneJob) and not late and self.may_start():
                self._start(JobRun(self._bench, got, fetch.delivery, fetch.seat, self, kept=fetch.kept))
            else:
                self._seats.give_back(fetch.seat)
                self._on_change()
        if late:  # whatever came of it: nothing runs after its deadline, and nobody tries again
            self.dispose_expired(fetch.delivery, fetch.job)
        elif isinstance(got, ObjectLost):
            delivered = delivered_of(fetch.delivery, fetch.job, self._bench.ack_wait_s[fetch.lane])
            self._count(fetch.lane, await self._disposal.task_lost(fetch.delivery, delivered, got.message))
        elif fetch.job_id not in self._live:
            nak = got if isinstance(got, Nak) else Nak(RETRY_S, "engine_not_ready")
            await answer(fetch.delivery, nak)
            self._count(fetch.lane, nak.reason)

    def stop_fetches(self) -> None:
        """This worker drains: what has not begun goes back at once."""
        for fetch in self._fetches.values():
            fetch.stop()

    def preempt(self, run: JobRun, reason: str) -> None:
        """Lets a run yield its place, which is free once the engine is rid of it: before its job is put away."""
        run.preempt(reason)
        self._spawn(self._free_seat(run))

    async def _free_seat(self, run: JobRun) -> None:
        await run.rid()
        self._give_back(run)
        self._on_change()

    # --- whose seat it is ----------------------------------------------------------------------------

    def joined(self, run: JobRun) -> None:
        other = next(other for other in self._live.values() if other is not run and other.beside(run))
        self._give_back(run)
        run.seat = other.seat
        self._on_change()

    def alone(self, run: JobRun) -> bool:
        if not self.shared(run):
            return True
        ask = self._seats.ask(run.job)
        if not self._seats.fits(ask):
            return False
        self._give_back(run)
        run.seat = self._seats.take(run.lane, ask)
        run.seat.made = lambda: run.generated
        return True

    def shared(self, run: JobRun) -> bool:
        return any(other is not run and other.seat is run.seat for other in self._live.values())

    def _give_back(self, run: JobRun) -> None:
        """The last one of a sequence gives its seat back."""
        others = [other for other in self._live.values() if other is not run and other.seat is run.seat]
        if others:
            run.seat.made = lambda: others[0].generated
        else:
            self._seats.give_back(run.seat)

    async def _run(self, run: JobRun) -> None:
        try:
            word = await run.run(lambda: self._suspects.alone(run))
            self._count(run.lane, word)
        finally:
            del self._live[run.job_id]
            self._give_back(run)
            self._suspects.run_left(run)
            self._on_change()

    def dispose_expired(self, delivery: Delivery, job: QueuedJob) -> None:
        delivered = delivered_of(delivery, job, self._bench.ack_wait_s[job.record.contract.lane])
        self._dispose(job.record.contract.lane, self._disposal.expired(delivery, delivered))

    def dispose_too_large(self, delivery: Delivery, job: QueuedJob) -> None:
        delivered = delivered_of(delivery, job, self._bench.ack_wait_s[job.record.contract.lane])
        limit = min(self._seats.context_length, self._seats.kv_tokens)
        self._dispose(job.record.contract.lane, self._disposal.never_fits(delivery, delivered, job, limit))

    def dispose_unreadable(self, delivery: Delivery, lane: Lane, why: str) -> None:
        delivered = unreadable_of(delivery, self._bench.ack_wait_s[lane])
        if delivered is None:
            self._dispose(lane, self._disposal.stray(delivery))
            return
        self._dispose(lane, self._disposal.unreadable(delivery, delivered, why))

    def _dispose(self, lane: Lane, disposal: Coroutine[Any, Any, str]) -> None:
        async def dispose() -> None:
            self._count(lane, await disposal)

        self._spawn(dispose())

    def _count(self, lane: Lane, word: str) -> None:
        metrics.RUNS.labels(self._bench.pool.name, lane.value, word).inc()
