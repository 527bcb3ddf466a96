"""Dead letters through admission: seen and touched within one's own tenant, run again as any job is accepted."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from msgspec.structs import replace

from laneway.admission.dead_letter_calls import PURGE_IDS_MAX
from laneway.client import Client
from laneway.core import ids, subjects
from laneway.core.dead_letters import POISON, UNREADABLE_JOB
from laneway.core.errors import (
    Code,
    DeadLetterNotFound,
    InvalidRequest,
    LaneSaturated,
    NotRequeueable,
    PermissionDenied,
)
from laneway.core.fleet import LanePlan
from laneway.core.job import NOT_ACCEPTED, JobError, JobRecord
from laneway.core.lanes import JobState, Lane, OnDisconnect
from laneway.runtime.dead_letters import DeadLetterStore
from laneway.runtime.grpc_errors import from_rpc_error
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.reading import last_from_leader
from laneway.runtime.wire.times import timestamp_of
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import common_pb2
from tests.support.admission import CLOCK, Gate, PuppetWorker, admission_settings, gate, spec
from tests.support.nats import REGION, eventually
from tests.support.services import ACME, OPERATOR, OTHER, bearer, with_tokens

pytestmark = pytest.mark.wire
UNKNOWN = "local-00000000-0000-7000-8000-000000000000"


@dataclass
class Office:
    """A door with its tenants, a worker that gives jobs up, and the letters."""

    door: Gate
    worker: PuppetWorker
    letters: DeadLetterStore

    async def submit(self, token: str = ACME, text: str = "Hello", lane: Lane = Lane.BATCH, **contract: Any) -> str:
        request = pb.SubmitRequest(spec=spec(text, lane=lane, **contract))
        return (await self.door.stub.Submit(request, metadata=bearer(token))).job_id

    async def give_up(self, reason: str = POISON, lane: Lane = Lane.BATCH) -> JobRecord:
        """The next job of the lane, as a worker ends it that will not try it again."""
        held = await self.worker.take(lane)
        record = await self.worker.fail(held, JobError(Code.INTERNAL, reason, "1 attempt ended without a result"))
        await self.letters.store(record, b"\xff\xff" if reason == UNREADABLE_JOB else held.delivery.data)
        return record

    async def dead(self, token: str = ACME, reason: str = POISON, lane: Lane = Lane.BATCH, **more: Any) -> str:
        job_id = await self.submit(token, lane=lane, **more)
        assert (await self.give_up(reason, lane)).job_id == job_id
        return job_id

    async def listed(self, token: str = ACME, **request: Any) -> list[str]:
        return [letter.job_id for letter in (await self.page(token, **request)).dead_letters]

    async def page(self, token: str = ACME, **request: Any) -> pb.ListDeadLettersResponse:
        call = self.door.stub.ListDeadLetters(pb.ListDeadLettersRequest(**request), metadata=bearer(token))
        return await self._said(call)

    async def requeue(self, job_id: str, token: str = ACME, **more: Any) -> pb.RequeueDeadLetterResponse:
        request = pb.RequeueDeadLetterRequest(job_id=job_id, **more)
        return await self._said(self.door.stub.RequeueDeadLetter(request, metadata=bearer(token)))

    async def purge(self, token: str = ACME, **request: Any) -> int:
        call = self.door.stub.PurgeDeadLetters(pb.PurgeDeadLettersRequest(**request), metadata=bearer(token))
        return int((await self._said(call)).purged)

    async def quotes(self, reason: str, lane: Lane) -> None:
        """Waits until the door answers so."""

        async def answered() -> bool:
            request = pb.QuoteRequest(spec=spec(lane=lane))
            return bool((await self.door.stub.Quote(request, metadata=bearer(ACME))).verdict.reason == reason)

        await eventually(answered)

    async def _said(self, call: Any) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


@pytest.fixture
async def office(nats_server: LocalNats, tmp_path: Path) -> AsyncIterator[Office]:
    settings = with_tokens(admission_settings(nats_server), tmp_path)
    admission = msgspec.structs.replace(settings.admission, listen="127.0.0.1:0")
    settings = msgspec.structs.replace(settings, admission=admission)
    async with gate(nats_server, tmp_path, settings) as door, PuppetWorker(door.bus).alive() as worker:
        made = Office(door, worker, DeadLetterStore(door.bus, REGION))
        await door.plan()
        await made.quotes("LANE_OPEN", Lane.BATCH)
        yield made


# --- looking -----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_letter_says_what_became_of_the_job(office: Office):
    job_id = await office.dead(labels={"team": "a"})
    page = await office.page()
    (letter,) = page.dead_letters
    record = await office.door.record(job_id, "acme")
    assert (letter.job_id, letter.tenant, letter.model, letter.lane) == (job_id, "acme", "chat", common_pb2.LANE_BATCH)
    assert (letter.reason, letter.message) == (POISON, "1 attempt ended without a result")
    assert letter.died_at == timestamp_of(record.timings.ended_s)
    assert [(a.attempt, a.worker_id) for a in letter.attempts] == [(1, office.worker.id)]
    assert (letter.requeueable, letter.prompt_tokens, letter.max_tokens) == (True, 5, 16)
    assert dict(letter.labels) == {"team": "a"}


async def test_a_tenant_sees_and_touches_only_its_own(office: Office):
    mine, theirs = await office.dead(ACME), await office.dead(OTHER)
    assert await office.listed(ACME) == await office.listed(ACME, tenant="acme") == [mine]
    assert await office.listed(OTHER) == [theirs]
    assert await office.listed(OPERATOR) == [theirs, mine]
    assert await office.listed(OPERATOR, tenant="acme") == [mine]
    for call in (office.requeue(theirs), office.requeue(UNKNOWN)):
        with pytest.raises(DeadLetterNotFound):
            await call
    for tenant in ("other", "nobody"):
        for request in (office.listed(tenant=tenant), office.purge(tenant=tenant)):
            with pytest.raises(PermissionDenied) as refused:
                await request
            assert refused.value.field == "tenant"
    assert await office.purge(ACME, job_ids=[theirs, UNKNOWN]) == 0
    assert await office.purge(ACME) == 1, "all that it sees"
    assert await office.listed(OPERATOR) == [theirs]
    assert await office.purge(OPERATOR, job_ids=[theirs]) == 1


async def test_pages_and_filters(office: Office):
    made = [await office.dead(lane=Lane.BATCH if n % 2 else Lane.DEFERRABLE) for n in range(3)]
    bad = await office.dead(reason=UNREADABLE_JOB)
    everything = [bad, *made[::-1]]
    for size in (3, 4, 5):
        page = await office.page(page_size=size)
        assert [letter.job_id for letter in page.dead_letters] == everything[:size]
        assert bool(page.next_page_token) is (size < 4)
        if page.next_page_token:
            assert await office.listed(page_size=size, page_token=page.next_page_token) == everything[size:]
    assert await office.listed(lane=common_pb2.LANE_DEFERRABLE) == [made[2], made[0]]
    assert await office.listed(reason=UNREADABLE_JOB) == [bad]
    assert await office.listed(reason="NO_SUCH_REASON") == []

    first = await office.page(page_size=1)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"page_token": "garbage"}, "page_token"),
        ({"page_token": first.next_page_token, "reason": POISON}, "page_token"),
        ({"page_size": -1}, "page_size"),
        ({"lane": 99}, "lane"),
        ({"reason": "a.b"}, "reason"),
        ({"tenant": ">"}, "tenant"),
    ]
    for request, field in wrong:
        with pytest.raises(InvalidRequest) as refused:
            await office.listed(**request)
        assert refused.value.field == field
    with pytest.raises(InvalidRequest, match="another list"):
        await office.listed(OTHER, page_token=first.next_page_token)


# --- running again -----------------------------------------------------------------------------------


async def test_a_requeue_runs_the_same_task_under_a_new_id_and_removes_the_letter(office: Office):
    old_id = await office.dead(text="Hello again", due_s=100.0, labels={"team": "a"})
    old = await office.door.record(old_id, "acme")
    before_s = CLOCK.now()
    response = await office.requeue(old_id, OPERATOR)
    assert response.job_id == ids.requeued_job_id(REGION, "acme", old_id)
    assert response.verdict.reason == "LANE_OPEN"
    assert await office.listed(OPERATOR) == []
    held = await office.worker.take(Lane.BATCH)
    new = held.record
    assert bytes(held.task.prompt_ids) == b"Hello again"
    assert (new.tenant, new.requeued_from, new.attached) == ("acme", old_id, False)
    assert new.contract.labels == {"team": "a"}
    assert new.contract.on_disconnect is OnDisconnect.KEEP
    span_s = old.contract.deadline_s - old.timings.created_s
    assert before_s + span_s <= new.contract.deadline_s <= CLOCK.now() + span_s, "as far ahead as the old one's"
    await office.worker.finish(held, "fine")
    shown = await office.door.stub.GetJob(pb.GetJobRequest(job_id=response.job_id), metadata=bearer(ACME))
    assert (shown.job.requeued_from, shown.job.result.text) == (old_id, "fine")
    assert (await office.door.record(old_id, "acme")) == old, "the end of the old job stands"


@pytest.mark.slow
async def test_a_deadline_of_the_new_job_may_be_given(office: Office):
    old_id = await office.dead()
    due_s = CLOCK.now() + 500.0
    for wrong in (timestamp_of(CLOCK.now() - 1.0), timestamp_of(CLOCK.now() + 31 * 86_400.0), Timestamp(nanos=-1)):
        with pytest.raises(InvalidRequest) as refused:
            await office.requeue(old_id, deadline=wrong)
        assert refused.value.field == "deadline"
    assert await office.listed() == [old_id]
    new_id = (await office.requeue(old_id, deadline=timestamp_of(due_s))).job_id
    assert (await office.door.record(new_id, "acme")).contract.deadline_s == pytest.approx(due_s, abs=1e-6)


async def test_a_repeated_requeue_gives_the_same_job_before_and_after_it_ended(office: Office):
    old_id = await office.dead()
    first = await office.requeue(old_id)
    assert await office.requeue(old_id) == first
    assert await office.requeue(old_id, OPERATOR, deadline=timestamp_of(CLOCK.now() + 9.0)) == first
    held = await office.worker.take(Lane.BATCH)
    await office.worker.finish(held, "fine")
    assert await office.requeue(old_id) == first
    assert await office.door.messages() == 0, "it ran once"
    with pytest.raises(DeadLetterNotFound):
        await office.requeue(old_id, OTHER)


@pytest.mark.slow
async def test_a_letter_that_outlived_its_requeue_gives_the_same_job_and_goes(office: Office):
    """As where the letter could not be removed, or was stored once more by a worker that had crashed."""
    old_id = await office.dead()
    stored = await last_from_leader(
        office.door.bus, subjects.dead_stream(REGION), subjects.dead_letters(REGION, job=old_id)
    )
    assert stored is not None
    first = await office.requeue(old_id)
    await office.door.bus.store(subjects.dead_letter(REGION, Lane.BATCH, POISON, old_id), stored.data)
    assert await office.listed() == [old_id]
    assert await office.requeue(old_id) == first
    assert await office.listed() == []
    assert await office.door.messages() == 1


@pytest.mark.slow
async def test_a_requeue_that_never_reached_its_lane_is_made_again(office: Office):
    """As where its door died after the record, and the scheduler ended that."""
    old_id = await office.dead()
    record = await office.door.record(old_id, "acme")
    new_id = ids.requeued_job_id(REGION, "acme", old_id)
    lost = JobError(Code.UNAVAILABLE, NOT_ACCEPTED, "the job was never stored in its lane; nothing ran")
    body = hashlib.sha256(f"requeue {old_id}".encode()).digest()
    record = replace(record, job_id=new_id, body_digest=body, attempt=0, lineage=(), starts=0)
    await office.door.records.create(replace(record, state=JobState.CANCELLED, error=lost))
    assert (await office.requeue(old_id)).job_id == new_id
    assert await office.listed() == []
    await office.worker.finish(await office.worker.take(Lane.BATCH), "fine")
    assert (await office.door.record(new_id, "acme")).state is JobState.SUCCEEDED


@pytest.mark.slow
async def test_a_requeue_that_dies_again_is_requeued_again(office: Office):
    chain = [await office.dead()]
    for _ in range(2):
        new_id = (await office.requeue(chain[-1])).job_id
        assert (await office.give_up()).job_id == new_id
        page = await office.page()
        assert [(letter.job_id, letter.requeued_from) for letter in page.dead_letters] == [(new_id, chain[-1])]
        chain.append(new_id)
    last = (await office.requeue(chain[-1])).job_id
    assert len({*chain, last}) == 4
    await office.worker.finish(await office.worker.take(Lane.BATCH), "fine")
    assert (await office.door.record(last, "acme")).state is JobState.SUCCEEDED


async def test_a_refused_requeue_leaves_the_letter(office: Office):
    old_id = await office.dead(lane=Lane.PRIORITY)
    await office.door.plan(free_slots=0, lanes=[LanePlan(Lane.PRIORITY, ready=12, running=4, limit=12)])
    await office.quotes("LANE_SATURATED", Lane.PRIORITY)
    with pytest.raises(LaneSaturated) as refused:
        await office.requeue(old_id)
    assert refused.value.retry_after_s
    assert await office.listed() == [old_id]
    await office.door.plan()
    await office.quotes("LANE_OPEN", Lane.PRIORITY)
    await office.requeue(old_id)
    assert await office.listed() == []


@pytest.mark.slow
async def test_what_cannot_be_run_again_says_why_and_stays(office: Office):
    unreadable = await office.dead(reason=UNREADABLE_JOB)
    with pytest.raises(NotRequeueable, match="cannot be read"):
        await office.requeue(unreadable)
    await office.submit()
    held = await office.worker.take(Lane.BATCH)
    record = await office.worker.fail(held, JobError(Code.INTERNAL, POISON, "given up"))
    changes: list[tuple[dict[str, str], str]] = [
        ({"job_id": f"{UNKNOWN[:-1]}1", "model": "gone"}, "there is no such model"),
        ({"job_id": f"{UNKNOWN[:-1]}2", "pool": "gone"}, "tokenizer of pool gone"),
    ]
    for change, why in changes:
        await office.letters.store(replace(record, **change), held.delivery.data)
        with pytest.raises(NotRequeueable, match=why) as refused:
            await office.requeue(change["job_id"])
        assert (refused.value.row.code, refused.value.job_id) == (Code.FAILED_PRECONDITION, change["job_id"])
    assert await office.listed() == [*(change["job_id"] for change, _ in changes[::-1]), unreadable]


@pytest.mark.slow
async def test_ids_that_name_no_letter(office: Office):
    alive = await office.submit()
    for job_id, kind in [
        ("", InvalidRequest),
        ("a.b", InvalidRequest),
        ("nonsense", InvalidRequest),
        (UNKNOWN, DeadLetterNotFound),
        (UNKNOWN.replace("local", "elsewhere"), DeadLetterNotFound),
        (alive, DeadLetterNotFound),
    ]:
        with pytest.raises(kind) as refused:
            await office.requeue(job_id, OPERATOR)
        assert refused.value.field == ("job_id" if kind is InvalidRequest else "")


# --- removing ----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_purge_takes_what_it_selects(office: Office):
    old = await office.dead()
    between_s = CLOCK.now()
    urgent, broken = await office.dead(lane=Lane.PRIORITY), await office.dead(reason=UNREADABLE_JOB)
    theirs = await office.dead(OTHER)
    assert await office.purge(before=timestamp_of(between_s)) == 1
    assert await office.listed(OPERATOR) == [theirs, broken, urgent]
    assert await office.purge(lane=common_pb2.LANE_PRIORITY) == 1
    assert await office.purge(OPERATOR, tenant="acme", reason=UNREADABLE_JOB) == 1
    assert await office.listed(OPERATOR) == [theirs]
    assert await office.purge(OPERATOR) == 1
    assert await office.purge(OPERATOR) == 0
    assert (await office.door.record(old, "acme")).state is JobState.FAILED, "its record stays"


@pytest.mark.slow
async def test_a_purge_names_at_most_so_many_jobs_and_either_jobs_or_a_selection(office: Office):
    mine = await office.dead()
    names = [mine, *(f"{REGION}-d{n}" for n in range(PURGE_IDS_MAX))]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"job_ids": names}, "job_ids"),
        ({"job_ids": [mine], "lane": common_pb2.LANE_BATCH}, "job_ids"),
        ({"job_ids": [mine, "a.b"]}, "job_ids[1]"),
        ({"before": Timestamp()}, "before"),
        ({"before": Timestamp(nanos=-1)}, "before"),
        ({"lane": 99}, "lane"),
    ]
    for request, field in wrong:
        with pytest.raises(InvalidRequest) as refused:
            await office.purge(**request)
        assert refused.value.field == field
    assert await office.listed() == [mine]
    assert await office.purge(OPERATOR, job_ids=names[:PURGE_IDS_MAX]) == 1


@pytest.mark.slow
async def test_the_client_lists_across_pages_and_purges_in_parts(office: Office, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("laneway.client.admission.PAGE_SIZE", 2)
    monkeypatch.setattr("laneway.client.admission.PURGE_IDS", 2)
    made = [await office.dead() for _ in range(5)]
    async with Client(office.door.address, token=ACME) as client:
        assert [letter.job_id async for letter in client.list_dead_letters()] == made[::-1]
        assert [letter.job_id async for letter in client.list_dead_letters(limit=3)] == made[:1:-1]
        assert await client.purge_dead_letters([]) == 0, "no names are not all names"
        assert await client.purge_dead_letters(made[:3]) == 3
        new = await client.requeue_dead_letter(made[3], deadline_s=60.0)
        assert (await client.get_job(new.job_id)).requeued_from == made[3]
        assert await client.purge_dead_letters(before_s=CLOCK.now() + 1.0) == 1
        assert [letter async for letter in client.list_dead_letters()] == []
