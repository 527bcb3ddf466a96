"""The engine `openai` over real connections: a scripted server that does what sound ones do not, and llama.cpp's."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.errors import ConfigError
from laneway.core.lanes import FinishReason
from laneway.core.prompt import ChatTurn
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions, ProviderOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines import openai_http
from laneway.workers.engines.openai import make_openai
from laneway.workers.engines.protocol import Engine, EngineGone, EngineRequest, EngineStartError
from laneway.workers.engines.provider_gate import OpenTicket, Ticket
from laneway.workers.engines.registry import make_engine
from tests.support.engines import Heard, RecordingSink
from tests.support.nats import eventually
from tests.support.openai_server import LlamaOptions, openai_server
from tests.support.scripted_openai import (
    MODEL,
    Reply,
    ScriptedOpenAi,
    answer,
    chat_event,
    error_reply,
    text_event,
    usage_event,
)

PROMPT = b"a prompt"
KEY = "sk_a_secret_of_this_test"
POOL = Pool(
    name="under-test",
    model="chat",
    tier="small",
    engine="openai",
    context_length=2048,
    vocabulary_size=260,
    slots=16,
    workers=1,
    kv_tokens=16_384,
    tokenizer="bytes",
    capabilities=capabilities_of("openai"),
)
REAL_POOL = replace(POOL, vocabulary_size=49_152, tokenizer="smollm2")


def options_of(
    base_url: str, *, start_timeout_s: float = 20.0, health_interval_s: float = 30.0, **provider: Any
) -> Any:
    providers = (ProviderOptions(base_url=base_url, name="it", **provider),)
    return EngineOptions(providers=providers, start_timeout_s=start_timeout_s, health_interval_s=health_interval_s)


@asynccontextmanager
async def started(
    base_url: str, pool: Pool = POOL, gate: Any = None, **options: Any
) -> AsyncIterator[tuple[Engine, RecordingSink]]:
    engine, sink = make_openai(pool, options_of(base_url, **options), gate), RecordingSink()
    try:
        await engine.start(sink)
        yield engine, sink
    finally:
        await engine.close()


async def refused_start(server: ScriptedOpenAi, pool: Pool = POOL, **options: Any) -> str:
    engine = make_engine(pool, options_of(server.base_url, **options))
    with pytest.raises(EngineStartError) as raised:
        await engine.start(RecordingSink())
    return str(raised.value)


async def ran(engine: Engine, sink: RecordingSink, max_tokens: int = 100, **changes: Any) -> Heard:
    return await sink.run(engine, PROMPT, max_tokens, ignore_eos=False, **changes)


# --- starting ------------------------------------------------------------------------------------------


async def test_it_is_ready_once_the_server_has_given_a_token():
    async with ScriptedOpenAi() as server, started(server.base_url) as (_, sink):
        (asked,) = server.requests
        assert (asked.path, asked.body["max_tokens"], asked.body["model"]) == ("/v1/completions", 1, MODEL)
        assert sink.calls == 0


async def test_a_start_waits_for_a_server_that_is_away_or_loads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("laneway.workers.engines.openai_provider.LOOK_S_MIN", 0.01)
    async with ScriptedOpenAi() as server:
        await server.stop()
        engine, sink = make_openai(POOL, options_of(server.base_url)), RecordingSink()
        starting = asyncio.create_task(engine.start(sink))
        await asyncio.sleep(0.05)
        server.models = error_reply(503, "Loading model")
        await server.start()
        assert await eventually(lambda: server.looks >= 2)
        server.replies += [error_reply(500), error_reply(429), Reply([text_event("x")], cut=True)]
        server.models = ScriptedOpenAi().models
        await starting
        assert len(server.requests) == 4
        await engine.close()


async def test_a_start_that_is_in_vain_ends_in_time_and_says_what_it_met():
    async with ScriptedOpenAi() as server:
        server.models = error_reply(503, "their words")
        words = await refused_start(server, start_timeout_s=0.3)
        assert "was not ready after 0.3 s: the server failed on this request" in words
        assert "their words" not in words
        await server.stop()
        assert "nothing answers there" in await refused_start(server, start_timeout_s=0.3)


@pytest.mark.parametrize(
    ("models", "reply", "words"),
    [
        (Reply(body={"data": [{"id": "other"}]}), None, "no model 'wanted': set served_model to one of other"),
        (error_reply(401), None, "does not take the API key"),
        (None, error_reply(403), "may not use this model"),
        (None, error_reply(404), "no such route or model"),
        (Reply(body=b"<html>a page</html>"), None, "lists no model"),
        (None, Reply(body=b"<html>a page</html>"), "no stream of events"),
        (Reply(status=307, headers={"location": "http://127.0.0.1:9/v1"}, body={}), None, "says that it is elsewhere"),
        (None, Reply(["nonsense"]), "could not be read"),
        (Reply(body={"data": [{"id": "wanted", "max_model_len": 512}]}), None, "set context_length = 512"),
    ],
)
async def test_what_will_never_be_ready_is_refused_at_once(models: Reply | None, reply: Reply | None, words: str):
    async with ScriptedOpenAi() as server:
        server.models = models or Reply(body={"data": [{"id": "wanted"}]})
        server.replies += [reply] if reply else []
        assert words in await refused_start(server, served_model="wanted")


async def test_a_server_that_lists_no_models_is_asked_for_the_one_that_is_named():
    async with ScriptedOpenAi() as server:
        server.models = error_reply(404)
        async with started(server.base_url, served_model="named") as (engine, sink):
            assert bytes((await ran(engine, sink)).ids) == b"so it is"
            assert {asked.body["model"] for asked in server.requests} == {"named"}
        assert "no such route" in await refused_start(server)


def test_a_missing_package_is_said_with_a_way_to_mend_it(monkeypatch: pytest.MonkeyPatch):
    for module in ("openai", "openai_http", "openai_provider"):
        monkeypatch.delitem(sys.modules, f"laneway.workers.engines.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(ConfigError, match=r"pip install 'laneway\[openai\]'"):
        make_engine(POOL, options_of("http://127.0.0.1:9"))


# --- answers -------------------------------------------------------------------------------------------


async def test_prompts_go_as_ids_and_text_comes_back_as_ids_with_the_servers_end():
    async with ScriptedOpenAi() as server, started(server.base_url) as (engine, sink):
        server.replies.append(Reply([text_event("héllo"), text_event("", "length"), usage_event(8, 6), "[DONE]"]))
        heard = await ran(engine, sink, 6)
        assert (bytes(heard.ids).decode(), heard.finish) == ("héllo", FinishReason.LENGTH)
        assert server.requests[-1].body["prompt"] == list(PROMPT)


async def test_a_server_that_takes_no_ids_gets_text_and_no_control_tokens():
    async with ScriptedOpenAi() as server, started(server.base_url, prompt_ids=False) as (engine, sink):
        await ran(engine, sink)
        assert server.requests[-1].body["prompt"] == PROMPT.decode()
        chat = load_tokenizer("bytes").encode_chat([ChatTurn("user", "Hi")])
        heard = await sink.run(engine, chat, 9, ignore_eos=False)
        assert heard.finish is FinishReason.ERROR
        assert "control tokens" in heard.message


async def test_a_chat_goes_as_the_messages_that_its_prompt_was_made_of():
    turns = [ChatTurn("system", "Be brief."), ChatTurn("user", "Why?")]
    prompt = load_tokenizer("bytes").encode_chat(turns)
    async with ScriptedOpenAi() as server, started(server.base_url, route="chat") as (engine, sink):
        server.replies.append(
            Reply([chat_event(None), chat_event("So"), chat_event("", "stop"), usage_event(9, 1), "[DONE]"])
        )
        heard = await sink.run(engine, prompt, 9, ignore_eos=False)
        assert (bytes(heard.ids), heard.finish) == (b"So", FinishReason.STOP)
        asked = server.requests[-1]
        assert asked.path == "/v1/chat/completions"
        assert asked.body["messages"] == [{"role": turn.role, "content": turn.content} for turn in turns]
        assert not engine.capabilities().token_ids_in, "no answer of it is gone on with"
        gone_on = await sink.run(engine, [*prompt, *heard.ids], 9, ignore_eos=False)
        assert gone_on.finish is FinishReason.ERROR
        assert "send messages" in gone_on.message
        assert len(server.requests) == 2, "it was not asked"


async def test_a_stop_token_that_no_text_shows_is_refused():
    async with ScriptedOpenAi() as server, started(server.base_url) as (engine, sink):
        heard = await ran(engine, sink, stop_token_ids=(256,))
        assert (heard.finish, "control token" in heard.message) == (FinishReason.ERROR, True)
        eos = min(load_tokenizer("bytes").eos_ids)
        assert (await ran(engine, sink, stop_token_ids=(eos,))).finish is FinishReason.STOP


async def test_an_answer_without_counts_ends_all_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("laneway.workers.engines.openai_provider.USAGE_S", 0.1)
    async with ScriptedOpenAi() as server, started(server.base_url, gate=(gate := NotingGate())) as (engine, sink):
        server.replies.append(Reply([text_event("so"), text_event("", "stop")], hang=True))
        assert (await ran(engine, sink)).finish is FinishReason.STOP
        assert gate.ended == [("used", len(PROMPT), 2)]


async def test_answers_that_were_whole_leave_their_connection_to_the_next():
    async with ScriptedOpenAi() as server, started(server.base_url) as (engine, sink):
        before = server.connections  # the answer of the start was longer than wanted
        end, counts = text_event("", "stop"), usage_event(8, 2)
        for rest in ([end, counts, "[DONE]"], [end, counts], [counts | end, "[DONE]"], [end, counts, "[DONE]", "x"]):
            events = [text_event("so"), *rest]
            server.replies.append(Reply(events))
            assert (await ran(engine, sink)).finish is FinishReason.STOP
        assert server.connections == before + 1


async def test_what_broke_before_a_word_of_an_answer_is_asked_once_more_on_a_connection_of_its_own():
    """A server may close a connection that it kept just as it is used again."""
    async with ScriptedOpenAi() as server, started(server.base_url, gate=(gate := NotingGate())) as (engine, sink):
        server.replies += [answer("so it is"), Reply(mute=True), answer("so it is")]
        assert (await ran(engine, sink)).finish is FinishReason.STOP
        before, connections = len(server.requests), server.connections
        heard = await ran(engine, sink)
        assert (bytes(heard.ids), heard.finish) == (b"so it is", FinishReason.STOP)
        assert (len(server.requests), server.connections) == (before + 2, connections + 1)
        server.replies += [Reply(mute=True), Reply(mute=True)]
        assert (await ran(engine, sink)).finish is FinishReason.CANCELLED
        assert len(server.requests) == before + 4
        assert [ended[0] for ended in gate.ended] == ["used", "used", "failed"]
        assert sink.closed == []


async def test_what_makes_no_sense_harms_its_request_only():
    bad = [
        Reply(["nonsense"]),
        Reply([text_event("x", "strange")]),
        Reply([text_event("x", "content_filter")]),
        Reply([text_event("x", "length"), usage_event(8, 1)]),
        Reply([text_event("x" * (2 * 1024 * 1024))]),
        error_reply(400, "their words"),
        Reply(body=b"x" * 100, status=422),
    ]
    async with ScriptedOpenAi() as server, started(server.base_url) as (engine, sink):
        for reply in bad:
            server.replies.append(reply)
            heard = await ran(engine, sink)
            assert heard.finish is (FinishReason.CANCELLED if len(str(reply.events)) > 10_000 else FinishReason.ERROR)
            assert "their words" not in heard.message
        assert (await ran(engine, sink)).finish is FinishReason.STOP
        assert sink.closed == []
        assert await eventually(lambda: server.open == 0)


async def test_an_event_has_so_many_bytes_and_no_more(monkeypatch: pytest.MonkeyPatch):
    event = text_event("x" * 50, "stop")
    size = len('data: {"choices": [{"index": 0, "text": "' + "x" * 50 + '", "finish_reason": "stop"}]}')
    async with ScriptedOpenAi() as server, started(server.base_url) as (engine, sink):
        for limit, finish in ((size, FinishReason.STOP), (size - 1, FinishReason.CANCELLED)):
            monkeypatch.setattr(openai_http, "EVENT_BYTES_MAX", limit)
            server.replies.append(Reply([event, "[DONE]"]))
            assert (await ran(engine, sink)).finish is finish


async def test_a_body_is_read_to_so_many_bytes_and_no_more(monkeypatch: pytest.MonkeyPatch):
    models = Reply(body=b'{"data": [{"id": "scripted"}]}')
    async with ScriptedOpenAi() as server:
        server.models = models
        monkeypatch.setattr(openai_http, "BODY_BYTES_MAX", len(models.body))
        async with started(server.base_url):
            pass
        monkeypatch.setattr(openai_http, "BODY_BYTES_MAX", len(models.body) - 1)
        assert "lists no model" in await refused_start(server)


# --- aborts --------------------------------------------------------------------------------------------


async def test_an_abort_closes_the_stream():
    async with ScriptedOpenAi() as server, started(server.base_url, gate=(gate := NotingGate())) as (engine, sink):
        server.replies += [Reply([text_event("so it is")], hang=True), Reply([], hang=True)]
        decoding = sink.submit(engine, PROMPT, 99, ignore_eos=False)
        await sink.until(lambda: sink.heard[decoding].ids)
        silent = sink.submit(engine, PROMPT, 99, ignore_eos=False)
        assert await eventually(lambda: server.open == 2)
        for request_id in (decoding, silent, silent):
            engine.abort(request_id)
        heard = await sink.ended([decoding, silent])
        assert {each.finish for each in heard} == {FinishReason.CANCELLED}
        assert await eventually(lambda: (server.open, server.left) == (0, 2))
        assert gate.ended == [("dropped",), ("dropped",)]


async def test_one_that_waits_in_the_gate_is_queued_and_its_abort_asks_nobody():
    async with ScriptedOpenAi() as server, started(server.base_url, gate=(gate := NotingGate())) as (engine, sink):
        gate.open.clear()
        doomed, waiting = (sink.submit(engine, PROMPT, 9, ignore_eos=False) for _ in range(2))
        await eventually(lambda: gate.waiting == 2)
        assert (engine.stats().queued, engine.stats().prefilling_tokens) == (2, 2 * len(PROMPT))
        engine.abort(doomed)
        assert (await sink.ended(doomed))[0].finish is FinishReason.CANCELLED
        assert (gate.waiting, len(server.requests)) == (1, 1)
        gate.open.set()
        assert (await sink.ended(waiting))[0].finish is FinishReason.STOP
        assert len(server.requests) == 2


async def test_closing_leaves_no_stream_open():
    async with ScriptedOpenAi() as server:
        async with started(server.base_url) as (engine, sink):
            server.replies += [Reply([text_event("so it is")], hang=True) for _ in range(20)]
            live = [sink.submit(engine, PROMPT, 99, ignore_eos=False) for _ in range(20)]
            await sink.until(lambda: all(sink.heard[i].ids for i in live))
            await asyncio.gather(engine.close(), engine.close())
            with pytest.raises(EngineGone):
                sink.submit(engine, PROMPT, 1)
        assert await eventually(lambda: server.open == 0)


async def test_a_hundred_requests_at_once_get_each_its_own():
    async with ScriptedOpenAi() as server, started(server.base_url) as (engine, sink):
        server.replies += [answer(f"answer {i}") for i in range(100)]
        ids = [sink.submit(engine, PROMPT, 99, ignore_eos=False) for _ in range(100)]
        assert {bytes(h.ids) for h in await sink.ended(ids)} == {b"answer %d" % i for i in range(100)}
        stats = engine.stats()
        assert (stats.running, stats.queued, stats.prefilling_tokens, stats.kv_tokens_used) == (0, 0, 0, 0)


# --- the gate ------------------------------------------------------------------------------------------


class NotingGate:
    """Lets through while it is open, gives delays to what failed, and notes all that it is told."""

    def __init__(self, *delays_s: float | None, providers: tuple[str, ...] = ()) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.waiting = 0
        self.entered: list[int] = []
        self.headers: list[Mapping[str, str]] = []
        self.ended: list[tuple[Any, ...]] = []
        self._delays_s = list(delays_s)
        self._providers = list(providers)

    async def enter(self, request: EngineRequest, provider: str = "") -> Ticket:
        if provider:  # the first token of all, by which it shows that it serves
            return OpenTicket(provider)
        self.waiting += 1
        try:
            await self.open.wait()
        finally:
            self.waiting -= 1
        self.entered.append(request.id)
        return NotingTicket(self, self._providers.pop(0) if self._providers else "it")

    def heard(self, provider: str, headers: Mapping[str, str]) -> None:
        self.headers.append(headers)

    def delay_s(self) -> float | None:
        return self._delays_s.pop(0) if self._delays_s else None


class NotingTicket:
    def __init__(self, gate: NotingGate, provider: str) -> None:
        self._gate = gate
        self.provider = provider

    def used(self, prompt_tokens: int, completion_tokens: int) -> None:
        self._gate.ended.append(("used", prompt_tokens, completion_tokens))

    def failed(self, status: int, headers: Mapping[str, str]) -> float | None:
        self._gate.ended.append(("failed", status, headers.get("retry-after")))
        return self._gate.delay_s()

    def dropped(self) -> None:
        self._gate.ended.append(("dropped",))


async def test_what_failed_without_output_is_asked_again_when_the_gate_says_so():
    gate = NotingGate(0.0, 0.01, 0.0, 0.0)
    async with ScriptedOpenAi() as server, started(server.base_url, gate=gate) as (engine, sink):
        server.replies += [
            error_reply(429, headers={"Retry-After": "7", "x-ratelimit-remaining-requests": "0"}),
            error_reply(500),
            Reply([], cut=True),
            Reply([{"error": {"code": 503, "message": "their words"}}]),
            Reply([text_event("so"), text_event("", "stop"), usage_event(8, 3), "[DONE]"]),
        ]
        heard = await ran(engine, sink)
        assert (bytes(heard.ids), heard.finish) == (b"so", FinishReason.STOP)
        assert gate.ended == [
            ("failed", 429, "7"),
            ("failed", 500, None),
            ("failed", 0, None),
            ("failed", 503, None),
            ("used", 8, 3),
        ]
        assert len(set(gate.entered)) == 1
        assert any(headers.get("x-ratelimit-remaining-requests") == "0" for headers in gate.headers)


@pytest.mark.parametrize(
    ("reply", "finish"),
    [
        (error_reply(429), FinishReason.CANCELLED),  # lost: others may go on with it
        (error_reply(503), FinishReason.CANCELLED),
        (Reply([], cut=True), FinishReason.CANCELLED),
        (error_reply(400), FinishReason.ERROR),  # it would not do better elsewhere
        (error_reply(401), FinishReason.ERROR),
    ],
)
async def test_what_the_gate_gives_up_is_lost_if_another_time_may_help_and_else_an_error(
    reply: Reply, finish: FinishReason
):
    async with ScriptedOpenAi() as server, started(server.base_url) as (engine, sink):
        server.replies.append(reply)
        heard = await ran(engine, sink)
        assert (heard.ids, heard.finish, bool(heard.message)) == ([], finish, finish is FinishReason.ERROR)
        assert (await ran(engine, sink)).finish is FinishReason.STOP
        assert sink.closed == []


async def test_nothing_is_asked_again_after_output():
    gate = NotingGate(0.0, 0.0, 0.0)
    async with ScriptedOpenAi() as server, started(server.base_url, gate=gate) as (engine, sink):
        for broken in (
            Reply([text_event("so it is ")], cut=True),
            Reply([text_event("so it is ")]),
            Reply([text_event("so it is "), {"error": {"code": 500}}]),
        ):
            server.replies.append(broken)
            heard = await ran(engine, sink)
            assert (bytes(heard.ids), heard.finish) == (b"so it", FinishReason.CANCELLED)
        assert gate.ended == [("dropped",)] * 3
        assert len(server.requests) == 4
        assert sink.closed == []


async def test_the_gate_says_which_provider_is_asked():
    async with ScriptedOpenAi() as one, ScriptedOpenAi() as other:
        gate = NotingGate(0.0, providers=("one", "other", "other"))
        providers = (
            ProviderOptions(base_url=one.base_url, name="one", served_model=MODEL),
            ProviderOptions(base_url=other.base_url, name="other", served_model=MODEL, route="chat"),
        )
        engine, sink = make_openai(POOL, EngineOptions(providers=providers), gate), RecordingSink()
        await engine.start(sink)
        one.requests.clear()
        other.requests.clear()
        one.replies.append(error_reply(429))
        prompt = load_tokenizer("bytes").encode_chat([ChatTurn("user", "Hi")])
        for _ in range(2):
            assert (await sink.run(engine, prompt, 99, ignore_eos=False)).finish is FinishReason.STOP
        assert [asked.path for asked in one.requests] == ["/v1/completions"]
        assert [asked.path for asked in other.requests] == ["/v1/chat/completions"] * 2
        await engine.close()


async def test_what_waits_for_its_turn_is_no_engine_that_stands_still(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("laneway.workers.engines.openai.SIGN_S", 0.01)
    async with ScriptedOpenAi() as server, started(server.base_url, gate=(gate := NotingGate(0.05))) as (engine, sink):
        gate.open.clear()
        waiting = sink.submit(engine, PROMPT, 99, ignore_eos=False)
        await sink.until(lambda: engine.stats().steps >= 3)
        assert (engine.stats().queued, engine.stats().running, sink.heard[waiting].ids) == (1, 0, [])
        server.replies.append(error_reply(429))
        steps = engine.stats().steps
        gate.open.set()
        assert (await sink.ended(waiting))[0].finish is FinishReason.STOP
        assert engine.stats().steps > steps + 3, "neither is one that waits to be asked again"


async def test_a_ticket_that_comes_just_as_its_request_is_aborted_is_dropped():
    class Late(NotingGate):
        async def enter(self, request: EngineRequest, provider: str = "") -> Ticket:
            with contextlib.suppress(asyncio.CancelledError):  # it has been given already
                await self.open.wait()
            return await super().enter(request, provider)

    async with ScriptedOpenAi() as server, started(server.base_url, gate=(gate := Late())) as (engine, sink):
        gate.open.clear()
        doomed = sink.submit(engine, PROMPT, 9, ignore_eos=False)
        await asyncio.sleep(0)
        engine.abort(doomed)
        gate.open.set()
        assert (await sink.ended(doomed))[0].finish is FinishReason.CANCELLED
        assert (gate.ended, len(server.requests)) == ([("dropped",)], 1)


# --- being gone ----------------------------------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laneway.workers.engines.openai_provider.HEALTH_LOOK_S", 0.01)


async def test_a_server_that_went_is_told_of_once_by_the_request_that_meets_it(hasty: None):
    async with ScriptedOpenAi() as server, started(server.base_url) as (engine, sink):
        server.replies += [Reply([text_event("so it is ")], hang=True) for _ in range(5)]
        live = [sink.submit(engine, PROMPT, 99, ignore_eos=False) for _ in range(5)]
        await sink.until(lambda: all(sink.heard[i].ids for i in live))
        await server.stop()
        await sink.until(lambda: sink.closed)
        (reason,) = sink.closed
        assert "is gone: nothing answers there" in reason
        with pytest.raises(EngineGone):
            sink.submit(engine, PROMPT, 1)
        assert engine.stats().running == 0


async def test_an_idle_server_that_went_or_is_unwell_is_noticed(hasty: None):
    async with ScriptedOpenAi() as server, started(server.base_url, health_interval_s=0.02) as (_, sink):
        await server.stop()
        await sink.until(lambda: sink.closed)
    async with ScriptedOpenAi() as server, started(server.base_url, health_interval_s=0.02) as (_, unwell):
        server.models = error_reply(500)
        await unwell.until(lambda: unwell.closed)


async def test_one_look_that_fails_and_one_that_is_refused_are_no_death(hasty: None):
    async with ScriptedOpenAi() as server, started(server.base_url, health_interval_s=0.02) as (engine, sink):
        looks = server.looks
        server.model_replies += [error_reply(status) for status in (429, 429, 401, 401, 404, 404)]
        server.model_replies += [error_reply(500), server.models] * 3
        assert await eventually(lambda: server.looks >= looks + 12)
        assert (await ran(engine, sink)).finish is FinishReason.STOP
        assert sink.closed == []


# --- secrets -------------------------------------------------------------------------------------------


async def test_the_key_is_sent_and_is_in_no_message_and_no_log(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("THE_KEY", KEY)
    with structlog.testing.capture_logs() as logs:
        async with (
            ScriptedOpenAi() as server,
            started(server.base_url, api_key_env="THE_KEY") as (engine, sink),
        ):
            assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
            said = []
            for status in (400, 401, 422, 429, 500):
                server.replies.append(error_reply(status, f"bad key {KEY}", type=KEY, code=f"no {KEY}", param=KEY[:4]))
                said.append((await ran(engine, sink)).message)
            server.replies.append(Reply([{"error": {"code": 400, "message": f"bad key {KEY}"}}]))
            said.append((await ran(engine, sink)).message)
    assert KEY not in repr(said)
    assert KEY not in repr(logs)
    assert [entry["status"] for entry in logs if entry["event"] == "provider_refused"] == [400, 401, 422, 429, 500]


async def test_a_redirect_is_not_followed_and_the_key_stays_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("THE_KEY", KEY)
    async with (
        ScriptedOpenAi() as elsewhere,
        ScriptedOpenAi() as server,
        started(server.base_url, api_key_env="THE_KEY") as (engine, sink),
    ):
        location = {"location": f"{elsewhere.base_url}/completions"}
        server.replies.append(Reply(status=307, headers=location, body={}))
        heard = await ran(engine, sink)
        assert "set base_url to where it is" in heard.message
        assert elsewhere.requests == []


# --- a real server -------------------------------------------------------------------------------------


@pytest.mark.model
async def test_the_text_of_a_real_server_is_the_text_that_it_gives_without_us():
    """Both routes, with and without log probabilities, of which llama.cpp has none for parts of characters."""
    import httpx2

    tokenizer = load_tokenizer("smollm2")
    asked = [[ChatTurn("system", "Be brief."), ChatTurn("user", text)] for text in ("Why is the sky blue?", "Say 😀!")]
    prompts = [tokenizer.encode_chat(turns) for turns in asked]
    async with openai_server(LlamaOptions(api_key=KEY)) as base_url:
        async with httpx2.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {KEY}"}) as client:
            bodies = [{"prompt": prompt, "max_tokens": 16, "temperature": 0} for prompt in prompts]
            plain = [
                # A last character that was cut is shown in a whole answer, and not in a stream.
                (await client.post(f"{base_url}/completions", json=body)).json()["choices"][0]["text"].rstrip("\ufffd")
                for body in bodies
            ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("THE_KEY", KEY)
            for route in ("completions", "chat"):
                async with started(base_url, REAL_POOL, route=route, api_key_env="THE_KEY") as (engine, sink):
                    for prompt, text in zip(prompts, plain, strict=True):
                        heard = await sink.run(engine, prompt, 16, ignore_eos=False)
                        assert b"".join(map(tokenizer.token_bytes, heard.ids)).decode() == text
                    heard = await sink.run(engine, prompts[0], 16, ignore_eos=False, logprobs=True)
                    assert b"".join(map(tokenizer.token_bytes, heard.ids)).decode() == plain[0]
                    assert len(heard.logprobs) == len(heard.ids)
            patch.setenv("THE_KEY", "another")
            with pytest.raises(EngineStartError, match="does not take the API key"):
                async with started(base_url, REAL_POOL, api_key_env="THE_KEY"):
                    pass
