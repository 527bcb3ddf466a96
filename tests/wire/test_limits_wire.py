"""Limits that NATS and gRPC hold for us: at N a message is taken, at N + 1 it is refused, or the oldest goes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from laneway.core import subjects
from laneway.core.errors import LaneSaturated
from laneway.core.lanes import Lane
from laneway.runtime import layout
from laneway.runtime.bus import Bus
from laneway.runtime.grpc_options import channel_options
from laneway.runtime.puller import LanePuller, Puller
from laneway.runtime.settings import GrpcSettings, Settings
from laneway.v1 import admission_pb2, admission_pb2_grpc
from tests.support.nats import POOL, REGION, TENANT, eventually, provision_region, small_catalogue
from tests.wire.test_grpc_server import failure, serving

pytestmark = [pytest.mark.wire, pytest.mark.slow]
KIB = 1024


def of_record(name: str) -> str:
    return subjects.record(REGION, TENANT, name)


def of_object(name: str) -> str:
    return f"$O.{subjects.objects_bucket(REGION)}.C.{name}"


def of_ingest(_: str) -> str:
    return subjects.ingest(REGION, Lane.BATCH, TENANT)


def of_dead(name: str) -> str:
    return subjects.dead_letter(REGION, Lane.BATCH, "POISON", name)


async def state(bus: Bus, stream: str) -> dict[str, Any]:
    found: dict[str, Any] = (await bus.api(f"STREAM.INFO.{stream}", {}))["state"]
    return found


async def until_refused(bus: Bus, subject: Callable[[str], str], size: int) -> LaneSaturated:
    """Stores messages until one is refused; how it was."""
    for i in range(1000):
        try:
            await bus.store(subject(f"m{size}-{i}"), b"x" * size)
        except LaneSaturated as error:
            return error
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("setting", "subject", "stream"),
    [
        ("records_bytes_max", of_record, subjects.jobs_stream(REGION)),
        ("ingest_bytes_max", of_ingest, subjects.ingest_stream(REGION)),
        ("objects_bytes_max", of_object, subjects.objects_stream(REGION)),
    ],
)
async def test_a_stream_of_what_was_accepted_refuses_beyond_its_bytes_and_drops_nothing(
    bus: Bus, setting: str, subject: Callable[[str], str], stream: str
):
    limits: dict[str, Any] = {setting: 64 * KIB}
    await provision_region(bus, small_catalogue(), **limits)
    for size in (4 * KIB, 64, 1):
        await until_refused(bus, subject, size)
    found = await state(bus, stream)
    assert 63 * KIB < found["bytes"] <= 64 * KIB
    assert found["first_seq"] == 1


@pytest.mark.parametrize(
    ("setting", "subject", "stream"),
    [
        ("checkpoints_bytes_max", lambda n: subjects.checkpoint(REGION, n, 1, 0), subjects.checkpoint_stream(REGION)),
        ("verdicts_bytes_max", lambda n: subjects.verdict(REGION, TENANT, n), subjects.verdict_stream(REGION)),
        ("dead_bytes_max", of_dead, subjects.dead_stream(REGION)),
    ],
)
async def test_a_stream_of_what_may_go_drops_its_oldest_beyond_its_bytes(
    bus: Bus, setting: str, subject: Callable[[str], str], stream: str
):
    limits: dict[str, Any] = {setting: 64 * KIB}
    await provision_region(bus, small_catalogue(), **limits)
    size = (await stored_size(bus, subject("first"), stream)) - 4 * KIB
    fits = 64 * KIB // (4 * KIB + size)
    for i in range(1, fits):
        await bus.store(subject(f"m{i:04}x"[:5]), b"x" * 4 * KIB)
    assert (await state(bus, stream))["first_seq"] == 1
    await bus.store(subject("m9999"), b"x" * 4 * KIB)
    assert (await state(bus, stream))["first_seq"] == 2


async def stored_size(bus: Bus, subject: str, stream: str) -> int:
    """What one message of 4 KiB takes in the stream."""
    await bus.store(subject, b"x" * 4 * KIB)
    return int((await state(bus, stream))["bytes"])


async def test_so_many_messages_of_producers_wait_and_one_more_is_refused(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout, "INGEST_MESSAGES_MAX", 3)
    await provision_region(bus, small_catalogue())
    for _ in range(3):
        await bus.store(of_ingest(""), b"x")
    with pytest.raises(LaneSaturated):
        await bus.store(of_ingest(""), b"x")
    assert (await state(bus, subjects.ingest_stream(REGION)))["messages"] == 3


async def test_the_priority_lane_holds_slots_and_queue_and_no_more(bus: Bus):
    catalogue = small_catalogue(slots=2, workers=2, queue_length=3)
    await provision_region(bus, catalogue)
    for i in range(2 * 2 + 3):
        await bus.store(subjects.ready(REGION, Lane.PRIORITY, POOL, TENANT, f"j{i}"), b"x")
    with pytest.raises(LaneSaturated):
        await bus.store(subjects.ready(REGION, Lane.PRIORITY, POOL, TENANT, "one-more"), b"x")
    assert (await state(bus, subjects.lane_stream(REGION, Lane.PRIORITY)))["messages"] == 7


async def test_producers_messages_that_are_put_off_are_so_many(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout, "INGEST_PENDING_MAX", 2)
    await provision_region(bus, small_catalogue())
    for _ in range(3):
        await bus.store(of_ingest(""), b"job")
    async with Puller(bus, subjects.ingest_stream(REGION), layout.INGEST_CONSUMER) as puller:
        consumer = f"CONSUMER.INFO.{subjects.ingest_stream(REGION)}.{layout.INGEST_CONSUMER}"

        async def counted() -> bool:  # a pull that does not wait is answered from what the consumer counts
            return (await bus.api(consumer, {}))["num_pending"] == 3

        await eventually(counted)
        first, _ = await puller.pull(3, timeout_s=0.5)
        assert await puller.pull(1, timeout_s=0.5) == []
        assert "max_ack_pending" in puller.trouble
        await first.ack()
        assert len(await eventually(lambda: puller.pull(1))) == 1


async def test_pulls_that_wait_are_so_many_and_one_more_is_told(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout, "WAITING_PULLS_MAX", 2)
    await provision_region(bus, small_catalogue())
    async with contextlib.AsyncExitStack() as stack:
        pullers = [await stack.enter_async_context(LanePuller(bus, REGION, Lane.PRIORITY, POOL)) for _ in range(3)]
        for puller in pullers:
            puller.hold(20.0, lambda: None)
            await bus.flush()
        await eventually(lambda: not pullers[2].held)
        assert "409" in pullers[2].trouble
        assert [puller.held for puller in pullers] == [True, True, False]


# --- gRPC ------------------------------------------------------------------------------------------


async def test_an_answer_beyond_the_limit_is_refused_by_the_client_and_the_connection_lives():
    limit = 4096
    async with serving() as (_, server, _, _):
        options = channel_options(GrpcSettings(response_bytes_max=limit))
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            stub: Any = admission_pb2_grpc.AdmissionServiceStub(channel)
            empty = await stub.GetJob(admission_pb2.GetJobRequest(job_id="a"))
            room = limit - empty.ByteSize() - 16
            fitting = admission_pb2.GetJobRequest(job_id="a" * room)
            while (await stub.GetJob(fitting)).ByteSize() < limit:
                fitting.job_id += "a"
            error = await failure(stub.GetJob(admission_pb2.GetJobRequest(job_id=fitting.job_id + "a")))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await stub.GetJob(admission_pb2.GetJobRequest(job_id="a"))).job.job_id == "a"


async def test_metadata_beyond_the_limit_is_refused_and_the_connection_lives():
    limit = 2048
    async with serving(Settings(grpc=GrpcSettings(metadata_bytes_max=limit))) as (_, _, _, stub):

        async def taken(size: int) -> bool:
            metadata = (("laneway-filler", "x" * size),)
            try:
                await stub.GetJob(admission_pb2.GetJobRequest(job_id="a"), metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                return False
            return True

        fits, too_large = 0, 2 * limit
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            fits, too_large = (middle, too_large) if await taken(middle) else (fits, middle)
        assert limit - 600 < fits < limit, "with what every call brings"
        assert await taken(fits)
        assert not await taken(fits + 1)
