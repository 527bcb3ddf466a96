"""What we rely on of NATS for parked jobs: held by the real server and by the one that simulations use."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from laneway.core import subjects
from laneway.core.errors import Code
from laneway.core.job import JobError, JobRecord, cancel, claim
from laneway.core.lanes import JobState, Lane
from laneway.core.subjects import ParkSubject
from laneway.runtime.bus import ApiError, OutOfStorage, PublishUnknown, WrongSequence
from laneway.runtime.lanes import LaneStore, ReleaseOutcome
from laneway.runtime.puller import Bell, Delivery, LanePuller
from laneway.runtime.records import RecordStore
from tests.contract.nats_twins import Twin, Twins, twins_of
from tests.support.lanes import GROUP, message_count, pull_all
from tests.support.nats import POOL, REGION, TENANT, eventually, make_job, make_record

LANE = Lane.BATCH
STREAM = subjects.lane_stream(REGION, LANE)
CANCELLED = JobError(Code.CANCELLED, "CANCELLED", "")


@pytest.fixture(
    params=[pytest.param("real", marks=pytest.mark.wire), pytest.param("memory", marks=pytest.mark.looptime)]
)
def twins(request: pytest.FixtureRequest, tmp_path: Path) -> Twins:
    return twins_of(request.param, tmp_path)


def lanes_of(twin: Twin) -> LaneStore:
    return LaneStore(twin.bus, REGION)


async def park(twin: Twin, record: JobRecord, in_s: float = 1000.0, sequence: int = 1) -> ParkSubject:
    fire_at_s = twin.clock.now() + in_s
    return await lanes_of(twin).park(make_job(record), sequence, fire_at_s=fire_at_s, group=GROUP)


def jobs_of(deliveries: list[Delivery]) -> list[str]:
    return sorted(delivery.job.record.job_id for delivery in deliveries)


async def test_a_parked_job_is_seen_and_neither_delivered_nor_rung_for(twins: Twins):
    async with twins() as twin:
        record, parked = make_record(lane=LANE), list[ParkSubject]()
        async with Bell(twin.bus, REGION, POOL) as bell, Bell.parked(twin.bus, REGION, parked.append):
            subject = await park(twin, record)
            await eventually(lambda: parked == [subject])
            assert await lanes_of(twin).parked(LANE) == [subject]
            assert await lanes_of(twin).is_parked(record)
            assert await pull_all(twin.bus, LANE) == []
            assert not bell.ring.is_set()


async def test_a_parked_job_fires_at_its_time_and_rings(twins: Twins):
    async with twins() as twin:
        record, heard = make_record(lane=LANE), list[str]()
        await twin.bus.listen(f"lane.{REGION}.>", lambda msg: heard.append(msg.subject))
        async with Bell(twin.bus, REGION, POOL) as bell, LanePuller(twin.bus, REGION, LANE, POOL) as puller:
            fire_at_s = twin.clock.now() + 0.3
            subject = await park(twin, record, in_s=0.3, sequence=7)
            await bell.ring.wait()
            assert twin.clock.now() >= fire_at_s - 0.001  # what the header can say
            (delivery,) = await puller.pull(1, wait_s=5.0)
        assert (delivery.job, delivery.record_sequence) == (make_job(record), 7)
        assert delivery.headers["Nats-Scheduler"] == str(subject)
        assert delivery.headers["Nats-Schedule-Next"] == "purge"
        assert not {"Nats-Msg-Id", "Nats-Schedule", "Nats-Schedule-Target"} & delivery.headers.keys()
        assert not await lanes_of(twin).is_parked(record)
        assert await message_count(twin.bus, LANE) == 1
        assert heard == []  # of what fires, core subscribers are not told


async def test_a_schedule_that_is_over_fires_at_once(twins: Twins):
    async with twins() as twin, LanePuller(twin.bus, REGION, LANE, POOL) as puller:
        record = make_record(lane=LANE)
        await park(twin, record, in_s=-5.0)
        assert jobs_of(await puller.pull(1, wait_s=5.0)) == [record.job_id]


@pytest.mark.slow
async def test_a_parked_job_and_one_due_meanwhile_survive_a_dead_server(twins: Twins):
    async with twins() as twin:
        later, soon = make_record(lane=LANE), make_record(lane=LANE)
        await park(twin, later)
        await park(twin, soon, in_s=0.2)
        await twin.kill()
        await asyncio.sleep(0.2)
        await twin.start()
        await twin.bus.wait_connected(10.0)
        async with LanePuller(twin.bus, REGION, LANE, POOL) as puller:
            assert jobs_of(await eventually(lambda: puller.pull(5, wait_s=1.0))) == [soon.job_id]
        assert await lanes_of(twin).is_parked(later)


async def test_an_early_release_makes_the_job_ready_once(twins: Twins):
    async with twins() as twin:
        lanes, record = lanes_of(twin), make_record(lane=LANE)
        subject = await park(twin, record, sequence=9)
        async with Bell(twin.bus, REGION, POOL) as bell:
            assert await lanes.release(subject, now_s=twin.clock.now(), reason="idle") is ReleaseOutcome.RELEASED
            await bell.ring.wait()
        assert await lanes.release(subject, now_s=twin.clock.now(), reason="idle") is ReleaseOutcome.GONE
        assert not await lanes.is_parked(record)
        (delivery,) = await pull_all(twin.bus, LANE)
        assert (delivery.job, delivery.record_sequence) == (make_job(record), 9)
        assert delivery.headers[subjects.H_RELEASED_BY] == "idle"
        assert await message_count(twin.bus, LANE) == 0


async def test_a_restagger_changes_only_the_fire_time(twins: Twins):
    async with twins() as twin, LanePuller(twin.bus, REGION, LANE, POOL) as puller:
        lanes, record = lanes_of(twin), make_record(lane=LANE)
        subject = await park(twin, record)
        for in_s in (700.0, 600.0, 0.2):
            now_s = twin.clock.now()
            assert await lanes.restagger(subject, now_s + in_s, now_s=now_s) is ReleaseOutcome.RELEASED
            assert await message_count(twin.bus, LANE) == 1
        assert jobs_of(await puller.pull(1, wait_s=5.0)) == [record.job_id]
        assert await puller.pull(1) == []


@pytest.mark.parametrize(
    ("target", "number"), [("lane.elsewhere.batch.x", 10190), (f"lane.{REGION}.batch.*.x", 10190), ("", 10190)]
)
async def test_a_schedule_needs_a_target_of_its_own_stream(twins: Twins, target: str, number: int):
    async with twins() as twin:
        headers = {"Nats-Schedule": "@at 2033-01-01T00:00:00Z", "Nats-Schedule-Target": target}
        with pytest.raises(ApiError, match=str(number)):
            await twin.bus.store(f"park.{REGION}.batch.x", b"", headers)


async def test_a_lane_that_does_not_park_refuses_a_schedule(twins: Twins):
    async with twins() as twin:
        subject = subjects.ready(REGION, Lane.PRIORITY, POOL, TENANT, "a")
        headers = {"Nats-Schedule": "@at 2033-01-01T00:00:00Z", "Nats-Schedule-Target": subject + "b"}
        with pytest.raises(ApiError, match="10188"):
            await twin.bus.store(subject, b"", headers)


async def test_a_release_without_a_guard_is_not_idempotent(twins: Twins):
    async with twins() as twin:
        subject = await park(twin, make_record(lane=LANE))
        headers = {"Nats-Scheduler": str(subject), "Nats-Schedule-Next": "purge"}
        for _ in range(2):
            await twin.bus.store(subject.ready, b"", headers)
        assert await lanes_of(twin).parked(LANE) == []
        assert await message_count(twin.bus, LANE) == 2


async def test_a_release_names_a_schedule_or_nothing_that_is_there(twins: Twins):
    async with twins() as twin:
        subject, plain = await park(twin, make_record(lane=LANE)), f"park.{REGION}.batch.plain"
        await twin.bus.store(plain, b"")
        for scheduler in ("", subject.ready, plain):
            headers = {"Nats-Schedule-Next": "purge"} | ({"Nats-Scheduler": scheduler} if scheduler else {})
            with pytest.raises(ApiError, match="10212"):
                await twin.bus.store(subject.ready, b"", headers)
        assert await message_count(twin.bus, LANE) == 2


@pytest.mark.slow
async def test_full_storage_strands_what_is_due_until_a_restart_and_refuses_its_release(twins: Twins):
    limits = ("checkpoints", "ingest", "verdicts", "dead", "objects", "records")
    sizes: dict[str, Any] = {f"{name}_bytes_max": 1024**2 for name in limits}
    async with twins(storage_bytes=16 * 1024**2, **sizes) as twin:
        stranded, released = make_record(lane=LANE), make_record(lane=LANE)
        fire_at_s = twin.clock.now() + 3.0
        await park(twin, stranded, in_s=3.0)
        subject = await park(twin, released, in_s=2.5)
        for size in (1_000_000, 10_000, 100):
            with pytest.raises(OutOfStorage):
                await fill(twin, size)
        assert await lanes_of(twin).storage_used() > 0.999
        await asyncio.sleep(max(0.0, fire_at_s + 0.3 - twin.clock.now()))
        assert len(await lanes_of(twin).parked(LANE)) == 2
        with pytest.raises(OutOfStorage):
            await lanes_of(twin).release(subject, now_s=0.0, reason="sweep")
        await twin.bus.api(f"STREAM.PURGE.{subjects.lane_stream(REGION, Lane.DEFERRABLE)}", {})
        await asyncio.sleep(0.5)
        assert len(await lanes_of(twin).parked(LANE)) == 2
        assert await lanes_of(twin).release(subject, now_s=0.0, reason="sweep") is ReleaseOutcome.RELEASED
        assert jobs_of(await pull_all(twin.bus, LANE)) == [released.job_id]
        await twin.kill()
        await twin.start()
        await twin.bus.wait_connected(10.0)
        async with LanePuller(twin.bus, REGION, LANE, POOL) as puller:
            assert jobs_of(await eventually(lambda: puller.pull(5, wait_s=1.0))) == [stranded.job_id]


async def fill(twin: Twin, size_bytes: int) -> None:
    for n in range(1000):
        await twin.bus.store(f"lane.{REGION}.deferrable.fill.{size_bytes}.{n}", b"x" * size_bytes)


# --- races -----------------------------------------------------------------------------------------------


async def test_two_releasers_make_one_copy(twins: Twins):
    async with twins() as twin:
        lanes, second = lanes_of(twin), LaneStore(await twin.connect("second"), REGION)
        parked = [await park(twin, make_record(lane=LANE)) for _ in range(20)]
        now_s = twin.clock.now()
        outcomes = await asyncio.gather(
            *(store.release(subject, now_s=now_s, reason="race") for subject in parked for store in (lanes, second))
        )
        pairs = list(zip(outcomes[::2], outcomes[1::2], strict=True))
        assert all(pair.count(ReleaseOutcome.RELEASED) == 1 for pair in pairs)
        assert jobs_of(await pull_all(twin.bus, LANE)) == sorted(subject.job for subject in parked)


async def test_a_release_and_a_restagger_at_once_leave_one_job(twins: Twins):
    async with twins() as twin:
        lanes, second = lanes_of(twin), LaneStore(await twin.connect("second"), REGION)
        parked = [await park(twin, make_record(lane=LANE)) for _ in range(20)]
        now_s = twin.clock.now()
        await asyncio.gather(
            *(lanes.release(subject, now_s=now_s, reason="race") for subject in parked),
            *(second.restagger(subject, now_s + 2000.0, now_s=now_s) for subject in parked),
        )
        left = [subject.job for subject in await lanes.parked(LANE)]
        assert sorted(left + jobs_of(await pull_all(twin.bus, LANE))) == sorted(subject.job for subject in parked)


@pytest.mark.slow
async def test_releases_aimed_at_the_fire_time_lose_no_job_and_claims_remove_the_copies(twins: Twins):
    """The guard is switched off by a wrong `now_s`, as by a clock that runs behind."""
    async with twins() as twin:
        lanes, records = lanes_of(twin), RecordStore(twin.bus, clock=twin.clock)
        fire_at_s, made, parked = twin.clock.now() + 0.5, [make_record(lane=LANE) for _ in range(30)], []
        for record in made:
            sequence = await records.create(record)
            parked.append(await lanes.park(make_job(record), sequence, fire_at_s=fire_at_s, group=GROUP))
        await asyncio.sleep(max(0.0, fire_at_s - twin.clock.now() - 0.01))
        await asyncio.gather(*(lanes.release(subject, now_s=0.0, reason="race") for subject in parked))

        async def none_parked() -> bool:
            return not await lanes.parked(LANE)

        await eventually(none_parked)
        claims = Counter[str]()
        for delivery in await pull_all(twin.bus, LANE):
            try:
                await records.update(claim(delivery.job.record, "w", 1.0), delivery.record_sequence)
            except WrongSequence:
                continue
            claims[delivery.job.record.job_id] += 1
        assert claims == Counter(record.job_id for record in made)


async def test_firing_against_a_cancel_never_runs_the_job(twins: Twins):
    async with twins() as twin:
        lanes, records = lanes_of(twin), RecordStore(await twin.connect("door"), clock=twin.clock)
        fire_at_s, made = twin.clock.now() + 0.5, [make_record(lane=LANE) for _ in range(30)]
        for record in made:
            sequence = await records.create(record)
            await lanes.park(make_job(record), sequence, fire_at_s=fire_at_s, group=GROUP)

        async def cancel_job(record: JobRecord) -> None:
            await records.change(REGION, TENANT, record.job_id, lambda r: cancel(r, CANCELLED, 1.0))
            await lanes.purge(record)

        await asyncio.sleep(max(0.0, fire_at_s - twin.clock.now() - 0.005))
        await asyncio.gather(*(cancel_job(record) for record in made))
        for delivery in await pull_all(twin.bus, LANE):
            with pytest.raises(WrongSequence):
                await records.update(claim(delivery.job.record, "w", 1.0), delivery.record_sequence)
        stored = [await records.get(REGION, TENANT, record.job_id) for record in made]
        assert {found.record.state for found in stored if found} == {JobState.CANCELLED}
        assert await lanes.parked(LANE) == []


async def test_a_cancel_and_a_release_at_once_never_run_the_job(twins: Twins):
    async with twins() as twin:
        records = RecordStore(twin.bus, clock=twin.clock)
        scheduler = LaneStore(await twin.connect("scheduler"), REGION)
        made = [make_record(lane=LANE) for _ in range(20)]
        parked = [await park(twin, record, sequence=await records.create(record)) for record in made]

        async def cancel_job(record: JobRecord) -> None:
            await records.change(REGION, TENANT, record.job_id, lambda r: cancel(r, CANCELLED, 1.0))
            await lanes_of(twin).purge(record)

        now_s = twin.clock.now()
        await asyncio.gather(
            *(cancel_job(record) for record in made),
            *(scheduler.release(subject, now_s=now_s, reason="race") for subject in parked),
        )
        for delivery in await pull_all(twin.bus, LANE):
            with pytest.raises(WrongSequence):
                await records.update(claim(delivery.job.record, "w", 1.0), delivery.record_sequence)
        assert await scheduler.parked(LANE) == []


async def test_a_release_after_a_purge_revives_nothing(twins: Twins):
    async with twins() as twin:
        lanes, record = lanes_of(twin), make_record(lane=LANE)
        subject = await park(twin, record)
        found = await lanes._parked_message(subject)
        assert found is not None
        assert await lanes.purge(record) == 1
        # What a slow releaser would do that had read the message before the purge.
        outcome = await lanes._act(subject, found, subject.ready, lanes._release_headers(subject, found, "late"))
        assert outcome is ReleaseOutcome.LOST
        assert await pull_all(twin.bus, LANE) == []


async def test_a_park_of_unknown_outcome_repeats_without_a_second_job(twins: Twins):
    async with twins() as twin:
        hasty = LaneStore(await twin.connect("hasty", request_timeout_s=0.2), REGION)
        record, fire_at_s = make_record(lane=LANE), twin.clock.now() + 1000.0
        twin.pause()
        with pytest.raises(PublishUnknown):
            await hasty.park(make_job(record), 1, fire_at_s=fire_at_s, group=GROUP)
        twin.resume()
        await park(twin, record)
        await eventually(lambda: lanes_of(twin).is_parked(record))
        assert await message_count(twin.bus, LANE) == 1
