"""The engine `trtllm_grpc` over a real connection to a fake of its server: tests/support/trtllm_server.py."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from msgspec.structs import replace
from smg_grpc_proto import trtllm_service_pb2 as pb

from laneway.core.catalogue import Pool
from laneway.core.errors import ConfigError
from laneway.core.lanes import FinishReason
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.protocol import Engine, EngineGone, EngineStartError
from laneway.workers.engines.registry import make_engine
from tests.support.engines import RecordingSink
from tests.support.nats import eventually
from tests.support.trtllm_server import FakeOptions, FakeTrtllmServer

PROMPT = b"a prompt"
POOL = Pool(
    name="under-test",
    model="chat",
    tier="small",
    engine="trtllm_grpc",
    context_length=2048,
    vocabulary_size=260,
    slots=16,
    workers=1,
    kv_tokens=16_384,
    tokenizer="bytes",
    capabilities=capabilities_of("trtllm_grpc"),
)
EOS = min(load_tokenizer("bytes").eos_ids)


@asynccontextmanager
async def serving(options: FakeOptions | None = None) -> AsyncIterator[tuple[FakeTrtllmServer, str]]:
    server = FakeTrtllmServer(options)
    address = await server.start()
    try:
        yield server, address
        assert server.stopped or server.leaked == []
    finally:
        await server.stop()


@asynccontextmanager
async def started(address: str, pool: Pool = POOL, **options: Any) -> AsyncIterator[tuple[Engine, RecordingSink]]:
    engine, sink = make_engine(pool, EngineOptions(address=address, **options)), RecordingSink()
    try:
        await engine.start(sink)
        yield engine, sink
    finally:
        await engine.close()


async def refused_start(address: str, pool: Pool = POOL, **options: Any) -> str:
    engine = make_engine(pool, EngineOptions(address=address, **options))
    with pytest.raises(EngineStartError) as raised:
        await engine.start(RecordingSink())
    with pytest.raises(EngineGone):
        RecordingSink().submit(engine, PROMPT, 1)
    return str(raised.value)


def chunk(*ids: int, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=ids, **fields))


def complete(*ids: int, reason: str = "stop", **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(complete=pb.GenerateComplete(output_token_ids=ids, finish_reason=reason, **fields))


def answering(*responses: pb.GenerateResponse) -> Any:
    async def script(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        for response in responses:
            yield response

    return script


# --- starting ------------------------------------------------------------------------------------------


async def test_a_start_without_a_server_ends_in_time_and_says_where_it_looked():
    words = await refused_start("127.0.0.1:9", start_timeout_s=0.3)
    assert words.startswith("the trtllm-serve at 127.0.0.1:9 was not ready after 0.3 s: nothing answers there")


async def test_a_start_waits_for_a_server_that_comes_up_and_loads():
    async with serving() as (first, address):
        await first.stop()
        engine, sink = make_engine(POOL, EngineOptions(address=address, start_timeout_s=20.0)), RecordingSink()
        starting = asyncio.create_task(engine.start(sink))
        server = FakeTrtllmServer()
        server.status = "Executor is not available"
        await server.start(int(address.rpartition(":")[2]))
        try:
            await eventually(lambda: server.health_checks >= 2)
            assert not starting.done()
            server.status = "OK"
            await starting
            assert (await sink.run(engine, PROMPT, 3)).finish is FinishReason.LENGTH
        finally:
            await engine.close()
            await server.stop()


async def test_a_server_that_stays_unwell_is_no_start():
    async with serving() as (server, address):
        server.status = "RuntimeError: /a/path of theirs"
        words = await refused_start(address, start_timeout_s=0.3)
        assert "it says that it is not well" in words
        assert "path" not in words


async def test_a_server_of_another_kind_is_told_from_one_that_is_away():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        words = await refused_start(f"127.0.0.1:{port}")
        assert words.endswith("answered with UNIMPLEMENTED: is it a trtllm-serve that was started with --grpc?")
    finally:
        await server.stop(None)


async def test_a_pool_with_more_context_than_the_server_is_refused_with_both_numbers():
    async with serving(FakeOptions(told_max_seq_len=512)) as (_, address):
        words = await refused_start(address)
        assert "takes 512 tokens" in words
        assert "2048" in words
        async with started(address, replace(POOL, context_length=512)) as (engine, sink):
            assert (await sink.run(engine, PROMPT, 3)).finish is FinishReason.LENGTH


async def test_a_missing_package_or_address_is_said_with_a_way_to_mend_it(monkeypatch: pytest.MonkeyPatch):
    for address in ("", "http://host:1"):
        with pytest.raises(ConfigError, match=r"engine_options\.address"):
            make_engine(POOL, EngineOptions(address=address))
    for module in ("trtllm_grpc", "trtllm_wire"):
        monkeypatch.delitem(sys.modules, f"laneway.workers.engines.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    with pytest.raises(ConfigError, match=r"pip install 'laneway\[trtllm-grpc\]'"):
        make_engine(POOL, EngineOptions(address="127.0.0.1:9"))


async def test_a_server_too_old_for_penalties_has_them_refused_and_serves_the_rest():
    async with serving(FakeOptions(version="1.2.1")) as (_, address), started(address) as (engine, sink):
        heard = await sink.run(engine, PROMPT, 3, repetition_penalty=1.2)
        assert (heard.finish, heard.message) == (FinishReason.ERROR, "the pool does not offer repetition_penalty")
        assert (await sink.run(engine, PROMPT, 3)).finish is FinishReason.LENGTH
    async with serving() as (server, address), started(address) as (engine, sink):
        await sink.run(engine, PROMPT, 3, repetition_penalty=1.25)
        assert server.requests[0].sampling_config.repetition_penalty == 1.25


# --- running -------------------------------------------------------------------------------------------


async def test_a_hundred_requests_at_once_get_each_its_own_and_leave_nothing():
    async with serving() as (server, address), started(address) as (engine, sink):
        prompts = [f"prompt {i}".encode() for i in range(100)]
        ids = [sink.submit(engine, prompt, 8) for prompt in prompts]  # the sink recounts at every call
        assert engine.stats().queued == 100
        heard = await sink.ended(ids)
        assert {h.finish for h in heard} == {FinishReason.LENGTH}
        assert len({tuple(h.ids) for h in heard}) == 100
        for i in (0, 57, 99):
            assert (await sink.run(engine, prompts[i], 8)).ids == heard[i].ids
        assert await eventually(lambda: server.live == 0)
        assert len({request.request_id for request in server.requests}) == 103
        stats = engine.stats()
        assert (stats.running, stats.queued, stats.prefilling_tokens, stats.kv_tokens_used) == (0, 0, 0, 0)


async def test_an_abort_cancels_the_call_and_the_server_sees_it():
    async with serving() as (server, address), started(address) as (engine, sink):
        doomed, other = (sink.submit(engine, PROMPT, 1500) for _ in range(2))
        await sink.until(lambda: sink.heard[doomed].ids)
        engine.abort(doomed)
        engine.abort(doomed)
        (heard,) = await sink.ended(doomed)
        assert heard.finish is FinishReason.CANCELLED
        assert await eventually(lambda: len(server.aborted) == 1)
        assert len(server.abort_calls) == 1
        before = len(sink.heard[other].ids)
        await sink.until(lambda: len(sink.heard[other].ids) > before + 5)
        assert server.live == 1


async def test_a_hundred_aborts_at_once_all_reach_the_server_whatever_it_is_writing():
    pool = replace(POOL, slots=100, kv_tokens=200_000)
    options = FakeOptions(slots=pool.slots, kv_tokens=pool.kv_tokens, pace_s=0.02)
    async with serving(options) as (server, address), started(address, pool) as (engine, sink):
        ids = [sink.submit(engine, PROMPT, 1500) for _ in range(100)]
        await sink.until(lambda: all(sink.heard[i].ids for i in ids))
        for i in ids:
            engine.abort(i)
        assert {heard.finish for heard in await sink.ended(ids)} == {FinishReason.CANCELLED}
        assert len(server.aborted) == 100
        assert await eventually(lambda: server.live == 0)


async def test_an_abort_is_told_by_a_call_and_a_server_that_does_not_answer_that_call_sees_the_cancel():
    async with serving() as (server, address), started(address) as (engine, sink):
        server.on_abort = lambda context: context.abort(grpc.StatusCode.INTERNAL, "deaf")
        doomed = sink.submit(engine, PROMPT, 1500)
        await sink.until(lambda: sink.heard[doomed].ids)
        engine.abort(doomed)
        assert (await sink.ended(doomed))[0].finish is FinishReason.CANCELLED
        assert await eventually(lambda: server.cancelled or server.leaked)  # the latter if it was just writing
        server.leaked.clear()


async def test_what_the_server_makes_of_an_abort_is_an_abort():
    aborted = asyncio.Event()

    async def cancelled(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield chunk(65)
        await aborted.wait()
        yield complete(65, reason="cancelled")

    async with serving() as (server, address), started(address) as (engine, sink):

        async def on_abort(context: grpc.aio.ServicerContext) -> None:
            aborted.set()
            await eventually(lambda: sink.heard[doomed].finish)

        server.script, server.on_abort = cancelled, on_abort
        doomed = sink.submit(engine, PROMPT, 9)
        await sink.until(lambda: sink.heard[doomed].ids)
        engine.abort(doomed)
        (heard,) = await sink.ended(doomed)
        assert (heard.ids, heard.finish, heard.message) == ([65], FinishReason.CANCELLED, "")


async def test_one_that_is_aborted_at_once_never_reaches_the_server():
    async with serving() as (server, address), started(address) as (engine, sink):
        doomed = sink.submit(engine, PROMPT, 5)
        engine.abort(doomed)
        assert (await sink.ended(doomed))[0].finish is FinishReason.CANCELLED
        await sink.run(engine, PROMPT, 2)
        assert len(server.requests) == 1


async def test_two_workers_at_one_server_do_not_meet_in_their_request_ids():
    async with serving() as (server, address), started(address) as (one, sink), started(address) as (two, other):
        doomed, kept = sink.submit(one, PROMPT, 1500), other.submit(two, PROMPT, 200)
        assert doomed == kept
        await other.until(lambda: sink.heard[doomed].ids and other.heard[kept].ids)
        one.abort(doomed)
        assert len((await other.ended(kept))[0].ids) == 200
        assert len(server.aborted) == 1


async def test_closing_stops_what_is_live_without_a_word():
    async with serving() as (server, address):
        async with started(address) as (engine, sink):
            live = [sink.submit(engine, PROMPT, 1500) for _ in range(10)]
            await sink.until(lambda: all(sink.heard[i].ids for i in live))
            await asyncio.gather(engine.close(), engine.close())
            calls = sink.calls
            assert len(server.abort_calls) == 10
            with pytest.raises(RuntimeError, match="once"):
                await engine.start(sink)
        assert await eventually(lambda: not server.live)
        assert len(server.aborted) == 10
        assert (sink.live(), sink.closed, sink.calls) == (set(live), [], calls)


# --- answers of all kinds ------------------------------------------------------------------------------


async def test_a_finish_comes_with_an_empty_delta_also_without_any_token():
    async with serving() as (server, address), started(address) as (engine, sink):
        server.script = answering(chunk(65, cached_tokens=4), chunk(66, cached_tokens=4), complete(65, 66))
        heard = await sink.run(engine, PROMPT, 9)
        assert (heard.ids, heard.finish, heard.cached_tokens) == ([65, 66], FinishReason.STOP, 4)
        server.script = answering(complete())
        heard = await sink.run(engine, PROMPT, 9, logprobs=True)
        assert (heard.ids, heard.finish) == ([], FinishReason.STOP)


async def test_what_only_the_last_message_has_is_given_out_as_well():
    async with serving() as (server, address), started(address) as (engine, sink):
        server.script = answering(chunk(65), complete(65, 66, 67, reason="length"))
        heard = await sink.run(engine, PROMPT, 3)
        assert (heard.ids, heard.finish) == ([65, 66, 67], FinishReason.LENGTH)


async def test_an_end_token_among_the_ids_ends_the_answer_and_is_not_given_out():
    async with serving() as (server, address), started(address) as (engine, sink):
        server.script = answering(chunk(65, EOS), complete(65, EOS))
        heard = await sink.run(engine, PROMPT, 9, ignore_eos=False)
        assert (heard.ids, heard.finish) == ([65], FinishReason.STOP)
        heard = await sink.run(engine, PROMPT, 2, ignore_eos=True)
        assert (heard.ids, heard.finish) == ([65, EOS], FinishReason.STOP)


async def test_unknown_fields_and_messages_of_a_newer_server_are_passed_over():
    newer = b"\xf8\x06\x01"  # field 111
    known = pb.GenerateResponse.FromString(chunk(65).SerializeToString() + newer)
    async with serving() as (server, address), started(address) as (engine, sink):
        server.script = answering(pb.GenerateResponse.FromString(newer), known, complete(65, reason="length"))
        heard = await sink.run(engine, PROMPT, 1)
        assert (heard.ids, heard.finish) == ([65], FinishReason.LENGTH)


async def test_max_tokens_that_the_server_cuts_silently_are_an_error_with_both_numbers():
    async with serving(FakeOptions(context_length=32)) as (_, address), started(address) as (engine, sink):
        heard = await sink.run(engine, PROMPT, 100)
        assert heard.finish is FinishReason.ERROR
        assert heard.message.startswith("TensorRT-LLM gave 24 of 100 tokens and stopped")


async def test_an_answer_that_ends_without_a_word_or_makes_no_sense_is_an_error():
    async with serving() as (server, address), started(address) as (engine, sink):
        for response, words in ((chunk(65), "without a word"), (chunk(260), "outside the vocabulary")):
            server.script = answering(response)
            heard = await sink.run(engine, PROMPT, 5)
            assert heard.finish is FinishReason.ERROR
            assert words in heard.message


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "the server refused the request as invalid"),
        (grpc.StatusCode.INTERNAL, "the server failed on this request (INTERNAL)"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "the request or its answer is too large for the server"),
        (grpc.StatusCode.PERMISSION_DENIED, "the server failed on this request (PERMISSION_DENIED)"),
    ],
    ids=lambda value: value.name if isinstance(value, grpc.StatusCode) else "",
)
async def test_a_request_that_the_server_fails_on_ends_in_our_words_and_harms_no_other(
    code: grpc.StatusCode, words: str
):
    async def failing(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield chunk(65)
        await context.abort(code, "their words, with a /path")

    async with serving() as (server, address), started(address) as (engine, sink):
        running = sink.submit(engine, PROMPT, 200)
        await sink.until(lambda: sink.heard[running].ids)
        server.script = failing
        heard = await sink.run(engine, PROMPT, 5)
        assert (heard.finish, heard.message) == (FinishReason.ERROR, words)
        assert len((await sink.ended(running))[0].ids) == 200


async def test_a_server_that_goes_on_after_the_end_is_stopped():
    stopped = asyncio.Event()

    async def endless(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield chunk(65, EOS)
            while True:
                await asyncio.sleep(0.01)
                yield chunk(66)
        finally:
            stopped.set()

    async with serving() as (server, address), started(address) as (engine, sink):
        server.script = endless
        heard = await sink.run(engine, PROMPT, 9, ignore_eos=False)
        assert (heard.ids, heard.finish) == ([65], FinishReason.STOP)
        async with asyncio.timeout(10.0):
            await stopped.wait()


# --- a server that is gone -----------------------------------------------------------------------------


async def test_a_server_that_shuts_down_ends_all_and_is_told_of_once():
    async with serving() as (server, address), started(address) as (engine, sink):
        live = [sink.submit(engine, PROMPT, 1500) for _ in range(20)]
        await sink.until(lambda: sum(bool(sink.heard[i].ids) for i in live) >= 10)
        await server.stop()
        await sink.until(lambda: sink.closed)
        assert await engine.drain(0.0)
        assert engine.stats().running + engine.stats().queued == 0
        with pytest.raises(EngineGone):
            sink.submit(engine, PROMPT, 5)
        engine.abort(live[0])
    assert len(sink.closed) == 1
    assert f"the trtllm-serve at {address} is gone" in sink.closed[0]
    assert all(sink.heard[i].finish is None for i in live)


async def test_what_came_before_the_end_of_the_server_is_told_first():
    async def leaving(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield chunk(65)
        yield chunk(66)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "leaving")

    async with serving() as (server, address), started(address) as (engine, sink):
        server.script = leaving
        live = sink.submit(engine, PROMPT, 9)
        await sink.until(lambda: sink.closed)
        assert (sink.heard[live].ids, sink.heard[live].finish) == ([65, 66], None)


async def test_a_server_that_dies_while_nothing_runs_is_noticed():
    async with serving() as (server, address), started(address, health_interval_s=0.05) as (_, sink):
        await eventually(lambda: server.health_checks >= 3)
        assert sink.closed == []
        await server.stop()
        await sink.until(lambda: sink.closed)
        assert sink.closed == [f"the trtllm-serve at {address} does not answer (UNAVAILABLE)"]


async def test_a_server_whose_engine_died_is_gone_with_the_first_request_that_fails():
    async def failing(
        request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        server.status = "RuntimeError: CUDA error"
        await context.abort(grpc.StatusCode.INTERNAL, "executor is dead")
        yield chunk()

    async with serving() as (server, address), started(address) as (engine, sink):
        running = sink.submit(engine, PROMPT, 1500)
        await sink.until(lambda: sink.heard[running].ids)
        server.script = failing
        sink.submit(engine, PROMPT, 5)
        await sink.until(lambda: sink.closed)
        assert sink.closed == [f"the trtllm-serve at {address} says that it is not well"]
        assert engine.stats().running == 0
