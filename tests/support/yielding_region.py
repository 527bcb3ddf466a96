"""A pool of workers under virtual time: the real pull loops and the real choice of who yields, with model lanes and
engines, and a model scheduler that puts parked jobs back when the pool has room."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.fleet import LanePlan, Plan, PoolPlan
from laneway.core.job import GenerateTask, JobRecord, LaneJob, QueuedJob, Sampling
from laneway.core.lanes import LANES, Lane
from laneway.core.subjects import HOME_ANY
from laneway.policy.lengths import LengthBook
from laneway.policy.preempt import PreemptParams
from laneway.policy.pull import PullParams
from laneway.runtime.bells import Ring
from laneway.runtime.puller import Delivery, LanePuller
from laneway.workers.engines.protocol import EngineCapacity
from laneway.workers.floor import Floor
from laneway.workers.homes import Homes
from laneway.workers.ledger import Seat, Seats
from laneway.workers.outcomes import Kind, Outcome
from laneway.workers.pulling import PullLoop
from laneway.workers.rates import Rates
from laneway.workers.runs import Runs
from laneway.workers.sources import Sources
from laneway.workers.yielding import Yielding
from tests.support.nats import POOL, make_record, small_catalogue
from tests.support.plain_gate import PlainGate

TOKEN_S = 0.02  # of one sequence
LONG = 3000  # tokens: a job of 60 s
ABORT_S = 0.03  # until the engine is rid of a sequence
EXCHANGE_S = 0.001  # with NATS
PRICE = 100  # KV tokens of a prompt
_numbers = itertools.count()


class LoopClock:
    def now(self) -> float:
        return 1_800_000_000.0 + self.monotonic()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


CLOCK = LoopClock()
YIELDING = PreemptParams()


@dataclass
class Life:
    """What became of one job."""

    job: LaneJob
    published_s: float
    made: int = 0  # tokens that its checkpoints hold
    starts_s: list[float] = field(default_factory=list)
    ends: int = 0


@dataclass(eq=False)
class ModelDelivery:
    region: Region
    job: LaneJob
    deliveries: int
    pending: int
    stream_sequence: int
    subject: str = "lane.local.l.p.any.t.j"
    headers: Mapping[str, str] = field(default_factory=dict)
    steal: str = ""

    @property
    def stored_s(self) -> float:
        return self.region.lives[self.job.record.job_id].published_s

    async def ack(self) -> None: ...

    async def progress(self) -> None: ...

    async def nak(self, delay_s: float = 0.0) -> None:
        asyncio.get_running_loop().call_later(delay_s, self.region.put, self.job, self.deliveries)


class ModelPuller:
    """Pulls from a lane that all workers share."""

    def __init__(self, region: Region, lane: Lane) -> None:
        self.trouble = ""
        self.held = False
        self._region = region
        self._lane = lane

    async def start(self) -> None: ...

    async def pull(self, batch: int) -> list[ModelDelivery]:
        await asyncio.sleep(EXCHANGE_S)
        queue, region = self._region.lanes[self._lane], self._region
        taken = [queue.popleft() for _ in range(min(batch, len(queue)))]
        return [ModelDelivery(region, job, deliveries + 1, len(queue), next(_numbers)) for job, deliveries in taken]


class ModelRun:
    """A run that makes a token each TOKEN_S, from where its checkpoints ended."""

    def __init__(self, floor: ModelFloor, job: LaneJob, delivery: Delivery, seat: Seat, *, kept: bool) -> None:
        self.job, self.delivery, self.seat, self.kept = job, delivery, seat, kept
        self.job_id, self.lane = job.record.job_id, job.record.contract.lane
        self.preemptions = job.record.preemptions
        self.began_s = CLOCK.monotonic()
        self.outcome: Outcome | None = None
        self._floor = floor
        self._had = floor.region.lives[self.job_id].made
        self._told = asyncio.Event()

    @property
    def generated(self) -> int:
        ran = int((CLOCK.monotonic() - self.began_s) / TOKEN_S + 1e-6)
        return min(self.job.task.sampling.max_tokens, self._had + ran)

    @property
    def prefilling(self) -> bool:
        return self.generated == self._had

    def preempt(self) -> None:
        if self.outcome is None:
            self.outcome = Outcome(Kind.PREEMPTED)
            self._floor.region.lives[self.job_id].made = self.generated
            self._told.set()

    async def live(self) -> None:
        left = self.job.task.sampling.max_tokens - self._had
        try:
            async with asyncio.timeout(left * TOKEN_S):
                await self._told.wait()
        except TimeoutError:
            self.outcome = self.outcome or Outcome(Kind.FINISHED)
        if self.outcome is not None and self.outcome.kind is Kind.PREEMPTED:
            await asyncio.sleep(ABORT_S)


class ModelFloor:
    """The runs of one worker: the pull loop's Floor, and what Yielding takes for Runs."""

    def __init__(self, region: Region, seats: Seats) -> None:
        self.region = region
        self.seats = seats
        self.live: dict[str, ModelRun] = {}
        self.alone = False  # a suspect runs
        self.changed: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[ModelRun]:
        return iter(tuple(self.live.values()))

    def may_start(self) -> bool:
        return not self.alone

    def lower_prefills(self) -> int:
        return sum(run.prefilling and run.lane is not Lane.PRIORITY for run in self.live.values())

    def running(self, job_id: str) -> ModelRun | None:
        return self.live.get(job_id)

    def launch(self, delivery: Delivery, job: QueuedJob, *, kept: bool) -> None:
        assert isinstance(job, LaneJob)
        assert job.record.job_id not in self.region.running, "a job runs once"
        seat = self.seats.take(job.record.contract.lane, self.seats.ask(job))
        run = ModelRun(self, job, delivery, seat, kept=kept)
        self.live[run.job_id] = run
        self.region.running.add(run.job_id)
        self.region.lives[run.job_id].starts_s.append(CLOCK.now())
        self.region.spawn(self._run(run))

    def preempt(self, run: ModelRun, reason: str) -> None:
        self.region.preempted[run.job_id] += 1
        run.preempt()

    async def _run(self, run: ModelRun) -> None:
        await run.live()
        del self.live[run.job_id]
        self.region.running.discard(run.job_id)
        self.seats.give_back(run.seat)
        self.region.left(run)
        self.changed()


