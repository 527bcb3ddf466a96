"""Races in the lanes: releases against each other, the fire time, cancels and unknown outcomes."""

import asyncio
from collections import Counter

import pytest

from laneway.core.errors import Code
from laneway.core.job import JobError, JobRecord, cancel, claim
from laneway.core.lanes import JobState, Lane
from laneway.runtime.bus import Bus, PublishUnknown, WrongSequence
from laneway.runtime.lanes import LaneStore, ReleaseOutcome
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.records import RecordStore
from tests.support.lanes import GROUP, message_count, now_s, park, pull_all
from tests.support.nats import REGION, TENANT, connected, eventually, make_job, make_record

pytestmark = pytest.mark.wire

CANCELLED = JobError(Code.CANCELLED, "CANCELLED", "")


@pytest.fixture
def lanes(provisioned_bus: Bus) -> LaneStore:
    return LaneStore(provisioned_bus, REGION)


async def test_two_releasers_make_one_copy(nats_server: LocalNats, provisioned_bus: Bus, lanes: LaneStore):
    async with connected(nats_server, "second") as other:
        second = LaneStore(other, REGION)
        parked = [await park(lanes, make_record(lane=Lane.BATCH)) for _ in range(40)]
        outcomes = await asyncio.gather(
            *(store.release(subject, now_s=now_s(), reason="race") for subject in parked for store in (lanes, second))
        )
        pairs = list(zip(outcomes[::2], outcomes[1::2], strict=True))
        assert all(pair.count(ReleaseOutcome.RELEASED) == 1 for pair in pairs)
        assert all(set(pair) <= set(ReleaseOutcome) - {ReleaseOutcome.TOO_CLOSE} for pair in pairs)
        jobs = [delivery.job.record.job_id for delivery in await pull_all(provisioned_bus, Lane.BATCH)]
        assert sorted(jobs) == sorted(subject.job for subject in parked)


async def test_a_release_and_a_restagger_at_once_leave_one_job(
    nats_server: LocalNats, provisioned_bus: Bus, lanes: LaneStore
):
    async with connected(nats_server, "second") as other:
        second = LaneStore(other, REGION)
        parked = [await park(lanes, make_record(lane=Lane.BATCH)) for _ in range(40)]
        await asyncio.gather(
            *(lanes.release(subject, now_s=now_s(), reason="race") for subject in parked),
            *(second.restagger(subject, now_s() + 2000.0, now_s=now_s()) for subject in parked),
        )
        left = {subject.job for subject in await lanes.parked(Lane.BATCH)}
        released = Counter(d.job.record.job_id for d in await pull_all(provisioned_bus, Lane.BATCH))
        assert set(released) | left == {subject.job for subject in parked}
        assert not set(released) & left
        assert set(released.values()) <= {1}


async def test_releases_aimed_at_the_fire_time_lose_no_job_and_claims_remove_the_copies(
    nats_server: LocalNats, provisioned_bus: Bus, lanes: LaneStore
):
    """The guard is switched off by a wrong `now_s`, as by a clock that runs behind."""
    records = RecordStore(provisioned_bus)
    fire_at_s = now_s() + 0.6
    jobs: dict[str, tuple[JobRecord, int]] = {}
    parked = []
    for _ in range(60):
        record = make_record(lane=Lane.BATCH)
        jobs[record.job_id] = record, await records.create(record)
        parked.append(await lanes.park(make_job(record), jobs[record.job_id][1], fire_at_s=fire_at_s, group=GROUP))
    await asyncio.sleep(max(0.0, fire_at_s - now_s() - 0.01))
    await asyncio.gather(*(lanes.release(subject, now_s=fire_at_s - 1000.0, reason="race") for subject in parked))
    await eventually(lambda: no_longer_parked(lanes))
    delivered = await pull_all(provisioned_bus, Lane.BATCH)
    assert {d.job.record.job_id for d in delivered} == set(jobs)
    claims = Counter[str]()
    for delivery in delivered:
        job = delivery.job
        try:
            await records.update(claim(job.record, "w", 1.0), delivery.record_sequence)
        except WrongSequence:
            continue
        claims[job.record.job_id] += 1
    assert claims == Counter(dict.fromkeys(jobs, 1))


async def no_longer_parked(lanes: LaneStore) -> bool:
    return not await lanes.parked(Lane.BATCH)


async def test_a_cancel_and_a_release_at_once_never_run_the_job(
    nats_server: LocalNats, provisioned_bus: Bus, lanes: LaneStore
):
    records = RecordStore(provisioned_bus)
    async with connected(nats_server, "scheduler") as other:
        scheduler = LaneStore(other, REGION)

        async def cancel_job(record: JobRecord) -> None:
            await records.change(REGION, TENANT, record.job_id, lambda r: cancel(r, CANCELLED, 1.0))
            await lanes.purge(record)

        made = [make_record(lane=Lane.BATCH) for _ in range(40)]
        sequences = {record.job_id: await records.create(record) for record in made}
        parked = [await park(lanes, record, sequence=sequences[record.job_id]) for record in made]
        await asyncio.gather(
            *(cancel_job(record) for record in made),
            *(scheduler.release(subject, now_s=now_s(), reason="race") for subject in parked),
        )
        for delivery in await pull_all(provisioned_bus, Lane.BATCH):
            with pytest.raises(WrongSequence):
                await records.update(claim(delivery.job.record, "w", 1.0), delivery.record_sequence)
        states = {(await records.get(REGION, TENANT, record.job_id)).record.state for record in made}  # type: ignore[union-attr]  # there
        assert states == {JobState.CANCELLED}
        assert await lanes.parked(Lane.BATCH) == []


async def test_a_release_after_a_purge_revives_nothing(provisioned_bus: Bus, lanes: LaneStore):
    record = make_record(lane=Lane.BATCH)
    subject = await park(lanes, record)
    found = await lanes._parked_message(subject)
    assert found is not None
    await lanes.purge(record)
    # What a slow releaser would do that had read the message before the purge.
    outcome = await lanes._act(subject, found, subject.ready, lanes._release_headers(subject, found, "late"))
    assert outcome is ReleaseOutcome.LOST
    assert await pull_all(provisioned_bus, Lane.BATCH) == []


async def test_a_park_of_unknown_outcome_repeats_without_a_second_job(nats_server: LocalNats, provisioned_bus: Bus):
    async with connected(nats_server, request_timeout_s=0.2) as hasty:
        hasty_lanes, lanes = LaneStore(hasty, REGION), LaneStore(provisioned_bus, REGION)
        record = make_record(lane=Lane.BATCH)
        nats_server.pause()
        with pytest.raises(PublishUnknown):
            await park(hasty_lanes, record)
        nats_server.resume()
        await park(lanes, record)
        await eventually(lambda: lanes.is_parked(record))
        assert await message_count(provisioned_bus, Lane.BATCH) == 1
