"""A pull loop over consumers that answer when the test says so: no NATS, no engine, a clock that is set by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.clock import ManualClock
from laneway.core.fleet import HomePlan, Plan, PoolPlan
from laneway.core.job import GenerateTask, LaneJob, Sampling
from laneway.core.lanes import LANES, Lane
from laneway.policy.pull import PullParams
from laneway.runtime.puller import LanePuller
from laneway.workers.engines.protocol import EngineCapacity
from laneway.workers.floor import Floor, Gate
from laneway.workers.homes import Homes
from laneway.workers.ledger import Seat, Seats
from laneway.workers.pulling import PullLoop
from laneway.workers.sources import Sources
from tests.support.nats import POOL, make_record, small_catalogue
from tests.support.plain_gate import PlainGate

ME = "me"
_numbers = itertools.count(1)


@dataclass
class HeldDelivery:
    """A delivery that only notes how it was answered. Without a job it must not be looked into."""

    job: LaneJob | None = None
    pending: int = 0
    deliveries: int = 1
    naks: list[float] = field(default_factory=list)
    subject: str = "lane.local.priority.p.any.t.j"
    headers: Mapping[str, str] = field(default_factory=dict)
    steal: str = ""
    stored_s: float = 0.0
    stream_sequence: int = 1
    back: list[HeldDelivery] | None = None  # the queue to which it goes when it is given back

    @property
    def job_id(self) -> str:
        assert self.job is not None
        return self.job.record.job_id

    async def nak(self, delay_s: float = 0.0) -> None:
        self.naks.append(delay_s)
        if self.back is not None:
            self.deliveries += 1
            self.back.append(self)


def delivery_of(lane: Lane = Lane.PRIORITY, *, latest_start_s: float = 3e9, tokens: int = 8) -> HeldDelivery:
    record = make_record(lane=lane, latest_start_s=latest_start_s)
    record = replace(record, contract=replace(record.contract, deadline_s=4e9))
    task = GenerateTask((1, 2, 3), Sampling(max_tokens=tokens))
    return HeldDelivery(LaneJob(record, task), stored_s=ManualClock().now(), stream_sequence=next(_numbers))


class Server:
    """A consumer: pulls that wait are answered when the test says so, others from `queue`."""

    def __init__(self) -> None:
        self.trouble = ""
        self.refuses = False
        self.holds = 0
        self.pulls = 0
        self.started = self.closed = 0
        self.queue: list[HeldDelivery] = []
        self.brought: list[HeldDelivery] = []
        self.late: list[HeldDelivery] = []  # what was on its way when a held pull was let go
        self._heard: Callable[[], None] | None = None
        self._offer: Callable[[HeldDelivery], bool] = lambda delivery: False

    async def start(self) -> None:
        self.started += 1

    async def close(self) -> None:
        assert not self.held, "nothing may be held of what is closed"
        self.closed += 1

    async def pull(self, batch: int) -> list[HeldDelivery]:
        assert not self.held, "one pull at a time"
        self.pulls += 1
        await asyncio.sleep(0)
        got = self.queue[:batch]
        del self.queue[:batch]
        for delivery in got:
            delivery.pending = len(self.queue)
        return got

    def hold(self, wait_s: float, heard: Callable[[], None], offer: Callable[[HeldDelivery], bool]) -> None:
        assert not self.held
        self.holds += 1
        self._heard, self._offer = heard, offer
        if self.refuses:
            self.end("refused")

    @property
    def held(self) -> bool:
        return self._heard is not None

    def let_go(self) -> None:
        if self.held:
            self.end("", *self.late)

    def end(self, trouble: str = "", *brought: HeldDelivery, offered: bool = False) -> None:
        """The held pull ends; with a message, which is `offered` before."""
        self.trouble = trouble
        heard, self._heard = self._heard, None
        assert heard is not None
        self.brought = [delivery for delivery in brought if not (offered and self._offer(delivery))]
        heard()

    async def collect(self) -> list[HeldDelivery]:
        assert not self.held
        brought, self.brought = self.brought, []
        return brought


class Servers(dict[tuple[Lane, str], Server]):
    """Consumers by lane and home slot, made when they are asked for."""

    def __missing__(self, key: tuple[Lane, str]) -> Server:
        self[key] = Server()
        return self[key]

    def priority(self, home: str = "any") -> Server:
        return self[Lane.PRIORITY, home]

    def open(self, lane: Lane, home: str) -> LanePuller:
        return cast(LanePuller, self[lane, home])

    @property
    def held(self) -> list[tuple[Lane, str]]:
        return sorted(key for key, server in self.items() if server.held)


class PlainFloor:
    """Takes jobs, and seats for them."""

    def __init__(self, seats: Seats) -> None:
        self.seats = seats
        self.launched: list[LaneJob] = []
        self.kept: list[bool] = []
        self.live: list[Seat] = []

    def may_start(self) -> bool:
        return True

    def running(self, job_id: str) -> None:
        return None

    def launch(self, delivery: HeldDelivery, job: LaneJob, *, kept: bool) -> None:
        self.live.append(self.seats.take(job.record.contract.lane, self.seats.ask(job)))
        self.launched.append(job)
        self.kept.append(kept)

    @property
    def job_ids(self) -> list[str]:
        """In the order in which they started."""
        return [job.record.job_id for job in self.launched]

    @property
    def lanes(self) -> list[Lane]:
        return [job.record.contract.lane for job in self.launched]


class World:
    """What a worker is told of its pool."""

    def __init__(self, home_slots: int = 0) -> None:
        self.clock = ManualClock()
        self.home_slots = home_slots
        self.plan: Plan | None = None
        self.is_fresh = True
        self.dead: set[str] = set()
        self.patience_s = 0.5

    def serve(self, homes: Mapping[str, str], ready: Mapping[str, int] | None = None, oldest_s: float = 0.0) -> None:
        """A new plan says who serves which slot."""
        plans = tuple(
            HomePlan(home, worker, (ready or {}).get(home, 0), 0, oldest_s if home in (ready or {}) else 0.0)
            for home, worker in homes.items()
        )
        self.plan = Plan("local", pools=(PoolPlan(POOL, homes=plans),))

    def homes(self) -> Homes:
        pool = cast(Pool, small_catalogue().pool(POOL))
        return Homes(
            replace(pool, home_slots=self.home_slots),
            ME,
            lambda: self.plan,
            lambda: self.plan is not None and self.is_fresh,
            lambda worker: worker not in self.dead,
        )

    def sources(self, servers: Servers) -> Sources:
        return Sources(self.homes(), servers.open, self.clock, lambda lane: self.patience_s)


def loop_of(
    servers: Servers,
    seats: Seats,
    *,
    reserved: int = 1,
    paused: frozenset[Lane] = frozenset(),
    floor: object | None = None,
    world: World | None = None,
    gate: Gate | None = None,
    params: PullParams | None = None,
) -> PullLoop:
    world = world or World()
    pull = params or PullParams()
    return PullLoop(
        world.sources(servers),
        seats,
        cast(Floor, floor or PlainFloor(seats)),
        gate or PlainGate(reserved=reserved),
        lambda: pull,
        world.clock,
        ack_wait_s=dict.fromkeys(LANES, 3.0),
        fallback_s=0.01,
        paused=lambda: paused,
        engine_steps=lambda: 0,
    )


def seats_of(slots: int) -> Seats:
    return Seats(EngineCapacity(slots=slots, kv_tokens=65536, context_length=1024, vocabulary_size=260))


@asynccontextmanager
async def running(pulls: PullLoop) -> AsyncIterator[None]:
    task = asyncio.create_task(pulls.run())
    try:
        await settle()
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is not None:
            raise cast(BaseException, task.exception())


async def settle() -> None:
    for _ in range(60):
        await asyncio.sleep(0)
