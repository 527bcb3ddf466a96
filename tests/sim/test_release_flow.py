"""Release under virtual time: one pool, stale leases, jobs in clumps, a scheduler that looks each 250 ms."""

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from laneway.core.catalogue import Capabilities, Catalogue, Pool
from laneway.core.fleet import WorkerLease, WorkerState
from laneway.core.lanes import PARKING_LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.policy.fairness import Ledger
from laneway.policy.parked import ParkIndex
from laneway.policy.plan import Depth, Snapshot, make_plan
from laneway.policy.release import ReleaseParams, choose, room_of

LOOK_S = 0.25
RENEW_S = 1.0
WORKERS, SLOTS = 2, 4
POOL = Pool(
    name="p", model="chat", tier="small", engine="simulated", context_length=4096, vocabulary_size=300, slots=SLOTS,
    workers=WORKERS, kv_tokens=16384, tokenizer="bytes", capabilities=Capabilities(),
)  # fmt: skip


@dataclass
class World:
    """Workers pull ready jobs into free places at once; leases show what was true up to a second ago."""

    seed: int
    service_s: float
    params: ReleaseParams = field(default_factory=ReleaseParams)
    now_s: float = 1_000_000.0
    ready: list[ParkSubject] = field(default_factory=list)
    running: list[tuple[float, str]] = field(default_factory=list)
    started_s: dict[str, float] = field(default_factory=dict)
    releases: Counter[str] = field(default_factory=Counter)
    most_ready: int = 0
    idle_places_s: float = 0.0  # place-seconds empty while a job was parked that might have run
    priority: int = 0  # places that priority work holds

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.index = ParkIndex()
        self.ledger = Ledger(self.params.fair)
        self.leased = 0

    def places(self) -> int:
        return WORKERS * SLOTS - self.priority - len(self.running)

    def park(self, count: int, *, due_s: float, tenant: str = "a", lane: Lane = Lane.DEFERRABLE) -> None:
        for _ in range(count):
            job = f"j{len(self.started_s) + len(self.index) + len(self.ready):05}-{self.random.random()}"[:40]
            due_ms = int((self.now_s + due_s + self.random.random()) * 1000)
            park = ParkSubject("local", lane, "p", tenant, 0, due_ms, int(self.service_s * 1000 / SLOTS), "g", job)
            self.index.add(park, now_ms=int(self.now_s * 1000))

    def work(self, until_s: float) -> None:
        """Workers go on until then."""
        while True:
            while self.ready and self.places() > 0:
                park = self.ready.pop(0)
                self.started_s[park.job] = self.now_s
                ends = self.now_s + self.service_s * self.random.uniform(0.5, 1.5)
                heapq.heappush(self.running, (ends, park.job))
            next_s = min(until_s, self.running[0][0] if self.running else until_s)
            if len(self.index):
                self.idle_places_s += max(0, self.places()) * (next_s - self.now_s)
            self.now_s = next_s
            if self.running and self.running[0][0] <= next_s:
                heapq.heappop(self.running)
                continue
            return

    def look(self) -> None:
        leases = [
            WorkerLease(f"w{i}", f"w{i}", "p", "simulated", WorkerState.READY, slots=SLOTS,
                        running=self.leased // WORKERS, service_s=self.service_s)
            for i in range(WORKERS)
        ]  # fmt: skip
        depths = {("p", Lane.DEFERRABLE): Depth(len(self.ready), len(self.running) + self.priority)}
        snapshot = Snapshot(leases=leases, depths=depths)
        plan = make_plan(
            snapshot, Catalogue((POOL,)), region="local", epoch=1, version=1, now_s=self.now_s, valid_s=3.0
        )
        self.index.wake(int(self.now_s * 1000))
        room = room_of(plan.pool("p"), self.params)
        for release in choose(self.index, room, self.ledger, now_s=self.now_s, params=self.params):
            self.index.discard(release.park.job)
            self.ledger.charge(release.park, release.charge)
            self.releases[release.park.job] += 1
            self.ready.append(release.park)
        self.most_ready = max(self.most_ready, len(self.ready))

    def run(self, seconds: float) -> None:
        for step in range(int(seconds / LOOK_S)):
            if step % int(RENEW_S / LOOK_S) == 0:
                self.leased = len(self.running) + self.priority
            self.look()
            self.work(self.now_s + LOOK_S)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("service_s", [0.5, 4.0])
def test_a_backlog_keeps_every_place_busy_behind_a_short_queue(seed: int, service_s: float) -> None:
    world = World(seed, service_s)
    world.park(1500, due_s=36_000.0)
    world.run(40.0)
    assert set(world.releases.values()) == {1}, "each job once"
    places_s = WORKERS * SLOTS * 40.0
    assert world.idle_places_s <= 0.02 * places_s, "no place stays empty while jobs are parked"
    assert world.most_ready <= 2 * WORKERS * SLOTS, "what is ready stays short"
    assert len(world.index) > 0


def test_a_full_pool_releases_only_a_short_queue_until_latest_starts_come_near() -> None:
    world = World(1, 4.0, priority=WORKERS * SLOTS)
    world.park(50, due_s=60.0)
    world.run(50.0)
    assert world.started_s == {}
    assert sum(world.releases.values()) == 4, "8 places x 2 s / 4 s of service"
    world.run(12.0)
    assert sum(world.releases.values()) == 50, "at their latest start all of them are with the workers"


@pytest.mark.parametrize("seed", range(3))
def test_tenants_share_a_backlog_and_a_late_tenant_is_not_behind_it(seed: int) -> None:
    world = World(seed, 1.0)
    world.park(1000, due_s=36_000.0, tenant="greedy", lane=Lane.BATCH)
    world.run(20.0)
    before = Counter(world.releases)
    world.park(200, due_s=36_000.0, tenant="late", lane=Lane.BATCH)
    late = {p.job for p in world.index.queue("p", Lane.BATCH, "late")}
    world.run(20.0)
    gone = Counter({job: n for job, n in world.releases.items() if job not in before})
    share = sum(job in late for job in gone) / len(gone)
    assert 0.45 <= share <= 0.55


@pytest.mark.parametrize("seed", range(3))
def test_no_job_starts_late_while_the_work_fits(seed: int) -> None:
    """70 % load in clumps with deadlines of a minute."""
    world = World(seed, 2.0)
    parked: dict[str, ParkSubject] = {}
    for _ in range(10):
        world.park(int(0.7 * WORKERS * SLOTS / 2.0 * 12.0), due_s=60.0, tenant=world.random.choice("abc"))
        parked.update({p.job: p for p in world.index.by_due("p", PARKING_LANES)})
        world.run(12.0)
    world.run(90.0)
    assert len(world.started_s) == len(parked)
    late = [job for job, at in world.started_s.items() if at * 1000 > parked[job].due_ms]
    assert late == []
