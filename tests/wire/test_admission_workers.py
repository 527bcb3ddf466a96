"""The door and real workers together: the answer of a run without faults, whatever happens to workers and readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import msgspec

from laneway.admission.server import serve
from laneway.core.lanes import JobState, Lane
from laneway.runtime.clock import SystemClock
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.settings import AdmissionSettings
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import admission_pb2_grpc
from tests.support.admission import generate, opening, rest, text_of
from tests.support.nats import eventually
from tests.support.services import served
from tests.support.worker import Yard, yard


@dataclass
class Town:
    yard: Yard
    stub: admission_pb2_grpc.AdmissionServiceAsyncStub


@asynccontextmanager
async def town(server: LocalNats, folder: Path, *, workers: int, **changes) -> AsyncIterator[Town]:
    async with yard(server, workers=workers, **changes) as place:
        admission = AdmissionSettings(listen="127.0.0.1:0", beat_s=0.3, silence_s=1.0)
        settings = msgspec.structs.replace(place.settings, admission=admission)
        async with served(serve, settings, folder / "ready.json") as channel:
            stub = admission_pb2_grpc.AdmissionServiceStub(channel)

            async def known() -> bool:
                quote = await stub.Quote(pb.QuoteRequest(spec=generate().spec))
                return bool(quote.verdict.reason == "LANE_OPEN")

            await eventually(known)
            yield Town(place, stub)


def request(text: str, tokens: int, **more) -> pb.GenerateRequest:
    wanted = generate(text, due_s=900.0, **more)
    wanted.spec.generate.sampling.max_tokens = tokens
    wanted.spec.generate.sampling.temperature = 0.0
    wanted.spec.generate.sampling.ignore_eos = True
    wanted.spec.contract.ttft_target.FromSeconds(600)
    return wanted


async def answer(stub: admission_pb2_grpc.AdmissionServiceAsyncStub, wanted: pb.GenerateRequest) -> str:
    call = stub.Generate(wanted)
    await opening(call)
    events = await rest(call)
    indexes = [(e.chunk.first_index, len(e.chunk.token_ids)) for e in events if e.HasField("chunk")]
    assert [first for first, _ in indexes] == [sum(n for _, n in indexes[:i]) for i in range(len(indexes))]
    assert sum(count for _, count in indexes) == wanted.spec.generate.sampling.max_tokens
    assert events[-1].HasField("finished")
    return text_of(events)


async def test_many_streams_at_once_each_get_their_own_answer(nats_server: LocalNats, tmp_path: Path):
    async with town(nats_server, tmp_path, workers=2, model__slots=8) as place:
        alone = [await answer(place.stub, request(f"prompt {i}", 24)) for i in range(4)]
        together = await asyncio.gather(*(answer(place.stub, request(f"prompt {i % 4}", 24)) for i in range(16)))
        assert together == [alone[i % 4] for i in range(16)]
        await eventually(place.yard.lanes_empty)
        assert all(worker.idle() for worker in place.yard.workers)


async def test_an_answer_survives_its_worker(nats_server: LocalNats, tmp_path: Path):
    async with town(nats_server, tmp_path, workers=1, engine__pace_s=0.02, nats__ack_wait_priority_s=1.0) as place:
        wanted = request("Hello", 100)
        whole = await answer(place.stub, request("Hello", 100))
        call = place.stub.Generate(wanted)
        job_id = (await opening(call)).job_id
        for _ in range(10):
            await call.read()
        await place.yard.workers[0].die()
        await place.yard.start_worker("second")
        received = await rest(call)
        record = (await place.stub.GetJob(pb.GetJobRequest(job_id=job_id))).job
        assert record.attempt == 2
        assert received[-1].HasField("finished")
        assert whole.endswith(text_of(received))
        assert record.result.text == whole


async def test_watching_a_run_from_the_middle_and_from_the_start(nats_server: LocalNats, tmp_path: Path):
    async with town(nats_server, tmp_path, workers=1, engine__pace_s=0.01) as place:
        call = place.stub.Generate(request("Hello", 80))
        job_id = (await opening(call)).job_id
        got = [await call.read() for _ in range(20)]
        watchers = [place.stub.Watch(pb.WatchRequest(job_id=job_id, from_index=i)) for i in (0, 0, 5, 70)]
        streams = await asyncio.gather(*(rest(watcher) for watcher in watchers))
        whole = text_of(got + await rest(call))
        job = (await place.stub.GetJob(pb.GetJobRequest(job_id=job_id))).job
        assert whole == job.result.text
        starts = [0, sum(job.result.text_lengths[:5]), sum(job.result.text_lengths[:70])]
        assert [text_of(events) for events in streams] == [whole, whole, whole[starts[1] :], whole[starts[2] :]]
        assert len([e for e in streams[0] if e.HasField("chunk")]) > 1, "it was streamed, not only read at the end"


async def test_callers_who_vanish_by_the_dozen_leave_nothing(nats_server: LocalNats, tmp_path: Path):
    async with town(nats_server, tmp_path, workers=1, model__slots=4, engine__pace_s=0.005) as place:
        calls: list[grpc.aio.UnaryStreamCall] = [place.stub.Generate(request(f"p{i}", 2000)) for i in range(12)]
        ids = [(await opening(call)).job_id for call in calls]
        await asyncio.wait([asyncio.ensure_future(call.read()) for call in calls], return_when=asyncio.FIRST_COMPLETED)
        for call in calls:
            call.cancel()
        for job_id in ids:

            async def ended(job_id: str = job_id) -> bool:
                stored = await place.yard.records.get("local", "default", job_id)
                return stored is not None and stored.record.state is JobState.CANCELLED

            await eventually(ended)
        await eventually(place.yard.lanes_empty)
        await eventually(place.yard.workers[0].idle)
        assert await answer(place.stub, request("next", 8))


async def test_batch_work_is_submitted_and_collected_later(nats_server: LocalNats, tmp_path: Path):
    async with town(nats_server, tmp_path, workers=1) as place:
        wanted = request("Hello", 8, lane=Lane.BATCH)
        submitted = await place.stub.Submit(pb.SubmitRequest(spec=wanted.spec))
        # No scheduler runs here: what is parked leaves at its fire time, or by hand.
        [park] = await place.yard.lanes.parked(Lane.BATCH)
        assert park.job == submitted.job_id
        await place.yard.lanes.release(park, now_s=SystemClock().now(), reason="test")
        events = await rest(place.stub.Watch(pb.WatchRequest(job_id=submitted.job_id)))
        assert events[-1].finished.usage.completion_tokens == 8
