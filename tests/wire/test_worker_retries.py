"""Failed attempts draw from one budget of their tenant and lane: claims on real records, and workers under a storm."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.admission.application import Admission
from laneway.client import Client
from laneway.core import job as jobs
from laneway.core.clock import ManualClock
from laneway.core.errors import Code, LanewayError
from laneway.core.job import JobRecord
from laneway.core.lanes import LANES, JobState, Phase
from laneway.policy.retry import RetryParams
from laneway.runtime.bus import Bus
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.records import RecordStore, StoredRecord
from laneway.workers.claims import STRIKES_MAX, Ack, Claims, Delivered, Nak
from laneway.workers.outcomes import Kind, Outcome
from laneway.workers.retries import Retries
from laneway.workers.run import JobRun
from tests.support.admission import gate
from tests.support.nats import REGION, TENANT, eventually, make_record
from tests.support.worker import yard

NO_FLOOR = RetryParams(floor_per_s=0.0)
ME, DEAD = "w2-1a", "w1-1a"


class Taker:
    """One worker's claims, with a clock of the test and no more retries than first attempts earn."""

    def __init__(self, bus: Bus) -> None:
        self.records = RecordStore(bus)
        self.clock = ManualClock(wall_s=1_900_000_000.0)
        self.budgets = Retries(self.clock, Random(1), NO_FLOOR)
        self.claims = Claims(self.records, ME, self.clock, lambda owner: owner != DEAD, self.budgets)

    async def stored(self, change: Any = None, **changes: Any) -> StoredRecord:
        record = make_record(**changes)
        deadline_s = self.clock.now() + 600.0
        record = replace(record, contract=replace(record.contract, deadline_s=deadline_s))
        record = change(record) if change else record
        return StoredRecord(record, await self.records.create(record))

    async def takes(self, stored: StoredRecord, alone: Any = None) -> Any:
        record = stored.record
        delivered = Delivered(REGION, record.tenant, record.job_id, stored, True, 3.0)
        return await self.claims.claim(delivered, alone or _alone)

    def earn(self, retries: int, record: JobRecord) -> None:
        for _ in range(10 * retries):
            self.budgets.first_attempt(record)


async def _alone() -> bool:
    return True


def lost(record: JobRecord) -> JobRecord:
    """Given back by a worker whose engine died."""
    return jobs.requeue(jobs.claim(record, DEAD, 1.0), DEAD, record.attempt + 1)


def owned_by_the_dead(record: JobRecord) -> JobRecord:
    return jobs.claim(record, DEAD, 1.0)


def handed_back(record: JobRecord) -> JobRecord:
    return jobs.hand_back(jobs.claim(record, DEAD, 1.0), DEAD, record.attempt + 1)


@pytest.mark.parametrize("how", [lost, owned_by_the_dead])
async def test_a_claim_after_a_failed_start_is_paid_for_or_waits(provisioned_bus: Bus, how: Any) -> None:
    taker = Taker(provisioned_bus)
    first, second = await taker.stored(how), await taker.stored(how)
    refused = await taker.takes(first)
    assert isinstance(refused, Nak)
    assert (refused.reason, refused.delay_s > 0.0) == ("retry_budget_empty", True)
    assert (await taker.records.get(REGION, TENANT, first.record.job_id, leader=True)) == first
    taker.earn(1, first.record)
    taken = await taker.takes(first)
    assert (taken.record.state, taken.record.attempt, taken.record.retries) == (JobState.RUNNING, 2, 1)
    assert isinstance(await taker.takes(second), Nak)


async def test_a_clean_hand_back_costs_nothing_and_a_first_claim_earns(provisioned_bus: Bus) -> None:
    taker = Taker(provisioned_bus)
    for _ in range(10):
        assert isinstance(await taker.takes(await taker.stored(handed_back)), StoredRecord)
    waiting = await taker.stored(lost)
    assert isinstance(await taker.takes(waiting), Nak)
    for _ in range(10):
        assert isinstance(await taker.takes(await taker.stored()), StoredRecord)
    assert isinstance(await taker.takes(waiting), StoredRecord)


async def test_one_tenants_failures_take_nothing_from_another(provisioned_bus: Bus) -> None:
    taker = Taker(provisioned_bus)
    other = await taker.stored(lost, tenant="other")
    taker.earn(1, other.record)
    for _ in range(5):
        assert isinstance(await taker.takes(await taker.stored(lost)), Nak)
    assert isinstance(await taker.takes(other), StoredRecord)


async def test_a_suspect_that_cannot_pay_stops_nobody_and_one_that_finds_no_gap_pays_nothing(
    provisioned_bus: Bus,
) -> None:
    taker, asked = Taker(provisioned_bus), 0
    suspect = await taker.stored(lambda record: jobs.requeue(jobs.claim(lost(record), DEAD, 2.0), DEAD, 2))

    async def no_gap() -> bool:
        nonlocal asked
        asked += 1
        return False

    refused = await taker.takes(suspect, no_gap)
    assert (refused.reason, asked) == ("retry_budget_empty", 0)
    taker.earn(1, suspect.record)
    for count in (1, 2):
        refused = await taker.takes(suspect, no_gap)
        assert (refused.reason, asked) == ("runs_alone", count)
    assert (await taker.takes(suspect)).record.attempt == 3
    assert isinstance(await taker.takes(await taker.stored(lost)), Nak), "what it was given back, it has spent"


