"""The pull policy driven through time against model lanes and a model engine: order, floor, KV, repeatability."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass

import pytest

from laneway.core.lanes import LANES, Lane
from laneway.policy.pull import LaneView, Pull, PullParams, Room, Start, Turns, next_step, started

WIDE = PullParams()


@dataclass(frozen=True)
class ModelJob:
    lane: Lane
    name: int
    kv_tokens: int = 100
    service_s: float = 1.0


@dataclass
class ModelWorker:
    """A worker under virtual time: slots, KV, lanes that others publish to, and the policy between them."""

    slots: int
    kv_tokens: int
    params: PullParams = WIDE
    job_tokens_max: int = 1000

    def __post_init__(self) -> None:
        self.now_s = 0.0
        self.lanes: dict[Lane, deque[ModelJob]] = {lane: deque() for lane in LANES}
        self.hints = dict.fromkeys(LANES, False)
        self.staged: dict[Lane, ModelJob] = {}
        self.running: list[tuple[float, int, ModelJob]] = []
        self.order: list[ModelJob] = []
        self.turns = Turns()
        self.pulls = 0
        self.staged_most = 0

    def publish(self, *jobs: ModelJob) -> None:
        for job in jobs:
            self.lanes[job.lane].append(job)
            self.hints[job.lane] = True
        self.work()

    def advance(self) -> bool:
        """Goes on to the next end of a job."""
        if not self.running:
            return False
        self.now_s, _, _ = heapq.heappop(self.running)
        self.work()
        return True

    def drain(self) -> None:
        while self.advance():
            pass

    def views(self) -> list[LaneView]:
        return [
            LaneView(lane, self.hints[lane], False, self.staged[lane].kv_tokens if lane in self.staged else None)
            for lane in LANES
        ]

    def room(self) -> Room:
        used = sum(job.kv_tokens for _, _, job in self.running)
        return Room(self.slots - len(self.running), self.kv_tokens - used, self.job_tokens_max, 64, 64)

    def work(self) -> None:
        while (step := next_step(views := self.views(), self.room(), self.turns, self.params)) is not None:
            if isinstance(step, Start):
                self.start(self.staged.pop(step.lane), views)
                continue
            assert isinstance(step, Pull), "nobody yields here, and nothing is held"
            self.pulls += 1
            queue = self.lanes[step.lane]
            got = [queue.popleft() for _ in range(min(step.batch, len(queue)))]
            self.hints[step.lane] = len(got) == step.batch
            for job in got:
                if job.kv_tokens <= self.room().kv_tokens:
                    self.start(job, views)
                else:
                    assert job.lane not in self.staged, "at most one job a lane is staged"
                    self.staged[job.lane] = job
            self.staged_most = max(self.staged_most, len(self.staged))

    def start(self, job: ModelJob, views: list[LaneView]) -> None:
        self.turns = started(self.turns, job.lane, 1, views)
        self.order.append(job)
        heapq.heappush(self.running, (self.now_s + job.service_s, len(self.order), job))
        assert len(self.running) <= self.slots
        assert sum(j.kv_tokens for _, _, j in self.running) <= self.kv_tokens


def jobs(lane: Lane, count: int, **kwargs: float) -> list[ModelJob]:
    return [ModelJob(lane, i, **kwargs) for i in range(count)]  # type: ignore[arg-type] # kv_tokens stays an int


def test_a_priority_job_behind_400_batch_jobs_starts_before_any_further_batch_job():
    worker = ModelWorker(slots=4, kv_tokens=100_000)
    worker.publish(*jobs(Lane.BATCH, 400))
    for _ in range(10):
        worker.advance()
    before = len(worker.order)
    worker.publish(ModelJob(Lane.PRIORITY, 0))
    worker.drain()
    assert worker.order[before].lane is Lane.PRIORITY
    assert Counter(job.lane for job in worker.order) == {Lane.BATCH: 400, Lane.PRIORITY: 1}
    assert [j.name for j in worker.order if j.lane is Lane.BATCH] == list(range(400))


@pytest.mark.parametrize("floor_turns", [2, 5, 10, 20])
def test_the_lower_lanes_get_their_floor_under_saturating_priority(floor_turns: int):
    worker = ModelWorker(slots=4, kv_tokens=100_000, params=PullParams(floor_turns=floor_turns))
    worker.publish(*jobs(Lane.PRIORITY, 2000), *jobs(Lane.DEFERRABLE, 2000), *jobs(Lane.BATCH, 2000))
    while len(worker.order) < 1000:
        worker.advance()
    window = worker.order[10:1010]  # the first jobs were pulled before the lower lanes had any
    share = Counter(job.lane for job in window)
    lower = share[Lane.DEFERRABLE] + share[Lane.BATCH]
    assert abs(lower - len(window) / floor_turns) <= 2
    assert abs(share[Lane.DEFERRABLE] - 4 * share[Lane.BATCH]) <= 4
    gaps = [i for i, job in enumerate(window) if job.lane is not Lane.PRIORITY]
    assert max(b - a for a, b in itertools.pairwise(gaps)) <= floor_turns


def test_without_lower_work_priority_gets_every_turn_and_owes_nothing():
    worker = ModelWorker(slots=4, kv_tokens=100_000)
    worker.publish(*jobs(Lane.PRIORITY, 500))
    worker.drain()
    worker.publish(*jobs(Lane.PRIORITY, 8), *jobs(Lane.BATCH, 8))
    worker.drain()
    assert [job.lane for job in worker.order[500:508]] == [Lane.PRIORITY] * 8


def test_a_big_batch_job_waits_for_kv_without_delaying_priority():
    worker = ModelWorker(slots=8, kv_tokens=1000)
    worker.publish(*jobs(Lane.PRIORITY, 4, kv_tokens=200))
    worker.publish(ModelJob(Lane.BATCH, -1, kv_tokens=900), *jobs(Lane.BATCH, 5, kv_tokens=10))
    assert list(worker.staged) == [Lane.BATCH]
    worker.publish(ModelJob(Lane.PRIORITY, 9, kv_tokens=200))
    assert worker.order[-1] == ModelJob(Lane.PRIORITY, 9, kv_tokens=200)
    worker.drain()
    assert [j.name for j in worker.order if j.lane is Lane.BATCH] == [-1, 0, 1, 2, 3, 4]
    assert not worker.staged


def test_a_big_priority_job_gets_the_kv_that_frees_first():
    worker = ModelWorker(slots=8, kv_tokens=1000)
    worker.publish(*jobs(Lane.BATCH, 50, kv_tokens=100))
    worker.publish(ModelJob(Lane.PRIORITY, 0, kv_tokens=1000))
    worker.drain()
    first_after = next(i for i, job in enumerate(worker.order) if job.lane is Lane.PRIORITY)
    assert first_after == 8  # nothing started between its arrival and its start
    assert len(worker.order) == 51


@pytest.mark.parametrize("seed", range(5))
def test_the_same_history_gives_the_same_order_and_everything_ends(seed: int):
    def play() -> list[tuple[Lane, int]]:
        dice = random.Random(seed)
        worker = ModelWorker(slots=dice.randint(1, 6), kv_tokens=2000)
        for i in range(300):
            lane = dice.choice(LANES)
            worker.publish(ModelJob(lane, i, dice.randint(1, 1000), dice.uniform(0.1, 3.0)))
            if dice.random() < 0.6:
                worker.advance()
        worker.drain()
        assert len(worker.order) == 300
        for lane in LANES:
            names = [job.name for job in worker.order if job.lane is lane]
            assert names == sorted(names), "a lane keeps its order"
        return [(job.lane, job.name) for job in worker.order]

    assert play() == play()
