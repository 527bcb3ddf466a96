"""Plans: the newest one wins, whoever publishes last."""

import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.clock import ManualClock
from laneway.core.fleet import Demand, LanePlan, Plan, PoolPlan, TenantDepth
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus
from laneway.runtime.clock import SystemClock
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.plans import NewerPlan, PlanPublisher, PlanTooLarge, PlanView
from laneway.runtime.reading import last_message
from laneway.runtime.wire.plans import decode_plan
from tests.support.nats import REGION, connected, eventually

pytestmark = pytest.mark.wire


def plan_of(epoch: int, version: int, made_s: float = 1.0, valid_until_s: float = 100.0) -> Plan:
    return Plan(REGION, epoch=epoch, version=version, made_s=made_s, valid_until_s=valid_until_s)


def has(view: PlanView, plan: Plan):
    return lambda: view.plan == plan


async def test_a_view_starts_with_the_stored_plan_and_follows(provisioned_bus: Bus):
    publisher = PlanPublisher(provisioned_bus, REGION)
    early = PlanView(provisioned_bus, REGION, SystemClock())
    await early.start()
    assert early.plan is None
    assert not early.fresh()
    await publisher.publish(plan_of(1, 1))
    seen: list[Plan] = []
    late = PlanView(provisioned_bus, REGION, SystemClock(), seen.append)
    await late.start()
    await publisher.publish(plan_of(1, 2))
    for view in (early, late):
        await eventually(has(view, plan_of(1, 2)))
    assert seen == [plan_of(1, 1), plan_of(1, 2)]
    await early.close()
    await late.close()


async def test_a_plan_that_is_too_large_is_published_without_its_details(provisioned_bus: Bus):
    """A region that has no plan takes no work, and a scheduler that ends for it leads no more."""
    curve = tuple(Demand(1e9 + i, float(i)) for i in range(60_000))
    pool = PoolPlan("p", workers=1, lanes=(LanePlan(Lane.BATCH, parked=1, parked_device_s=5.0, demand=curve),))
    publisher, seen = PlanPublisher(provisioned_bus, REGION), list[Plan]()
    view = PlanView(provisioned_bus, REGION, SystemClock(), seen.append)
    await view.start()
    await publisher.publish(replace(plan_of(1, 1), pools=(pool,)))
    await eventually(lambda: bool(seen))
    assert seen[0].pool("p").lane(Lane.BATCH) == LanePlan(Lane.BATCH, parked=1, parked_device_s=5.0)
    names = tuple(TenantDepth(f"t{i:040}", Lane.BATCH, 5) for i in range(30_000))
    with pytest.raises(PlanTooLarge):
        await publisher.publish(replace(plan_of(1, 2), tenants=names))
    await publisher.publish(plan_of(1, 3))
    await eventually(lambda: seen[-1] == plan_of(1, 3))
    await view.close()


async def test_a_lower_epoch_or_an_older_version_is_ignored(provisioned_bus: Bus):
    publisher = PlanPublisher(provisioned_bus, REGION)
    seen: list[Plan] = []
    view = PlanView(provisioned_bus, REGION, SystemClock(), seen.append)
    await view.start()
    order = [plan_of(2, 5), plan_of(1, 99), plan_of(2, 4), plan_of(2, 5), plan_of(3, 1)]
    for plan in order:
        await publisher.publish(plan)
    await eventually(lambda: view.plan == plan_of(3, 1))
    assert seen == [plan_of(2, 5), plan_of(3, 1)]
    await view.close()


@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 3600.0])
async def test_a_plan_is_fresh_for_its_time_from_when_it_was_heard_whatever_the_clocks_say(
    provisioned_bus: Bus, skew_s: float
):
    clock = ManualClock()
    view = PlanView(provisioned_bus, REGION, clock)
    await view.start()
    made_s = clock.now() + skew_s
    await PlanPublisher(provisioned_bus, REGION).publish(plan_of(1, 1, made_s=made_s, valid_until_s=made_s + 3.0))
    await eventually(view.fresh)
    clock.advance(2.9)
    assert view.fresh()
    clock.advance(0.2)
    assert not view.fresh()
    await view.close()


