"""A worker whose engine is a real Triton server with the small real model: real NATS, real gRPC, a door of bytes."""

from __future__ import annotations

import pytest

from laneway.core.lanes import FinishReason, JobState
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.tokenizer import load_tokenizer
from tests.support.nats import eventually
from tests.support.triton_server import triton_server
from tests.support.worker import ByteDoor, yard

pytestmark = [pytest.mark.wire, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

PROMPT = load_tokenizer("smollm2").encode("The capital of France is")
POOL = {"model__engine": "triton", "model__tokenizer": "smollm2", "engine__start_timeout_s": 60.0}


@pytest.mark.parametrize("dialect", ["llmapi", "bls", "ids"])
async def test_a_job_is_answered(nats_server: LocalNats, dialect: str):
    model = f"smollm2_{dialect}"
    async with triton_server(model) as server:
        changes = {"engine__address": server.address, "engine__served_model": model, "engine__dialect": dialect}
        async with yard(nats_server, workers=1, **POOL, **changes) as place, ByteDoor(place.bus) as door:
            stored = await place.submit(prompt=PROMPT, caller_at=door, max_tokens=24)
            job_id = stored.record.job_id
            (record,) = await place.ended(job_id)
            assert record.state is JobState.SUCCEEDED
            assert record.result is not None
            assert record.result.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
            ids = record.result.token_ids
            await eventually(lambda: tuple(door.ids(job_id)) == ids)
            spelled = b"".join(map(load_tokenizer("smollm2").token_bytes, ids))
            assert record.result.text == spelled.decode(errors="replace") == door.text(job_id)
            assert record.result.text.strip()
            assert await eventually(place.lanes_empty)
            assert await eventually(place.workers[0].idle)


async def test_a_job_goes_on_where_it_was_when_its_server_comes_back(nats_server: LocalNats):
    """Ids go in and out of this model, and it is exact: so the text is as if nothing had been."""
    changes = {"engine__served_model": "smollm2_ids", "engine__dialect": "ids", "model__exact": True}
    async with triton_server("smollm2_ids", exact="true") as server:
        port = int(server.address.rpartition(":")[2])
        async with (
            yard(nats_server, workers=1, **POOL, **changes, engine__address=server.address) as place,
            ByteDoor(place.bus) as door,
        ):
            whole = await place.submit(prompt=PROMPT, max_tokens=100)
            (expected,) = await place.ended(whole.record.job_id)
            stored = await place.submit(prompt=PROMPT, caller_at=door, max_tokens=100)
            job_id = stored.record.job_id
            await eventually(lambda: len(door.ids(job_id)) >= 20)
            server.kill()
            async with triton_server("smollm2_ids", exact="true", port=port):
                (record,) = await place.ended(job_id)
                assert record.state is JobState.SUCCEEDED
                assert record.result is not None
                assert expected.result is not None
                ids = record.result.token_ids
                assert ids == expected.result.token_ids
                await eventually(lambda: tuple(door.ids(job_id)) == ids)
