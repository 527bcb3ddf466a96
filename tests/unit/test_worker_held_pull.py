"""The one pull that is held open at the server, for a priority job into a reserved slot."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from laneway.core.clock import ManualClock
from laneway.core.lanes import LANES, Lane
from laneway.policy.pull import PullParams
from laneway.workers.engines.protocol import EngineCapacity
from laneway.workers.floor import PlainGate
from laneway.workers.ledger import KvAsk, Seats
from laneway.workers.pulling import PullLoop


@dataclass
class HeldDelivery:
    """A delivery that only notes how it was answered."""

    pending: int = 0
    naks: list[float] = field(default_factory=list)
    subject: str = "lane.local.priority.p.any.t.j"

    async def nak(self, delay_s: float = 0.0) -> None:
        self.naks.append(delay_s)


class Server:
    """A consumer: pulls that wait are answered when the test says so."""

    def __init__(self) -> None:
        self.trouble = ""
        self.refuses = False
        self.holds = 0
        self.brought: list[HeldDelivery] = []
        self._heard: Callable[[], None] | None = None

    async def pull(self, batch: int) -> list[HeldDelivery]:
        return []

    def hold(self, wait_s: float, heard: Callable[[], None], offer: object) -> None:
        assert not self.held
        self.holds += 1
        self._heard = heard
        if self.refuses:
            self.end("refused")

    @property
    def held(self) -> bool:
        return self._heard is not None

    def end(self, trouble: str = "", *brought: HeldDelivery) -> None:
        self.trouble, self.brought = trouble, list(brought)
        heard, self._heard = self._heard, None
        assert heard is not None
        heard()

    async def collect(self) -> list[HeldDelivery]:
        assert not self.held
        brought, self.brought = self.brought, []
        return brought


class Floor:
    def may_start(self) -> bool:
        return True


def loop_of(
    servers: dict[Lane, Server],
    seats: Seats,
    *,
    reserved: int = 1,
    paused: frozenset[Lane] = frozenset(),
    floor: Floor | None = None,
) -> PullLoop:
    params = PullParams(priority_reserved_slots=reserved)
    return PullLoop(
        servers,  # type: ignore[arg-type]  # answers as a LanePuller does
        seats,
        floor or Floor(),  # type: ignore[arg-type]  # nothing is placed here
        PlainGate(lambda: 0, lambda: params),
        lambda: params,
        ManualClock(),
        ack_wait_s=dict.fromkeys(LANES, 3.0),
        fallback_s=0.01,
        paused=lambda: paused,
        engine_steps=lambda: 0,
    )


def seats_of(slots: int) -> Seats:
    return Seats(EngineCapacity(slots=slots, kv_tokens=4096, context_length=1024, vocabulary_size=260))


def consumers() -> dict[Lane, Server]:
    return {lane: Server() for lane in LANES}


@asynccontextmanager
async def running(pulls: PullLoop) -> AsyncIterator[None]:
    task = asyncio.create_task(pulls.run())
    try:
        await settle()
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_idle_worker_holds_one_pull_open_for_priority_alone():
    servers = consumers()
    async with running(loop_of(servers, seats_of(4))):
        assert servers[Lane.PRIORITY].held
        assert servers[Lane.PRIORITY].holds == 1
        assert all(not server.held for lane, server in servers.items() if lane is not Lane.PRIORITY)


async def test_no_pull_is_held_without_a_reserved_slot_or_in_a_paused_lane():
    for pulls, servers in (
        (loop_of(few := consumers(), seats_of(4), reserved=0), few),
        (loop_of(still := consumers(), seats_of(4), paused=frozenset({Lane.PRIORITY})), still),
        (loop_of(full := consumers(), filled := seats_of(1)), full),
    ):
        if servers is full:
            filled.take(Lane.BATCH, KvAsk(10, 0))
        async with running(pulls):
            assert not servers[Lane.PRIORITY].held


async def test_a_held_job_goes_back_at_once_when_its_slot_is_gone():
    servers, seats = consumers(), seats_of(1)
    async with running(loop_of(servers, seats)):
        assert servers[Lane.PRIORITY].held
        seats.take(Lane.BATCH, KvAsk(5, 5))  # a due floor
        delivery = HeldDelivery()
        servers[Lane.PRIORITY].end("", delivery)
        await settle()
        assert delivery.naks == [0.0]


async def test_a_drain_gives_back_what_the_held_pull_still_brings():
    servers = consumers()
    pulls = loop_of(servers, seats_of(4))
    async with running(pulls):
        assert servers[Lane.PRIORITY].held
        pausing = asyncio.create_task(pulls.pause())
        await settle()
        assert not pausing.done()
        delivery = HeldDelivery()
        servers[Lane.PRIORITY].end("", delivery)
        await pausing
        await settle()
        assert delivery.naks == [0.0]
        assert servers[Lane.PRIORITY].holds == 1


async def test_a_held_pull_that_ends_at_once_is_not_asked_for_again_and_again():
    servers = consumers()
    servers[Lane.PRIORITY].refuses = True  # as without a connection
    async with running(loop_of(servers, seats_of(4))):
        assert servers[Lane.PRIORITY].holds == 1