async def test_a_plan_that_was_read_is_as_old_as_it_was_stored(provisioned_bus: Bus, monkeypatch: pytest.MonkeyPatch):
    """Its scheduler may be long gone."""
    publisher = PlanPublisher(provisioned_bus, REGION)
    await publisher.publish(plan_of(1, 1))

    async def newcomer(after_s: float = 0.0) -> PlanView:
        async def later(bus: Bus) -> float:
            return SystemClock().now() + after_s

        monkeypatch.setattr(Bus, "server_time_s", later)
        view = PlanView(provisioned_bus, REGION, ManualClock(elapsed_s=5000.0))
        await view.start()
        assert view.plan == plan_of(1, 1)
        return view

    early, late = await newcomer(), await newcomer(after_s=200.0)
    assert early.fresh()
    assert not late.fresh()
    await publisher.publish(plan_of(1, 1))
    await eventually(late.fresh)
    for view in (early, late):
        await view.close()


async def test_a_deposed_scheduler_keeps_no_plan_fresh(provisioned_bus: Bus):
    clock, publisher = ManualClock(), PlanPublisher(provisioned_bus, REGION)
    view = PlanView(provisioned_bus, REGION, clock)
    await view.start()
    await publisher.publish(plan_of(2, 1))
    await eventually(view.fresh)
    clock.advance(100.0)
    await publisher.publish(plan_of(1, 9))
    await publisher.publish(plan_of(2, 0))
    await provisioned_bus.nc.flush()
    assert view.plan == plan_of(2, 1)
    assert not view.fresh()
    await view.close()


async def test_a_deposed_scheduler_stores_no_plan_over_a_newer_one(provisioned_bus: Bus):
    """It may have been stopped in the middle of its publish; whoever reads the store then must not go back."""
    old, new = PlanPublisher(provisioned_bus, REGION), PlanPublisher(provisioned_bus, REGION)
    await old.publish(plan_of(1, 7))
    await new.publish(plan_of(2, 1))
    for _ in range(2):
        with pytest.raises(NewerPlan, match="epoch 2 is stored"):
            await old.publish(plan_of(1, 8))
    view = PlanView(provisioned_bus, REGION, SystemClock())
    await view.start()
    assert view.plan == plan_of(2, 1)
    await new.publish(plan_of(2, 2))
    await eventually(has(view, plan_of(2, 2)))
    await view.close()


async def test_a_publish_goes_on_after_one_whose_outcome_was_unknown(provisioned_bus: Bus):
    publisher = PlanPublisher(provisioned_bus, REGION)
    await publisher.publish(plan_of(1, 1))
    await PlanPublisher(provisioned_bus, REGION).publish(plan_of(1, 2))  # as its own, whose answer was lost
    await publisher.publish(plan_of(1, 3))
    found = await last_message(provisioned_bus, f"KV_{subjects.plan_bucket(REGION)}", subjects.plan_changes(REGION))
    assert found is not None
    assert decode_plan(found.data) == plan_of(1, 3)


async def test_what_is_no_plan_changes_nothing(provisioned_bus: Bus):
    publisher = PlanPublisher(provisioned_bus, REGION)
    view = PlanView(provisioned_bus, REGION, SystemClock())
    await view.start()
    await publisher.publish(plan_of(1, 1))
    await provisioned_bus.store(subjects.plan_changes(REGION), b"\xff\xff")
    await provisioned_bus.store(subjects.plan_changes(REGION), b"")
    await publisher.publish(plan_of(1, 2))
    await eventually(lambda: view.plan == plan_of(1, 2))
    await view.close()


async def test_a_plan_published_while_a_view_was_cut_off_is_seen_after_it(nats_server: LocalNats, provisioned_bus: Bus):
    async with connected(nats_server, "door") as door:
        view = PlanView(door, REGION, SystemClock())
        await view.start()
        await nats_server.restart()
        await provisioned_bus.wait_connected(10.0)
        await PlanPublisher(provisioned_bus, REGION).publish(plan_of(1, 7))
        await eventually(lambda: view.plan == plan_of(1, 7))
        await view.close()
