"""Running batch work that yields to a priority request, through every service: its caller does not wait for their end,
and the batch job ends later with the very text that it has undisturbed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from laneway.client import Job, JobState, RequestFields
from laneway.runtime.local_nats import LocalNats
from tests.support.nats import eventually
from tests.support.region import LocalRegion, local_region, region_settings

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

# What a slow machine needs; it has nothing to do with what is tested.
PATIENT: RequestFields = {"model": "chat", "ttft_target_s": 600.0, "deadline_s": 900.0}
LONG: RequestFields = {
    **PATIENT,
    "messages": [{"role": "user", "content": "Tell me of the rivers of Europe, one after the other."}],
    "temperature": 0.0,
    "max_tokens": 240,
    "ignore_eos": True,
    "lane": "batch",
}
URGENT: RequestFields = {**PATIENT, "prompt": "The sea is", "temperature": 0.0, "max_tokens": 4}
HOUR_JOB: RequestFields = {**PATIENT, "lane": "batch", "max_tokens": 3000, "ignore_eos": True, "deadline_s": 3600.0}


@pytest.mark.model
async def test_the_real_models_batch_answer_is_the_same_though_it_yielded_its_only_slot(tmp_path: Path):
    async with LocalNats(tmp_path / "nats") as server:
        settings = region_settings(server, engine="openvino", exact=True, slots=1, workers=1, kv_tokens=16_384)
        async with local_region(server, tmp_path, settings) as region:
            alone = await answer_of(region, (await region.client.submit(**LONG)).job_id)
            assert (alone.attempt, alone.preemptions) == (1, 0)
            batch = await region.client.submit(**LONG)
            await has_tokens(region, batch.job_id)
            async with region.client.generate(**URGENT) as stream:
                assert await stream.text()
            assert (await region.client.get_job(batch.job_id)).state is not JobState.SUCCEEDED
            job = await answer_of(region, batch.job_id)
            assert (job.attempt, job.preemptions) == (2, 1)
            assert job.result is not None
            assert alone.result is not None
            assert job.result.text == alone.result.text
            assert job.result.token_ids == alone.result.token_ids
            await explained(region, batch.job_id)
            region.job_ids = {batch.job_id}
            await region.nothing_is_live()


async def test_a_priority_caller_does_not_wait_for_long_batch_jobs_that_hold_every_slot(tmp_path: Path):
    async with LocalNats(tmp_path / "nats") as server:
        settings = region_settings(
            server, options={"pace_s": 0.02}, policy={"priority_reserved_slots": 0, "headroom_z": 0.0},
            engine="simulated", slots=4, workers=2, kv_tokens=65_536,
        )  # fmt: skip
        async with local_region(server, tmp_path, settings, workers=2) as region:
            batch: list[RequestFields] = [{**HOUR_JOB, "prompt": f"Batch {n}"} for n in range(8)]
            held = [(await region.client.submit(**request)).job_id for request in batch]
            await eventually(lambda: all_run(region, held), timeout_s=60)
            # Not patient: as a caller comes who says nothing of targets. A batch job takes a minute.
            for number in range(3):
                urgent: RequestFields = {"model": "chat", "prompt": f"Urgent {number}", "max_tokens": 3}
                urgent["deadline_s"] = 20.0
                async with region.client.generate(**urgent) as stream:
                    await stream.text()
            jobs = [await region.client.get_job(job_id) for job_id in held]
            assert not any(job.state.terminal for job in jobs)
            # The first made room; as long as a place is free, the next may find it.
            assert 1 <= sum(job.preemptions for job in jobs) <= 3
            await eventually(lambda: all_run(region, held), timeout_s=60)  # back as soon as there is room again
            for job_id in held:
                await region.client.cancel(job_id)
            region.job_ids = set(held)
            await region.nothing_is_live()


async def has_tokens(region: LocalRegion, job_id: str) -> None:
    """Waits until the job runs and has given a fair part of its answer, far from most of it."""
    await eventually(lambda: runs(region, job_id), timeout_s=60)
    sequence = region.log.added()[-1]
    await eventually(lambda: region.log.tokens_of(sequence.id) >= 24, timeout_s=60)


async def runs(region: LocalRegion, job_id: str) -> bool:
    return (await region.client.get_job(job_id)).state is JobState.RUNNING


async def all_run(region: LocalRegion, job_ids: list[str]) -> bool:
    return all(await asyncio.gather(*(runs(region, job_id) for job_id in job_ids)))


async def answer_of(region: LocalRegion, job_id: str) -> Job:
    job = await region.client.wait(job_id, timeout_s=200)
    assert job.state is JobState.SUCCEEDED, job.error
    return job


async def explained(region: LocalRegion, job_id: str) -> None:
    steps = [(step.action, step.reason) for step in (await region.scheduler.explain_job(job_id)).steps]
    yielded, resumed = steps.index(("preempted", "YIELDED_TO_PRIORITY")), steps.index(("claimed", "RESUMED"))
    assert steps.index(("claimed", "FIRST_CLAIM")) < yielded < resumed
