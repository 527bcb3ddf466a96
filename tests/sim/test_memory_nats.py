"""The NATS in memory: what simulations need beyond what it shares with the real one. Faults of the wire, and time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from laneway.core import subjects
from laneway.core.clock import ManualClock
from laneway.core.lanes import Lane
from laneway.runtime.bus import PublishUnknown
from laneway.runtime.lanes import LaneDepth, LaneStore
from laneway.runtime.provision import provision
from laneway.runtime.puller import LanePuller
from laneway.runtime.records import RecordExists, RecordStore
from laneway.runtime.settings import NatsSettings
from tests.sim.memory_nats import LoopClock, MemoryBus, MemoryNats
from tests.support.nats import POOL, REGION, TENANT, eventually, make_record, provision_region, small_catalogue

LANE = Lane.BATCH


@asynccontextmanager
async def region(ack_wait_s: float = 10.0) -> AsyncIterator[tuple[MemoryNats, MemoryBus]]:
    clock = LoopClock()
    server = MemoryNats(clock)
    driver = server.drive()
    bus = await MemoryBus.to(server, clock)
    await provision(bus, REGION, small_catalogue(), NatsSettings(), ack_wait_s=dict.fromkeys(Lane, ack_wait_s))
    yield server, bus
    await bus.close()
    driver.close()


def ready_of(job: str) -> str:
    return subjects.ready(REGION, LANE, POOL, TENANT, job)


async def depth(bus: MemoryBus) -> LaneDepth:
    return await LaneStore(bus, REGION).depths(LANE, POOL)


# --- time ------------------------------------------------------------------------------------------------


async def test_an_owner_without_a_loops_clock_moves_time_itself():
    clock = ManualClock()
    server = MemoryNats(clock)
    bus = await MemoryBus.to(server, clock)
    await provision_region(bus, small_catalogue())
    await bus.store(subjects.record(REGION, TENANT, "short"), b"", {"Nats-TTL": "60s"})
    await bus.store(subjects.record(REGION, TENANT, "long"), b"", {"Nats-TTL": "3600s"})
    assert server.timers.next_s() == clock.now() + 60.0
    clock.advance(59.9)
    assert server.run_due() == 0
    clock.advance(0.1)
    assert server.run_due() == 1
    assert await RecordStore(bus, clock=clock).list_ids(REGION, TENANT) == ["long"]
    await bus.close()


@pytest.mark.looptime
async def test_who_follows_an_idle_stream_for_an_hour_keeps_its_consumer():
    async with region() as (server, bus):
        records = RecordStore(bus, clock=LoopClock())
        async with records.follow(REGION, TENANT) as followed:
            waiting = asyncio.ensure_future(anext(followed))
            (consumer,) = server.streams[subjects.jobs_stream(REGION)].consumers
            await asyncio.sleep(3600.0)
            assert list(server.streams[subjects.jobs_stream(REGION)].consumers) == [consumer]
            record = make_record()
            await records.create(record)
            assert (await waiting).record == record


@pytest.mark.looptime
async def test_the_consumer_of_a_follower_that_is_gone_is_removed():
    async with region() as (server, _):
        other = await MemoryBus.to(server, LoopClock())
        async with RecordStore(other).follow(REGION, TENANT):
            other.nc.cut()
            await asyncio.sleep(60.0)
            assert server.streams[subjects.jobs_stream(REGION)].consumers == {}
            other.nc.mend()
            await asyncio.sleep(1.0)
        await other.close()


@pytest.mark.looptime
async def test_two_thousand_jobs_parked_for_one_second_are_each_delivered_once():
    async with region() as (_, bus):
        lanes, clock = LaneStore(bus, REGION), LoopClock()
        stamp = "@at 2027-01-15T09:00:00Z"  # an hour after the clock's origin
        for n in range(2000):
            park = f"park.{REGION}.{LANE.value}.{POOL}.{TENANT}.0.0.1.abcdefghij.j{n}"
            await bus.store(park, b"x", {"Nats-Schedule": stamp, "Nats-Schedule-Target": ready_of(f"j{n}")})
        assert len(await lanes.parked(LANE)) == 2000
        await asyncio.sleep(3601.0 - asyncio.get_running_loop().time())
        assert clock.now() >= 1_800_003_600.0
        seen: list[str] = []
        async with LanePuller(bus, REGION, LANE, POOL) as puller:
            while got := await puller.pull(100):
                seen += [delivery.subject for delivery in got]
                for delivery in got:
                    await delivery.ack()
        assert sorted(seen) == sorted(ready_of(f"j{n}") for n in range(2000))
        await bus.flush()
        assert await depth(bus) == LaneDepth(0, 0)


# --- faults ----------------------------------------------------------------------------------------------


def but_acknowledgements(command: str, subject: str = "", *rest: Any) -> int:
    return 0 if command == "PUB" and subject.startswith("$JS.ACK.") else 1


def once(*frame: Any) -> int:
    return 1


def never(*frame: Any) -> int:
    return 0


def twice(*frame: Any) -> int:
    return 2


@pytest.mark.looptime
async def test_a_lost_acknowledgement_means_a_redelivery_after_the_ack_wait():
    async with region(ack_wait_s=10.0) as (_, bus), LanePuller(bus, REGION, LANE, POOL) as puller:
        await bus.store(ready_of("a"), b"")
        (first,) = await puller.pull(1)
        bus.nc.to_server.copies = but_acknowledgements
        await first.ack()
        began_s = asyncio.get_running_loop().time()
        (again,) = await puller.pull(1, wait_s=60.0)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(10.0, abs=0.1)
        assert again.deliveries == 2
        bus.nc.to_server.copies = once
        await again.ack()
        await bus.flush()
        assert await depth(bus) == LaneDepth(0, 0)


@pytest.mark.looptime
async def test_a_lost_answer_leaves_what_was_stored():
    async with region() as (server, _):
        other = await MemoryBus.to(server, LoopClock(), request_timeout_s=1.0)
        records, record = RecordStore(other), make_record()
        other.nc.to_client.copies = never
        with pytest.raises(PublishUnknown):
            await records.create(record)
        other.nc.to_client.copies = once
        with pytest.raises(RecordExists):
            await records.create(record)
        await other.close()


@pytest.mark.looptime
async def test_a_job_that_is_published_twice_is_stored_once():
    async with region() as (_, bus):
        bus.nc.to_server.copies = twice
        await bus.store(ready_of("a"), b"", {"Nats-Msg-Id": "a:1:ready"})
        record = make_record()
        await RecordStore(bus).create(record)
        bus.nc.to_server.copies = once
        assert await depth(bus) == LaneDepth(ready=1, running=0)
        stored = await RecordStore(bus).get(REGION, TENANT, record.job_id)
        assert stored is not None
        assert stored.sequence == 1


@pytest.mark.looptime
async def test_a_partition_holds_what_is_sent_and_ends_in_order():
    async with region() as (server, bus):
        other, heard = await MemoryBus.to(server, LoopClock()), list[bytes]()
        await bus.listen("ctl.x", lambda msg: heard.append(msg.data))
        other.nc.to_server.hold()
        for n in range(5):
            other.post("ctl.x", b"%d" % n)
        await asyncio.sleep(60.0)
        assert heard == []
        other.nc.to_server.free()
        await eventually(lambda: len(heard) == 5)
        assert heard == [b"0", b"1", b"2", b"3", b"4"]
        await other.close()


@pytest.mark.looptime
async def test_a_slow_wire_keeps_the_order():
    async with region() as (_, bus):
        heard: list[tuple[float, bytes]] = []
        loop = asyncio.get_running_loop()
        await bus.listen("ctl.x", lambda msg: heard.append((loop.time() - began_s, msg.data)))
        began_s, delays = loop.time(), iter([0.5, 0.1, 0.9])
        bus.nc.to_server.delay_s = lambda: next(delays, 0.0)
        for n in range(3):
            bus.post("ctl.x", b"%d" % n)
        await eventually(lambda: len(heard) == 3)
        assert [data for _, data in heard] == [b"0", b"1", b"2"]
        assert [at_s for at_s, _ in heard] == pytest.approx([0.5, 0.5, 0.9], abs=0.05)


@pytest.mark.looptime
async def test_a_kill_may_take_the_knowledge_of_the_last_deliveries():
    async with region(ack_wait_s=3600.0) as (server, bus), LanePuller(bus, REGION, LANE, POOL) as puller:
        for job in "ab":
            await bus.store(ready_of(job), b"")
        await puller.pull(1)
        await asyncio.sleep(1.0)
        await puller.pull(1)
        server.kill(unsaved_s=0.5)
        await asyncio.sleep(0.1)
        server.start()
        await bus.wait_connected(1.0)
        assert await depth(bus) == LaneDepth(ready=1, running=1)
        (again,) = await puller.pull(2)
        assert (again.subject, again.deliveries) == (ready_of("b"), 1)


@pytest.mark.looptime
async def test_one_connection_is_lost_without_the_others():
    async with region() as (server, bus):
        other, heard = await MemoryBus.to(server, LoopClock()), list[bytes]()
        await other.listen("ctl.x", lambda msg: heard.append(msg.data))
        other.nc.cut()
        await eventually(lambda: not other._up.is_set())
        assert (bus.connected, other.connected) == (True, False)
        bus.post("ctl.x", b"unheard")
        await bus.flush()
        other.nc.mend()
        await other.wait_connected(1.0)
        await other.flush()
        bus.post("ctl.x", b"heard")
        await eventually(lambda: heard == [b"heard"])
        await other.close()


@pytest.mark.looptime
async def test_after_a_leader_that_died_what_healthy_owners_hold_is_given_out_again():
    """More than a leader that steps down does, and what one may do that knew less: redelivery is not death."""
    async with region(ack_wait_s=60.0) as (server, bus), LanePuller(bus, REGION, LANE, POOL) as puller:
        await bus.store(ready_of("a"), b"a")
        (held,) = await puller.pull(1)
        await held.progress()
        await bus.flush()
        server.change_leaders()
        (again,) = await puller.pull(1)
        assert (again.data, again.deliveries) == (b"a", 2)
        await held.ack()
        await bus.flush()
        assert await depth(bus) == LaneDepth(0, 0)
