"""Leases: who is alive, who is dead, and who cannot be judged."""

import asyncio

import pytest

from laneway.core import subjects
from laneway.core.clock import ManualClock
from laneway.core.fleet import LEASE_S, WorkerLease, WorkerState
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.clock import SystemClock
from laneway.runtime.leases import LeaseKeeper, LeaseWatcher
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.reading import subject_list
from tests.support.nats import POOL, REGION, connected, eventually

pytestmark = pytest.mark.wire


def lease_of(worker_id: str) -> WorkerLease:
    return WorkerLease(worker_id=worker_id, name=worker_id, pool=POOL, engine="simulated", state=WorkerState.READY)


def keeper_of(bus: Bus, worker_id: str, clock: ManualClock) -> LeaseKeeper:
    return LeaseKeeper(bus, REGION, lambda: lease_of(worker_id), clock)


async def keys(bus: Bus) -> list[str]:
    bucket = subjects.workers_bucket(REGION)
    return await subject_list(bus, f"KV_{bucket}", f"$KV.{bucket}.>")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def watcher(provisioned_bus: Bus, clock: ManualClock):
    watcher = LeaseWatcher(provisioned_bus, REGION, clock)
    await watcher.start()
    yield watcher
    await watcher.close()


async def test_a_worker_is_alive_until_it_was_silent_for_a_lease(
    provisioned_bus: Bus, clock: ManualClock, watcher: LeaseWatcher
):
    keeper = keeper_of(provisioned_bus, "w", clock)
    assert not keeper.held()
    await keeper.renew()
    await eventually(lambda: watcher.alive("w"))
    assert watcher.live() == [lease_of("w")]
    clock.advance(LEASE_S - 0.01)
    assert (watcher.alive("w"), keeper.held()) == (True, True)
    await keeper.renew()
    await provisioned_bus.flush()
    clock.advance(LEASE_S - 0.01)
    assert (watcher.alive("w"), keeper.held()) == (True, True)
    clock.advance(0.02)
    assert (watcher.alive("w"), keeper.held()) == (False, False)
    assert watcher.live() == []


async def test_a_watcher_that_just_started_cannot_call_anybody_dead(clock: ManualClock, watcher: LeaseWatcher):
    assert watcher.alive("unknown") is None
    clock.advance(LEASE_S - 0.01)
    assert watcher.alive("unknown") is None
    clock.advance(0.02)
    assert watcher.alive("unknown") is False


async def test_a_watcher_reads_the_leases_that_are_there(provisioned_bus: Bus, clock: ManualClock):
    for worker_id in ("w1", "w2"):
        await keeper_of(provisioned_bus, worker_id, clock).renew()
    watcher = LeaseWatcher(provisioned_bus, REGION, clock)
    await watcher.start()
    assert {lease.worker_id for lease in watcher.live()} == {"w1", "w2"}
    await watcher.close()


async def test_a_released_lease_ends_at_once(provisioned_bus: Bus, clock: ManualClock, watcher: LeaseWatcher):
    keeper = keeper_of(provisioned_bus, "w", clock)
    await keeper.renew()
    await eventually(lambda: watcher.alive("w"))
    clock.advance(LEASE_S)
    await keeper.renew()
    await keeper.release()
    await eventually(lambda: watcher.alive("w") is False)
    assert not keeper.held()


async def test_the_bucket_holds_the_living_only(provisioned_bus: Bus, clock: ManualClock):
    await keeper_of(provisioned_bus, "w", clock).renew()
    assert len(await keys(provisioned_bus)) == 1

    async def empty() -> bool:
        return await keys(provisioned_bus) == []

    await eventually(empty)


async def test_an_outage_of_ones_own_connection_makes_nobody_dead(
    nats_server: LocalNats, provisioned_bus: Bus, clock: ManualClock, watcher: LeaseWatcher
):
    clock.advance(LEASE_S)
    await keeper_of(provisioned_bus, "w", clock).renew()
    await eventually(lambda: watcher.alive("w"))
    await nats_server.kill()
    await eventually(lambda: not provisioned_bus.connected)
    clock.advance(100.0)
    assert watcher.alive("w") is None
    assert watcher.live() == [lease_of("w")]
    await nats_server.start()
    await provisioned_bus.wait_connected(10.0)
    assert watcher.alive("w") is None
    clock.advance(LEASE_S - 0.01)
    assert watcher.alive("w") is None
    clock.advance(0.02)
    await eventually(lambda: watcher.alive("w") is False)


async def test_a_stopped_server_that_still_looks_connected_makes_nobody_dead(
    nats_server: LocalNats, provisioned_bus: Bus, clock: ManualClock, watcher: LeaseWatcher
):
    await keeper_of(provisioned_bus, "w", clock).renew()
    await eventually(lambda: watcher.alive("w"))
    nats_server.pause()
    try:
        await eventually(lambda: not watcher._link.sound())
        assert provisioned_bus.connected
        clock.advance(100.0)
        assert watcher.alive("w") is None
    finally:
        nats_server.resume()
    await eventually(watcher._link.sound)
    assert watcher.alive("w") is None  # it has a whole lease from now to be heard
    clock.advance(LEASE_S)
    assert watcher.alive("w") is False


async def test_a_keeper_that_cannot_renew_loses_its_lease_and_gets_it_back(
    nats_server: LocalNats, provisioned_bus: Bus, clock: ManualClock
):
    keeper = keeper_of(provisioned_bus, "w", clock)
    await keeper.renew()
    await nats_server.kill()
    await eventually(lambda: not provisioned_bus.connected)
    with pytest.raises(BusError):
        await keeper.renew()
    clock.advance(LEASE_S)
    assert not keeper.held()
    await nats_server.start()
    await provisioned_bus.wait_connected(10.0)
    await keeper.renew()
    assert keeper.held()


async def test_a_running_keeper_renews_through_a_restart(nats_server: LocalNats, catalogue, provisioned_bus: Bus):
    clock = SystemClock()
    async with connected(nats_server, "worker") as worker, asyncio.TaskGroup() as tasks:
        keeper = LeaseKeeper(worker, REGION, lambda: lease_of("w"), clock)
        task = tasks.create_task(keeper.run())
        await eventually(keeper.held)
        await nats_server.restart()
        await worker.wait_connected(10.0)
        before = keeper._renewed_s
        await eventually(lambda: keeper._renewed_s != before)
        assert keeper.held()
        task.cancel()


async def test_a_lease_that_cannot_be_read_counts_as_a_sign_of_life(
    provisioned_bus: Bus, clock: ManualClock, watcher: LeaseWatcher
):
    clock.advance(LEASE_S)
    await provisioned_bus.store(subjects.kv_subject(subjects.workers_bucket(REGION), "new"), b"\xff\xff")
    await eventually(lambda: watcher.alive("new"))
    assert watcher.live() == []
