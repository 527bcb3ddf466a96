"""What one decision costs while a hundred thousand jobs are parked: a verdict, a pull, a release, a plan.

No NATS and no engine: the functions and objects that decide, with what they would know. A door's Judge has a plan that
shows the parked jobs and gets a new one every few hundred requests; its requests are of all lanes and a thousand
tenants. A worker's pull asks which home slot each lane turns to, what its interference budget and headroom leave, and
what to do next. The scheduler's release is one look of `choose` into a pool with many free places, divided by the jobs
it gives, charged and taken out of the index; its plan is made as at each look, and now and then with the demand read
anew. A decision waits for nothing, so what it costs is processor time: that decides (`--check`). Wall time stands
beside it; it is the same on a machine that nobody else uses.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TypeVar, cast

from msgspec.structs import replace
from report import Bar, Report, main, percentile

from laneway.admission.judging import Judge
from laneway.admission.ledger import Ledger as DoorLedger
from laneway.admission.preparing import Option
from laneway.core.catalogue import Catalogue, Pool
from laneway.core.fleet import HomePlan, LanePlan, Plan, PoolPlan, StepTimes, WorkerLease, WorkerState
from laneway.core.job import Contract, GenerateTask, Sampling, Usage
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.policy import interference
from laneway.policy.admit import AdmitParams, Candidate
from laneway.policy.demand import demand_curve
from laneway.policy.desired import NEAR_JOBS
from laneway.policy.fairness import Ledger
from laneway.policy.forecast import Outlook
from laneway.policy.headroom import Arrivals, HeadroomParams, headroom
from laneway.policy.interference import InterferenceParams, Load
from laneway.policy.parked import ParkIndex
from laneway.policy.plan import Depth, Parked, Snapshot, make_plan
from laneway.policy.pull import LaneView, PullParams, Step, Turns, next_step, started
from laneway.policy.pull import Room as PullRoom
from laneway.policy.release import ReleaseParams, choose, room_of
from laneway.policy.stealing import Slot, next_turn
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.clock import SystemClock
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.params import admit_params
from laneway.runtime.plans import PlanView
from laneway.runtime.settings import ModelSettings, Settings

ADMISSION_MS_MAX = 1.0
PULL_MS_MAX = 2.0
SIZES = (100_000, 1_000_000)
BARS_AT = 100_000
TENANTS = 1_000
GROUPS = 5_000
WORKERS, SLOTS, HOMES = 8, 16, 8
DECISIONS = 20_000
PLAN_EVERY = 250  # requests between two plans at a door
LOOKS = 200
REGION = "bench"
KV_TOKENS = 200_000

T = TypeVar("T")


@dataclass
class Times:
    """Of one kind of act, in seconds."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def time(self, act: Callable[[], T], parts: Callable[[T], int] = lambda made: 1) -> T:
        """Acts; the time counts for each of the `parts` of what it made."""
        cpu, wall = time.thread_time(), time.perf_counter()
        made = act()
        wall_s, cpu_s = time.perf_counter() - wall, time.thread_time() - cpu
        self.wall_s.append(wall_s / max(1, parts(made)))
        self.cpu_s.append(cpu_s / max(1, parts(made)))
        return made

    def figures(self, name: str) -> dict[str, float]:
        out = {f"{name}_p{q}_ms": 1000 * percentile(self.wall_s, q) for q in (50, 99)}
        return out | {f"{name}_cpu_p{q}_ms": 1000 * percentile(self.cpu_s, q) for q in (50, 99)}


def settings() -> Settings:
    tiers = [
        ModelSettings(
            name="chat", tier=tier, engine="simulated", tokenizer="bytes", slots=SLOTS, workers=WORKERS,
            kv_tokens=KV_TOKENS, home_slots=HOMES,
        )
        for tier in ("small", "strong")
    ]  # fmt: skip
    return Settings(models=tuple(tiers))


