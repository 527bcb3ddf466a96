"""SubmitMany on a real door: each item gets its own outcome, whatever becomes of the others, the caller or the door."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from laneway.admission import many
from laneway.admission.application import Admission
from laneway.core.errors import Code, Unavailable
from laneway.core.ids import keyed_job_id
from laneway.core.lanes import JobState, Lane
from laneway.runtime.grpc_errors import from_status
from laneway.runtime.local_nats import LocalNats
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import common_pb2
from tests.support.admission import TENANT, Gate, PuppetWorker, error_of_call, open_gate, spec
from tests.support.nats import REGION, eventually

pytestmark = pytest.mark.wire


@pytest.fixture
async def opened(nats_server: LocalNats, tmp_path: Path) -> AsyncIterator[tuple[Gate, PuppetWorker]]:
    async with open_gate(nats_server, tmp_path) as both:
        yield both


def item(ref: str, text: str = "Hello", *, key: str = "", **more: Any) -> pb.SubmitManyItem:
    more.setdefault("lane", Lane.BATCH)
    return pb.SubmitManyItem(client_ref=ref, spec=spec(text, **more), idempotency_key=key)


async def begin(door: Gate) -> Any:
    """An open call whose window was told."""
    call: Any = door.stub.SubmitMany()
    first = await call.read()
    assert (first.window, len(first.outcomes)) == (many.WINDOW, 0)
    return call


async def outcomes(call: Any, count: int) -> dict[str, pb.SubmitManyOutcome]:
    """The next that many outcomes by client_ref; each came once."""
    found: list[pb.SubmitManyOutcome] = []
    while len(found) < count:
        response = await call.read()
        assert response is not grpc.aio.EOF, f"the call ended after {len(found)} outcomes"
        found += response.outcomes
    named = {outcome.client_ref: outcome for outcome in found}
    assert len(named) == len(found) == count
    return named


async def send(call: Any, *items: pb.SubmitManyItem) -> None:
    await call.write(pb.SubmitManyRequest(items=items))


async def test_items_become_jobs_and_a_half_closed_call_ends_ok(opened: tuple[Gate, PuppetWorker]):
    door, worker = opened
    call = await begin(door)
    await send(call, *(item(f"line {i}", key=f"k{i}") for i in range(3)))
    await send(call, item("alone"))
    await call.done_writing()
    found = await outcomes(call, 4)
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert {o.accepted.verdict.kind for o in found.values()} <= {
        common_pb2.VERDICT_KIND_ACCEPTED,
        common_pb2.VERDICT_KIND_HELD,
    }
    assert found["line 1"].accepted.job_id == keyed_job_id(REGION, TENANT, "k1")
    assert sorted(await door.job_ids()) == sorted(o.accepted.job_id for o in found.values())
    assert await door.messages() == 4
    held = await worker.take(Lane.BATCH)
    await worker.finish(held, "done")
    assert (await door.record(held.record.job_id)).state is JobState.SUCCEEDED


async def test_a_bad_item_is_told_why_and_disturbs_no_other(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    call = await begin(door)
    bad = {
        "model": item("model", model="nothing"),
        "past": item("past", due_s=-1.0),
        "long": item("long", "x" * 2000),
        "key": item("key", key="k" * 129),
        "": item(""),
    }
    await send(call, item("good 1"), *bad.values(), item("good 2"))
    found = await outcomes(call, len(bad) + 2)
    fields = {ref: from_status(found[ref].error).field for ref in bad}
    assert fields == {
        "model": "spec.model",
        "past": "spec.contract.deadline",
        "long": "spec.generate.prompt",
        "key": "idempotency_key",
        "": "client_ref",
    }
    for ref in bad:
        status = found[ref].error
        assert status.code == Code.INVALID_ARGUMENT
        assert {detail.TypeName() for detail in status.details} == {"google.rpc.ErrorInfo", "google.rpc.BadRequest"}
    assert found["good 1"].HasField("accepted")
    assert found["good 2"].HasField("accepted")
    assert await door.messages() == 2
    call.cancel()


async def test_an_item_that_does_not_parse_spoils_no_other_of_its_message(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    call: Any = door.channel.stream_stream("/laneway.v1.AdmissionService/SubmitMany")()
    await call.read()

    def framed(data: bytes) -> bytes:
        return bytes([pb.SubmitManyRequest.ITEMS_FIELD_NUMBER << 3 | 2, len(data)]) + data

    broken = b"\x0a\x03bad\x12\x02\xff\xff"  # client_ref "bad", then no JobSpec
    nameless = b"\x0a\x02\xff\xfe"  # not UTF-8
    whole = pb.SubmitManyRequest(items=[item("good")]).SerializeToString()
    await call.write(framed(broken) + whole + framed(nameless))
    found: dict[str, pb.SubmitManyOutcome] = {}
    while len(found) < 3:
        for outcome in pb.SubmitManyResponse.FromString(await call.read()).outcomes:
            found[outcome.client_ref] = outcome
    assert found["good"].HasField("accepted")
    assert from_status(found["bad"].error).reason == "MALFORMED_REQUEST"
    assert from_status(found[""].error).reason == "MALFORMED_REQUEST"
    await call.write(b"\xff")
    assert (await error_of_call(call)).reason == "MALFORMED_REQUEST"


async def test_a_client_ref_names_one_item_at_a_time(
    opened: tuple[Gate, PuppetWorker], monkeypatch: pytest.MonkeyPatch
):
    door, _ = opened
    gate_open = pause(monkeypatch)
    call = await begin(door)
    await send(call, item("same"), item("same", "Other"))
    first = (await outcomes(call, 1))["same"]
    assert from_status(first.error).reason == "CLIENT_REF_IN_USE"
    gate_open.set()
    assert (await outcomes(call, 1))["same"].HasField("accepted")
    call.cancel()


async def test_the_same_key_names_the_same_job_and_another_body_is_refused(opened: tuple[Gate, PuppetWorker]):
    door, _ = opened
    call = await begin(door)
    await send(call, item("a", key="k"))
    first = (await outcomes(call, 1))["a"].accepted.job_id
    await send(call, item("b", key="k"), item("c", "Other", key="k"))
    found = await outcomes(call, 2)
    assert found["b"].accepted.job_id == first
    assert found["c"].error.code == Code.ALREADY_EXISTS
    assert await door.messages() == 1
    call.cancel()


async def test_a_caller_beyond_the_window_waits_and_loses_nothing(
    opened: tuple[Gate, PuppetWorker], monkeypatch: pytest.MonkeyPatch
):
    door, _ = opened
    monkeypatch.setattr(many, "WINDOW", 4)
    begun: list[str] = []
    gate_open = pause(monkeypatch, begun)
    call = await begin(door)
    total = 64

    async def sending() -> None:
        for i in range(total):
            await send(call, item(f"{i}"))
        await call.done_writing()

    sender = asyncio.ensure_future(sending())
    await eventually(lambda: len(begun) == 4)
    await door.bus.flush()
    assert len(begun) == 4, "the service works on no more than the window"
    gate_open.set()
    found = await outcomes(call, total)
    await sender
    assert all(o.HasField("accepted") for o in found.values())
    assert await call.read() is grpc.aio.EOF
    assert await door.messages() == total


@pytest.mark.slow
async def test_a_caller_beyond_the_windows_bytes_waits_and_loses_nothing(
    opened: tuple[Gate, PuppetWorker], monkeypatch: pytest.MonkeyPatch
):
    door, _ = opened
    items = [item(f"{i}") for i in range(9)]
    monkeypatch.setattr(many, "WINDOW_BYTES", 3 * items[0].ByteSize())
    begun: list[str] = []
    gate_open = pause(monkeypatch, begun)
    call = await begin(door)
    await send(call, *items)
    await call.done_writing()
    await eventually(lambda: len(begun) == 3)
    await door.bus.flush()
    assert len(begun) == 3, "the service works on no more bytes than the window"
    gate_open.set()
    found = await outcomes(call, len(items))
    assert all(o.HasField("accepted") for o in found.values())
    assert await door.messages() == len(items)


async def test_what_was_read_is_accepted_when_the_caller_is_gone(
    opened: tuple[Gate, PuppetWorker], monkeypatch: pytest.MonkeyPatch
):
    door, worker = opened
    begun: list[str] = []
    gate_open = pause(monkeypatch, begun)
    call = await begin(door)
    await send(call, *(item(f"{i}") for i in range(5)))
    await eventually(lambda: len(begun) == 5)
    call.cancel()
    gate_open.set()

    async def all_there() -> bool:
        return await door.messages() == 5

    await eventually(all_there)
    held = await worker.take(Lane.BATCH)
    await worker.finish(held, "done")
    assert (await door.record(held.record.job_id)).state is JobState.SUCCEEDED


async def test_a_door_that_shuts_down_answers_what_it_read_and_says_when_to_come_again(
    opened: tuple[Gate, PuppetWorker], monkeypatch: pytest.MonkeyPatch
):
    door, _ = opened
    begun: list[str] = []
    gate_open = pause(monkeypatch, begun)
    call = await begin(door)
    idle = await begin(door)
    await send(call, *(item(f"{i}") for i in range(5)))
    await eventually(lambda: len(begun) == 5)
    door.stop.set()
    error = await error_of_call(idle)
    assert isinstance(error, Unavailable)
    assert (error.reason, error.retry_after_s) == ("DRAINING", many.DRAINING_RETRY_S)
    gate_open.set()
    assert len(await outcomes(call, 5)) == 5
    assert (await error_of_call(call)).reason == "DRAINING"
    assert await door.messages() == 5


async def test_a_bug_of_ours_costs_one_item(opened: tuple[Gate, PuppetWorker], monkeypatch: pytest.MonkeyPatch):
    door, _ = opened
    submit = Admission.submit_here

    async def breaking(self, caller, request):
        if request.key == "bug":
            raise KeyError("/srv/secret")
        return await submit(self, caller, request)

    monkeypatch.setattr(Admission, "submit_here", breaking)
    call = await begin(door)
    await send(call, item("a"), item("b", key="bug"), item("c"))
    found = await outcomes(call, 3)
    assert found["b"].error.code == Code.INTERNAL
    assert "secret" not in found["b"].error.message
    assert found["a"].HasField("accepted")
    assert found["c"].HasField("accepted")
    call.cancel()


def pause(monkeypatch: pytest.MonkeyPatch, begun: list[str] | None = None) -> asyncio.Event:
    """Keeps every acceptance from beginning until the event is set."""
    accept = Admission._accept
    gate_open = asyncio.Event()

    async def waiting(self, decided):
        if begun is not None:
            begun.append(decided.record.job_id)
        await gate_open.wait()
        return await accept(self, decided)

    monkeypatch.setattr(Admission, "_accept", waiting)
    return gate_open
