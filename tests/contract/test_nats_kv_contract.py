"""What we rely on of NATS for keys, leases, plans, core messages and provisioning: both servers alike."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from laneway.core import subjects
from laneway.core.fleet import LEASE_S, Plan, WorkerLease, WorkerState
from laneway.runtime.bus import NoAnswer, NoStream, NotConnected, PayloadTooLarge, WrongSequence
from laneway.runtime.kv import Key
from laneway.runtime.leases import LeaseKeeper, LeaseWatcher
from laneway.runtime.plans import NewerPlan, PlanPublisher, PlanView
from laneway.runtime.provision import ProvisionError
from laneway.runtime.reading import subject_list
from tests.contract.nats_twins import Twins, twins_of
from tests.support.nats import POOL, REGION, eventually, provision_region, small_catalogue

BUCKET = subjects.leader_bucket(REGION)


@pytest.fixture(
    params=[pytest.param("real", marks=pytest.mark.wire), pytest.param("memory", marks=pytest.mark.looptime)]
)
def twins(request: pytest.FixtureRequest, tmp_path: Path) -> Twins:
    return twins_of(request.param, tmp_path)


def lease_of(worker_id: str) -> WorkerLease:
    return WorkerLease(worker_id=worker_id, name=worker_id, pool=POOL, engine="simulated", state=WorkerState.READY)


def plan_of(epoch: int, version: int) -> Plan:
    return Plan(REGION, epoch=epoch, version=version, made_s=1.0, valid_until_s=4.0)


# --- keys ------------------------------------------------------------------------------------------------


async def test_a_key_is_written_by_who_knows_what_it_holds(twins: Twins):
    async with twins() as twin:
        key = Key(twin.bus, BUCKET, "leader")
        assert (await key.read()).sequence == 0
        first = await key.write(b"a", 0)
        for stale in (0, first + 1):
            with pytest.raises(WrongSequence):
                await key.write(b"b", stale)
        second = await key.write(b"b", first)
        value = await key.read()
        assert (value.data, value.sequence) == (b"b", second)


async def test_edits_at_once_all_take_place(twins: Twins):
    async with twins() as twin:
        keys = [Key(await twin.connect(f"c{n}"), BUCKET, "lanes") for n in range(4)]
        await asyncio.gather(*(key.change(lambda data: data + b"+") for key in keys))
        assert (await keys[0].read()).data == b"++++"


async def test_who_watches_a_key_is_told_of_each_write(twins: Twins):
    async with twins() as twin:
        seen: list[bytes] = []
        key, other = Key(twin.bus, BUCKET, "leader"), Key(twin.bus, BUCKET, "another")
        async with key.watch(seen.append):
            await other.write(b"x", 0)
            await key.write(b"b", await key.write(b"a", 0))
            await twin.bus.flush()
            assert seen == [b"a", b"b"]
        await key.write(b"c", 3)
        await twin.bus.flush()
        assert seen == [b"a", b"b"]


# --- leases and plans ------------------------------------------------------------------------------------


async def test_a_lease_is_heard_read_and_released(twins: Twins):
    async with twins() as twin:
        early, late = (LeaseWatcher(twin.bus, REGION, twin.clock) for _ in range(2))
        await early.start()
        keeper = LeaseKeeper(twin.bus, REGION, lambda: lease_of("w"), twin.clock)
        await keeper.renew()
        assert keeper.held()
        await late.start()
        await eventually(lambda: early.alive("w") and late.alive("w"))
        assert early.live() == late.live() == [lease_of("w")]
        await keeper.release()
        await eventually(lambda: early.live() == late.live() == [])
        await early.close()
        await late.close()


@pytest.mark.slow
async def test_a_lease_that_is_not_renewed_is_gone_from_the_bucket(twins: Twins):
    async with twins() as twin:
        bucket = subjects.workers_bucket(REGION)
        watcher = LeaseWatcher(twin.bus, REGION, twin.clock)
        await watcher.start()
        await LeaseKeeper(twin.bus, REGION, lambda: lease_of("w"), twin.clock).renew()
        await eventually(lambda: watcher.alive("w"))
        heard_s = twin.clock.monotonic()

        async def gone() -> bool:
            return not await subject_list(twin.bus, f"KV_{bucket}", f"$KV.{bucket}.>")

        assert not await gone()
        await eventually(gone)
        await eventually(lambda: watcher.alive("w") is False)
        assert twin.clock.monotonic() - heard_s >= LEASE_S - 0.1
        await watcher.close()


async def test_the_newest_plan_is_read_and_heard_and_an_older_one_is_refused(twins: Twins):
    async with twins() as twin:
        publisher, seen = PlanPublisher(twin.bus, REGION), list[Plan]()
        await publisher.publish(plan_of(2, 1))
        view = PlanView(twin.bus, REGION, twin.clock, seen.append)
        await view.start()
        assert view.plan == plan_of(2, 1)
        assert view.fresh()
        await publisher.publish(plan_of(2, 2))
        await eventually(lambda: view.plan == plan_of(2, 2))
        deposed = PlanPublisher(await twin.connect("deposed"), REGION)
        with pytest.raises(NewerPlan):
            await deposed.publish(plan_of(1, 9))
        assert seen == [plan_of(2, 1), plan_of(2, 2)]
        await view.close()


# --- core messages ---------------------------------------------------------------------------------------


async def test_of_a_queue_group_one_hears_each_message_and_all_others_hear_all(twins: Twins):
    async with twins() as twin:
        other, heard = await twin.connect("other"), Counter[str]()
        await twin.bus.listen("ctl.*", lambda msg: heard.update("a"), "q")
        await other.listen("ctl.*", lambda msg: heard.update("b"), "q")
        await other.listen("ctl.*", lambda msg: heard.update(["all"]))
        for _ in range(20):
            await twin.bus.emit("ctl.x", b"")
        await twin.bus.emit("ctl.x.y", b"")
        await twin.bus.flush()
        await other.flush()
        assert heard["a"] + heard["b"] == heard["all"] == 20


async def test_messages_of_one_connection_come_in_order_and_to_callbacks_too(twins: Twins):
    async with twins() as twin:
        plain, tasks = list[bytes](), list[bytes]()

        async def callback(msg) -> None:
            tasks.append(msg.data)

        await twin.bus.listen("tok.door", lambda msg: plain.append(msg.data))
        subscription = await twin.bus.subscribe("tok.>", callback)
        sent = [b"%d" % n for n in range(50)]
        for data in sent:
            twin.bus.post("tok.door", data)
        await eventually(lambda: plain == tasks == sent)
        await twin.bus.drain(subscription, 1.0)
        twin.bus.post("tok.door", b"last")
        await twin.bus.flush()
        assert (plain, tasks) == ([*sent, b"last"], sent)


async def test_a_request_is_answered_or_says_why_not(twins: Twins):
    async with twins() as twin:
        other = await twin.connect("other")

        def answer(msg) -> None:
            other.nc.post(msg.reply, msg.data * 2, headers={"Own": "header"})

        await other.listen("ctl.ask", answer)
        await other.listen("ctl.silent", lambda msg: None)
        msg = await twin.bus.request("ctl.ask", b"ab")
        assert (msg.data, (msg.headers or {})["Own"]) == (b"abab", "header")
        with pytest.raises(NoStream):
            await twin.bus.request("ctl.nobody", b"")
        with pytest.raises(NoAnswer):
            await twin.bus.request("ctl.silent", b"", timeout_s=0.05)


async def test_what_is_too_large_is_not_sent(twins: Twins):
    async with twins() as twin:
        most = twin.bus.payload_bytes_max
        assert most == 1024 * 1024 - 4096
        await twin.bus.emit("x", b"x" * most)
        for headers in (None, {"A": "b"}):
            with pytest.raises(PayloadTooLarge):
                await twin.bus.emit("x", b"x" * (most - len(headers or ()) + (headers is None)), headers)


async def test_the_clocks_agree(twins: Twins):
    async with twins() as twin:
        assert abs(await twin.bus.server_time_s() - twin.clock.now()) < 1.0


async def test_a_lost_connection_is_told_and_subscriptions_come_back(twins: Twins):
    async with twins() as twin:
        told, heard = list[str](), list[bytes]()
        twin.bus.on_disconnect(lambda: told.append("lost"))
        twin.bus.on_reconnect(lambda: told.append("back"))
        await twin.bus.listen("ev.x", lambda msg: heard.append(msg.data))
        await twin.bus.listen("ctl.silent", lambda msg: None)
        request = asyncio.ensure_future(twin.bus.request("ctl.silent", b"", timeout_s=30.0))
        await twin.bus.flush()
        await twin.kill()
        await eventually(lambda: told == ["lost"])
        with pytest.raises(NoAnswer, match="connection"):
            await request
        with pytest.raises(NotConnected):
            twin.bus.post("ev.x", b"not sent")
        with pytest.raises(NotConnected):
            await twin.bus.store("ev.x", b"", timeout_s=0.05)
        await twin.start()
        await eventually(lambda: told == ["lost", "back"])
        twin.bus.post("ev.x", b"sent")
        await eventually(lambda: heard == [b"sent"])


# --- provisioning ----------------------------------------------------------------------------------------


async def test_provisioning_twice_changes_nothing_and_a_change_takes_hold(twins: Twins):
    async with twins() as twin:
        catalogue = small_catalogue()
        await provision_region(twin.bus, catalogue)  # other ack waits
        assert await provision_region(twin.bus, catalogue) == []
        wider = small_catalogue(queue_length=9)
        (change,) = await provision_region(twin.bus, wider)
        assert "max_msgs 16 -> 17" in change
        with pytest.raises(ProvisionError, match="max_bytes"):
            await provision_region(twin.bus, wider, checkpoints_bytes_max=1024)
