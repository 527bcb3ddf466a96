"""Provisioning: again, at the same time, and never with harm."""

import asyncio

import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.runtime.bus import Bus
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.provision import ProvisionError
from tests.support.nats import (
    POOL,
    REGION,
    TENANT,
    connected,
    provision_region,
    small_catalogue,
)

pytestmark = pytest.mark.wire

PRIORITY = subjects.lane_stream(REGION, Lane.PRIORITY)
BATCH = subjects.lane_stream(REGION, Lane.BATCH)


async def stream_config(bus: Bus, name: str) -> dict[str, object]:
    return (await bus.api(f"STREAM.INFO.{name}", {}))["config"]


async def consumer_config(bus: Bus, lane: Lane, pool: str = POOL) -> dict[str, object]:
    stream = subjects.lane_stream(REGION, lane)
    return (await bus.api(f"CONSUMER.INFO.{stream}.{subjects.consumer(lane, pool)}", {}))["config"]


async def update_stream(bus: Bus, name: str, **changes: object) -> None:
    await bus.api(f"STREAM.UPDATE.{name}", await stream_config(bus, name) | changes)


async def test_a_second_run_changes_nothing(bus: Bus):
    first = await provision_region(bus, small_catalogue())
    second = await provision_region(bus, small_catalogue())
    assert len(first) == 16
    assert second == []


async def test_several_at_once_end_alike(nats_server: LocalNats, bus: Bus):
    async with connected(nats_server, "second") as second, connected(nats_server, "third") as third:
        await asyncio.gather(*(provision_region(one, small_catalogue()) for one in (bus, second, third, bus)))
        assert await provision_region(bus, small_catalogue()) == []


async def test_several_updates_at_once_end_alike(nats_server: LocalNats, provisioned_bus: Bus):
    larger = small_catalogue(queue_length=100)
    async with connected(nats_server, "second") as second:
        await asyncio.gather(*(provision_region(one, larger) for one in (provisioned_bus, second)))
    assert (await stream_config(provisioned_bus, PRIORITY))["max_msgs"] == larger.pools[0].priority_limit


async def test_two_regions_live_side_by_side(bus: Bus):
    await provision_region(bus, small_catalogue(), "eu")
    await provision_region(bus, small_catalogue(), "us")
    assert await provision_region(bus, small_catalogue(), "eu") == []


async def test_limits_of_the_lanes_are_as_designed(bus: Bus):
    catalogue = small_catalogue(slots=4, workers=100, pools=(POOL, "other"))
    await provision_region(bus, catalogue)
    priority = await stream_config(bus, PRIORITY)
    assert priority["max_msgs"] == sum(pool.priority_limit for pool in catalogue.pools)
    assert (priority["discard"], priority["retention"]) == ("new", "workqueue")
    for lane in PARKING_LANES:
        config = await stream_config(bus, subjects.lane_stream(REGION, lane))
        # A limit here would silently drop accepted jobs.
        assert [config.get(name) for name in ("max_msgs", "max_bytes", "max_msgs_per_subject")] == [-1, -1, -1]
        assert config.get("max_age", 0) == 0
        assert config["allow_msg_schedules"]
        assert not config.get("allow_msg_ttl")
    for lane, ack_wait_s in zip(LANES, (3, 10, 30), strict=True):
        for pool in catalogue.pools:
            consumer = await consumer_config(bus, lane, pool.name)
            assert consumer["ack_policy"] == "explicit"
            assert consumer["ack_wait"] == ack_wait_s * 1_000_000_000
            assert consumer["max_deliver"] == -1
            assert consumer["max_ack_pending"] == 4 * 4 * 100
            assert consumer["max_waiting"] == 4096


async def test_growth_is_applied_with_jobs_in_the_lane(provisioned_bus: Bus):
    subject = subjects.ready(REGION, Lane.PRIORITY, POOL, TENANT, "j")
    await provisioned_bus.store(subject, b"x")
    changed = await provision_region(
        provisioned_bus, small_catalogue(workers=40, pools=(POOL, "other")), ack_wait_priority_s=5.0
    )
    assert any("max_msgs" in change for change in changed)
    assert any("ack_wait" in change for change in changed)
    assert any("created consumer priority_other_any" in change for change in changed)
    assert (await provisioned_bus.api(f"STREAM.INFO.{PRIORITY}", {}))["state"]["messages"] == 1


