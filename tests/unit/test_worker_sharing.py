"""Random histories of shared sequences: whatever comes and goes, each job gets its answer whole, in order and once, and
the engine is told to stop exactly when the last has left."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from laneway.core.clock import ManualClock
from laneway.core.job import GenerateTask, LaneJob, Sampling
from laneway.core.lanes import LANES, FinishReason, Lane
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStats, SequenceStep
from laneway.workers.ledger import Seat, Seats
from laneway.workers.runs import Runs
from laneway.workers.sequences import Flight, LiveSequence, Sequences
from tests.support.nats import make_record

LENGTH = 6  # of every answer; that of key k is k, k + 1, ...
FOLLOWERS_MAX = 3


@dataclass
class Engine:
    """Gives what is asked for, one token a step; a request's prompt is its key and what is done of the answer."""

    left: dict[int, list[int]] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)

    def submit(self, request: EngineRequest) -> None:
        key, *done = request.prompt_ids
        self.left[request.id] = [key + i for i in range(len(done), LENGTH)]

    def abort(self, request_id: int) -> None:
        assert request_id in self.left, "nobody stops what is not there, or twice"
        del self.left[request_id]
        self.cancelled.append(request_id)

    def step(self, some: list[int]) -> list[SequenceStep]:
        steps = [SequenceStep(each, [], finish=FinishReason.CANCELLED) for each in self.cancelled]
        self.cancelled.clear()
        for each in some:
            token = self.left[each].pop(0)
            finish = None if self.left[each] else FinishReason.LENGTH
            steps.append(SequenceStep(each, [token], finish=finish))
            if finish:
                del self.left[each]
        return steps


@dataclass(eq=False)
class Job:
    key: int
    lane: Lane
    start: int  # tokens that it has from earlier
    ids: list[int] = field(default_factory=list)
    part: LiveSequence | None = None
    ended: str = ""

    def on_step(self, step: SequenceStep, now_s: float) -> None:
        assert not self.ended.startswith("whole"), "nothing follows the end"
        if self.ended:
            return
        self.ids += step.token_ids
        if step.finish is not None:
            self.ended = "whole" if step.finish is FinishReason.LENGTH else "cancelled"

    def on_engine_lost(self, reason: str) -> None:
        self.ended = self.ended or "lost"

    def on_fault(self, error: Exception) -> None:
        raise AssertionError(error)


acts = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from([10, 20]), st.sampled_from(LANES), st.integers(0, LENGTH - 1)),
        st.tuples(st.just("step"), st.integers(0, 7)),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("turn")),
        st.tuples(st.just("die")),
    ),
    max_size=40,
)


@given(acts=acts)
def test_each_gets_its_answer_whole_and_the_engine_stops_when_the_last_has_left(acts: list[tuple[Any, ...]]):
    asyncio.run(history(acts))


async def history(acts: list[tuple[Any, ...]]) -> None:
    sequences, engine, jobs = Sequences(ManualClock(), lambda: None, lambda: None), Engine(), list[Job]()
    sequences.followers_max = FOLLOWERS_MAX
    sequences.attach(engine)  # type: ignore[arg-type]  # all that sequences ask of an engine
    for act, *rest in acts:
        if act == "submit":
            jobs.append(submit(sequences, *rest))
        elif act == "step":
            some = [each for i, each in enumerate(sorted(engine.left)) if rest[0] >> i % 3 & 1]
            sequences.on_step(engine.step(some), EngineStats())
        elif act == "leave" and jobs and not (job := jobs[rest[0] % len(jobs)]).ended:
            job.ended = "left"
            assert job.part is not None
            sequences.abort(job.part)
        elif act == "turn":
            await asyncio.sleep(0)
        elif act == "die":
            sequences.on_closed("gone")
            engine = Engine()
            sequences.attach(engine)  # type: ignore[arg-type]  # the same
            assert all(job.ended for job in jobs)
        check(sequences, engine, jobs)
    while engine.left or engine.cancelled:
        sequences.on_step(engine.step(list(engine.left)), EngineStats())
    await asyncio.sleep(0)
    check(sequences, engine, jobs)
    for job in jobs:
        assert job.ended in ("whole", "left", "lost")
        assert job.part is not None
        assert job.part.ended
        if job.ended == "whole":
            assert len(job.ids) == LENGTH - job.start


def submit(sequences: Sequences, key: int, lane: Lane, start: int) -> Job:
    job = Job(key, lane, start)
    done = tuple(key + i for i in range(start))
    job.part = sequences.submit(
        job, lambda number: EngineRequest(number, (key, *done), LENGTH - start), Flight(key, lane, done, start)
    )
    return job


def check(sequences: Sequences, engine: Engine, jobs: list[Job]) -> None:
    for job in jobs:
        assert job.ids == [job.key + i for i in range(job.start, job.start + len(job.ids))], "in order, each once"
    wanted = {job.part.id for job in jobs if not job.ended and job.part is not None}
    rest = sequences._rest[0] if sequences._rest is not None else ()  # given, and told in the next turn of the loop
    assert wanted <= engine.left.keys() | {step.id for step in rest}, "whoever is there is computed for"
    assert engine.left.keys() <= wanted | ended_now(sequences, jobs), "and nothing for nobody"
    assert sequences.followers <= FOLLOWERS_MAX


def ended_now(sequences: Sequences, jobs: list[Job]) -> set[int]:
    """Those whose last token was given and waits for the next turn of the loop."""
    return {job.part.id for job in jobs if job.part is not None and not job.part.ended}


@dataclass(eq=False)
class Sitting:
    """A run, as far as its seat is concerned."""

    job: LaneJob
    seat: Seat
    generated: int = 0
    lane: Lane = Lane.BATCH


def test_who_takes_a_seat_of_its_own_leaves_the_shared_one_to_count_those_that_stay():
    seats = Seats(EngineCapacity(4, 4096, 4096, 260, paged=True), predict=lambda job: 10)
    absent: Any = None
    runs = Runs(absent, seats, absent, absent, absent, lambda: None)
    job = LaneJob(make_record(), GenerateTask((1,) * 100, Sampling(max_tokens=900)))
    seat = seats.take(Lane.BATCH, seats.ask(job))
    first, second = Sitting(job, seat, 500), Sitting(job, seat, 500)
    seat.made = lambda: first.generated
    live: dict[str, Any] = {"first": first, "second": second}
    runs._live = live
    assert runs.alone(first)  # type: ignore[arg-type]
    first.generated = 0  # it begins anew
    assert first.seat is not second.seat
    assert seats.holds(second.seat) == 600
    assert seats.holds(first.seat) == 100
