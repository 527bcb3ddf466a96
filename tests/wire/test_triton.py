"""The adapter `triton` in front of a real Triton server, whose model echoes: what the conformance kit does not ask."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from laneway.core.lanes import FinishReason
from laneway.runtime.engine_options import EngineOptions
from laneway.workers.engines.protocol import Engine, EngineCapacity, EngineStartError
from laneway.workers.engines.registry import make_engine
from tests.support.engines import RecordingSink
from tests.support.nats import eventually
from tests.support.triton_kit import triton_pool
from tests.support.triton_server import TritonServer, triton_server

pytestmark = [pytest.mark.wire, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

MODELS = ("echo_llmapi", "echo_bls", "echo_ids")
each_model = pytest.mark.parametrize("model", MODELS)
LONG = 1500  # tokens of a run that is stopped long before its end,
PACE_S = 0.04  # which takes a minute
FREED_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TritonServer]:
    """It looks for cancelled calls so seldom that only a stop request, or a test of its own, is noticed in time."""
    async with triton_server(
        *MODELS, pace_s="0.005", told_requests="4", told_blocks="200", told_block_tokens="32"
    ) as it:
        yield it


class Started:
    def __init__(self, engine: Engine, sink: RecordingSink, capacity: EngineCapacity) -> None:
        self.engine, self.sink, self.capacity = engine, sink, capacity

    async def run(self, prompt: str, max_tokens: int, **changes: Any) -> Any:
        return await self.sink.run(self.engine, list(prompt.encode()), max_tokens, **changes)


@asynccontextmanager
async def started(server: TritonServer, model: str, **options: Any) -> AsyncIterator[Started]:
    chosen = EngineOptions(address=server.address, served_model=model, **options)
    engine, sink = make_engine(triton_pool(model, chosen), chosen), RecordingSink()
    try:
        yield Started(engine, sink, await engine.start(sink))
    finally:
        await engine.close()


async def gauge(server: TritonServer, name: str, model: str) -> float:
    page = await asyncio.to_thread(server.metrics)
    found = re.search(rf'^{name}{{model="{model}".*}} (\S+)$', page, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


async def computes(server: TritonServer, model: str, requests: int) -> bool:
    """Whether the model comes to compute so many."""

    async def so_many() -> bool:
        return await gauge(server, "laneway_test_live", model) == requests

    return await eventually(so_many, FREED_S)


@each_model
async def test_a_dialect_that_is_not_named_is_found_in_the_model(server: TritonServer, model: str):
    async with started(server, model) as t:
        heard = await t.run("abc ", 9, ignore_eos=False)
        assert bytes(heard.ids) == b"abc abc a"
        assert heard.finish is FinishReason.LENGTH


async def test_without_a_dialect_only_what_all_have_is_offered(server: TritonServer):
    async with started(server, "echo_ids") as t:
        heard = await t.run("abc", 5, logprobs=True, ignore_eos=False)
        assert (heard.finish, heard.message) == (FinishReason.ERROR, "the pool does not offer logprobs")
    async with started(server, "echo_ids", dialect="ids") as t:
        heard = await t.run("abc", 3, logprobs=True, ignore_eos=False)
        assert heard.logprobs == [-1 / 1024, -2 / 1024, -3 / 1024]


async def test_log_probabilities_of_text_are_those_of_its_tokens(server: TritonServer):
    async with started(server, "echo_bls", dialect="bls") as t:
        heard = await t.run("abc ", 12, logprobs=True, ignore_eos=False)
        assert heard.logprobs == [-n / 1024 for n in range(1, 13)]


async def test_a_model_that_gives_text_in_pieces_is_read_and_warned_of():
    async with triton_server("echo_bls", accumulate_tokens="false") as server:
        with capture_logs() as logs:
            async with started(server, "echo_bls", dialect="bls") as t:
                heard = await t.run("abc ", 9, logprobs=True, ignore_eos=False)
        assert bytes(heard.ids) == b"abc abc a"
        assert heard.logprobs == [-n / 1024 for n in range(1, 10)]
        assert "triton_text_in_pieces" in [each["event"] for each in logs]


@each_model
async def test_an_abort_ends_cancelled_and_frees_the_server(server: TritonServer, model: str):
    async with started(server, model) as t:
        live = [t.sink.submit(t.engine, list(b"abc "), LONG, ignore_eos=False) for _ in range(3)]
        await t.sink.until(lambda: all(t.sink.heard[i].ids for i in live))
        assert await gauge(server, "laneway_test_live", model) == 3
        for i in live[:2]:
            t.engine.abort(i)
        await t.sink.ended(live[:2])
        assert {t.sink.heard[i].finish for i in live[:2]} == {FinishReason.CANCELLED}
        assert t.sink.heard[live[2]].finish is None
        assert await computes(server, model, 1)
    assert await computes(server, model, 0), "closing the engine stops what is live"


@each_model
async def test_no_abort_of_many_is_taken_for_an_end_of_its_own(server: TritonServer, model: str):
    """Two dialects do not say why an answer ended, and its stream may end before the call is cancelled."""
    async with started(server, model) as t:
        live = [t.sink.submit(t.engine, list(b"abc "), LONG, ignore_eos=False) for _ in range(200)]
        await t.sink.until(lambda: any(t.sink.heard[i].ids for i in live))
        for i in live:
            t.engine.abort(i)
        await t.sink.ended(live)
        assert {t.sink.heard[i].finish for i in live} == {FinishReason.CANCELLED}


@pytest.mark.parametrize("model", ["echo_llmapi", "echo_ids"])
async def test_a_stop_request_reaches_a_server_that_does_not_look_for_cancelled_calls(model: str):
    async with (
        triton_server(model, cancellation_check_period_ms="3600000", pace_s=str(PACE_S)) as server,
        started(server, model) as t,
    ):
        live = t.sink.submit(t.engine, list(b"abc "), LONG, ignore_eos=False)
        await t.sink.until(lambda: t.sink.heard[live].ids)
        t.engine.abort(live)
        await t.sink.ended([live])
        assert await computes(server, model, 0)


async def test_what_the_server_says_of_an_error_does_not_reach_the_caller(server: TritonServer):
    async with started(server, "echo_llmapi") as t:
        heard = await t.sink.run(t.engine, [256], 5, ignore_eos=False)  # a control token: its text is empty
        assert heard.finish is FinishReason.ERROR
        assert heard.message == "the server refused the request, or failed on it"
        assert (await t.run("abc", 5, ignore_eos=False)).finish is FinishReason.LENGTH


async def test_the_server_is_told_of_a_time_limit(server: TritonServer):
    async with started(server, "echo_ids", server_timeout_s=77.0) as t:
        await t.run("abc", 2, ignore_eos=False)
    assert await gauge(server, "laneway_test_timeout_us", "echo_ids") == 77e6


async def test_priority_orders_what_waits_in_the_servers_queue():
    """While the model is busy with taking a first request, two more come; it answers one at a time."""
    async with (
        triton_server("echo_ids", slots="1", execute_s="3", priority_levels="10") as server,
        started(server, "echo_ids") as t,
    ):

        async def executing() -> bool:
            return await gauge(server, "laneway_test_executing", "echo_ids") == 1

        first = t.sink.submit(t.engine, list(b"abc "), 20, ignore_eos=False)
        assert await eventually(executing)
        low, high = (
            t.sink.submit(t.engine, list(b"abc "), 20, priority=priority, ignore_eos=False) for priority in (0.1, 0.9)
        )
        await t.sink.until(lambda: t.sink.heard[high].finish)
        assert t.sink.heard[first].finish is FinishReason.LENGTH
        assert t.sink.heard[low].finish is None
        await t.sink.ended([low])


async def test_its_statistics_tell_when_requests_wait_inside():
    async with (
        triton_server("echo_ids", execute_s="2") as server,
        started(server, "echo_ids", health_interval_s=0.2) as t,
    ):
        with capture_logs() as logs:
            await t.sink.ended([t.sink.submit(t.engine, list(b"abc "), 2, ignore_eos=False) for _ in range(4)])

            def warned() -> list[Any]:
                return [each for each in logs if each["event"] == "triton_requests_wait_inside"]

            assert (await eventually(warned, FREED_S))[0]["mean_s"] > 1.0


async def test_its_metrics_say_what_room_it_has(server: TritonServer):
    async with started(server, "echo_ids", metrics_address=server.metrics_address) as t:
        assert (t.capacity.slots, t.capacity.kv_tokens, t.capacity.block_tokens) == (4, 6400, 32)
    async with started(server, "echo_ids") as t:
        assert (t.capacity.slots, t.capacity.kv_tokens, t.capacity.block_tokens) == (8, 16_384, 1)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("echo_ids", {"dialect": "bls"}, 'the model speaks ids; engine_options have dialect = "bls"'),
        ("none", {"start_timeout_s": 1.0}, 'it has no model "none" that is ready'),
        ("echo_ids", {"metrics_address": "127.0.0.1:9"}, "gave no metrics"),
    ],
)
async def test_what_cannot_serve_is_said_at_the_start(
    server: TritonServer, model: str, options: dict[str, Any], said: str
):
    with pytest.raises(EngineStartError, match=re.escape(said)):
        async with started(server, model, **options):
            pass


async def test_a_model_that_does_not_stream_is_refused():
    async with triton_server("echo_llmapi", decoupled="false") as server:
        with pytest.raises(EngineStartError, match="set decoupled"):
            async with started(server, "echo_llmapi"):
                pass


async def test_a_model_that_is_gone_while_nothing_runs_is_noticed():
    async with triton_server("echo_ids") as server, started(server, "echo_ids", health_interval_s=0.2) as t:
        server.kill()
        await t.sink.until(lambda: t.sink.closed)
        assert "does not answer (UNAVAILABLE)" in t.sink.closed[0]
