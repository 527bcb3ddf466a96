"""Producers on NATS: every message gets a durable verdict, once, whatever it holds and however often it comes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from google.protobuf import json_format

from laneway.admission.application import Admission, Request
from laneway.core import subjects
from laneway.core.errors import Code
from laneway.core.ids import keyed_job_id
from laneway.core.job import JobRecord
from laneway.core.lanes import JobState, Lane
from laneway.runtime.auth import Caller
from laneway.runtime.layout import INGEST_CONSUMER
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.puller import Puller
from laneway.runtime.reading import subject_list
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import bus_pb2, common_pb2
from tests.support.admission import Gate, PuppetWorker, admission_settings, open_gate, spec
from tests.support.nats import REGION, eventually

ACME = "acme"


@pytest.fixture
async def opened(nats_server: LocalNats, tmp_path: Path) -> AsyncIterator[tuple[Gate, PuppetWorker]]:
    async with open_gate(nats_server, tmp_path) as both:
        yield both


def body(text: str = "Hello", **more) -> bytes:
    return pb.SubmitRequest(spec=spec(text, **more)).SerializeToString()


async def publish(door: Gate, data: bytes, *, lane: str = "batch", **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await door.bus.store(f"ingest.{REGION}.{lane}.{ACME}", data, named)


async def verdicts(door: Gate, count: int) -> list[bus_pb2.IngestVerdict]:
    """That many verdicts, and no message left to consume."""
    stream = subjects.verdict_stream(REGION)

    async def there() -> list[str] | None:
        found = await subject_list(door.bus, stream, f"verdict.{REGION}.{ACME}.*")
        left = await door.messages(subjects.ingest_stream(REGION))
        return found if len(found) >= count and not left else None

    found = await eventually(there)
    assert len(found) == count
    messages = [await door.bus.request(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"") for subject in found]
    return [bus_pb2.IngestVerdict.FromString(msg.data) for msg in messages]


@pytest.mark.parametrize("form", ["protobuf", "json", "json by header"])
async def test_a_message_becomes_a_job_of_the_subjects_tenant(opened: tuple[Gate, PuppetWorker], form: str):
    door, worker = opened
    data = body(labels={"a": "b"})
    if form != "protobuf":
        data = json_format.MessageToJson(pb.SubmitRequest.FromString(data)).encode()
    headers = {}
    if form == "json by header":
        data, headers = b"\n" + data, {"Content_Type": "application/json; charset=utf-8"}
    await publish(door, data, **headers)
    [verdict] = await verdicts(door, 1)
    assert verdict.verdict.kind == common_pb2.VERDICT_KIND_ACCEPTED
    assert not verdict.HasField("error")
    record = await door.record(verdict.job_id, ACME)
    assert (record.tenant, record.origin, record.contract.lane) == (ACME, "NATS", Lane.BATCH)
    assert record.contract.labels == {"a": "b"}
    held = await worker.take(Lane.BATCH)
    assert held.task.prompt_ids == tuple(b"Hello")
    await worker.finish(held, "done")
    assert (await door.record(verdict.job_id, ACME)).state is JobState.SUCCEEDED


async def test_a_key_makes_a_publish_repeatable(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    for _ in range(3):
        await publish(door, body(), Laneway_Key="k1")
    [verdict] = await verdicts(door, 1)
    assert (verdict.job_id, verdict.key) == (keyed_job_id(REGION, ACME, "k1"), "k1")
    assert await door.messages() == 1


async def test_a_key_with_another_body_is_refused_without_harm(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    await publish(door, body(), Laneway_Key="k1")
    await verdicts(door, 1)
    await publish(door, body("Other"), Laneway_Key="k1")
    found = {v.verdict.kind: v for v in await verdicts(door, 2)}
    accepted, refused = found[common_pb2.VERDICT_KIND_ACCEPTED], found[common_pb2.VERDICT_KIND_REFUSED]
    assert accepted.job_id == keyed_job_id(REGION, ACME, "k1")
    assert refused.error.code == Code.ALREADY_EXISTS
    assert (await door.record(accepted.job_id, ACME)).state is JobState.WAITING
    assert (await door.record(refused.job_id, ACME)).state is JobState.REFUSED


@pytest.mark.parametrize(
    ("data", "lane", "field"),
    [
        (b"\xff\xff\xff", "batch", "body"),
        (b"{", "batch", "body"),
        (b'{"spec": {"modell": "chat"}}', "batch", "spec.modell"),
        (b'{"spec": {"model": 7}}', "batch", "spec.model"),
        (b"{\xff}", "batch", "body"),
        (b"", "batch", "spec.model"),
        (body(), "urgent", "subject.lane"),
        (body(lane=Lane.PRIORITY), "batch", "spec.contract.lane"),
        (body(model="nothing"), "batch", "spec.model"),
        (body(text="x" * 2000), "deferrable", "spec.generate.prompt"),
        (body(due_s=-1.0), "batch", "spec.contract.deadline"),
    ],
    ids=lambda value: value if isinstance(value, str) else "data",  # bodies with times differ from run to run
)
async def test_what_can_never_run_is_refused_once_and_named(
    opened: tuple[Gate, PuppetWorker], data: bytes, lane: str, field: str
):
    door, _ = opened
    await publish(door, data, lane=lane)
    [verdict] = await verdicts(door, 1)
    assert verdict.verdict.kind == common_pb2.VERDICT_KIND_REFUSED
    assert (verdict.error.code, verdict.error.field) == (Code.INVALID_ARGUMENT, field)
    record = await door.record(verdict.job_id, ACME)
    assert (record.state, record.tenant) == (JobState.REFUSED, ACME)
    assert record.error is not None
    assert record.error.field == field
    assert "xxx" not in verdict.verdict.message + verdict.error.message
    assert await door.messages() == 0
    await publish(door, body())
    assert len(await verdicts(door, 2)) == 2, "the next message is served"


async def test_a_message_that_comes_again_changes_nothing(opened: tuple[Gate, PuppetWorker]):
    """As after a crash between the verdict and the acknowledgement: the stream's sequence names the job."""
    from laneway.admission.ingest import Ingest

    door, _ = opened
    pause = Ingest._tell
    told: list[str] = []

    async def tell_and_fail(self, record, key):
        await pause(self, record, key)
        told.append(record.job_id)
        if len(told) == 1:
            raise RuntimeError("the process dies here")

    Ingest._tell = tell_and_fail  # type: ignore[method-assign]
    try:
        await publish(door, body())
        await verdicts(door, 1)
    finally:
        Ingest._tell = pause  # type: ignore[method-assign]
    assert len(told) == 2
    assert len(set(told)) == 1
    assert await door.messages() == 1