class Region:
    """Lanes, workers and a scheduler that looks four times a second."""

    def __init__(self, tasks: asyncio.TaskGroup, *, slots: int, preempt: PreemptParams, pull: PullParams) -> None:
        self.lanes: dict[Lane, deque[tuple[LaneJob, int]]] = {lane: deque() for lane in LANES}
        self.lives: dict[str, Life] = {}
        self.running: set[str] = set()
        self.preempted: Counter[str] = Counter()
        self.parked: list[LaneJob] = []
        self.floors: list[ModelFloor] = []
        self.pulls: list[PullLoop] = []
        self.plan: Plan | None = None
        self.paused: frozenset[Lane] = frozenset()
        self._tasks = tasks
        self._slots = slots
        self._preempt = preempt
        self._pull = pull

    def spawn(self, work: object) -> None:
        self._tasks.create_task(work)  # type: ignore[arg-type] # a coroutine

    def add_worker(self) -> ModelFloor:
        seats = Seats(
            EngineCapacity(
                slots=self._slots, kv_tokens=50_000, context_length=40_000, vocabulary_size=260, block_tokens=1
            )
        )
        floor = ModelFloor(self, seats)
        pool = cast(Pool, small_catalogue().pool(POOL))
        relief = Yielding(
            cast(Runs, floor), seats, pool, Rates(), LengthBook(), lambda: self.plan, CLOCK, lambda: self._preempt
        )
        pulls = PullLoop(
            self._sources(pool),
            seats,
            cast(Floor, floor),
            PlainGate(floor.lower_prefills),
            lambda: self._pull,
            CLOCK,
            ack_wait_s=dict.fromkeys(LANES, 3.0),
            fallback_s=0.25,
            paused=lambda: self.paused,
            engine_steps=lambda: 0,
            relief=relief,
        )
        floor.changed = pulls.room_changed
        self.floors.append(floor)
        self.pulls.append(pulls)
        self.spawn(pulls.run())
        return floor

    def _sources(self, pool: Pool) -> Sources:
        homes = Homes(pool, "me", lambda: None, lambda: False, lambda worker: None)
        return Sources(homes, lambda lane, home: cast(LanePuller, ModelPuller(self, lane)), CLOCK, lambda lane: 1.0)

    def submit(
        self, lane: Lane, tokens: int, *, prompt: int = PRICE, deadline_s: float = 1e6, **sampling: object
    ) -> Life:
        record: JobRecord = make_record(lane=lane, max_tokens=tokens)
        record = replace(record, contract=replace(record.contract, deadline_s=CLOCK.now() + deadline_s))
        task = GenerateTask((1,) * prompt, Sampling(max_tokens=tokens, ignore_eos=True, **sampling))  # type: ignore[arg-type] # fields of Sampling
        life = Life(LaneJob(record, task), CLOCK.now())
        self.lives[record.job_id] = life
        self.put(life.job)
        return life

    def put(self, job: LaneJob, deliveries: int = 0) -> None:
        lane = job.record.contract.lane
        self.lanes[lane].append((job, deliveries))
        if not deliveries:
            for pulls in self.pulls:
                pulls.ring(Ring(lane, HOME_ANY))

    def left(self, run: ModelRun) -> None:
        life = self.lives[run.job_id]
        assert run.outcome is not None
        if run.outcome.kind is Kind.PREEMPTED:
            record = replace(run.job.record, preemptions=run.job.record.preemptions + 1)
            self.parked.append(replace(run.job, record=record))
        else:
            life.made = run.generated
            life.ends += 1

    async def schedule(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            room = self.free_slots - sum(len(queue) for queue in self.lanes.values())
            for job in self.parked[: max(0, room)]:
                self.put(job)
            self.parked = self.parked[max(0, room) :]

    @property
    def free_slots(self) -> int:
        return sum(floor.seats.slots_free for floor in self.floors)

    def show_plan(self, free_slots: int) -> None:
        pool = PoolPlan(POOL, workers=len(self.floors), free_slots=free_slots, lanes=(LanePlan(Lane.PRIORITY),))
        self.plan = Plan("local", pools=(pool,))


@asynccontextmanager
async def region_of(
    workers: int, slots: int, *, preempt: PreemptParams = YIELDING, floor_turns: int = 0
) -> AsyncIterator[Region]:
    pull = PullParams(floor_turns=floor_turns)
    async with asyncio.TaskGroup() as tasks:
        region = Region(tasks, slots=slots, preempt=preempt, pull=pull)
        for _ in range(workers):
            region.add_worker()
        background = tasks.create_task(region.schedule())
        yield region
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task() and task is not background:
                task.cancel()
        background.cancel()


async def fill(region: Region, lane: Lane = Lane.BATCH, tokens: int = LONG, **changes: object) -> list[Life]:
    """Takes every slot of the region with long jobs."""
    lives = [region.submit(lane, tokens, **changes) for _ in range(region.free_slots)]  # type: ignore[arg-type] # as given
    await asyncio.sleep(1.0)
    assert not region.free_slots
    return lives


def waited_s(life: Life) -> float:
    return life.starts_s[0] - life.published_s if life.starts_s else float("inf")
