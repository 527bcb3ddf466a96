"""A worker whose engine is a server of its own: real NATS, real gRPC, a fake of `trtllm-serve --grpc` at its end."""

from __future__ import annotations

from laneway.core.lanes import FinishReason, JobState
from laneway.runtime.local_nats import LocalNats
from tests.support.nats import eventually
from tests.support.trtllm_server import FakeOptions, FakeTrtllmServer
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
        assert len(again.requests[0].tokenized.input_token_ids) > len(b"Hello"), "with what it had given already"
        assert await eventually(place.lanes_empty)
    await again.stop()