async def test_a_door_that_closes_gives_its_messages_to_the_others_at_once(
    nats_server: LocalNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun: list[str] = []

    async def never(admission: Admission, caller: Caller, request: Request) -> JobRecord:
        begun.append(request.job_id)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    monkeypatch.setattr(Admission, "submit_here", never)
    async with open_gate(nats_server, tmp_path) as (door, _):
        await asyncio.gather(*(publish(door, body(str(i))) for i in range(20)))
        await eventually(lambda: len(begun) == 20)
        door.stop.set()
        await door.task
        found: list[int] = []
        async with Puller(door.bus, subjects.ingest_stream(REGION), INGEST_CONSUMER) as puller:

            async def again() -> bool:
                found.extend(each.deliveries for each in await puller.pull(20))
                return len(found) == 20

            await eventually(again)  # far sooner than the ack wait
        assert found == [2] * 20  # none was first given to the closing door's own open pull


async def test_a_full_lane_puts_messages_off_and_refuses_none(nats_server: LocalNats, tmp_path: Path):
    settings = admission_settings(nats_server, slots=1, queue_length=1)
    async with open_gate(nats_server, tmp_path, settings) as (door, worker):
        request = pb.SubmitRequest(spec=spec(due_s=900.0))
        request.spec.contract.ttft_target.FromSeconds(600)
        for _ in range(4):
            await publish(door, request.SerializeToString(), lane="priority")

        async def full() -> bool:
            return await door.messages() == 2

        await eventually(full)
        for _ in range(4):
            await worker.finish(await worker.take(), "ok")
        found = await verdicts(door, 4)
        assert {v.verdict.kind for v in found} == {common_pb2.VERDICT_KIND_ACCEPTED}
        states = [(await door.record(v.job_id, ACME)).state for v in found]
        assert states == [JobState.SUCCEEDED] * 4


async def test_many_messages_are_consumed_with_bounded_haste(nats_server: LocalNats, tmp_path: Path):
    settings = admission_settings(nats_server, ingest_inflight=4)
    async with open_gate(nats_server, tmp_path, settings) as (door, _):
        await asyncio.gather(*(publish(door, body(str(i))) for i in range(100)))
        found = await verdicts(door, 100)
        assert len({v.job_id for v in found}) == 100
        assert await door.messages() == 100