def parked_jobs(count: int, pool: str, now_s: float, rng: Random) -> Iterator[ParkSubject]:
    for i in range(count):
        lane = Lane.BATCH if i % 3 else Lane.DEFERRABLE
        due_s = now_s + (rng.uniform(300.0, 3_600.0) if lane is Lane.DEFERRABLE else rng.uniform(3_600.0, 86_400.0))
        yield ParkSubject(
            REGION, lane, pool, f"t{rng.randrange(TENANTS)}", 0, int(due_s * 1000), rng.randrange(100, 4_000),
            f"g{rng.randrange(GROUPS)}", f"{REGION}-{i:012}",
        )  # fmt: skip


class Ground:
    """What all of them know: an index of parked jobs, workers, and the plan made of both."""

    def __init__(self, count: int) -> None:
        self.rng = Random(7)
        self.now_s = time.time()
        self.catalogue: Catalogue = catalogue_of(settings())
        self.pool: Pool = self.catalogue.pools[0]
        self.index = ParkIndex(parked_jobs(count, self.pool.name, self.now_s, self.rng), now_ms=int(self.now_s * 1000))
        times = StepTimes(base_s=0.012, sequence_s=0.0006, prefill_token_s=0.0001, chunk_tokens=512)
        self.leases = [
            WorkerLease(
                f"w{i}-1", f"w{i}", pool.name, "simulated", WorkerState.READY, slots=SLOTS, running=SLOTS // 2,
                kv_tokens=KV_TOKENS, kv_tokens_used=80_000, prefill_tokens_per_s=8_000.0, decode_tokens_per_s=40.0,
                service_s=4.0, step_times=times, lower_tokens_per_s=2_000.0, theta=0.8, lower_places=SLOTS // 2,
            )
            for pool in self.catalogue.pools
            for i in range(WORKERS)
        ]  # fmt: skip
        self.version = 0
        self.snapshot = self.read(Snapshot())

    def read(self, before: Snapshot) -> Snapshot:
        """Of the index, with parked work by due time, as the planner does it."""
        index, name = self.index, self.pool.name
        keys = [(name, lane) for lane in PARKING_LANES]
        return replace(
            before,
            leases=self.leases,
            depths={(pool.name, lane): Depth(4, 20) for pool in self.catalogue.pools for lane in LANES},
            parked={key: Parked(index.count(*key), index.device_s(*key)) for key in keys},
            demand={(name, lane): demand_curve(index.demand(name, [lane]), self.now_s) for lane in PARKING_LANES},
            near={name: index.near(name, NEAR_JOBS)},
            outlook={name: Outlook(per_s=5.0, burstiness=3.0, jobs=20.0, jobs_q90=30.0, surge=4.0)},
        )

    def plan(self) -> Plan:
        self.version += 1
        plan = make_plan(
            self.snapshot, self.catalogue, region=REGION, epoch=1, version=self.version, now_s=self.now_s, valid_s=60.0
        )
        homes = tuple(HomePlan(f"h{i}", f"w{i % WORKERS}-1", i % 3, 4) for i in range(HOMES))
        return replace(plan, pools=tuple(replace(pool, homes=homes) for pool in plan.pools))


# --- a verdict -----------------------------------------------------------------------------------------


class _Storage:
    def used(self) -> float:
        return 0.1


class _Open:
    on = False


