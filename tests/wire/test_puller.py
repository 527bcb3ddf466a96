"""Pulling: nothing is lost, over-claimed or delivered to a pull that nobody waits for, whatever the server does."""

import asyncio

import pytest

import laneway.runtime.puller as puller_module
from laneway.core import subjects
from laneway.core.catalogue import Catalogue
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus
from laneway.runtime.lanes import LaneDepth, LaneStore
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.provision import provision
from laneway.runtime.puller import Bell, Delivery, LanePuller
from laneway.runtime.settings import NatsSettings
from laneway.runtime.wire.reading import UnreadableMessage
from tests.support.lanes import seen_by
from tests.support.nats import (
    POOL,
    REGION,
    TENANT,
    connected,
    eventually,
    make_job,
    make_record,
    provision_region,
    small_catalogue,
)

pytestmark = pytest.mark.wire

LANE = Lane.BATCH
STREAM = subjects.lane_stream(REGION, LANE)
CONSUMER = subjects.consumer(LANE, POOL)


def puller_of(bus: Bus) -> LanePuller:
    return LanePuller(bus, REGION, LANE, POOL)


async def put(bus: Bus, count: int) -> list[str]:
    """As `send`, and a pull that does not wait sees them."""
    async with seen_by(bus, LANE, count):
        return await send(bus, count)


async def send(bus: Bus, count: int) -> list[str]:
    lanes = LaneStore(bus, REGION)
    records = [make_record(lane=LANE) for _ in range(count)]
    for record in records:
        await lanes.put_ready(make_job(record), 1)
    return [record.job_id for record in records]


def job_ids(deliveries: list[Delivery]) -> list[str]:
    return [delivery.job.record.job_id for delivery in deliveries]


async def set_consumer(bus: Bus, **changes: object) -> None:
    config = (await bus.api(f"CONSUMER.INFO.{STREAM}.{CONSUMER}", {}))["config"] | changes
    body = {"stream_name": STREAM, "config": config, "action": "update"}
    await bus.api(f"CONSUMER.CREATE.{STREAM}.{CONSUMER}.{config['filter_subject']}", body)


async def depth(bus: Bus) -> LaneDepth:
    return await LaneStore(bus, REGION).depths(LANE, POOL)


async def test_a_pull_gives_what_is_there_and_never_more_than_asked(provisioned_bus: Bus):
    put_ids = await put(provisioned_bus, 5)
    async with puller_of(provisioned_bus) as puller:
        first = await puller.pull(2)
        rest = await puller.pull(10)
        none = await puller.pull(10)
    assert (len(first), len(rest), none) == (2, 3, [])
    assert job_ids(first) + job_ids(rest) == put_ids
    assert [d.pending for d in first + rest] == [4, 3, 2, 1, 0]
    assert puller.trouble == ""


async def test_an_idle_lane_delivers_at_once_after_many_empty_pulls(provisioned_bus: Bus):
    async with puller_of(provisioned_bus) as puller:
        for _ in range(50):
            assert await puller.pull(4) == []
        await put(provisioned_bus, 1)
        assert len(await puller.pull(4)) == 1
        info = await provisioned_bus.api(f"CONSUMER.INFO.{STREAM}.{CONSUMER}", {})
        assert info["num_waiting"] == 0  # no orphan is left behind to claim the next job


async def test_a_pull_may_wait_for_the_first_message(provisioned_bus: Bus):
    async with puller_of(provisioned_bus) as puller:
        assert await puller.pull(4, wait_s=0.05) == []
        assert puller.trouble == ""
        pull = asyncio.ensure_future(puller.pull(4, wait_s=50.0))
        await eventually(lambda: waiting_pulls(provisioned_bus))
        put_ids = await send(provisioned_bus, 1)
        assert job_ids(await pull) == put_ids
        assert await waiting_pulls(provisioned_bus) == 0
        put_ids = await put(provisioned_bus, 3)
        assert job_ids(await puller.pull(2, wait_s=50.0)) == put_ids[:2]
        assert job_ids(await puller.pull(2, wait_s=50.0)) == put_ids[2:]


