"""Plans: the newest one wins, whoever publishes last."""

import pytest

from laneway.core import subjects
from laneway.core.fleet import Plan
from laneway.runtime.bus import Bus
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.plans import PlanPublisher, PlanView
from tests.support.nats import REGION, connected, eventually

pytestmark = pytest.mark.wire


def plan_of(epoch: int, version: int, valid_until_s: float = 100.0) -> Plan:
    return Plan(REGION, epoch=epoch, version=version, made_s=1.0, valid_until_s=valid_until_s)


def has(view: PlanView, plan: Plan):
    return lambda: view.plan == plan


async def test_a_view_starts_with_the_stored_plan_and_follows(provisioned_bus: Bus):
    publisher = PlanPublisher(provisioned_bus, REGION)
    early = PlanView(provisioned_bus, REGION)
    await early.start()
    assert early.plan is None
    assert not early.fresh(0.0)
    await publisher.publish(plan_of(1, 1))
    seen: list[Plan] = []
    late = PlanView(provisioned_bus, REGION, seen.append)
    await late.start()
    await publisher.publish(plan_of(1, 2))
    for view in (early, late):
        await eventually(has(view, plan_of(1, 2)))
    assert seen == [plan_of(1, 1), plan_of(1, 2)]
    await early.close()
    await late.close()


async def test_a_lower_epoch_or_an_older_version_is_ignored(provisioned_bus: Bus):
    publisher = PlanPublisher(provisioned_bus, REGION)
    seen: list[Plan] = []
    view = PlanView(provisioned_bus, REGION, seen.append)
    await view.start()
    order = [plan_of(2, 5), plan_of(1, 99), plan_of(2, 4), plan_of(2, 5), plan_of(3, 1)]
    for plan in order:
        await publisher.publish(plan)
    await eventually(lambda: view.plan == plan_of(3, 1))
    assert seen == [plan_of(2, 5), plan_of(3, 1)]
    await view.close()


async def test_a_plan_is_fresh_until_its_time(provisioned_bus: Bus):
    view = PlanView(provisioned_bus, REGION)
    await PlanPublisher(provisioned_bus, REGION).publish(plan_of(1, 1, valid_until_s=50.0))
    await view.start()
    assert view.fresh(49.9)
    assert not view.fresh(50.0)
    await view.close()


async def test_what_is_no_plan_changes_nothing(provisioned_bus: Bus):
    publisher = PlanPublisher(provisioned_bus, REGION)
    view = PlanView(provisioned_bus, REGION)
    await view.start()
    await publisher.publish(plan_of(1, 1))
    await provisioned_bus.store(subjects.plan_changes(REGION), b"\xff\xff")
    await provisioned_bus.store(subjects.plan_changes(REGION), b"")
    await publisher.publish(plan_of(1, 2))
    await eventually(lambda: view.plan == plan_of(1, 2))
    await view.close()


async def test_a_plan_published_while_a_view_was_cut_off_is_seen_after_it(nats_server: LocalNats, provisioned_bus: Bus):
    async with connected(nats_server, "door") as door:
        view = PlanView(door, REGION)
        await view.start()
        await nats_server.restart()
        await provisioned_bus.wait_connected(10.0)
        await PlanPublisher(provisioned_bus, REGION).publish(plan_of(1, 7))
        await eventually(lambda: view.plan == plan_of(1, 7))
        await view.close()
