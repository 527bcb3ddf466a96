"""Lanes: parking, firing, releasing early, purging, and the races between these."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.core.subjects import ParkSubject
from laneway.runtime.bus import ApiError, Bus, StreamFull
from laneway.runtime.lanes import LaneDepth, LaneStore, ReleaseOutcome
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.puller import Bell, LanePuller
from laneway.runtime.records import RecordStore
from tests.support.lanes import GROUP, message_count, now_s, park, pull_all
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


@pytest.fixture
def lanes(provisioned_bus: Bus) -> LaneStore:
    return LaneStore(provisioned_bus, REGION)


# --- ready -------------------------------------------------------------------------------------------


async def test_a_ready_job_arrives_as_it_was_put(provisioned_bus: Bus, lanes: LaneStore):
    for lane in LANES:
        job = make_job(make_record(lane=lane))
        await lanes.put_ready(job, 42)
        (delivery,) = await pull_all(provisioned_bus, lane)
        assert delivery.job == job
        assert delivery.record_sequence == 42
        assert delivery.deliveries == 1


async def test_a_repeated_put_is_one_job_and_a_later_attempt_another(provisioned_bus: Bus, lanes: LaneStore):
    record = make_record()
    for attempt in (0, 0, 1):
        await lanes.put_ready(make_job(replace(record, attempt=attempt)), 1)
    assert len(await pull_all(provisioned_bus, Lane.PRIORITY)) == 2


async def test_a_full_priority_lane_refuses_and_stores_nothing(bus: Bus):
    catalogue = small_catalogue(slots=1, workers=2, queue_length=3)
    await provision_region(bus, catalogue)
    lanes = LaneStore(bus, REGION)
    limit = catalogue.pools[0].priority_limit
    for _ in range(limit):
        await lanes.put_ready(make_job(make_record()), 1)
    with pytest.raises(StreamFull):
        await lanes.put_ready(make_job(make_record()), 1)
    assert await lanes.depths(Lane.PRIORITY, POOL) == LaneDepth(ready=limit, running=0)
    # A running job counts until it is acknowledged; then there is room for one.
    async with LanePuller(bus, REGION, Lane.PRIORITY, POOL) as puller:
        (delivery,) = await puller.pull(1)
        with pytest.raises(StreamFull):
            await lanes.put_ready(make_job(make_record()), 1)
        await delivery.ack()
        await eventually(lambda: has_room(lanes))


async def has_room(lanes: LaneStore) -> bool:
    try:
        await lanes.put_ready(make_job(make_record()), 1)
    except StreamFull:
        return False
    return True


async def test_depths_tell_ready_from_running(provisioned_bus: Bus, lanes: LaneStore):
    for _ in range(5):
        await lanes.put_ready(make_job(make_record(lane=Lane.BATCH)), 1)
    async with LanePuller(provisioned_bus, REGION, Lane.BATCH, POOL) as puller:
        assert len(await puller.pull(2)) == 2
        assert await lanes.depths(Lane.BATCH, POOL) == LaneDepth(ready=3, running=2)
        assert await lanes.depths(Lane.DEFERRABLE, POOL) == LaneDepth(ready=0, running=0)


async def test_a_lane_refuses_a_time_to_live_which_would_lose_jobs(provisioned_bus: Bus):
    for lane in LANES:
        with pytest.raises(ApiError, match="TTL is disabled"):
            await provisioned_bus.store(subjects.ready(REGION, lane, POOL, TENANT, "j"), b"", {"Nats-TTL": "60s"})


async def test_storage_in_use_is_a_share_of_the_accounts_limit(tmp_path):
    async with LocalNats(tmp_path / "nats", storage_bytes=64 * 1024**2) as server, connected(server) as bus:
        small = (
            "checkpoints_bytes_max", "ingest_bytes_max", "verdicts_bytes_max", "dead_bytes_max", "objects_bytes_max",
        )  # fmt: skip
        limits: dict[str, Any] = {**dict.fromkeys(small, 1024**2), "records_bytes_max": 32 * 1024**2}
        await provision_region(bus, small_catalogue(), **limits)
        lanes = LaneStore(bus, REGION)
        assert await lanes.storage_used() == 0.0
        for i in range(16):
            await bus.store(subjects.ready(REGION, Lane.BATCH, POOL, TENANT, f"j{i}"), b"x" * 500_000)
        used = await lanes.storage_used()
        assert 8_000_000 / (64 * 1024**2) <= used < 0.2
        for i in range(24):
            await bus.store(subjects.record(REGION, TENANT, f"j{i}"), b"x" * 1_000_000)
        assert await lanes.storage_used() > 0.7  # of what records may use


# --- parked ------------------------------------------------------------------------------------------


async def test_a_parked_job_fires_by_itself_and_rings(provisioned_bus: Bus, lanes: LaneStore):
    record = make_record(lane=Lane.DEFERRABLE)
    parked: list[ParkSubject] = []
    async with (
        Bell.parked(provisioned_bus, REGION, parked.append),
        Bell(provisioned_bus, REGION, POOL) as bell,
        LanePuller(provisioned_bus, REGION, Lane.DEFERRABLE, POOL) as puller,
    ):
        subject = await park(lanes, record, in_s=0.3, sequence=7)
        await eventually(lambda: parked == [subject])
        await bell.ring.wait()
        (delivery,) = await puller.pull(1)
        assert delivery.job == make_job(record)
        assert delivery.record_sequence == 7
        assert not await lanes.is_parked(record)


async def test_a_parked_job_is_not_delivered_and_survives_a_dead_server(nats_server: LocalNats, catalogue):
    async with connected(nats_server) as bus:
        await provision_region(bus, catalogue)
        lanes = LaneStore(bus, REGION)
        later, soon = make_record(lane=Lane.BATCH), make_record(lane=Lane.BATCH)
        await park(lanes, later)
        await park(lanes, soon, in_s=0.2)
        await nats_server.kill()
        await nats_server.start()
        await bus.wait_connected(10.0)
        async with LanePuller(bus, REGION, Lane.BATCH, POOL) as puller:
            (delivery,) = await eventually(lambda: puller.pull(5))
        assert delivery.job.record == soon
        assert await lanes.is_parked(later)


async def test_a_parked_job_is_neither_delivered_nor_rung_for(provisioned_bus: Bus, lanes: LaneStore):
    record = make_record(lane=Lane.BATCH)
    async with Bell(provisioned_bus, REGION, POOL) as bell:
        subject = await park(lanes, record)
        assert await lanes.is_parked(record)
        assert await lanes.parked(Lane.BATCH) == [subject]
        assert await pull_all(provisioned_bus, Lane.BATCH) == []
        assert not bell.ring.is_set()


async def test_an_early_release_makes_the_job_ready_once(provisioned_bus: Bus, lanes: LaneStore):
    record = make_record(lane=Lane.BATCH)
    subject = await park(lanes, record, sequence=9)
    async with Bell(provisioned_bus, REGION, POOL) as bell:
        assert await lanes.release(subject, now_s=now_s(), reason="idle") is ReleaseOutcome.RELEASED
        await bell.ring.wait()
    assert await lanes.release(subject, now_s=now_s(), reason="idle") is ReleaseOutcome.GONE
    assert not await lanes.is_parked(record)
    (delivery,) = await pull_all(provisioned_bus, Lane.BATCH)
    assert (delivery.job, delivery.record_sequence) == (make_job(record), 9)
    assert delivery.headers[subjects.H_RELEASED_BY] == "idle"
    assert "Nats-Rollup" not in delivery.headers
    assert "Nats-Msg-Id" not in delivery.headers


@pytest.mark.parametrize(
    ("away_s", "left_alone"), [(2.5, False), (1.9, True), (0.0, True), (-1.9, True), (-2.5, False)]
)
async def test_a_job_close_to_its_fire_time_is_left_to_fire(lanes: LaneStore, away_s: float, left_alone: bool):
    record = make_record(lane=Lane.BATCH)
    fire_at_s = now_s() + 1000.0
    subject = await lanes.park(make_job(record), 1, fire_at_s=fire_at_s, group=GROUP)
    told_s = fire_at_s - away_s
    restaggered = await lanes.restagger(subject, fire_at_s + 500.0, now_s=told_s)
    if left_alone:
        assert restaggered is ReleaseOutcome.TOO_CLOSE
        assert await lanes.release(subject, now_s=told_s, reason="sweep") is ReleaseOutcome.TOO_CLOSE
        assert await lanes.is_parked(record)
    else:
        assert restaggered is ReleaseOutcome.RELEASED
        assert await lanes.release(subject, now_s=told_s, reason="sweep") is ReleaseOutcome.RELEASED


async def test_a_restagger_changes_only_the_fire_time(provisioned_bus: Bus, lanes: LaneStore):
    record = make_record(lane=Lane.DEFERRABLE)
    subject = await park(lanes, record, sequence=5)
    for _ in range(3):  # more than once: no message id may swallow the second
        assert await lanes.restagger(subject, now_s() + 700.0, now_s=now_s()) is ReleaseOutcome.RELEASED
    assert await lanes.parked(Lane.DEFERRABLE) == [subject]
    assert await message_count(provisioned_bus, Lane.DEFERRABLE) == 1
    assert await lanes.restagger(subject, now_s() + 0.3, now_s=now_s()) is ReleaseOutcome.RELEASED
    async with LanePuller(provisioned_bus, REGION, Lane.DEFERRABLE, POOL) as puller:
        (delivery,) = await eventually(lambda: puller.pull(2))
    assert (delivery.job, delivery.record_sequence) == (make_job(record), 5)
    assert await lanes.restagger(subject, now_s() + 700.0, now_s=now_s()) is ReleaseOutcome.GONE


async def test_a_job_handed_back_parks_again_under_the_same_subject(provisioned_bus: Bus, lanes: LaneStore):
    record = make_record(lane=Lane.BATCH)
    subject = await park(lanes, record)
    await lanes.release(subject, now_s=now_s(), reason="idle")
    assert len(await pull_all(provisioned_bus, Lane.BATCH)) == 1
    assert await park(lanes, replace(record, attempt=1, clean=1)) == subject
    assert await lanes.is_parked(record)


async def test_a_hundred_parked_jobs_are_rebuilt_from_their_subjects(lanes: LaneStore):
    wanted = {}
    for lane in PARKING_LANES:
        records = [make_record(lane=lane, device_ms=i, latest_start_s=2_000_000_000.25 + i) for i in range(50)]
        wanted[lane] = set(await asyncio.gather(*(park(lanes, record) for record in records)))
    await lanes.put_ready(make_job(make_record(lane=Lane.BATCH)), 1)
    for lane in PARKING_LANES:
        found = await lanes.parked(lane)
        assert len(found) == 50
        assert set(found) == wanted[lane]
    assert {p.due_ms - 2_000_000_000_250 for p in wanted[Lane.BATCH]} == {i * 1000 for i in range(50)}


async def test_a_stray_message_hides_no_parked_job(provisioned_bus: Bus, lanes: LaneStore):
    await provisioned_bus.store(f"park.{REGION}.batch.stray", b"x")
    subject = await park(lanes, make_record(lane=Lane.BATCH))
    assert await lanes.parked(Lane.BATCH) == [subject]


async def test_a_message_without_a_schedule_does_not_count_as_parked(provisioned_bus: Bus, lanes: LaneStore):
    subject = await park(lanes, make_record(lane=Lane.BATCH))
    await provisioned_bus.store(str(subject), b"x")
    assert await lanes.release(subject, now_s=now_s(), reason="sweep") is ReleaseOutcome.GONE
    assert await lanes.restagger(subject, now_s() + 900.0, now_s=now_s()) is ReleaseOutcome.GONE


async def test_a_release_of_unknown_outcome_is_safe_to_repeat(nats_server: LocalNats, catalogue):
    async with connected(nats_server) as bus, connected(nats_server, request_timeout_s=0.2) as hasty:
        await provision_region(bus, catalogue)
        lanes, hasty_lanes = LaneStore(bus, REGION), LaneStore(hasty, REGION)
        record = make_record(lane=Lane.BATCH)
        subject = await park(lanes, record)
        sent = hasty.nc.stats["out_msgs"]
        release = asyncio.ensure_future(hasty_lanes.release(subject, now_s=now_s(), reason="idle"))
        # Stopped before it may have answered anything of it; what was sent is carried out when it goes on.
        await eventually(lambda: hasty.nc.stats["out_msgs"] > sent)
        nats_server.pause()
        outcomes = await asyncio.gather(release, return_exceptions=True)
        nats_server.resume()
        again = await lanes.release(subject, now_s=now_s(), reason="idle")
        assert again in (ReleaseOutcome.RELEASED, ReleaseOutcome.GONE, ReleaseOutcome.LOST), outcomes
        assert len(await pull_all(bus, Lane.BATCH)) == 1


# --- purging -----------------------------------------------------------------------------------------


async def test_purging_removes_parked_ready_and_running_and_nothing_else(provisioned_bus: Bus, lanes: LaneStore):
    parked, ready, running, other = (make_record(lane=Lane.BATCH) for _ in range(4))
    await lanes.put_ready(make_job(running), 1)
    async with LanePuller(provisioned_bus, REGION, Lane.BATCH, POOL) as puller:
        (delivery,) = await puller.pull(1)
        await park(lanes, parked)
        await lanes.put_ready(make_job(ready), 1)
        await lanes.put_ready(make_job(other), 1)
        for record in (parked, ready, running):
            assert await lanes.purge(record) == 1
            assert await lanes.purge(record) == 0
        assert await message_count(provisioned_bus, Lane.BATCH) == 1
        await delivery.progress()
        await delivery.ack()  # late, and harmless
        await eventually(lambda: depth_is(lanes, Lane.BATCH, LaneDepth(ready=1, running=0)))


async def depth_is(lanes: LaneStore, lane: Lane, wanted: LaneDepth) -> bool:
    return await lanes.depths(lane, POOL) == wanted


async def test_purging_a_priority_job(provisioned_bus: Bus, lanes: LaneStore):
    record = make_record()
    await lanes.put_ready(make_job(record), 1)
    assert await lanes.purge(record) == 1
    assert not await lanes.is_parked(record)
    assert await pull_all(provisioned_bus, Lane.PRIORITY) == []


async def test_a_parked_job_is_found_by_its_record_as_stored(provisioned_bus: Bus, lanes: LaneStore):
    """Times of any fraction: what the subject says of them can be told from the record again."""
    records = RecordStore(provisioned_bus)
    for i in range(20):
        record = make_record(lane=Lane.BATCH, latest_start_s=now_s() + 500.0005 + i / 7.0, device_ms=i)
        not_before_s = now_s() + i / 3.0 if i % 2 else 0.0
        record = replace(record, contract=replace(record.contract, not_before_s=not_before_s))
        await park(lanes, record, sequence=await records.create(record))
        stored = await records.get(REGION, TENANT, record.job_id)
        assert stored is not None
        assert await lanes.is_parked(stored.record)
        assert await lanes.holds(stored.record)
        assert await lanes.purge(stored.record) == 1
        assert not await lanes.holds(stored.record)
