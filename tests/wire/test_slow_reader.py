"""A caller that does not read harms itself alone: its door keeps a bounded part for it, and nobody else notices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from laneway.admission.door import Door
from laneway.runtime.local_nats import LocalNats
from laneway.v1 import admission_pb2_grpc
from tests.support.admission import admission_settings, generate, ids_of, open_gate, opening, rest, text_of

CALLERS = 50
STEPS, PIECE = 60, 2_000  # characters, one token each
BUFFER_BYTES = 16 * 1024
PATIENT = Duration(seconds=3600)  # no caller is refused for the others before it
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]


@pytest.mark.slow
async def test_one_reader_that_stalls_among_fifty_fills_its_own_buffer_and_nothing_else(
    nats_server: LocalNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    doors: list[Door] = []
    start = Door.start

    async def noted(self: Door) -> None:
        doors.append(self)
        await start(self)

    monkeypatch.setattr(Door, "start", noted)
    settings = admission_settings(nats_server, queue_length=CALLERS, stream_buffer_bytes=BUFFER_BYTES)
    async with (
        open_gate(nats_server, tmp_path, settings) as (door, worker),
        grpc.aio.insecure_channel(door.address, options=SMALL_WINDOW) as narrow,
    ):
        stalled: Any = admission_pb2_grpc.AdmissionServiceStub(narrow).Generate(generate(ttft_target=PATIENT))
        await opening(stalled)
        calls = [door.stub.Generate(generate(ttft_target=PATIENT)) for _ in range(CALLERS - 1)]
        for call in calls:
            await opening(call)
        held = [await worker.take() for _ in range(CALLERS)]
        reading = [asyncio.ensure_future(rest(call)) for call in calls]
        answer = "".join(chr(ord("a") + step % 26) * PIECE for step in range(STEPS))
        kept: list[int] = []
        for step in range(STEPS):
            piece = answer[step * PIECE : (step + 1) * PIECE]
            await worker.send_batch([(each, step * PIECE, piece) for each in held])
            await door.bus.flush()
            kept.append(max(stream.unread_bytes for stream in doors[0].streams()))
        for each in held:
            await worker.finish(each, answer)
        others = await asyncio.gather(*reading)
        assert [text_of(events) == answer for events in others] == [True] * (CALLERS - 1)
        assert max(kept) <= BUFFER_BYTES
        assert kept[-1] > BUFFER_BYTES - 4 * PIECE, "it was full"
        events = await rest(stalled)
        assert text_of(events) == answer, "what did not fit came from the record"
        assert len(ids_of(events)) == len(answer)