async def test_a_pull_after_a_bell_finds_the_message(nats_server: LocalNats, provisioned_bus: Bus):
    """A pull that does not wait misses about one in 800: the bell is quicker than the consumer."""
    async with (
        connected(nats_server, "worker") as worker,
        Bell(worker, REGION, POOL) as bell,
        puller_of(worker) as puller,
    ):
        for _ in range(1000):
            bell.ring.clear()
            door = asyncio.ensure_future(send(provisioned_bus, 1))
            await bell.ring.wait()
            (delivery,) = await puller.pull(1, wait_s=5.0)
            await delivery.ack()
            await door


async def test_acknowledgements_do_what_they_say(provisioned_bus: Bus):
    await put(provisioned_bus, 4)
    async with puller_of(provisioned_bus) as puller:
        acked, given_back, delayed, removed = await puller.pull(4)
        await acked.ack()
        await removed.term("bad body:\r\nnot a message")
        await given_back.nak()
        await delayed.nak(3600.0)
        again = await eventually(lambda: puller.pull(4))
        assert job_ids(again) == job_ids([given_back])
        assert again[0].deliveries == 2
        # The delayed one counts as in flight, so that it takes part in max_ack_pending.
        await eventually(lambda: depth_is(provisioned_bus, LaneDepth(ready=0, running=2)))
        assert await puller.pull(4) == []


async def depth_is(bus: Bus, wanted: LaneDepth) -> bool:
    return await depth(bus) == wanted


async def test_a_message_without_an_acknowledgement_comes_again_and_progress_holds_it_off(bus: Bus):
    waits = {Lane.PRIORITY: 3.0, Lane.DEFERRABLE: 3.0, Lane.BATCH: 0.5}
    await provision(bus, REGION, small_catalogue(), NatsSettings(), ack_wait_s=waits)
    held_id, dropped_id = await put(bus, 2)
    async with puller_of(bus) as puller:
        held, dropped = await puller.pull(2)
        seen: list[Delivery] = []
        while not seen:  # the dropped one returns while progress keeps the other away
            await held.progress()
            seen = await puller.pull(2)
        assert job_ids(seen) == job_ids([dropped]) == [dropped_id]
        assert held.job.record.job_id == held_id


async def test_a_body_that_is_no_job_is_told_when_it_is_looked_at(provisioned_bus: Bus):
    await provisioned_bus.store(subjects.ready(REGION, LANE, POOL, TENANT, "j"), b"\xff\xff")
    async with puller_of(provisioned_bus) as puller:
        (delivery,) = await puller.pull(1, wait_s=2.0)
        assert delivery.record_sequence == 0
        with pytest.raises(UnreadableMessage):
            _ = delivery.job


# --- answers that do not come, or come late ----------------------------------------------------------


async def test_messages_that_come_after_the_timeout_are_given_by_the_next_pull(
    nats_server: LocalNats, provisioned_bus: Bus
):
    put_ids = await put(provisioned_bus, 3)
    async with puller_of(provisioned_bus) as puller:
        nats_server.pause()
        pull = asyncio.ensure_future(puller.pull(3, timeout_s=0.2))
        await eventually(lambda: puller.trouble)
        nats_server.resume()
        got = await pull
        while len(got) < 3:
            got += await puller.pull(3)
        assert job_ids(got) == put_ids
        assert {d.deliveries for d in got} == {1}
        await eventually(lambda: depth_is(provisioned_bus, LaneDepth(ready=0, running=3)))


async def test_a_pull_that_was_given_up_claims_nothing_later(provisioned_bus: Bus):
    """With max_ack_pending reached the server holds a no_wait pull without a word."""
    await set_consumer(provisioned_bus, max_ack_pending=1)
    await put(provisioned_bus, 3)
    async with puller_of(provisioned_bus) as puller:
        (first,) = await puller.pull(1)
        assert await puller.pull(2, timeout_s=0.2) == []
        assert "max_ack_pending" in puller.trouble
        # Had the pull stayed, it would get the second job as soon as there is room, unknown to everybody.
        await eventually(lambda: none_waits(provisioned_bus))
        await first.ack()
        await eventually(lambda: depth_is(provisioned_bus, LaneDepth(ready=2, running=0)))
        assert len(await puller.pull(1)) == 1


