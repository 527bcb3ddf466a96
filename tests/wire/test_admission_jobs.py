"""Watching, listing, reading and cancelling jobs, each within one's own tenant."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laneway.admission import results
from laneway.core.errors import InvalidRequest, JobCancelled, JobNotFound, PermissionDenied, Unauthenticated
from laneway.core.job import JobRecord
from laneway.core.lanes import JobState, Lane
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.reading import StoredMessage
from laneway.runtime.walking import Place, Walk
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import common_pb2
from tests.support.admission import (
    Gate,
    PuppetWorker,
    admission_settings,
    error_of_call,
    gate,
    generate,
    next_text,
    open_gate,
    opening,
    rest,
    spec,
    text_of,
)
from tests.support.nats import eventually
from tests.support.services import ACME, OPERATOR, OTHER, bearer, with_tokens


@pytest.fixture
async def opened(nats_server: LocalNats, tmp_path: Path) -> AsyncIterator[tuple[Gate, PuppetWorker]]:
    async with open_gate(nats_server, tmp_path) as both:
        yield both


async def submit(door: Gate, **more) -> str:
    return (await door.stub.Submit(pb.SubmitRequest(spec=spec(**more)))).job_id


# --- watch -----------------------------------------------------------------------------------------


async def test_watching_a_running_job_replays_what_is_wanted(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    job_id = await submit(door, lane=Lane.BATCH)
    held = await worker.take(Lane.BATCH)
    call = door.stub.Watch(pb.WatchRequest(job_id=job_id, from_index=1))
    assert (await opening(call)).job_id == job_id

    def attached() -> str:
        wanted = [b.door for b in worker.beats for a in b.attachments if a.job_id == job_id and a.replay]
        assert all(a.next_index == 1 for b in worker.beats for a in b.attachments)
        return wanted[0] if wanted else ""

    to = await eventually(attached)
    await worker.send(held, 0, "a", door=to)
    await worker.send(held, 1, "b", door=to)
    assert await next_text(call) == "b"
    await worker.finish(held, "abcd")
    events = await rest(call)
    assert text_of(events) == "cd"
    assert events[-1].finished.job_id == job_id


async def test_watching_before_the_claim_and_after_the_end(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    job_id = await submit(door, lane=Lane.BATCH)
    early = door.stub.Watch(pb.WatchRequest(job_id=job_id))
    await opening(early)
    held = await worker.take(Lane.BATCH)
    await worker.finish(held, "abcd")
    assert text_of(await rest(early)) == "abcd"
    for index, text in [(0, "abcd"), (3, "d"), (4, "")]:
        assert text_of(await rest(door.stub.Watch(pb.WatchRequest(job_id=job_id, from_index=index)))) == text
    for index in (5, 16, 17, 2**32 - 1):
        error = await error_of_call(door.stub.Watch(pb.WatchRequest(job_id=job_id, from_index=index)))
        assert isinstance(error, InvalidRequest)
        assert error.field == "from_index"


async def test_what_a_watcher_says_he_has_must_be_what_comes_before(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    job_id = await submit(door, lane=Lane.BATCH)
    held = await worker.take(Lane.BATCH)
    await worker.finish(held, "abcd")
    rest_of = pb.WatchRequest(job_id=job_id, from_index=2, delivered_ids=b"ab")
    assert text_of(await rest(door.stub.Watch(rest_of))) == "cd"
    for number in (1, 3):
        wrong = pb.WatchRequest(job_id=job_id, from_index=2, delivered_ids=b"abc"[:number])
        error = await error_of_call(door.stub.Watch(wrong))
        assert isinstance(error, InvalidRequest)
        assert error.field == "delivered_ids"


async def test_a_watcher_who_leaves_changes_nothing(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    call = door.stub.Generate(generate())
    job_id = (await opening(call)).job_id
    watching = door.stub.Watch(pb.WatchRequest(job_id=job_id))
    await opening(watching)
    held = await worker.take()
    outlet = await eventually(lambda: {b.door for b in worker.beats} - {held.record.door})
    await worker.send(held, 0, "ab")
    await worker.send(held, 0, "a", door=outlet.pop())
    assert await next_text(watching) == "a", "what each is sent does not disturb the other"
    watching.cancel()
    await worker.send(held, 2, "c")
    await worker.finish(held, "abc")
    assert text_of(await rest(call)) == "abc"
    assert worker.hints == []


async def test_watching_a_cancelled_job_ends_cancelled(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    job_id = await submit(door, lane=Lane.BATCH)
    call = door.stub.Watch(pb.WatchRequest(job_id=job_id))
    await opening(call)
    await door.stub.CancelJob(pb.CancelJobRequest(job_id=job_id))
    assert isinstance(await error_of_call(call), JobCancelled)
    assert isinstance(await error_of_call(door.stub.Watch(pb.WatchRequest(job_id=job_id))), JobCancelled)


# --- reading and cancelling ------------------------------------------------------------------------


async def test_states_as_readers_see_them(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    job_id = await submit(door, lane=Lane.BATCH, labels={"team": "a"})

    async def job() -> pb.Job:
        return (await door.stub.GetJob(pb.GetJobRequest(job_id=job_id))).job

    ready = await job()
    assert ready.state == common_pb2.JOB_STATE_READY
    assert (ready.model, ready.prompt_tokens, ready.max_tokens) == ("chat", 5, 16)
    assert ready.contract.labels == {"team": "a"}
    assert ready.contract.HasField("deadline")
    held = await worker.take(Lane.BATCH)
    assert (await job()).state == common_pb2.JOB_STATE_RUNNING
    await worker.finish(held, "abc")
    done = await job()
    assert (done.state, done.result.text) == (common_pb2.JOB_STATE_SUCCEEDED, "abc")
    assert done.usage.completion_tokens == 3


async def test_cancelling_is_idempotent_and_ends_once(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    job_id = await submit(door, lane=Lane.BATCH)
    request = pb.CancelJobRequest(job_id=job_id)
    answers = await asyncio.gather(*(door.stub.CancelJob(request) for _ in range(4)))
    assert {a.state for a in answers} == {common_pb2.JOB_STATE_CANCELLED}
    assert len({(a.ended_at.seconds, a.ended_at.nanos) for a in answers}) == 1
    assert await door.messages() == 0
    other = await submit(door, lane=Lane.BATCH)
    await worker.finish(await worker.take(Lane.BATCH), "ok")
    assert (await door.stub.CancelJob(pb.CancelJobRequest(job_id=other))).state == common_pb2.JOB_STATE_SUCCEEDED


async def test_ids_that_name_no_job(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    for job_id, kind in [
        ("", InvalidRequest),
        ("nonsense", InvalidRequest),
        ("a.b.*.>", InvalidRequest),
        ("local-00000000-0000-7000-8000-000000000000", JobNotFound),
        ("elsewhere-00000000-0000-7000-8000-000000000000", JobNotFound),
        ("local-abcdefghijklmnopqrstuvwxyz", JobNotFound),
    ]:
        for call in (
            door.stub.GetJob(pb.GetJobRequest(job_id=job_id)),
            door.stub.CancelJob(pb.CancelJobRequest(job_id=job_id)),
            door.stub.Watch(pb.WatchRequest(job_id=job_id)),
        ):
            assert isinstance(await error_of_call(call), kind), job_id


# --- lists -----------------------------------------------------------------------------------------


async def listed(door: Gate, token: str = ACME, **request) -> pb.ListJobsResponse:
    return await door.stub.ListJobs(pb.ListJobsRequest(**request), metadata=bearer(token))


async def test_lists_page_filter_and_keep_tenants_apart(nats_server: LocalNats, tmp_path: Path):
    settings = with_tokens(admission_settings(nats_server), tmp_path)
    admission = msgspec.structs.replace(settings.admission, listen="127.0.0.1:0")
    settings = msgspec.structs.replace(settings, admission=admission)
    async with gate(nats_server, tmp_path, settings) as door:
        assert isinstance(await error_of_call(door.stub.ListJobs(pb.ListJobsRequest())), Unauthenticated)
        assert list((await listed(door)).jobs) == []
        made: list[str] = []
        for number in range(7):
            lane = Lane.BATCH if number % 2 else Lane.DEFERRABLE
            request = pb.SubmitRequest(
                spec=spec(lane=lane, labels={"number": str(number)}), idempotency_key=f"key-{number * 7919 % 101}"
            )
            made.append((await door.stub.Submit(request, metadata=bearer(ACME))).job_id)
        foreign = pb.SubmitRequest(spec=spec(lane=Lane.BATCH))
        other = (await door.stub.Submit(foreign, metadata=bearer(OTHER))).job_id

        pages, token = [], ""
        while True:
            page = await listed(door, page_size=3, page_token=token)
            pages.append([job.job_id for job in page.jobs])
            token = page.next_page_token
            if not token:
                break
        assert [len(page) for page in pages] == [3, 3, 1]
        assert [job_id for page in pages for job_id in page] == made[::-1], "newest first"

        batch = await listed(door, lane=common_pb2.LANE_BATCH)
        assert [job.job_id for job in batch.jobs] == [made[5], made[3], made[1]]
        labelled = await listed(door, labels={"number": "4"})
        assert [job.job_id for job in labelled.jobs] == [made[4]]
        await door.stub.CancelJob(pb.CancelJobRequest(job_id=made[2]), metadata=bearer(ACME))
        cancelled = await listed(door, state=common_pb2.JOB_STATE_CANCELLED)
        assert [job.job_id for job in cancelled.jobs] == [made[2]]
        parked = await listed(door, state=common_pb2.JOB_STATE_PARKED)
        assert len(parked.jobs) == 6, "without a plan everything is held"
        assert not (await listed(door, state=common_pb2.JOB_STATE_READY)).jobs

        first = await listed(door, page_size=1)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"page_token": "garbage"}, "page_token"),
            ({"page_token": first.next_page_token, "lane": common_pb2.LANE_BATCH}, "page_token"),
            ({"page_size": -1}, "page_size"),
            ({"lane": 99}, "lane"),
            ({"state": 99}, "state"),
        ]
        for bad, field in wrong:
            error = await error_of_call(door.stub.ListJobs(pb.ListJobsRequest(**bad), metadata=bearer(ACME)))
            assert (type(error), error.field) == (InvalidRequest, field)
        stolen = pb.ListJobsRequest(page_token=first.next_page_token)
        assert (await error_of_call(door.stub.ListJobs(stolen, metadata=bearer(OTHER)))).field == "page_token"

        for call in (
            door.stub.GetJob(pb.GetJobRequest(job_id=other), metadata=bearer(ACME)),
            door.stub.CancelJob(pb.CancelJobRequest(job_id=other), metadata=bearer(ACME)),
            door.stub.Watch(pb.WatchRequest(job_id=other), metadata=bearer(ACME)),
        ):
            assert isinstance(await error_of_call(call), JobNotFound)
        assert (await door.record(other, "other")).state is JobState.WAITING
        seen = await door.stub.GetJob(pb.GetJobRequest(job_id=other), metadata=bearer(OPERATOR))
        assert seen.job.tenant == "other"
        ended = await door.stub.CancelJob(pb.CancelJobRequest(job_id=other), metadata=bearer(OPERATOR))
        assert ended.state == common_pb2.JOB_STATE_CANCELLED


async def test_a_credential_may_be_bound_to_lanes(nats_server: LocalNats, tmp_path: Path):
    path = tmp_path / "tokens.toml"
    secret = tmp_path / "secret"
    secret.write_text("only-batch\n")
    path.write_text(f'[[token]]\nvalue_file = "{secret}"\ntenant = "acme"\nlanes = ["batch"]\n')
    settings = admission_settings(nats_server, tokens_file=str(path))
    async with gate(nats_server, tmp_path, settings) as door:
        token = bearer("only-batch")
        error = await error_of_call(door.stub.Generate(generate(), metadata=token))
        assert isinstance(error, PermissionDenied)
        request = pb.SubmitRequest(spec=spec(lane=Lane.BATCH))
        assert (await door.stub.Submit(request, metadata=token)).job_id


@pytest.mark.slow
async def test_a_list_holds_few_records_whole_and_no_answers(
    opened: tuple[Gate, PuppetWorker], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(results, "RECORDS_AT_ONCE", 2)
    counts: list[int] = []
    shown: list[JobRecord] = []
    step, view = Walk.step, results.JobBook._view

    async def counted(walk: Walk, place: Place, count: int) -> tuple[list[StoredMessage], Place]:
        counts.append(count)
        return await step(walk, place, count)

    async def seen(book: results.JobBook, record: JobRecord) -> results.JobView:
        shown.append(record)
        return await view(book, record)

    monkeypatch.setattr(Walk, "step", counted)
    monkeypatch.setattr(results.JobBook, "_view", seen)
    door, worker = opened
    made = [await submit(door, lane=Lane.BATCH) for _ in range(5)]
    await worker.finish(await worker.take(Lane.BATCH), "an answer")
    page = await door.stub.ListJobs(pb.ListJobsRequest(page_size=1000))
    assert {job.job_id for job in page.jobs} == set(made)
    assert max(counts) == 2
    assert [job.usage.completion_tokens for job in page.jobs if job.state == common_pb2.JOB_STATE_SUCCEEDED] == [9]
    assert {record.result.token_ids for record in shown if record.result is not None} == {()}


@pytest.mark.slow
async def test_a_filter_that_matches_little_gives_shorter_pages(
    nats_server: LocalNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(results, "SCAN_JOBS_MAX", 3)
    async with gate(nats_server, tmp_path) as door:
        made = []
        for number in range(7):
            request = pb.SubmitRequest(spec=spec(lane=Lane.BATCH, labels={"odd": "yes" if number % 2 else "no"}))
            made.append((await door.stub.Submit(request)).job_id)
        pages, token = [], ""
        while True:
            wanted = pb.ListJobsRequest(page_size=3, page_token=token, labels={"odd": "yes"})
            page = await door.stub.ListJobs(wanted)
            pages.append([job.job_id for job in page.jobs])
            token = page.next_page_token
            if not token:
                break
        assert max(map(len, pages)) < 3, "a page of so few records read holds fewer"
        assert [job_id for page in pages for job_id in page] == [made[5], made[3], made[1]]
