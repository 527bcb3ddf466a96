"""Pulls that are held open at the server, for priority jobs into slots that nothing else may take."""

import asyncio

from laneway.core.lanes import LANES, Lane
from laneway.runtime.bells import Ring
from laneway.workers.ledger import KvAsk
from tests.support.pulling import (
    ME,
    HeldDelivery,
    PlainFloor,
    Servers,
    World,
    delivery_of,
    loop_of,
    running,
    seats_of,
    settle,
)

PRIORITY = Lane.PRIORITY


def world_of(**homes: str) -> World:
    world = World(home_slots=max(2, len(homes)))
    world.serve(homes or {"h0": ME, "h1": "other"})
    return world


async def test_an_idle_worker_holds_one_pull_open_for_priority_alone():
    servers = Servers()
    async with running(loop_of(servers, seats_of(4))):
        assert servers.held == [(PRIORITY, "any")]
        assert servers.priority().holds == 1


async def test_an_idle_worker_of_a_home_holds_a_pull_of_it_and_one_of_any():
    servers = Servers()
    async with running(loop_of(servers, seats_of(4), world=world_of())):
        assert servers.held == [(PRIORITY, "any"), (PRIORITY, "h0")]


async def test_no_pull_is_held_without_a_reserved_slot_or_in_a_paused_lane():
    for pulls, servers in (
        (loop_of(few := Servers(), seats_of(4), reserved=0), few),
        (loop_of(still := Servers(), seats_of(4), paused=frozenset({PRIORITY})), still),
        (loop_of(full := Servers(), filled := seats_of(1)), full),
    ):
        if servers is full:
            filled.take(Lane.BATCH, KvAsk(10, 0))
        async with running(pulls):
            assert not servers.held


async def test_no_more_pulls_are_held_than_there_are_slots_for_their_jobs():
    for slots, held in ((1, 1), (2, 1), (3, 2), (8, 2)):  # with two, a lower lane may still take one
        servers = Servers()
        async with running(loop_of(servers, seats_of(slots), world=world_of())):
            assert len(servers.held) == held, slots


async def test_what_a_held_pull_brings_starts_in_the_same_turn_and_the_next_is_held():
    servers, seats = Servers(), seats_of(4)
    floor = PlainFloor(seats)
    async with running(loop_of(servers, seats, world=world_of(), floor=floor)):
        servers.priority("h0").end("", delivery_of(), offered=True)
        assert floor.lanes == [PRIORITY]
        await settle()
        assert servers.held == [(PRIORITY, "any"), (PRIORITY, "h0")]


async def test_a_job_of_the_source_that_is_not_held_waits_for_one_exchange_only():
    """One slot: one pull is held, and the bell of the other source has it let go before it is asked for."""
    servers, seats = Servers(), seats_of(1)
    floor = PlainFloor(seats)
    pulls = loop_of(servers, seats, world=world_of(), floor=floor)
    async with running(pulls):
        ((_, held),) = servers.held
        other = "any" if held == "h0" else "h0"
        servers.priority(other).queue.append(delivery_of())
        pulls.ring(Ring(PRIORITY, other))
        await settle()
        assert floor.lanes == [PRIORITY]
        assert not servers.held, "there is no slot for it any more"


async def test_two_jobs_at_once_for_one_slot_are_not_both_claimed():
    servers, seats = Servers(), seats_of(1)
    floor = PlainFloor(seats)
    pulls = loop_of(servers, seats, world=world_of(), floor=floor)
    async with running(pulls):
        ((_, held),) = servers.held
        other = "any" if held == "h0" else "h0"
        waiting, brought = delivery_of(), delivery_of()
        servers.priority(other).queue.append(waiting)
        pulls.ring(Ring(PRIORITY, other))
        servers.priority(held).end("", brought)  # at the moment at which the other's bell rings
        await settle()
        assert floor.job_ids == [brought.job_id]
        assert servers.priority(other).queue == [waiting], "it stays for another worker"
        assert not waiting.naks
        assert not brought.naks


async def test_with_one_slot_the_sources_take_turns_to_be_held():
    servers = Servers()
    world = world_of()
    pulls = loop_of(servers, seats_of(1), world=world)
    async with running(pulls):
        order = []
        for _ in range(4):
            ((_, held),) = servers.held
            order.append(held)
            world.clock.advance(1.0)
            servers.priority(held).end()
            await settle()
        assert order[:2] == order[2:]
        assert set(order) == {"any", "h0"}


async def test_a_lower_job_takes_no_slot_for_which_a_pull_is_open():
    servers, seats = Servers(), seats_of(2)
    floor = PlainFloor(seats)
    for lane in (Lane.DEFERRABLE, Lane.BATCH):
        servers[lane, "any"].queue += [delivery_of(lane) for _ in range(4)]
    async with running(loop_of(servers, seats, world=world_of(), floor=floor)):
        assert floor.lanes == [Lane.DEFERRABLE]
        assert len(servers.held) == 1
        servers.priority(servers.held[0][1]).end("", delivery_of(), offered=True)
        assert floor.lanes == [Lane.DEFERRABLE, PRIORITY]


async def test_a_held_job_goes_back_at_once_when_its_slot_is_gone():
    servers, seats = Servers(), seats_of(1)
    async with running(loop_of(servers, seats)):
        seats.take(Lane.BATCH, KvAsk(5, 5))
        delivery = HeldDelivery()
        servers.priority().end("", delivery)
        await settle()
        assert delivery.naks == [0.0]


async def test_a_drain_lets_go_of_what_is_held_and_gives_back_what_it_brought():
    servers = Servers()
    pulls = loop_of(servers, seats_of(4), world=world_of())
    async with running(pulls):
        delivery = HeldDelivery()
        servers.priority("h0").late.append(delivery)
        await asyncio.wait_for(pulls.pause(), 5.0)
        await settle()
        assert delivery.naks == [0.0]
        assert not servers.held
        pulls.go_on()
        await settle()
        assert len(servers.held) == 2


async def test_a_held_pull_that_ends_at_once_is_not_asked_for_again_and_again():
    servers = Servers()
    servers.priority().refuses = True  # as without a connection
    async with running(loop_of(servers, seats_of(4))):
        assert servers.priority().holds == 1


async def test_a_home_that_goes_to_another_worker_is_let_go_and_loses_nothing():
    servers, seats, world = Servers(), seats_of(4), world_of()
    floor = PlainFloor(seats)
    pulls = loop_of(servers, seats, world=world, floor=floor)
    async with running(pulls):
        assert pulls.home == "h0"
        brought = delivery_of()
        servers.priority("h0").end("", brought)  # just before
        world.serve({"h0": "other", "h1": ME})
        pulls.room_changed()
        await settle()
        assert pulls.home == "h1"
        assert servers.held == [(PRIORITY, "any"), (PRIORITY, "h1")]
        assert floor.job_ids == [brought.job_id]
        assert [servers[lane, "h0"].closed for lane in LANES] == [1, 1, 1]
