"""Whoever ends a job, and whenever: the engine stops at its next step, nothing is left in a lane, and every count of
what is live comes back to zero. What the engine did is told by a witness in its own process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from laneway.client import JobCancelled, JobState, RequestFields
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.tokenizer import load_tokenizer
from tests.support.nats import eventually
from tests.support.recording_host import Added
from tests.support.region import LocalRegion, local_region, region_settings

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

SLOTS = 2
PATIENT: RequestFields = {"model": "chat", "ttft_target_s": 600.0, "deadline_s": 900.0}  # what a slow machine needs
SMALL: RequestFields = {**PATIENT, "prompt": "Hi", "max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
MODELS: dict[str, dict[str, Any]] = {
    "simulated": {
        "options": {"pace_s": 0.01, "prefill_chunk_tokens": 64, "prefix_cache": False},
        "context_length": 16_384,
        "kv_tokens": 65_536,
    },
    "openvino": {
        "options": {"prefill_chunk_tokens": 32, "prefix_cache": False},
        "context_length": 8192,
        "kv_tokens": 16_384,
    },
}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["simulated", pytest.param("openvino", marks=pytest.mark.model)],
)
async def region(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalRegion]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    async with LocalNats(folder / "nats") as server:
        settings = region_settings(server, engine=request.param, slots=SLOTS, workers=1, **MODELS[request.param])
        async with local_region(server, folder, settings) as made:
            yield made


def long_story(number: int, max_tokens: int = 4000) -> RequestFields:
    """A request that decodes for longer than any test."""
    return {**PATIENT, "prompt": f"Story {number}:", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}


def long_prompt(region: LocalRegion, number: int) -> RequestFields:
    """A request whose prompt takes the engine dozens of steps."""
    words = 2400 if region.settings.models[0].engine == "simulated" else 2000
    return {**PATIENT, "prompt": f"{number} " + "word " * words, "max_tokens": 5, "temperature": 0.0}


def ids_of(region: LocalRegion, request: RequestFields) -> tuple[int, ...]:
    name = "bytes" if region.settings.models[0].engine == "simulated" else "smollm2"
    return tuple(load_tokenizer(name).encode(request.get("prompt", "")))


async def reaches_engine(region: LocalRegion, request: RequestFields) -> Added:
    prompt_ids = ids_of(region, request)
    return await eventually(lambda: region.log.sequence_of(prompt_ids))


async def is_prefilling(region: LocalRegion, request: RequestFields) -> Added:
    """Waits until the engine has computed some of the prompt and is far from its end."""
    sequence = await reaches_engine(region, request)
    await eventually(lambda: sum(step.number > sequence.after_step for step in region.log.steps()) >= 2)
    left = region.log.steps()[-1].prefilling_tokens
    assert len(sequence.prompt_ids) / 4 < left < len(sequence.prompt_ids), "it was caught in the middle of its prompt"
    return sequence


async def is_decoding(region: LocalRegion, request: RequestFields) -> Added:
    sequence = await reaches_engine(region, request)
    await eventually(lambda: region.log.tokens_of(sequence.id) >= 3)
    return sequence


async def engine_stopped(region: LocalRegion, sequence: Added) -> None:
    """The first step after the abort's arrival reports the end, and neither it nor a later one has a token."""
    abort = await eventually(lambda: region.log.abort_of(sequence.id))
    later = await eventually(lambda: [step for step in region.log.steps() if step.number > abort.after_step])
    assert later[0].finished.get(sequence.id) == "cancelled"
    assert later[0].number == abort.after_step + 1
    assert not any(sequence.id in step.tokens for step in later)


async def all_is_free(region: LocalRegion) -> None:
    """Nothing is live anywhere, and the next request is served."""
    await region.nothing_is_live()
    async with region.client.generate(**SMALL) as stream:
        await stream.text()
    assert stream.finished.usage.completion_tokens == 2
    region.job_ids.add(stream.job_id)
    await region.nothing_is_live()


# --- cancelled -------------------------------------------------------------------------------------


