"""The `openai` engine behind the gate that its options ask for: real NATS, and a provider that does as it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from laneway.core import subjects
from laneway.core.catalogue import Pool
from laneway.core.errors import ConfigError
from laneway.core.lanes import FinishReason
from laneway.policy.quota import Amount, Quota, QuotaRecord, WindowQuota
from laneway.runtime.bus import Bus
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.clock import SystemClock
from laneway.runtime.engine_options import EngineOptions, ProviderOptions, QuotaOptions
from laneway.runtime.kv import Key
from laneway.runtime.wire.quotas import decode_quota
from laneway.workers.engines import openai
from laneway.workers.engines.protocol import Engine
from laneway.workers.engines.registry import make_engine
from laneway.workers.provider_quota import Provider
from laneway.workers.rented import gate_of, provider_of
from tests.support.engines import RecordingSink
from tests.support.nats import REGION, eventually
from tests.support.scripted_openai import MODEL, Reply, ScriptedOpenAi, answer, error_reply, text_event

pytestmark = pytest.mark.wire

PROMPT = b"a prompt"
HOUR = QuotaOptions(window_s=3600.0, requests=3)
POOL = Pool(
    name="chat-small",
    model="chat",
    tier="small",
    engine="openai",
    context_length=2048,
    vocabulary_size=260,
    slots=8,
    workers=1,
    kv_tokens=16_384,
    tokenizer="bytes",
    capabilities=capabilities_of("openai"),
)


@asynccontextmanager
async def rented(bus: Bus, *providers: ProviderOptions) -> AsyncIterator[tuple[Engine, RecordingSink]]:
    options = EngineOptions(providers=providers)
    async with gate_of(bus, REGION, POOL, options, "w-1", SystemClock()) as gate:
        assert gate is not None
        engine, sink = make_engine(POOL, options, gate), RecordingSink()
        try:
            await engine.start(sink)
            yield engine, sink
        finally:
            await engine.close()


def at(server: ScriptedOpenAi, name: str = "p", **options: Any) -> ProviderOptions:
    return ProviderOptions(name=name, base_url=server.base_url, served_model=MODEL, **options)


async def record_of(bus: Bus, name: str = "p") -> QuotaRecord:
    return decode_quota((await Key(bus, subjects.plan_bucket(REGION), subjects.quota_key(name)).read()).data)


async def spent_on(bus: Bus, name: str = "p") -> Amount:
    record = await record_of(bus, name)
    assert len(record.used) <= 1
    return sum((each.spent for use in record.used for each in use.slices), Amount())


async def test_a_refusal_is_asked_again_and_each_request_counts_once(provisioned_bus: Bus):
    async with ScriptedOpenAi() as server, rented(provisioned_bus, at(server, quotas=(HOUR,))) as (engine, sink):
        server.replies += [error_reply(429, headers={"retry-after-ms": "50"}), answer("yes")]
        heard = await sink.run(engine, PROMPT, 8, ignore_eos=False)
        assert (heard.finish, bytes(heard.ids)) == (FinishReason.STOP, b"yes")
        assert len(server.requests) == 3  # one at the start, one refused, one answered
        await eventually(lambda: _spent(provisioned_bus, 3))


async def _spent(bus: Bus, requests: int) -> bool:
    return not (await record_of(bus)).grants and (await spent_on(bus)).requests == requests


async def test_while_all_that_is_live_waits_for_a_quota_the_engine_says_that_it_goes_on(
    provisioned_bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(openai, "SIGN_S", 0.02)
    async with ScriptedOpenAi() as server, rented(provisioned_bus, at(server, quotas=(HOUR,))) as (engine, sink):
        await sink.run(engine, PROMPT, 8, ignore_eos=False)
        await sink.run(engine, PROMPT, 8, ignore_eos=False)
        waiting = sink.submit(engine, PROMPT, 8, ignore_eos=False)
        before = engine.stats().steps
        await eventually(lambda: engine.stats().steps >= before + 3)
        assert len(server.requests) == 3
        engine.abort(waiting)
        (heard,) = await sink.ended(waiting)
        assert heard.finish is FinishReason.CANCELLED
        after = engine.stats().steps
        await eventually(lambda: _empty(provisioned_bus))
        assert engine.stats().steps == after  # without work nothing is said


async def _empty(bus: Bus) -> bool:
    record = await record_of(bus)
    return not record.queue and not record.grants


async def test_a_provider_that_fails_is_asked_a_few_times_and_the_job_is_given_back(provisioned_bus: Bus):
    async with ScriptedOpenAi() as server, rented(provisioned_bus, at(server, concurrency=4)) as (engine, sink):
        server.replies += [error_reply(503)] * 4
        heard = await sink.run(engine, PROMPT, 8, ignore_eos=False)
        assert heard.finish is FinishReason.CANCELLED
        assert len(server.requests) == 1 + 4
        assert (await sink.run(engine, PROMPT, 8, ignore_eos=False)).finish is FinishReason.STOP


async def test_an_answer_that_broke_is_not_asked_for_again_and_counts_in_full(provisioned_bus: Bus):
    async with ScriptedOpenAi() as server, rented(provisioned_bus, at(server, quotas=(HOUR,))) as (engine, sink):
        server.replies.append(Reply([text_event("half an answer"), text_event(" and no more")], cut=True))
        heard = await sink.run(engine, PROMPT, 80, ignore_eos=False)
        assert heard.finish is FinishReason.CANCELLED
        assert heard.ids
        assert len(server.requests) == 2
        await eventually(lambda: _spent(provisioned_bus, 2))
        assert (await spent_on(provisioned_bus)).tokens >= len(PROMPT) + 80


async def test_where_the_cheaper_one_refuses_the_other_is_asked(provisioned_bus: Bus):
    async with AsyncExitStack() as stack:
        cheap, dear = [await stack.enter_async_context(ScriptedOpenAi()) for _ in range(2)]
        engine, sink = await stack.enter_async_context(
            rented(
                provisioned_bus,
                at(cheap, "cheap", price_per_million_completion_tokens=1.0),
                at(dear, "dear", price_per_million_completion_tokens=2.0),
            )
        )
        await eventually(lambda: cheap.requests)
        first = len(dear.requests)
        cheap.replies.append(error_reply(429, headers={"retry-after": "60"}))
        heard = await sink.run(engine, PROMPT, 8, ignore_eos=False, deadline_in_s=20.0)
        assert heard.finish is FinishReason.STOP
        assert len(dear.requests) == first + 1


def test_what_the_settings_say_of_a_provider_is_what_the_gate_goes_by():
    options = ProviderOptions(
        name="p",
        base_url="http://127.0.0.1:9/v1",
        quotas=(QuotaOptions(requests=100, tokens=20_000), QuotaOptions(window_s=86_400.0, spend=25.0)),
        concurrency=16,
        counts_asked_tokens=True,
        price_per_million_prompt_tokens=1.0,
        price_per_million_completion_tokens=2.0,
    )
    windows = (WindowQuota(60.0, requests=100, tokens=20_000), WindowQuota(86_400.0, spend=25.0))
    assert provider_of(options) == Provider("p", Quota(windows, 16), 1.0, 2.0, counts_asked=True)


async def test_without_a_quota_and_a_choice_there_is_no_gate(provisioned_bus: Bus):
    one = ProviderOptions(name="p", base_url="http://127.0.0.1:9/v1")
    async with gate_of(provisioned_bus, REGION, POOL, EngineOptions(providers=(one,)), "w", SystemClock()) as gate:
        assert gate is None
    with pytest.raises(ConfigError, match="providers"):
        async with gate_of(provisioned_bus, REGION, POOL, EngineOptions(), "w", SystemClock()):
            pass
