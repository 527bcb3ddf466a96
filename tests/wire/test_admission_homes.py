"""Every way in gives a job its affinity key and home: in its record, its subject, and after it was given up as well."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.dead_letters import POISON
from laneway.core.errors import Code
from laneway.core.fleet import HomePlan, LanePlan
from laneway.core.job import GenerateTask, JobError, JobRecord, Sampling
from laneway.core.lanes import LANES, JobState, Lane
from laneway.policy.affinity import affinity_key, choose_home
from laneway.runtime.dead_letters import DeadLetterStore
from laneway.runtime.lanes import ReleaseOutcome
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.settings import Settings
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import task_pb2
from tests.support.admission import CLOCK, TENANT, Gate, PuppetWorker, admission_settings, gate, opening, spec
from tests.support.nats import POOL, REGION, eventually

SESSION = "session-1"
KEY = affinity_key(POOL, TENANT, GenerateTask((1,), Sampling(max_tokens=1), session_id=SESSION))
HOME = choose_home(KEY, {"h0": 0, "h1": 0})
SERVED = (HomePlan("h0", "w0"), HomePlan("h1", "w1"))


def two_homes(server: LocalNats) -> Settings:
    settings = admission_settings(server, ingest=True)
    return replace(settings, models=(replace(settings.models[0], home_slots=2),))


@pytest.fixture
async def door(nats_server: LocalNats, tmp_path: Path) -> AsyncIterator[Gate]:
    async with gate(nats_server, tmp_path, two_homes(nats_server)) as door, PuppetWorker(door.bus).alive():
        await door.plan(homes=SERVED)
        await door.quotes("LANE_OPEN", lane=Lane.BATCH)
        yield door


def of_session(lane: Lane = Lane.BATCH) -> task_pb2.JobSpec:
    made = spec(lane=lane)
    made.generate.session_id = SESSION
    return made


async def homes_in_lanes(door: Gate) -> dict[str, str]:
    """By job, of all that are ready."""
    found: dict[str, str] = {}
    for lane in LANES:
        stream = subjects.lane_stream(REGION, lane)
        answer = await door.bus.api(f"STREAM.INFO.{stream}", {"subjects_filter": f"lane.{REGION}.>"})
        for subject in answer["state"].get("subjects") or {}:
            found[subject.split(".")[6]] = subject.split(".")[4]
    return found


async def goes_home(door: Gate, job_id: str) -> JobRecord:
    assert await homes_in_lanes(door) == {job_id: HOME}
    return await door.record(job_id)


async def test_generate(door: Gate) -> None:
    call = door.stub.Generate(pb.GenerateRequest(spec=of_session(Lane.PRIORITY)))
    accepted = await opening(call)
    assert await homes_in_lanes(door) == {accepted.job_id: HOME}
    record = await door.reaches(accepted.job_id, JobState.WAITING)
    assert (record.affinity_key, record.home) == (KEY, HOME)
    call.cancel()
    await door.reaches(accepted.job_id, JobState.CANCELLED)
    assert await homes_in_lanes(door) == {}, "it was purged from its home"


async def test_submit(door: Gate) -> None:
    job_id = (await door.stub.Submit(pb.SubmitRequest(spec=of_session()))).job_id
    record = await goes_home(door, job_id)
    assert (record.affinity_key, record.home) == (KEY, HOME)


async def test_submit_many(door: Gate) -> None:
    call = door.stub.SubmitMany()
    await call.write(pb.SubmitManyRequest(items=[pb.SubmitManyItem(client_ref="a", spec=of_session())]))
    await call.done_writing()
    outcomes = [outcome async for response in call for outcome in response.outcomes]
    await goes_home(door, outcomes[0].accepted.job_id)


async def test_a_producers_message(door: Gate) -> None:
    body = pb.SubmitRequest(spec=of_session()).SerializeToString()
    await door.bus.store(subjects.ingest(REGION, Lane.BATCH, TENANT), body)
    ready = await eventually(lambda: homes_in_lanes(door))
    assert list(ready.values()) == [HOME]


async def test_a_dead_letter_that_is_run_again(door: Gate) -> None:
    job_id = (await door.stub.Submit(pb.SubmitRequest(spec=of_session()))).job_id
    lane, stream = Lane.BATCH, subjects.lane_stream(REGION, Lane.BATCH)
    subject = subjects.ready(REGION, lane, POOL, TENANT, job_id, HOME)
    message = (await door.bus.request(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"")).data
    record = await door.record(job_id)
    died = replace(record, state=JobState.FAILED, error=JobError(Code.INTERNAL, POISON, "", None))
    await DeadLetterStore(door.bus, REGION).store(died, message)
    await door.records.change(REGION, TENANT, job_id, lambda found: died)
    await door.lanes.purge(record)
    deadline = Timestamp(seconds=int(CLOCK.now() + 600))
    again = await door.stub.RequeueDeadLetter(pb.RequeueDeadLetterRequest(job_id=job_id, deadline=deadline))
    await goes_home(door, again.job_id)


async def test_a_parked_job_is_released_into_its_home(door: Gate) -> None:
    await door.plan(free_slots=0, lanes=[LanePlan(Lane.BATCH, ready=9)], homes=SERVED)
    await door.quotes("HELD_FOR_CAPACITY", lane=Lane.BATCH)
    job_id = (await door.stub.Submit(pb.SubmitRequest(spec=of_session()))).job_id
    [park] = await door.lanes.parked(Lane.BATCH)
    assert await homes_in_lanes(door) == {}
    released = await door.lanes.release(park, now_s=CLOCK.now(), reason="IDLE")
    assert released is ReleaseOutcome.RELEASED
    await goes_home(door, job_id)


async def test_a_short_prompt_without_a_session_may_go_to_anyone(door: Gate) -> None:
    job_id = (await door.stub.Submit(pb.SubmitRequest(spec=spec(lane=Lane.BATCH)))).job_id
    assert await homes_in_lanes(door) == {job_id: subjects.HOME_ANY}
    assert (await door.record(job_id)).affinity_key == ""


async def test_without_a_worker_at_any_home_a_job_may_go_to_anyone(door: Gate) -> None:
    await door.plan(homes=(HomePlan("h0"), HomePlan("h1")))
    await door.plan(homes=(HomePlan("h0"), HomePlan("h1")), free_slots=3)

    async def sent() -> bool:
        job_id = (await door.stub.Submit(pb.SubmitRequest(spec=of_session()))).job_id
        return (await homes_in_lanes(door))[job_id] == subjects.HOME_ANY

    await eventually(sent)