async def test_cancelled_while_parked(region: LocalRegion):
    request: RequestFields = {**long_story(1), "lane": "batch", "not_before_s": 600.0}
    job_id = (await region.client.submit(**request)).job_id
    region.job_ids.add(job_id)
    assert (await region.client.get_job(job_id)).state is JobState.PARKED
    assert sum((await region.messages()).values()) == 1
    assert (await region.client.cancel(job_id)).state is JobState.CANCELLED
    assert sum((await region.messages()).values()) == 0
    await all_is_free(region)
    assert region.log.sequence_of(ids_of(region, request)) is None


async def test_cancelled_while_ready(region: LocalRegion):
    async with AsyncExitStack() as stack:
        for number in range(SLOTS):
            stream = await stack.enter_async_context(region.client.generate(**long_story(100 + number)))
            region.job_ids.add(stream.job_id)
            await is_decoding(region, long_story(100 + number))
        request = long_story(2)
        job_id = (await region.client.submit(**request)).job_id
        region.job_ids.add(job_id)
        assert (await region.client.get_job(job_id)).state is JobState.READY
        gauges = await region.gauges()
        assert gauges["laneway_worker_running_jobs"] == gauges["laneway_door_streams"] == SLOTS
        assert gauges["laneway_worker_kv_reserved_tokens"] > 4000 * SLOTS
        assert (await region.client.cancel(job_id)).state is JobState.CANCELLED
        assert sum((await region.messages()).values()) == SLOTS, "only those that run are left"
    await all_is_free(region)
    assert region.log.sequence_of(ids_of(region, request)) is None


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_cancelled_while_it_runs(region: LocalRegion, phase: str):
    request = long_prompt(region, 3) if phase == "prefill" else long_story(3)
    job_id = (await region.client.submit(**request)).job_id
    region.job_ids.add(job_id)
    sequence = await (is_prefilling if phase == "prefill" else is_decoding)(region, request)
    async with region.client.watch(job_id) as stream:
        assert (await region.client.cancel(job_id)).state is JobState.CANCELLED
        with pytest.raises(JobCancelled):
            await stream.text()
    await engine_stopped(region, sequence)
    await all_is_free(region)
    assert (await region.client.get_job(job_id)).state is JobState.CANCELLED


# --- the caller is gone ----------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_the_caller_vanishes(region: LocalRegion, phase: str):
    request = long_prompt(region, 4) if phase == "prefill" else long_story(4)
    async with region.client.generate(**request) as stream:
        region.job_ids.add(stream.job_id)
        sequence = await (is_prefilling if phase == "prefill" else is_decoding)(region, request)
    await engine_stopped(region, sequence)
    await all_is_free(region)
    assert (await region.client.get_job(stream.job_id)).state is JobState.CANCELLED


async def test_the_caller_vanishes_before_its_turn(region: LocalRegion):
    async with AsyncExitStack() as stack:
        for number in range(SLOTS):
            stream = await stack.enter_async_context(region.client.generate(**long_story(200 + number)))
            region.job_ids.add(stream.job_id)
            await is_decoding(region, long_story(200 + number))
        request = long_story(5)
        async with region.client.generate(**request) as stream:
            region.job_ids.add(stream.job_id)
            assert (await region.client.get_job(stream.job_id)).state is JobState.READY
        await eventually(lambda: _is_cancelled(region, stream.job_id))
        assert sum((await region.messages()).values()) == SLOTS, "only those that run are left"
    await all_is_free(region)
    assert region.log.sequence_of(ids_of(region, request)) is None


async def test_a_crowd_vanishes_in_every_state(region: LocalRegion):
    async with AsyncExitStack() as stack:
        for number in range(10, 30):  # two run, one of them perhaps in prefill, the others wait
            request = long_prompt(region, number) if number % 2 else long_story(number, 500)
            stream = await stack.enter_async_context(region.client.generate(**request, retry_s_max=0.0))
            region.job_ids.add(stream.job_id)
        for number in range(30, 40):
            held: RequestFields = {**long_story(number, 500), "lane": "deferrable", "not_before_s": 600.0}
            held["deadline_s"] = 86_400.0
            stream = await stack.enter_async_context(region.client.generate(**held, retry_s_max=0.0))
            region.job_ids.add(stream.job_id)
        assert (await region.gauges())["laneway_door_streams"] == 30
    await all_is_free(region)


async def _is_cancelled(region: LocalRegion, job_id: str) -> bool:
    return (await region.record(job_id)).state is JobState.CANCELLED
