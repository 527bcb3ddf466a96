"""The engine `trtllm` in a process of its own, around a generated `tensorrt_llm` (tests/support/trtllm_package.py)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from laneway.core.lanes import FinishReason
from laneway.runtime.engine_options import EngineOptions
from laneway.workers.engines.protocol import EngineCapacity, EngineStartError
from laneway.workers.engines.registry import make_engine
from tests.contract.test_engines import pool_of
from tests.support.engines import RecordingSink
from tests.support.nats import eventually
from tests.support.trtllm_fake import Options
from tests.support.trtllm_site import TrtllmSite

POOL = replace(pool_of("trtllm", "bytes"), slots=4)
PROMPT = tuple(b"Why is the sky blue?")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrtllmSite:
    return TrtllmSite(tmp_path, "1.4", monkeypatch)


class Running:
    def __init__(self, engine: Any, sink: RecordingSink, capacity: EngineCapacity) -> None:
        self.engine, self.sink, self.capacity = engine, sink, capacity

    def submit(self, max_tokens: int = 20, prompt: tuple[int, ...] = PROMPT, **changes: Any) -> int:
        return self.sink.submit(self.engine, prompt, max_tokens, **changes)

    async def run(self, max_tokens: int = 20, **changes: Any) -> Any:
        return (await self.sink.ended(self.submit(max_tokens, **changes)))[0]


@asynccontextmanager
async def running(options: EngineOptions, **pool: Any) -> AsyncIterator[Running]:
    engine, sink = make_engine(replace(POOL, **pool), options), RecordingSink()
    try:
        yield Running(engine, sink, await engine.start(sink))
    finally:
        await engine.close()


async def test_a_host_without_the_library_is_told_of_the_extra(site: TrtllmSite, tmp_path: Path):
    options = site.options()
    (tmp_path / "package" / "tensorrt_llm" / "__init__.py").write_text("raise ImportError('no libcuda')\n")
    with pytest.raises(EngineStartError, match=r"laneway\[trtllm\].*no libcuda"):
        async with running(options):
            pass


async def test_what_the_library_refuses_is_said_in_its_log_and_not_by_us(site: TrtllmSite):
    options = site.options()
    Path(options.llm_file).write_text("model = '/no/such/model'\n", encoding="utf-8")
    with pytest.raises(EngineStartError, match=r"1\.4\.0rc4 did not start with this llm_file: its own words are in"):
        async with running(options):
            pass


async def test_a_first_request_that_fails_is_the_start_that_failed(site: TrtllmSite):
    with pytest.raises(EngineStartError, match="a first request failed: TensorRT-LLM failed on this request"):
        async with running(site.options(fake=Options(refused_token_id=0))):
            pass


async def test_requests_carry_salt_and_priority(site: TrtllmSite):
    async with running(site.options()) as t:
        await t.run(cache_salt="a tenant", priority=0.9)
    *_, told = [line for line in site.journal_lines() if "request" in line]
    assert told["request"] == {
        "streaming": True,
        "cache_salt": "a tenant",
        "priority": 0.9,
        "prompt_tokens": len(PROMPT),
    }


async def test_schemas_and_adapters_reach_it(site: TrtllmSite):
    options = site.options(guided_decoding="xgrammar", adapters=("law=/adapters/law",))
    can = replace(POOL.capabilities, json_schema=True, adapters=True)
    async with running(options, capabilities=can) as t:
        await t.run(json_schema='{"type": "object"}', adapter="law")
        heard = await t.run(adapter="none such")
    assert (heard.finish, heard.message) == (
        FinishReason.ERROR,
        "there is no adapter of that name; the pool's are law",
    )
    made, *_ = [line["llm"] for line in site.journal_lines() if "llm" in line]
    assert made["lora_config"]["LoraConfig"]["lora_dir"] == ["/adapters/law"]
    *_, told = [line for line in site.journal_lines() if "request" in line]
    assert told["request"]["lora_request"]["LoRARequest"]["lora_path"] == "/adapters/law"
    assert told["params"]["SamplingParams"]["guided_decoding"] == {
        "GuidedDecodingParams": {"json": '{"type": "object"}', "json_object": False}
    }


async def test_a_salt_that_an_old_version_would_drop_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = TrtllmSite(tmp_path, "1.0", monkeypatch)
    async with running(site.options()) as t:
        heard = await t.run(cache_salt="a tenant")
        assert (heard.finish, heard.message) == (FinishReason.ERROR, "the pool does not offer cache_salt")
        assert (await t.run()).finish is FinishReason.LENGTH


@pytest.mark.parametrize(("policy", "paged"), [("reserve", False), ("page", True)])
async def test_the_ledger_is_told_how_kv_is_handed_out(site: TrtllmSite, policy: str, paged: bool):
    async with running(site.options(llm={"capacity": policy, "max_num_tokens": 256})) as t:
        assert t.capacity == EngineCapacity(4, 16_384, 2048, 260, 32, 256, paged)


@pytest.mark.parametrize("version", ["1.2", "1.4"])
async def test_less_kv_than_the_pool_says_is_found_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
):
    """New versions tell their capacity; of others the first iteration does."""
    site = TrtllmSite(tmp_path, version, monkeypatch)
    async with running(site.options(fake=Options(kv_tokens_found=4096))) as t:
        assert (t.capacity.kv_tokens, t.capacity.block_tokens) == (4096, 32)


@pytest.mark.parametrize("version", ["1.0", "1.2", "1.4"])
async def test_no_statistics_are_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str):
    """Nothing else empties their queue: what is not read stays for good."""
    site = TrtllmSite(tmp_path, version, monkeypatch)
    async with running(site.options()) as t:
        for _ in range(2):
            await t.sink.ended([t.submit(60) for _ in range(4)])
            await eventually(lambda: all_read(site))
        assert t.engine.stats().prefilled_tokens >= len(PROMPT)
    (told,) = [line["shutdown"] for line in site.journal_lines() if "shutdown" in line]
    assert told == {"live": 0}


def all_read(site: TrtllmSite) -> bool:
    """Of every iteration that there was."""
    *_, last = [line["stats"] for line in site.journal_lines() if "stats" in line]
    return last["made"] >= 60 and last["read"] == last["made"]


async def test_iterations_are_told_of_one_by_one_while_a_batch_stays_the_same(site: TrtllmSite):
    """From these a worker learns what steps cost; of others it learns nothing."""
    told = []

    class Sink(RecordingSink):
        def on_step(self, steps: Any, stats: Any) -> None:
            told.append(stats)
            super().on_step(steps, stats)

    engine, sink = make_engine(POOL, site.options(fake=Options(pace_s=0.02))), Sink()
    await engine.start(sink)
    t = Running(engine, sink, EngineCapacity(4, 0, 0, 0))
    await sink.ended([t.submit(40) for _ in range(3)])
    await engine.close()
    alone = [
        (round(now.busy_s - before.busy_s, 6), before.decoding)
        for before, now in pairwise(told)
        if now.steps == before.steps + 1 and now.busy_s > before.busy_s
    ]
    assert {length_s for length_s, _ in alone} == {0.02}
    assert sum(decoding == 3 for _, decoding in alone) >= 5


async def test_a_long_prompt_is_told_of_while_it_is_computed(site: TrtllmSite):
    """An engine that says nothing with work is taken for hung."""
    async with running(site.options(llm={"max_num_tokens": 64}, fake=Options(pace_s=0.03))) as t:
        prompt = tuple(65 + n * n % 26 for n in range(1500))
        live = t.submit(5, prompt)
        await t.sink.until(lambda: t.sink.stats.steps >= 5)
        assert t.sink.heard[live].ids == []
        assert 64 * 5 <= t.sink.stats.prefilled_tokens < 1500
        t.engine.abort(live)
        await t.sink.ended(live)


@pytest.mark.parametrize("version", ["1.2", "1.4"])
async def test_what_waits_is_aborted_even_where_the_library_says_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
):
    site = TrtllmSite(tmp_path, version, monkeypatch)
    async with running(site.options()) as t:
        full = [t.submit(1500) for _ in range(4)]
        await t.sink.until(lambda: all(t.sink.heard[i].ids for i in full))
        queued = t.submit()
        t.engine.abort(queued)
        (heard,) = await t.sink.ended(queued)
        assert (heard.finish, heard.ids) == (FinishReason.CANCELLED, [])
        for i in full:
            t.engine.abort(i)
        await t.sink.ended(full)
        assert (await t.run()).finish is FinishReason.LENGTH


async def test_a_request_that_fails_there_harms_no_other_and_is_told_in_our_words(site: TrtllmSite):
    async with running(site.options(fake=Options(refused_token_id=7))) as t:
        other = t.submit(100)
        heard = await t.run(prompt=(7,))
        assert (heard.finish, heard.message) == (FinishReason.ERROR, "TensorRT-LLM failed on this request")
        assert (await t.sink.ended(other))[0].finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("fatal_token_id", "failed (RuntimeError)"),
        ("lost_token_id", "not well"),
        ("deaf_token_id", "tells nothing more of itself"),
    ],
)
async def test_its_end_is_told_of_with_its_reason(site: TrtllmSite, fault: str, said: str):
    options = site.options(fake=replace(Options(), **{fault: 7}), health_interval_s=0.05)
    async with running(options) as t:
        t.submit(1500)
        t.submit(prompt=(7,))
        await t.sink.until(lambda: t.sink.closed)
        assert said in t.sink.closed[0]
        assert t.engine.stats().running == 0


async def test_processes_that_it_started_end_with_it_however_it_ends(site: TrtllmSite):
    """They hold the GPU."""
    engine, sink = make_engine(POOL, site.options(fake=Options(spawns=True))), RecordingSink()
    await engine.start(sink)
    (rank,) = [line["rank"] for line in site.journal_lines() if "rank" in line]
    assert running_process(rank)
    os.kill(engine.process_id, signal.SIGKILL)  # type: ignore[attr-defined] # a ProcessEngine
    await sink.until(lambda: sink.closed)
    await eventually(lambda: not running_process(rank))
    await engine.close()


def running_process(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_closing_while_it_loads_leaves_nothing(site: TrtllmSite):
    engine, sink = make_engine(POOL, site.options(fake=Options(pace_s=30.0))), RecordingSink()  # its warm-up is slow
    starting = asyncio.create_task(engine.start(sink))
    await eventually(site.journal.exists)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    process_id = engine.process_id  # type: ignore[attr-defined] # a ProcessEngine
    assert not running_process(process_id)
    await engine.close()
