"""Which run yields to priority here, and when: policy.preempt applied to the runs of this worker.

The same choice is made where runs have outgrown what the ledger predicted of them, before the engine evicts one.

A run that yields is told so at once, and so is the engine; its place is free as soon as the engine is rid of it, while
its record and its lane message are still being written.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from laneway.core.catalogue import Pool
from laneway.core.clock import Clock
from laneway.core.fleet import Plan
from laneway.core.lanes import Lane
from laneway.policy.lengths import LengthBook
from laneway.policy.preempt import (
    PreemptParams,
    Speeds,
    Standing,
    choose_victim,
    may_yield,
    places_elsewhere,
    wait_s,
)
from laneway.workers import metrics
from laneway.workers.ledger import Seats
from laneway.workers.predicting import predicted_tokens
from laneway.workers.rates import Rates
from laneway.workers.resume import goes_on
from laneway.workers.run import JobRun
from laneway.workers.runs import Runs

_log = structlog.get_logger(__name__)


class Yielding:
    """The pull loop's Relief."""

    def __init__(
        self,
        runs: Runs,
        seats: Seats,
        pool: Pool,
        rates: Rates,
        lengths: LengthBook,
        plan: Callable[[], Plan | None],
        clock: Clock,
        params: Callable[[], PreemptParams],
    ) -> None:
        """`plan`: the scheduler's newest; None while there is no fresh one. `params`: as they hold now."""
        self._runs = runs
        self._seats = seats
        self._pool = pool
        self._rates = rates
        self._lengths = lengths
        self._plan = plan
        self._clock = clock
        self._params = params
        self._outgrown = False  # what runs, by now known to be left to the engine

    def wait_s(self, *, staged: bool) -> float | None:
        params = self._params()
        if not params.preemptions_max:
            return None
        speeds, now_s = self._speeds(), self._clock.now()
        if not any(may_yield(self._standing(run, 0), speeds, now_s, params) for run in self._lower()):
            return None
        plan = None if staged else self._plan()
        elsewhere = plan is not None and places_elsewhere(plan.pool(self._pool.name), self._seats.slots_free) > 0
        return wait_s(elsewhere=elsewhere, params=params)

    def make_room(self, kv_tokens: int, job_id: str) -> bool:
        free_kv_tokens = self._seats.kv_tokens_free
        # What the peak falls by is dear to ask: two recounts of all seats for each run. Where a slot is all that is
        # missing, any run would do, and it is enough to know how large each is.
        kv_of = self._seats.frees if kv_tokens > free_kv_tokens else self._seats.grows_to
        victim = choose_victim(
            [self._standing(run, kv_of(run.seat)) for run in self._lower()],
            need_kv_tokens=kv_tokens,
            free_kv_tokens=free_kv_tokens,
            speeds=self._speeds(),
            now_s=self._clock.now(),
            params=self._params(),
        )
        return self._preempt(victim, "no_kv" if self._seats.slots_free else "no_slot", job_id)

    def look_at_kv(self) -> None:
        """After each step: where answers got longer than predicted and the engine is about to evict one of them, the
        newest run of the lowest lane yields by checkpoint, one at a time. Where none may, the engine evicts: what it
        computes again costs time, and no token."""
        short_tokens = self._seats.overrun_tokens()
        if not short_tokens:
            self._outgrown = False
            return
        lower = self._lower()
        if self._outgrown or any(run.outcome is not None for run in lower):  # one is on its way out
            return
        victim = choose_victim(
            [self._standing(run, self._seats.holds(run.seat)) for run in lower],
            need_kv_tokens=0,
            free_kv_tokens=0,
            speeds=self._speeds(),
            now_s=self._clock.now(),
            params=self._params(),
        )
        if not self._preempt(victim, "kv_outgrown"):
            self._outgrown = True
            _log.warning("kv_outgrown", short_tokens=short_tokens, running=len(self._seats))
            metrics.KV_OUTGROWN.labels(self._pool.name).inc()

    def _preempt(self, victim: Standing | None, reason: str, job_id: str = "") -> bool:
        """`job_id`: the job that it makes room for, if it is for one."""
        run = next((run for run in self._runs if victim is not None and run.job_id == victim.job_id), None)
        if victim is None or run is None:
            return False
        _log.info(
            "run_preempted", job_id=run.job_id, lane=run.lane.value, reason=reason, generated=victim.generated,
            for_job=job_id,
        )  # fmt: skip
        metrics.PREEMPTIONS.labels(self._pool.name, run.lane.value, reason).inc()
        self._runs.preempt(run, f"{reason.upper()} {job_id}".rstrip())
        return True

    def _lower(self) -> list[JobRun]:
        return [run for run in self._runs if run.lane is not Lane.PRIORITY]

    def _speeds(self) -> Speeds:
        return Speeds(
            self._rates.prefill_tokens_per_s or self._pool.prefill_tokens_per_s,
            self._rates.decode_tokens_per_s or self._pool.decode_tokens_per_s,
        )

    def _standing(self, run: JobRun, kv_tokens: int) -> Standing:
        task, record = run.job.task, run.job.record
        return Standing(
            run.job_id,
            run.lane,
            began_s=run.began_s,
            kv_tokens=kv_tokens,
            prompt_tokens=len(task.prompt_ids),
            generated=run.generated,
            predicted=self._predicted(run),
            deadline_s=record.contract.deadline_s,
            resumable=goes_on(task, self._pool.capabilities),
            preemptions=run.preemptions,
            kept=run.kept,
            ending=run.outcome is not None,
        )

    def _predicted(self, run: JobRun) -> int:
        predicted = predicted_tokens(run.job, self._lengths)
        return predicted if run.generated < predicted else run.job.task.sampling.max_tokens
