"""The jobs that run in this worker: the one set from which slots, gauges and the lease are counted.

Gives every run its seat and its task, and takes both away together when the run has ended and the engine is rid of it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from laneway.core.job import LaneJob
from laneway.core.lanes import LANES, Lane
from laneway.runtime.puller import Delivery
from laneway.workers import metrics
from laneway.workers.bench import Bench
from laneway.workers.deliveries import delivered_of, unreadable_of
from laneway.workers.disposal import Disposal
from laneway.workers.ledger import Seats
from laneway.workers.run import JobRun
from laneway.workers.suspects import Suspects

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Runs:
    """Where the pull loop puts deliveries (its Floor)."""

    def __init__(
        self, bench: Bench, seats: Seats, disposal: Disposal, spawn: Spawn, on_change: Callable[[], None]
    ) -> None:
        self._bench = bench
        self._seats = seats
        self._disposal = disposal
        self._spawn = spawn
        self._on_change = on_change  # room was freed, or a lane may do more
        self._live: dict[str, JobRun] = {}
        self._suspects = Suspects(lambda run: sum(other is not run for other in self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[JobRun]:
        return iter(tuple(self._live.values()))

    def running(self, job_id: str) -> JobRun | None:
        return self._live.get(job_id)

    def by_lane(self) -> Mapping[Lane, int]:
        runs = tuple(self._live.values())
        return {lane: sum(run.lane is lane for run in runs) for lane in LANES}

    def may_start(self) -> bool:
        return self._bench.sequences.ready and not self._suspects.any

    def lower_prefills(self) -> int:
        return sum(run.prefilling for run in self._live.values() if run.lane is not Lane.PRIORITY)

    def launch(self, delivery: Delivery, job: LaneJob) -> None:
        assert job.record.job_id not in self._live, "a job runs once"
        tokens = len(job.task.prompt_ids) + job.task.sampling.max_tokens
        seat = self._seats.take(job.record.contract.lane, tokens)
        run = JobRun(self._bench, job, delivery, seat)
        self._live[run.job_id] = run
        run.begin()
        self._spawn(self._run(run))

    async def _run(self, run: JobRun) -> None:
        try:
            word = await run.run(lambda: self._suspects.alone(run))
            self._count(run.lane, word)
        finally:
            del self._live[run.job_id]
            self._seats.give_back(run.seat)
            self._suspects.run_left(run)
            self._on_change()

    def dispose_expired(self, delivery: Delivery, job: LaneJob) -> None:
        delivered = delivered_of(delivery, job, self._bench.ack_wait_s[job.record.contract.lane])
        self._dispose(job.record.contract.lane, self._disposal.expired(delivery, delivered))

    def dispose_too_large(self, delivery: Delivery, job: LaneJob) -> None:
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
