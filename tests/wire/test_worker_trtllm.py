"""A worker whose engine is TensorRT-LLM: real NATS, and at its end a fake of `trtllm-serve --grpc`, over real gRPC, or
a generated `tensorrt_llm` in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from laneway.core.fleet import WorkerState
from laneway.core.lanes import FinishReason, JobState
from laneway.runtime.clock import SystemClock
from laneway.runtime.leases import LeaseWatcher
from laneway.runtime.local_nats import LocalNats
from tests.support.nats import REGION, eventually
from tests.support.trtllm_fake import Options
from tests.support.trtllm_server import FakeOptions, FakeTrtllmServer
from tests.support.trtllm_site import TrtllmSite
from tests.support.worker import ByteDoor, yard

POOL = {"model__engine": "trtllm_grpc", "model__tokenizer": "bytes"}
SERVER = FakeOptions(context_length=4096, pace_s=0.005)


async def test_a_job_is_answered_with_text_of_our_own_making(nats_server: LocalNats):
    server = FakeTrtllmServer(SERVER)
    address = await server.start()
    async with yard(nats_server, workers=1, **POOL, engine__address=address) as place, ByteDoor(place.bus) as door:
        stored = await place.submit(caller_at=door, max_tokens=40)
        job_id = stored.record.job_id
        (record,) = await place.ended(job_id)
        assert record.state is JobState.SUCCEEDED
        assert record.result is not None
        assert record.result.finish_reason is FinishReason.LENGTH
        assert record.result.usage.completion_tokens == 40
        await eventually(lambda: len(door.ids(job_id)) == 40)
        assert tuple(door.ids(job_id)) == record.result.token_ids
        assert record.result.text == bytes(door.ids(job_id)).decode(errors="replace") == door.text(job_id)
        assert await eventually(place.lanes_empty)
        assert await eventually(place.workers[0].idle)
        assert await eventually(lambda: server.live == 0)
    await server.stop()


async def test_a_job_goes_on_where_it_was_when_its_server_comes_back(nats_server: LocalNats):
    server = FakeTrtllmServer(SERVER)
    address = await server.start()
    changes = {**POOL, "engine__address": address, "engine__start_timeout_s": 20.0}
    async with yard(nats_server, workers=1, **changes) as place, ByteDoor(place.bus) as door:
        whole = await place.submit(max_tokens=120)
        (expected,) = await place.ended(whole.record.job_id)
        stored = await place.submit(caller_at=door, max_tokens=120)
        job_id = stored.record.job_id
        await eventually(lambda: len(door.ids(job_id)) >= 20)
        await server.stop()
        again = FakeTrtllmServer(SERVER)
        await again.start(int(address.rpartition(":")[2]))
        (record,) = await place.ended(job_id)
        assert record.state is JobState.SUCCEEDED
        assert record.result is not None
        assert expected.result is not None
        assert record.result.token_ids == expected.result.token_ids
        await eventually(lambda: len(door.ids(job_id)) == 120)
        assert door.text(job_id) == expected.result.text
        trial, resumed = again.requests[:2]
        assert trial.max_tokens == 1, "each new engine gives a token first"
        assert len(resumed.tokenized.input_token_ids) > len(b"Hello"), "with what it had given already"
        assert await eventually(place.lanes_empty)
    await again.stop()


INSIDE = {"model__engine": "trtllm", "model__tokenizer": "bytes"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrtllmSite:
    return TrtllmSite(tmp_path, "1.4", monkeypatch)


def inside(site: TrtllmSite) -> dict[str, object]:
    """Settings of a yard on that host."""
    options = site.options(llm={"max_num_tokens": 256}, fake=Options(pace_s=0.005, eos_mean_tokens=0.0))
    return {**INSIDE, "engine__llm_file": options.llm_file}


async def test_a_job_is_answered_by_the_library_in_the_engines_process(nats_server: LocalNats, site: TrtllmSite):
    async with yard(nats_server, workers=1, **inside(site)) as place, ByteDoor(place.bus) as door:
        stored = await place.submit(caller_at=door, max_tokens=40)
        job_id = stored.record.job_id
        (record,) = await place.ended(job_id)
        assert record.state is JobState.SUCCEEDED
        assert record.result is not None
        assert record.result.usage.completion_tokens == 40
        await eventually(lambda: len(door.ids(job_id)) == 40)
        assert tuple(door.ids(job_id)) == record.result.token_ids
        assert await eventually(place.lanes_empty)
        assert await eventually(place.workers[0].idle)
        assert await eventually(lambda: place.workers[0].worker.snapshot().busy_s > 0.0)


async def test_a_job_goes_on_in_a_new_process_when_the_library_kills_its_own(nats_server: LocalNats, site: TrtllmSite):
    async with yard(nats_server, workers=1, **inside(site)) as place, ByteDoor(place.bus) as door:
        whole = await place.submit(max_tokens=120)
        (expected,) = await place.ended(whole.record.job_id)
        stored = await place.submit(caller_at=door, max_tokens=120)
        job_id = stored.record.job_id
        await eventually(lambda: len(door.ids(job_id)) >= 20)
        (process_id,) = [line["process_id"] for line in site.journal_lines() if "process_id" in line]
        os.kill(process_id, signal.SIGKILL)
        (record,) = await place.ended(job_id)
        assert record.state is JobState.SUCCEEDED
        assert record.result is not None
        assert expected.result is not None
        assert record.result.token_ids == expected.result.token_ids
        await eventually(lambda: len(door.ids(job_id)) == 120)
        assert await eventually(place.lanes_empty)


async def test_a_worker_says_what_its_start_waits_for(nats_server: LocalNats):
    server = FakeTrtllmServer(SERVER)
    address = await server.start()
    await server.stop()
    async with yard(nats_server, workers=0, **POOL, engine__address=address) as place:
        watcher = LeaseWatcher(place.bus, REGION, SystemClock())
        await watcher.start()
        starting = asyncio.create_task(place.start_worker())
        lease = await eventually(lambda: watcher.live()[0] if watcher.live() else None)
        assert lease.state is WorkerState.STARTING
        assert address in lease.detail
        assert "nothing answers there" in lease.detail
        again = FakeTrtllmServer(SERVER)
        await again.start(int(address.rpartition(":")[2]))
        await starting
        await eventually(lambda: watcher.live()[0].state is WorkerState.READY)
        await watcher.close()
    await again.stop()
