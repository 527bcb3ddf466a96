"""What the door says and does while NATS is away, slow, or does not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio

from laneway.core.errors import OutcomeUnknown, Unavailable
from laneway.core.lanes import JobState, Lane
from laneway.runtime.local_nats import LocalNats
from laneway.v1 import admission_pb2 as pb
from tests.support.admission import (
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


async def test_a_stream_outlives_a_restart_of_nats(nats_server: LocalNats, tmp_path: Path):
    async with open_gate(nats_server, tmp_path) as (door, worker):
        call = door.stub.Generate(generate())
        await opening(call)
        held = await worker.take()
        await worker.send(held, 0, "ab")
        assert await next_text(call) == "ab"
        await nats_server.restart()
        await eventually(lambda: door.bus.connected)

        def asked() -> bool:
            return any(a.replay and a.next_index == 2 for b in worker.beats for a in b.attachments)

        await eventually(asked)  # whatever was sent in between is lost: the door asks by itself
        await worker.send(held, 2, "cd")
        await worker.finish(held, "abcd")
        assert text_of(await rest(call)) == "cd"


async def test_without_nats_callers_are_told_to_come_again(nats_server: LocalNats, tmp_path: Path):
    async with open_gate(nats_server, tmp_path) as (door, worker):
        await nats_server.kill()
        error = None

        async def away() -> bool:
            nonlocal error
            error = await error_of_call(door.stub.Generate(generate()))
            return isinstance(error, Unavailable) and error.reason == "NOT_CONNECTED"

        await eventually(away)
        assert error is not None
        assert error.retry_after_s is not None
        await nats_server.start()

        async def back() -> grpc.aio.Call | None:
            """The door has a connection of its own, which comes back in its own time."""
            call = door.stub.Generate(generate())
            try:
                await opening(call)
            except grpc.aio.AioRpcError:
                return None
            return call

        call = await eventually(back)
        await eventually(lambda: door.bus.connected)
        await worker.finish(await worker.take(), "ok")
        assert text_of(await rest(call)) == "ok"


async def test_an_unanswered_publish_is_neither_success_nor_refusal(nats_server: LocalNats, tmp_path: Path):
    settings = admission_settings(nats_server, publish_s_max=0.5)
    async with open_gate(nats_server, tmp_path, settings) as (door, _):
        nats_server.pause()
        error = await error_of_call(door.stub.Submit(pb.SubmitRequest(spec=spec(lane=Lane.BATCH))))
        assert isinstance(error, OutcomeUnknown)
        assert error.job_id.startswith("local-")
        assert error.retry_after_s is not None
        nats_server.resume()
        await eventually(lambda: door.bus.connected)
        # It was stored after all, or never: asking for the job tells.
        stored = await door.records.get("local", "default", error.job_id, leader=True)
        assert stored is None or stored.record.state is JobState.WAITING


async def test_a_moment_without_answers_is_only_a_delay(nats_server: LocalNats, tmp_path: Path):
    async with open_gate(nats_server, tmp_path) as (door, worker):
        nats_server.pause()
        calls = [asyncio.ensure_future(_whole(door.stub.Generate(generate(f"p{i}")))) for i in range(3)]
        await asyncio.sleep(2.5)  # longer than one publish waits for its acknowledgement
        nats_server.resume()
        for _ in calls:
            await worker.finish(await worker.take(), "ok")
        assert await asyncio.gather(*calls) == ["ok"] * 3
        assert await door.messages() == 0, "what was sent twice was stored once"


async def _whole(call) -> str:
    await opening(call)
    return text_of(await rest(call))


async def test_a_door_waits_for_its_region(nats_server: LocalNats, tmp_path: Path):
    import msgspec

    from laneway.admission.server import serve
    from tests.support.nats import connected

    ready_file = tmp_path / "early.json"
    settings = admission_settings(nats_server)
    process = msgspec.structs.replace(settings.process, ready_file=str(ready_file))
    stop = asyncio.Event()
    early = asyncio.ensure_future(serve(msgspec.structs.replace(settings, process=process), stop))
    try:
        async with connected(nats_server) as bus:
            await eventually(lambda: bus.connected)
            assert not early.done()
            async with gate(nats_server, tmp_path):  # provisions it
                await eventually(ready_file.exists)
    finally:
        stop.set()
        await early