async def test_what_came_does_not_wait_for_what_the_server_holds_back(provisioned_bus: Bus):
    await set_consumer(provisioned_bus, max_ack_pending=2)
    await put(provisioned_bus, 3)
    async with puller_of(provisioned_bus) as puller:
        got = await puller.pull(3, timeout_s=50.0)
        assert len(got) == 2
        assert "max_ack_pending" in puller.trouble
        for delivery in got:
            await delivery.ack()
        assert len(await eventually(lambda: puller.pull(3))) == 1
        assert await waiting_pulls(provisioned_bus) == 0


async def test_of_two_deliveries_of_one_message_the_newest_is_given(provisioned_bus: Bus):
    await put(provisioned_bus, 1)
    async with puller_of(provisioned_bus) as puller:
        (delivery,) = await puller.pull(1)
        # Late messages of an earlier pull: the same job twice in the buffer.
        await delivery.nak()
        again = await eventually(lambda: puller.pull(1))
        puller._arrived.extend([_as_message(delivery), _as_message(again[0])])
        (newest,) = await puller.pull(2)
        assert newest.deliveries == 2


def _as_message(delivery: Delivery):
    return delivery._bus.nc._build_message(
        0, delivery.subject.encode(), delivery._reply.encode(), delivery.data, dict(delivery.headers)
    )


async def test_a_consumer_that_is_deleted_ends_the_pull_and_one_made_again_serves(provisioned_bus: Bus, catalogue):
    async with puller_of(provisioned_bus) as puller:
        await provisioned_bus.api(f"CONSUMER.DELETE.{STREAM}.{CONSUMER}", {})
        assert await puller.pull(1, timeout_s=30.0) == []
        assert "provisioned" in puller.trouble
        await provision_region(provisioned_bus, catalogue)
        await put(provisioned_bus, 1)
        assert len(await puller.pull(1)) == 1
        assert puller.trouble == ""


async def test_a_consumer_deleted_under_an_open_pull_ends_it(provisioned_bus: Bus):
    await set_consumer(provisioned_bus, max_ack_pending=1)
    await put(provisioned_bus, 2)
    async with puller_of(provisioned_bus) as puller:
        await puller.pull(1)
        pull = asyncio.ensure_future(puller.pull(1, timeout_s=30.0))
        await eventually(lambda: waiting_pulls(provisioned_bus))
        await provisioned_bus.api(f"CONSUMER.DELETE.{STREAM}.{CONSUMER}", {})
        assert await pull == []
        assert "409" in puller.trouble
        assert "Consumer Deleted" in puller.trouble


async def none_waits(bus: Bus) -> bool:
    return await waiting_pulls(bus) == 0


async def waiting_pulls(bus: Bus) -> int:
    return (await bus.api(f"CONSUMER.INFO.{STREAM}.{CONSUMER}", {}))["num_waiting"]


# --- a pull that is held open --------------------------------------------------------------------------


async def test_a_held_pull_brings_the_next_message_and_says_so(provisioned_bus: Bus):
    async with puller_of(provisioned_bus) as puller:
        heard = asyncio.Event()
        puller.hold(60.0, heard.set)
        await eventually(lambda: waiting_pulls(provisioned_bus))
        assert puller.held
        put_ids = await send(provisioned_bus, 2)
        await heard.wait()
        assert job_ids(await puller.collect()) == put_ids[:1]
        await eventually(lambda: depth_is(provisioned_bus, LaneDepth(ready=1, running=1)))
        assert job_ids(await puller.pull(2)) == put_ids[1:]


async def test_a_held_pull_ends_empty_when_nothing_came(provisioned_bus: Bus):
    async with puller_of(provisioned_bus) as puller:
        heard = asyncio.Event()
        puller.hold(0.05, heard.set)
        await heard.wait()
        assert await puller.collect() == []
        assert puller.trouble == ""


async def test_a_held_pull_ends_with_the_connection(nats_server: LocalNats, provisioned_bus: Bus):
    async with puller_of(provisioned_bus) as puller:
        heard = asyncio.Event()
        puller.hold(60.0, heard.set)
        await eventually(lambda: waiting_pulls(provisioned_bus))
        await nats_server.kill()
        await heard.wait()
        assert await puller.collect() == []
        assert "connection" in puller.trouble


