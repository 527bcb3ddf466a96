"""A prompt and an answer that no NATS message holds, from a client through all services to an engine and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from laneway.client import Client, JobState, Lane
from laneway.core.lanes import JobState as State
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.objects import ObjectStore
from tests.support.nats import REGION
from tests.support.region import local_region, region_settings

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]

PROMPT = [200] * 350_000  # two bytes each
TOKENS = 15_000


async def test_a_large_prompt_and_a_large_answer_come_through(tmp_path: Path):
    async with LocalNats(tmp_path / "nats") as server:
        await through(server, tmp_path)


async def through(server: LocalNats, folder: Path) -> None:
    settings = region_settings(
        server,
        engine="simulated",
        options={"pace_s": 0.0005, "prefill_chunk_tokens": 100_000},
        context_length=400_000,
        kv_tokens=900_000,
        slots=2,
        workers=1,
        prefill_tokens_per_s=1e8,
        decode_tokens_per_s=1e5,
    )
    async with local_region(server, folder, settings) as region:
        client: Client = region.client
        large = await client.submit(
            model="chat", token_ids=PROMPT, max_tokens=TOKENS, lane=Lane.BATCH, logprobs=True, top_logprobs=5,
            ignore_eos=True, temperature=0.0, deadline_s=600.0,
        )  # fmt: skip
        small = await client.submit(model="chat", prompt="Hello", max_tokens=4, lane=Lane.BATCH)
        assert (await client.wait(small.job_id)).state is JobState.SUCCEEDED
        job = await client.wait(large.job_id)
        assert (job.state, job.error) == (JobState.SUCCEEDED, None)
        assert job.result is not None
        assert len(job.result.token_ids) == TOKENS
        async with client.watch(large.job_id) as stream:
            assert await stream.text() == job.result.text
        record = await region.record(large.job_id)
        assert (record.state, record.starts) == (State.SUCCEEDED, 1)
        assert record.result_object is not None
        kinds = {each.name.kind for each in await ObjectStore(region.bus, REGION).listed()}
        assert kinds == {"task", "result-1"}
        await region.nothing_is_live()
