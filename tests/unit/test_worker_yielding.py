"""Who yields, as a worker asks it of its ledger: the dear question only where the answer needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from laneway.core.clock import ManualClock
from laneway.core.job import GenerateTask, LaneJob, Sampling
from laneway.core.lanes import Lane
from laneway.policy.lengths import LengthBook
from laneway.policy.preempt import PreemptParams
from laneway.workers.engines.protocol import EngineCapacity
from laneway.workers.ledger import Seat, Seats
from laneway.workers.outcomes import Outcome
from laneway.workers.rates import Rates
from laneway.workers.yielding import Yielding
from tests.support.nats import make_record, small_catalogue


class CountedSeats(Seats):
    asked = 0  # how often it was computed what the peak falls by

    def frees(self, seat: Seat) -> int:
        self.asked += 1
        return super().frees(seat)


@dataclass(eq=False)
class Run:
    job_id: str
    job: LaneJob
    seat: Seat
    generated: int
    lane: Lane = Lane.BATCH
    began_s: float = 0.0
    preemptions: int = 0
    kept: bool = False
    outcome: Outcome | None = None


@dataclass
class Running:
    runs: list[Run] = field(default_factory=list)
    yielded: list[str] = field(default_factory=list)

    def __iter__(self) -> Any:
        return iter(self.runs)

    def preempt(self, run: Run, reason: str) -> None:
        self.yielded.append(f"{run.job_id} {reason}")


def place(kv_tokens: int) -> tuple[CountedSeats, Running, Yielding]:
    """Eight runs of a paged engine with eight slots, each with ten tokens more than the one before it."""
    capacity = EngineCapacity(8, kv_tokens, 4096, 260, block_tokens=16, paged=True)
    seats = CountedSeats(capacity, predict=lambda job: 400)
    runs: Any = Running()
    clock, pool = ManualClock(), small_catalogue().pools[0]
    for at in range(8):
        record = make_record(lane=Lane.BATCH)
        record = replace(record, contract=replace(record.contract, deadline_s=clock.now() + 86_400.0))
        job = LaneJob(record, GenerateTask((1,) * 100, Sampling(max_tokens=400, ignore_eos=True)))
        run = Run(f"job{at}", job, seats.take(Lane.BATCH, seats.ask(job)), 10 * (at + 1))
        run.seat.made = partial(getattr, run, "generated")
        runs.runs.append(run)
    return seats, runs, Yielding(runs, seats, pool, Rates(), LengthBook(), lambda: None, clock, PreemptParams)


def test_where_only_a_slot_is_missing_the_one_with_the_least_done_yields_and_no_peak_is_recounted():
    seats, runs, yielding = place(kv_tokens=65_536)
    assert yielding.make_room(512, "urgent")
    assert runs.yielded == ["job0 NO_SLOT urgent"]
    assert seats.asked == 0


def test_where_kv_is_missing_it_is_asked_what_each_would_free():
    seats, runs, yielding = place(kv_tokens=4608)
    assert yielding.make_room(seats.kv_tokens_free + 100, "urgent")
    assert runs.yielded == ["job0 NO_SLOT urgent"]
    assert seats.asked == 8
