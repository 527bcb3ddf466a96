"""The conformance kit on the adapter `openai` in front of llama.cpp's server, which was not made for us.

Slow: on two cores the prompts alone take a minute.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from laneway.core.catalogue import Pool
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions, ProviderOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.conformance.case import Case
from laneway.workers.conformance.kit import CASES, Judge, Outcome
from laneway.workers.conformance.subject import Subject
from laneway.workers.engines.protocol import Engine
from laneway.workers.engines.registry import make_engine
from tests.support.openai_server import LlamaOptions, LlamaProcess

POOL = Pool(
    name="under-test",
    model="chat",
    tier="small",
    engine="openai",
    context_length=2048,
    vocabulary_size=49_152,
    slots=8,
    workers=1,
    kv_tokens=16_384,
    tokenizer="smollm2",
    capabilities=capabilities_of("openai"),
)
NOT_OFFERED = {
    "length-exact": "needs token_ids_out",  # the server gives text
    "company-changes-nothing": "needs exact",
    "resume": "needs exact",
    "resume-sampled": "needs resumable_sampling, seed",
    "priority-first": "needs priority_inside",
    "top-logprobs": "needs top_logprobs",
    "seed-repeats-alone": "needs seed",
    "seed-repeats-in-company": "needs seed, exact",
    "seeds-differ": "needs seed",
    "prompt-whole": "the engine does not count prompt tokens",
    "prefix-found": "needs prefix_cache",  # the server tells of it with an answer's end only
    "counts-true": "the engine does not count tokens",
}
REPORT_ENV = "KIT_REPORT"  # names a file to write for tools/engine_table.py
MAY_BE_TOO_SHORT = {"abort-queued"}  # answers end by themselves


class Servers:
    """One for each engine."""

    def __init__(self) -> None:
        self._by_engine: dict[int, LlamaProcess] = {}

    def make(self) -> Engine:
        server = LlamaProcess(LlamaOptions(slots=POOL.slots, context_length=POOL.context_length))
        engine = make_engine(POOL, EngineOptions(providers=(ProviderOptions(base_url=server.base_url),)))
        self._by_engine[id(engine)] = server
        return engine

    def kill(self, engine: Engine) -> None:
        self._by_engine.pop(id(engine)).kill()

    def kill_all(self) -> None:
        for server in self._by_engine.values():
            server.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge() -> AsyncIterator[Judge]:
    servers = Servers()
    judge = Judge(Subject(servers.make, load_tokenizer(POOL.tokenizer), POOL.capabilities, servers.kill))
    try:
        await judge.start()
        yield judge
        await judge.close()
        report = judge.report()
        if path := os.environ.get(REPORT_ENV):
            Path(path).write_bytes(msgspec.json.encode({"engine": POOL.engine, "results": report.results}))
        assert report.failed == [], "nothing that was heard later breaks a case that had passed"
    finally:
        servers.kill_all()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(240)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_the_kit(judge: Judge, case: Case):
    result = await judge.run(case)
    if result.outcome is Outcome.NOT_OFFERED and case.name in MAY_BE_TOO_SHORT:
        return
    expected = Outcome.NOT_OFFERED if case.name in NOT_OFFERED else Outcome.PASSED
    assert (result.outcome, result.message) == (expected, NOT_OFFERED.get(case.name, ""))
