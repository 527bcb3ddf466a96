"""What waits to be published while NATS is away is bounded, and is sent once or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import msgspec
import pytest

from laneway.core.ids import new_job_id
from laneway.runtime.bus import Bus, NotConnected, PublishUnknown
from laneway.runtime.grpc_errors import from_rpc_error
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.outbox import BYTES_MAX, MESSAGES_MAX
from laneway.v1 import admission_pb2 as pb
from tests.support.admission import admission_settings, gate
from tests.support.nats import REGION, connected, eventually

KIB = 1024


async def make_stream(bus: Bus) -> None:
    await bus.api("STREAM.CREATE.S", {"name": "S", "subjects": ["s.>"], "retention": "limits", "storage": "memory"})


async def cut_off(server: LocalNats, bus: Bus) -> None:
    await server.kill()
    await eventually(lambda: not bus.connected)


async def back(server: LocalNats, bus: Bus) -> None:
    """With an empty stream: memory does not survive."""
    await server.start()
    await bus.wait_connected(10.0)


async def stored(bus: Bus) -> int:
    return int((await bus.api("STREAM.INFO.S", {}))["state"]["messages"])


async def test_a_thousand_publishes_wait_and_one_more_is_refused_at_once(nats_server: LocalNats) -> None:
    async with connected(nats_server, request_timeout_s=30.0) as bus:
        await bus.api("STREAM.CREATE.S", {"name": "S", "subjects": ["s.>"], "retention": "limits"})
        await cut_off(nats_server, bus)
        waiting = [asyncio.ensure_future(bus.store(f"s.{number}", b"x")) for number in range(MESSAGES_MAX)]
        await eventually(lambda: bus.outbox.waiting == (MESSAGES_MAX, MESSAGES_MAX))
        for refused in (bus.store("s.more", b"x"), bus.request("s.more", b"x"), bus.emit("s.more", b"x")):
            with pytest.raises(NotConnected) as caught:
                await asyncio.wait_for(refused, 1.0)
            assert caught.value.retry_after_s is not None
        await back(nats_server, bus)
        assert sorted(await asyncio.gather(*waiting)) == list(range(1, MESSAGES_MAX + 1))
        assert bus.outbox.waiting == (0, 0)
        assert await bus.store("s.more", b"x") == MESSAGES_MAX + 1
        assert await stored(bus) == MESSAGES_MAX + 1  # each once, and nothing of what was refused


async def test_sixteen_mib_wait_and_one_more_byte_is_refused_at_once(nats_server: LocalNats) -> None:
    async with connected(nats_server, request_timeout_s=30.0) as bus:
        await cut_off(nats_server, bus)
        piece = bytes(256 * KIB)
        waiting = [asyncio.ensure_future(bus.store("s.a", piece)) for _ in range(BYTES_MAX // len(piece))]
        await eventually(lambda: bus.outbox.waiting == (len(waiting), BYTES_MAX))
        with pytest.raises(NotConnected):
            await asyncio.wait_for(bus.store("s.a", b"x"), 1.0)
        empty = asyncio.ensure_future(bus.store("s.a", b""))
        await eventually(lambda: bus.outbox.waiting == (len(waiting) + 1, BYTES_MAX))
        for publish in (*waiting, empty):
            publish.cancel()
        await asyncio.gather(*waiting, empty, return_exceptions=True)
        assert bus.outbox.waiting == (0, 0)


async def test_core_messages_count_as_well(nats_server: LocalNats) -> None:
    async with connected(nats_server, request_timeout_s=30.0) as bus:
        await cut_off(nats_server, bus)
        for _ in range(MESSAGES_MAX - 1):
            await bus.emit("core", b"x")
        waiting = asyncio.ensure_future(bus.store("s.a", b"x"))
        await eventually(lambda: bus.outbox.waiting[0] == MESSAGES_MAX)
        with pytest.raises(NotConnected):
            await bus.emit("core", b"x")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await bus.emit("core", b"x")


async def test_whoever_waited_too_long_leaves_room_and_is_never_sent(nats_server: LocalNats) -> None:
    async with connected(nats_server, request_timeout_s=30.0) as bus:
        await cut_off(nats_server, bus)
        waiting = [bus.store("s.a", b"x", timeout_s=0.2) for _ in range(10)]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(outcome, NotConnected) for outcome in outcomes)
        assert bus.outbox.waiting == (0, 0)
        await back(nats_server, bus)
        await make_stream(bus)
        await bus.flush()
        assert await stored(bus) == 0


async def test_what_was_on_its_way_when_the_connection_broke_is_not_sent_after_it(nats_server: LocalNats) -> None:
    """Its publishers were told that its outcome is unknown, and have perhaps published it again."""
    async with connected(nats_server, request_timeout_s=30.0) as bus:
        await bus.api("STREAM.CREATE.S", {"name": "S", "subjects": ["s.>"], "retention": "limits"})
        nats_server.pause()
        publishes: list[asyncio.Future[int]] = []
        while not bus.nc.buffered[1] >= 512 * KIB:  # neither the socket nor the server's takes any more
            publishes.append(asyncio.ensure_future(bus.store("s.a", bytes(128 * KIB))))
            await asyncio.sleep(0.002)
        await cut_off(nats_server, bus)
        outcomes = await asyncio.gather(*publishes, return_exceptions=True)
        assert all(isinstance(outcome, PublishUnknown) for outcome in outcomes)
        await back(nats_server, bus)
        await bus.flush()
        assert await stored(bus) == 0


async def test_calls_that_need_nats_are_unavailable_with_a_time_to_come_again(
    nats_server: LocalNats, tmp_path: Path
) -> None:
    settings = admission_settings(nats_server)
    settings = msgspec.structs.replace(settings, nats=msgspec.structs.replace(settings.nats, request_timeout_s=0.1))
    async with gate(nats_server, tmp_path, settings) as door:
        await nats_server.kill()
        for call in (
            lambda: door.stub.GetJob(pb.GetJobRequest(job_id=new_job_id(REGION, 1.0, bytes(10)))),
            lambda: door.stub.ListJobs(pb.ListJobsRequest(page_size=5)),
        ):

            async def away(call=call) -> bool:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call()
                error = from_rpc_error(caught.value)
                return error.reason == "NOT_CONNECTED" and error.retry_after_s is not None

            await eventually(away)
