"""A worker whose engine is an OpenAI-compatible server: real NATS, llama.cpp's server or a scripted one at its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from laneway.core.lanes import FinishReason, JobState
from laneway.core.prompt import ChatTurn
from laneway.runtime.engine_options import ProviderOptions
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.tokenizer import load_tokenizer
from tests.support.nats import eventually
from tests.support.openai_server import LlamaOptions, LlamaProcess, openai_server
from tests.support.scripted_openai import Reply, ScriptedOpenAi, answer, chat_event, error_reply, text_event
from tests.support.worker import ByteDoor, yard

SMOLLM2 = load_tokenizer("smollm2")


def pool_of(base_url: str, tokenizer: str = "bytes", **options: Any) -> dict[str, Any]:
    return {
        "model__engine": "openai",
        "model__tokenizer": tokenizer,
        "model__context_length": 2048,
        "model__kv_tokens": 8192,
        "engine__providers": (ProviderOptions(base_url=base_url, name="it", **options),),
        "engine__start_timeout_s": 20.0,
    }


def text_of(door: ByteDoor, job_id: str) -> str:
    return b"".join(map(SMOLLM2.token_bytes, door.ids(job_id))).decode()


@pytest.mark.model
async def test_a_job_is_answered_with_the_text_of_a_real_server(nats_server: LocalNats):
    async with (
        openai_server() as base_url,
        yard(nats_server, workers=1, **pool_of(base_url, "smollm2")) as place,
        ByteDoor(place.bus) as door,
    ):
        prompt = tuple(SMOLLM2.encode("The capital of France is"))
        stored = await place.submit(caller_at=door, max_tokens=20, prompt=prompt)
        job_id = stored.record.job_id
        (record,) = await place.ended(job_id)
        assert record.state is JobState.SUCCEEDED
        result = record.result
        assert result is not None
        assert result.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert "Paris" in result.text
        assert await eventually(lambda: tuple(door.ids(job_id)) == result.token_ids)
        assert text_of(door, job_id) == result.text
        assert await eventually(place.lanes_empty)
        assert await eventually(place.workers[0].idle)


@pytest.mark.model
@pytest.mark.slow
async def test_a_job_goes_on_where_it_was_when_its_real_server_was_killed_and_is_back(nats_server: LocalNats):
    server = LlamaProcess()
    pool = pool_of(server.base_url, "smollm2")
    async with yard(nats_server, workers=1, **pool) as place, ByteDoor(place.bus) as door:
        prompt = tuple(SMOLLM2.encode("One, two, three, four, five, six, seven, eight, nine, ten, eleven,"))
        whole = await place.submit(max_tokens=150, prompt=prompt)
        (expected,) = await place.ended(whole.record.job_id)
        stored = await place.submit(caller_at=door, max_tokens=150, prompt=prompt)
        job_id = stored.record.job_id
        await eventually(lambda: len(door.ids(job_id)) >= 20)
        server.kill()
        again = LlamaProcess(LlamaOptions(port=server.port))
        try:
            (record,) = await place.ended(job_id)
            assert record.state is JobState.SUCCEEDED
            assert record.attempt == 2
            assert record.result is not None
            assert expected.result is not None
            assert text_of(door, job_id) == record.result.text
            assert record.result.text[:80] == expected.result.text[:80]
        finally:
            again.kill()


async def test_a_stream_that_breaks_is_gone_on_with_from_what_it_gave(nats_server: LocalNats):
    async with (
        ScriptedOpenAi() as server,
        yard(nats_server, workers=1, **pool_of(server.base_url)) as place,
        ByteDoor(place.bus) as door,
    ):
        delivered = asyncio.Event()
        server.replies += [Reply([text_event("so it is and "), delivered], cut=True), answer(" no more")]
        stored = await place.submit(caller_at=door, max_tokens=40)
        assert await eventually(lambda: bytes(door.ids(stored.record.job_id)) == b"so it is")
        delivered.set()
        (record,) = await place.ended(stored.record.job_id)
        assert record.state is JobState.SUCCEEDED
        assert record.result is not None
        assert record.result.text == "so it is no more" == door.text(stored.record.job_id)
        assert bytes(server.requests[-1].body["prompt"]).endswith(b"so it is")
        assert record.attempt == 2


async def test_a_chat_that_broke_after_output_is_not_gone_on_with(nats_server: LocalNats):
    prompt = load_tokenizer("bytes").encode_chat([ChatTurn("user", "Why?")])
    async with (
        ScriptedOpenAi() as server,
        yard(nats_server, workers=1, **pool_of(server.base_url, route="chat")) as place,
        ByteDoor(place.bus) as door,
    ):
        delivered = asyncio.Event()
        server.replies.append(Reply([chat_event("so it is and "), delivered], cut=True))
        stored = await place.submit(caller_at=door, max_tokens=40, prompt=prompt)
        assert await eventually(lambda: bytes(door.ids(stored.record.job_id)) == b"so it is")
        delivered.set()
        (record,) = await place.ended(stored.record.job_id)
        assert record.state is JobState.FAILED
        assert record.error is not None
        assert record.error.reason == "NOT_RESUMABLE"
        assert len(server.requests) == 2, "the token of the start, and the job once"


async def test_a_refusal_for_now_is_tried_again_and_one_for_good_is_told(nats_server: LocalNats):
    async with (
        ScriptedOpenAi() as server,
        yard(nats_server, workers=1, **pool_of(server.base_url)) as place,
    ):
        server.replies += [error_reply(429), answer("so it is"), error_reply(400, "their words")]
        tried = await place.submit(max_tokens=40)
        (record,) = await place.ended(tried.record.job_id)
        assert (record.state, record.attempt) == (JobState.SUCCEEDED, 2)
        refused = await place.submit(max_tokens=40)
        (record,) = await place.ended(refused.record.job_id)
        assert record.state is JobState.FAILED
        assert record.error is not None
        assert "refused the request as invalid" in record.error.message
        assert "their words" not in record.error.message