class _Plans:
    """The newest plan, always fresh: what PlanView is while plans come."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def fresh(self) -> bool:
        return True


def admissions(ground: Ground, decisions: int) -> tuple[Times, int, int]:
    """Times, how many requests got a verdict, and how many of them were accepted."""
    clock, rng = SystemClock(), ground.rng
    ledger, plans = DoorLedger(clock), _Plans(ground.plan())
    params: AdmitParams = admit_params(settings().policy, settings().admission)
    judge = Judge(
        REGION, cast(PlanView, plans), cast(LeaseWatcher, None), ledger, cast("object", _Storage()),  # type: ignore[arg-type]
        cast("object", _Open()), lambda: params, clock, rng,  # type: ignore[arg-type]
    )  # fmt: skip
    task = GenerateTask((1,), Sampling(max_tokens=256))
    times, verdicts, accepted = Times(), 0, 0
    for i in range(decisions):
        if i % PLAN_EVERY == 0:
            plans.plan = ground.plan()
            ledger.plan_arrived(plans.plan)
        lane = LANES[i % 3]
        prompt = rng.randrange(50, 2_000)
        options = [
            Option(Candidate(pool, prompt, 256, 120, 240), replace(task, prompt_ids=(i,)))
            for pool in ground.catalogue.pools
        ]
        due_s = time.time() + {Lane.PRIORITY: 60.0, Lane.DEFERRABLE: 7_200.0, Lane.BATCH: 86_400.0}[lane]
        contract = Contract(lane, 1.0 if lane is Lane.PRIORITY else 600.0, 0.1, due_s)
        judged = times.time(partial(judge.judge, options, contract, f"t{i % TENANTS}", f"job{i}"))
        verdicts += 1
        if judged.decision.refusal is None:
            accepted += 1
            if lane is Lane.PRIORITY:
                ledger.ended(f"job{i}")
    return times, verdicts, accepted


# --- a pull --------------------------------------------------------------------------------------------


class Puller:
    """What a worker asks at each turn of its pull loop."""

    def __init__(self, lease: WorkerLease) -> None:
        self.turns = Turns()
        self._params, self._budget, self._room = PullParams(), InterferenceParams(), HeadroomParams()
        self._lease = lease
        self._arrivals = Arrivals(self._room.window_s)
        for i in range(3_000):
            self._arrivals.arrived(i / 10.0)

    def decide(self, now_s: float, waited_s: list[float], decoding: int) -> Step | None:
        slots = [
            Slot("any" if home == HOMES else f"h{home}", home in (0, HOMES), waited_s[home], ready=home % 3)
            for home in range(HOMES + 1)
        ]
        turn = {lane: next_turn(slots, plan_fresh=True, patience_s=0.1) for lane in LANES}
        load = Load(
            self._lease.step_times, 0.1, 1.0, block_tokens=32, decoding=decoding, context_tokens=decoding * 500,
            priority=decoding // 2, priority_decoding=decoding // 2, recent=True,
        )  # fmt: skip
        credit = interference.refilled(100.0, 0.01, load, 0.8, self._budget)
        joins = interference.may_join(credit, 0, load, 0.8, self._budget) == interference.OPEN
        floor = interference.floor_may_join(credit, 0, load, self._budget)
        kept = headroom(
            self._arrivals, now_s, here=decoding // 2, slots=SLOTS, kv_tokens=KV_TOKENS, params=self._room,
            workers=WORKERS,
        )  # fmt: skip
        room = PullRoom(
            SLOTS - decoding, KV_TOKENS - decoding * 500, 4_096, lower_places=int(joins), floor_places=int(floor),
            reserved_slots=kept.slots, reserved_kv_tokens=kept.kv_tokens,
        )  # fmt: skip
        return next_step([LaneView(lane, turn[lane] is not None) for lane in LANES], room, self.turns, self._params)


def pulls(ground: Ground, decisions: int) -> tuple[Times, int]:
    """Times, and how many decisions said to do something."""
    puller, times, acts = Puller(ground.leases[0]), Times(), 0
    waiting = [LaneView(lane, True) for lane in LANES]
    for i in range(decisions):
        waited_s = [ground.rng.uniform(0.0, 0.3) for _ in range(HOMES + 1)]
        step = times.time(partial(puller.decide, 300.0 + i * 0.01, waited_s, ground.rng.randrange(SLOTS)))
        acts += step is not None
        puller.turns = started(puller.turns, LANES[i % 3], 1, waiting)
    return times, acts


# --- releases and plans --------------------------------------------------------------------------------


class Releaser:
    """One look of the scheduler into a pool with many free places, as its releaser makes it."""

    def __init__(self, ground: Ground) -> None:
        self.ledger = Ledger()
        self._ground = ground
        self._params = ReleaseParams()
        self._busy = frozenset(f"g{i}" for i in range(0, GROUPS, 7))
        plan = ground.plan().pool(ground.pool.name)
        self._pool: PoolPlan = replace(plan, free_slots=32, lanes=tuple(LanePlan(lane) for lane in LANES))

    def look(self) -> list[ParkSubject]:
        index = self._ground.index
        room = room_of(self._pool, self._params, leases=self._ground.leases, prompt_tokens=500.0)
        chosen = choose(
            index, room, self.ledger, now_s=self._ground.now_s, params=self._params, busy=self._busy
        )  # fmt: skip
        for release in chosen:
            self.ledger.charge(release.park, release.charge)
            index.discard(release.park.job)
        return [release.park for release in chosen]


def releases(ground: Ground, looks: int) -> tuple[Times, Times, int, int]:
    """Times for each look and for each job released; how many left the index, and how many releases said so."""
    releaser, of_looks, of_jobs = Releaser(ground), Times(), Times()
    before, count = len(ground.index), 0
    for i in range(looks):
        given = of_jobs.time(lambda: of_looks.time(releaser.look), parts=len)
        count += len(given)
        for park in given:
            releaser.ledger.ended(park.job, Usage(500, 100, 100 + i))
    return of_looks, of_jobs, before - len(ground.index), count


def measured(count: int, *, smoke: bool) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
    decisions, looks = (200, 10) if smoke else (DECISIONS, LOOKS)
    ground = Ground(count)
    gc.collect()
    gc.freeze()  # what is parked is old in a process that runs for long
    figures: dict[str, float] = {}
    verdict, verdicts, accepted = admissions(ground, decisions)
    figures |= verdict.figures("admission")
    pull, acts = pulls(ground, decisions)
    figures |= pull.figures("pull")
    plan, demand = Times(), Times()
    for _ in range(looks):
        plan.time(ground.plan)
    for _ in range(max(1, looks // 10)):
        demand.time(lambda: ground.read(ground.snapshot))
    figures |= plan.figures("plan") | demand.figures("demand")
    of_looks, of_jobs, left, given = releases(ground, looks)
    figures |= of_looks.figures("release_look") | of_jobs.figures("release_job")
    gc.unfreeze()
    counts = {
        f"verdicts, {count} parked": (verdicts, decisions),
        f"jobs that left the index, {count} parked": (left, given),
        f"looks that released, {count} parked": (int(given >= looks), 1),
        f"some accepted, {count} parked": (int(accepted > 0), 1),
        f"some pulled, {count} parked": (int(acts > 0), 1),
    }
    return figures, counts


async def measure(smoke: bool) -> Report:
    sizes = (2_000,) if smoke else tuple(int(n) for n in os.environ.get("DECISIONS_SIZES", "").split()) or SIZES
    found: dict[int, dict[str, float]] = {}
    figures: dict[str, float] = {}
    counts: dict[str, tuple[int, int]] = {}
    bars: list[Bar] = []
    for size in sizes:
        found[size], some = measured(size, smoke=smoke)
        figures |= {f"{name}_{size}": value for name, value in found[size].items()}
        counts |= some
        if size == BARS_AT:
            for name, limit in (("admission", ADMISSION_MS_MAX), ("pull", PULL_MS_MAX)):
                bars.append(Bar(f"{name} p99, {size} parked", found[size][f"{name}_cpu_p99_ms"], limit, "ms"))
    rows = [[name, *(f"{found[size][name]:,.3f}" for size in sizes)] for name in found[sizes[0]]]
    return Report("Decisions", ["ms", *(f"{size:,} parked" for size in sizes)], rows, figures, bars, counts)


if __name__ == "__main__":
    main(measure, __doc__ or "")