async def test_checkpoints_of_an_older_release_can_be_read_directly_after_provisioning(provisioned_bus: Bus):
    name = subjects.checkpoint_stream(REGION)
    await update_stream(provisioned_bus, name, allow_direct=False)
    await provisioned_bus.store(subjects.checkpoint(REGION, "local-1", 1, 0), b"x")
    changed = await provision_region(provisioned_bus, small_catalogue())
    assert changed == [f"changed stream {name}: allow_direct False -> True"]
    assert (await provisioned_bus.api(f"STREAM.INFO.{name}", {}))["state"]["messages"] == 1


async def test_a_lower_limit_of_a_lane_that_refuses_drops_nothing(bus: Bus):
    await provision_region(bus, small_catalogue(queue_length=20))
    for i in range(20):
        await bus.store(subjects.ready(REGION, Lane.PRIORITY, POOL, TENANT, f"j{i}"), b"x")
    await provision_region(bus, small_catalogue(queue_length=0))
    assert (await stream_config(bus, PRIORITY))["max_msgs"] == 8
    assert (await bus.api(f"STREAM.INFO.{PRIORITY}", {}))["state"]["messages"] == 20


async def test_a_change_that_could_drop_messages_is_refused_by_name(provisioned_bus: Bus):
    await update_stream(provisioned_bus, subjects.verdict_stream(REGION), max_age=0)
    with pytest.raises(ProvisionError, match=r"stream VERDICTS_local.*max_age from 0 to"):
        await provision_region(provisioned_bus, small_catalogue())
    assert (await stream_config(provisioned_bus, subjects.verdict_stream(REGION))).get("max_age", 0) == 0


@pytest.mark.parametrize(
    ("found", "names"),
    [
        ({"retention": "limits"}, "retention"),
        ({"storage": "memory"}, "storage"),
        ({"subjects": ["lane.local.priority.>", "other.>"]}, "subjects"),
        ({"discard": "old"}, "discard"),
    ],
)
async def test_a_stream_of_another_kind_is_refused_by_name(bus: Bus, found: dict[str, object], names: str):
    config = {"name": PRIORITY, "subjects": ["lane.local.priority.>"], "storage": "file", "num_replicas": 1}
    config |= {"retention": "workqueue", "discard": "new", "max_msgs": 1}
    await bus.api(f"STREAM.CREATE.{PRIORITY}", config | found)
    with pytest.raises(ProvisionError, match=f"stream {PRIORITY}.*{names}"):
        await provision_region(bus, small_catalogue())


async def test_a_consumer_with_another_filter_is_refused_by_name(provisioned_bus: Bus):
    name = subjects.consumer(Lane.BATCH, POOL)
    await provisioned_bus.api(f"CONSUMER.DELETE.{BATCH}.{name}", {})
    config = {"durable_name": name, "name": name, "ack_policy": "explicit", "filter_subject": "lane.local.batch.x.>"}
    body = {"stream_name": BATCH, "config": config, "action": "create"}
    await provisioned_bus.api(f"CONSUMER.CREATE.{BATCH}.{name}.lane.local.batch.x.>", body)
    with pytest.raises(ProvisionError, match=rf"consumer {name} of {BATCH}.*filter_subject"):
        await provision_region(provisioned_bus, small_catalogue())


async def test_what_was_removed_is_made_again(provisioned_bus: Bus):
    await provisioned_bus.api(f"STREAM.DELETE.{BATCH}", {})
    changed = await provision_region(provisioned_bus, small_catalogue())
    assert changed == [f"created stream {BATCH}", f"created consumer batch_{POOL}_any of {BATCH}"]


async def test_a_server_without_room_is_named(tmp_path):
    async with LocalNats(tmp_path / "nats", storage_bytes=1024**2) as server, connected(server) as bus:
        with pytest.raises(ProvisionError, match=r"stream JOBS_local: insufficient storage"):
            await provision_region(bus, small_catalogue())


async def test_a_catalogue_without_pools_has_a_lane_that_takes_nothing_much(bus: Bus):
    await provision_region(bus, replace(small_catalogue(), pools=()))
    assert (await stream_config(bus, PRIORITY))["max_msgs"] == 1