async def test_a_suspect_whose_deadline_passes_before_it_is_alone_is_not_claimed(provisioned_bus: Bus) -> None:
    taker = Taker(provisioned_bus)
    suspect = await taker.stored(lambda record: jobs.requeue(jobs.claim(lost(record), DEAD, 2.0), DEAD, 2))
    taker.clock.advance(599.9)
    taker.earn(1, suspect.record)

    async def late() -> bool:
        taker.clock.advance(0.1)
        return True

    ended = await taker.takes(suspect, late)
    assert isinstance(ended, Ack)
    assert ended.stored is not None
    assert (ended.stored.record.state, ended.stored.record.attempt) == (JobState.EXPIRED, 2)


async def test_whoever_waits_for_the_budget_ends_at_its_deadline(provisioned_bus: Bus) -> None:
    taker = Taker(provisioned_bus)
    waiting = await taker.stored(lost)
    taker.clock.advance(599.5)
    refused = await taker.takes(waiting)
    assert isinstance(refused, Nak)
    assert refused.delay_s <= 0.5  # and not beyond it
    taker.clock.advance(refused.delay_s)
    ended = await taker.takes(waiting)
    assert isinstance(ended, Ack)
    assert ended.stored is not None
    record = ended.stored.record
    assert record.state is JobState.EXPIRED
    assert record.error is not None
    assert (record.error.code, record.error.phase) == (Code.DEADLINE_EXCEEDED, Phase.QUEUE)


@pytest.mark.parametrize(("left_s", "runs"), [(30.1, True), (29.9, False)])
async def test_what_cannot_end_before_its_deadline_is_not_tried_again(
    provisioned_bus: Bus, left_s: float, runs: bool
) -> None:
    """A minute was predicted; the attempt that failed began half a minute ago."""
    taker = Taker(provisioned_bus)
    began_s = taker.clock.now() - 30.0

    def failed(record: JobRecord) -> JobRecord:
        record = replace(record, contract=replace(record.contract, deadline_s=taker.clock.now() + left_s))
        return jobs.requeue(jobs.claim(record, DEAD, began_s), DEAD, 1)

    stored = await taker.stored(failed, device_ms=60_000)
    taker.earn(1, stored.record)
    taken = await taker.takes(stored)
    if runs:
        assert isinstance(taken, StoredRecord)
        return
    assert isinstance(taken, Ack)
    assert taken.stored is not None
    error = taken.stored.record.error
    assert error is not None
    assert (error.code, error.phase) == (Code.DEADLINE_EXCEEDED, Phase.QUEUE)
    assert "another could not end" in error.message
    assert isinstance(await taker.takes(await taker.stored(lost)), StoredRecord)  # it paid nothing


# --- whole workers ---------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_storm_of_dying_attempts_adds_a_bounded_share_and_spares_other_tenants(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attempt of one tenant loses its engine at once, and the first one of another tenant as well."""
    submit, seen = JobRun._submit, set[str]()

    def dying(run: JobRun, plan: Any) -> None:
        first = run.job_id not in seen
        seen.add(run.job_id)
        if run.job.record.tenant == TENANT or first:
            run._end(Outcome(Kind.ENGINE_LOST))
        else:
            submit(run, plan)

    monkeypatch.setattr(JobRun, "_submit", dying)
    loop = asyncio.get_running_loop()
    async with yard(nats_server, workers=2) as place:
        began_s, count = loop.time(), 150
        ids = [(await place.submit(max_tokens=4)).record.job_id for _ in range(count)]

        async def starts() -> int:
            return sum([(await place.record(job_id)).starts for job_id in ids])

        async def all_tried() -> bool:
            return all([(await place.record(job_id)).starts for job_id in ids])

        await eventually(all_tried)
        other = await place.submit(max_tokens=4, tenant="other")
        await asyncio.sleep(1.0)  # without a budget each would have failed three times by now
        found = await place.records.get(REGION, "other", other.record.job_id, leader=True)
        assert found is not None
        assert (found.record.state, found.record.attempt) == (JobState.SUCCEEDED, 2)
        again, seconds = await starts() - count, loop.time() - began_s
        assert 20 <= again <= 0.1 * count + 2 * (10.0 + seconds + 1.0)


@pytest.mark.slow
async def test_client_and_workers_together_try_no_more_often_than_the_workers(
    nats_server: LocalNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    decide = Admission._decide

    async def counted(admission: Admission, *args: Any, **more: Any) -> Any:
        nonlocal asked
        asked += 1
        return await decide(admission, *args, **more)

    monkeypatch.setattr(Admission, "_decide", counted)
    monkeypatch.setattr(JobRun, "_submit", lambda run, plan: run._end(Outcome(Kind.ENGINE_LOST)))
    async with gate(nats_server, tmp_path) as door, yard(nats_server, workers=1):
        await door.plan()
        await door.quotes("LANE_OPEN")
        asked = 0
        async with Client(door.address, retry_budget=RetryParams(attempts_max=dict.fromkeys(LANES, 4))) as client:
            with pytest.raises(LanewayError) as caught:
                await answer_of(client)
        assert caught.value.reason == "POISON"
        assert asked == 1
        (job_id,) = await door.job_ids()
        record = await door.record(job_id)
        assert record.starts == record.attempt == STRIKES_MAX


async def answer_of(client: Client) -> str:
    async with client.generate(model="chat", prompt="Hello", max_tokens=4, idempotency_key="k") as stream:
        return await stream.text()