async def test_a_held_pull_that_is_never_answered_is_taken_off_the_server(
    provisioned_bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(puller_module, "PULL_TIMEOUT_S", 0.1 - 60.0)  # our patience ends before the server's
    async with puller_of(provisioned_bus) as puller:
        heard = asyncio.Event()
        puller.hold(60.0, heard.set)
        await heard.wait()
        assert await puller.collect() == []
        assert "max_ack_pending" in puller.trouble
        await put(provisioned_bus, 1)
        assert len(await puller.pull(1)) == 1  # it did not go to the pull that nobody waits for


# --- the server dies ---------------------------------------------------------------------------------


async def test_a_lost_connection_ends_an_open_pull_at_once(nats_server: LocalNats, provisioned_bus: Bus):
    async with puller_of(provisioned_bus) as puller:
        nats_server.pause()
        pull = asyncio.ensure_future(puller.pull(1, timeout_s=50.0))
        await eventually(lambda: puller._current)
        await nats_server.kill()
        assert await pull == []
        assert "connection" in puller.trouble
        await eventually(lambda: not provisioned_bus.connected)
        assert await puller.pull(1, timeout_s=50.0) == []


async def test_twenty_workers_pull_again_after_a_kill_and_no_job_is_lost(nats_server: LocalNats):
    async with connected(nats_server, "door") as door:
        waits = {Lane.PRIORITY: 1.0, Lane.DEFERRABLE: 1.0, Lane.BATCH: 1.0}
        await provision(door, REGION, small_catalogue(), NatsSettings(), ack_wait_s=waits)
        wanted = set(await put(door, 30))
        done: set[str] = set()
        connected_workers = set[int]()
        arrived, all_put = asyncio.Event(), asyncio.Event()

        async def work(number: int) -> None:
            async with connected(nats_server, f"w{number}") as bus, puller_of(bus) as puller:
                connected_workers.add(number)
                while not all_put.is_set() or done != wanted:
                    for delivery in await puller.pull(1):
                        done.add(delivery.job.record.job_id)
                        await delivery.ack()
                    if len(done) >= 10 and len(connected_workers) == 20:  # who is about to connect would fail
                        arrived.set()
                    await asyncio.sleep(0.01)

        async with asyncio.timeout(40), asyncio.TaskGroup() as workers:
            for number in range(20):
                workers.create_task(work(number))
            await arrived.wait()
            await nats_server.kill()
            await nats_server.start()
            await door.wait_connected(10.0)
            wanted |= set(await send(door, 30))
            all_put.set()
        assert done == wanted


# --- closing, and the bell ---------------------------------------------------------------------------


async def test_closing_gives_back_what_was_not_taken_and_leaves_no_subscription(provisioned_bus: Bus):
    await put(provisioned_bus, 1)
    before = len(provisioned_bus.nc._subs)
    puller = puller_of(provisioned_bus)
    await puller.start()
    (delivery,) = await puller.pull(1)
    puller._arrived.append(_as_message(delivery))
    await puller.close()
    await puller.close()
    assert len(provisioned_bus.nc._subs) == before
    with pytest.raises(RuntimeError):
        await puller.pull(1)
    async with puller_of(provisioned_bus) as second:
        (again,) = await eventually(lambda: second.pull(1))
        assert again.deliveries == 2


async def test_the_bell_rings_for_its_own_pool_in_any_lane(bus: Bus):
    catalogue = small_catalogue(pools=(POOL, "other"))
    await provision_region(bus, catalogue)
    lanes = LaneStore(bus, REGION)
    async with Bell(bus, REGION, POOL) as bell, Bell(bus, REGION, "other") as other:
        for lane in Lane:
            bell.ring.clear()
            await lanes.put_ready(make_job(make_record(lane=lane)), 1)
            await bell.ring.wait()
        assert not other.ring.is_set()


async def test_the_bell_rings_after_a_reconnect(nats_server: LocalNats, provisioned_bus: Bus):
    async with Bell(provisioned_bus, REGION, POOL) as bell:
        await nats_server.restart()
        await bell.ring.wait()


async def test_homes_and_pools_do_not_see_each_others_jobs(bus: Bus):
    catalogue: Catalogue = small_catalogue(pools=(POOL, "other"))
    await provision_region(bus, catalogue)
    await put(bus, 1)
    async with LanePuller(bus, REGION, LANE, "other") as other, puller_of(bus) as mine:
        assert await other.pull(1) == []
        assert len(await mine.pull(1)) == 1
