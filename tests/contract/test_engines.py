"""What every engine promises its worker: the cases of the conformance kit, and what only our own engines promise."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from laneway.core.catalogue import Pool
from laneway.core.lanes import FinishReason
from laneway.core.prompt import ChatTurn
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import Tokenizer, load_tokenizer
from laneway.workers.conformance import life
from laneway.workers.conformance.case import Case
from laneway.workers.conformance.kit import CASES, Judge, Outcome, Result
from laneway.workers.conformance.rig import QUESTIONS
from laneway.workers.conformance.subject import Subject, abort_calls_of
from laneway.workers.engines.host import ProcessEngine
from laneway.workers.engines.protocol import Engine, EngineCapacity, EngineGone
from laneway.workers.engines.registry import spec_of
from laneway.workers.engines.simulated import make_core
from laneway.workers.engines.simulated_inline import InlineEngine
from tests.support.engines import Heard, RecordingSink

CONTEXT_LENGTH = 2048
SLOTS = 16


def pool_of(engine: str, tokenizer: str) -> Pool:
    return Pool(
        name="under-test",
        model="chat",
        tier="small",
        engine=engine,
        context_length=CONTEXT_LENGTH,
        vocabulary_size=load_tokenizer(tokenizer).vocabulary_size,
        slots=SLOTS,
        workers=1,
        kv_tokens=16_384,
        tokenizer=tokenizer,
        capabilities=capabilities_of(engine, exact=True),
    )


@dataclass
class UnderTest:
    engine: Engine
    sink: RecordingSink
    capacity: EngineCapacity
    tokenizer: Tokenizer

    def prompt(self, question: str) -> list[int]:
        return self.tokenizer.encode_chat([ChatTurn("user", question)])

    async def run(self, prompt_ids: list[int], max_tokens: int, **changes) -> Heard:
        return await self.sink.run(self.engine, prompt_ids, max_tokens, **changes)

    def submit(self, prompt_ids: list[int], max_tokens: int, **changes) -> int:
        return self.sink.submit(self.engine, prompt_ids, max_tokens, **changes)


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def t(request: pytest.FixtureRequest) -> AsyncIterator[UnderTest]:
    kind = request.cls
    assert kind is not None
    assert issubclass(kind, EngineContract)
    pool = kind.pool()
    engine, sink = kind.make(pool), RecordingSink()
    capacity = await engine.start(sink)
    yield UnderTest(engine, sink, capacity, load_tokenizer(kind.tokenizer))
    assert await engine.drain(20.0)
    await engine.close()
    assert sink.closed == []


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def judge(request: pytest.FixtureRequest) -> AsyncIterator[Judge]:
    kind = request.cls
    assert kind is not None
    assert issubclass(kind, EngineContract)
    contract, pool = kind(), kind.pool()
    judge = Judge(
        Subject(
            lambda: kind.make(pool),
            load_tokenizer(kind.tokenizer),
            pool.capabilities,
            contract.kill,
            abort_calls=abort_calls_of(pool.capabilities),
        )
    )
    await judge.start()
    yield judge
    await judge.close()
    assert judge.report().failed == [], "nothing that was heard later breaks a case that had passed"


def each_of(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


class EngineContract:
    engine: ClassVar[str]
    tokenizer: ClassVar[str]
    options: ClassVar[EngineOptions]
    not_offered: ClassVar[frozenset[str]] = frozenset({"resume-sampled"})  # cases that it cannot be asked for

    @classmethod
    def pool(cls) -> Pool:
        return pool_of(cls.engine, cls.tokenizer)

    @classmethod
    def make(cls, pool: Pool) -> Engine:
        return ProcessEngine(spec_of(pool, cls.options))

    def kill(self, engine: Any) -> str:
        """Ends it without its consent; returns what must be in the reason."""
        os.kill(engine.process_id, signal.SIGKILL)
        return "SIGKILL"

    def interrupt(self, engine: Any) -> None:
        """As a terminal's Ctrl-C does, which must not end it."""
        os.kill(engine.process_id, signal.SIGINT)

    @each_of([case for case in CASES if case not in life.CASES])
    async def test_the_kit(self, judge: Judge, case: Case):
        self.check(await judge.run(case))

    @each_of(life.CASES)
    async def test_the_kit_of_its_life(self, judge: Judge, case: Case):
        """These end their engine, and the next one has to load."""
        self.check(await judge.run(case))

    def check(self, result: Result) -> None:
        expected = Outcome.NOT_OFFERED if result.case in self.not_offered else Outcome.PASSED
        assert result.outcome is expected, result.message

    async def test_tokens_come_step_by_step_and_end_once(self, t: UnderTest):
        heard = await t.run(t.prompt(QUESTIONS[0]), 12, logprobs=True)
        assert len(heard.ids) == len(heard.logprobs) == 12
        assert heard.calls >= 12
        assert heard.finish is FinishReason.LENGTH
        assert all(p <= 0.0 for p in heard.logprobs)

    async def test_an_answer_ends_by_itself_without_its_end_token(self, t: UnderTest):
        heard = await t.run(t.prompt("Say hello in one word."), 300, ignore_eos=False, logprobs=True)
        assert heard.finish is FinishReason.STOP
        assert heard.ids
        assert not t.tokenizer.eos_ids & set(heard.ids)

    async def test_higher_priority_leaves_the_queue_first(self, t: UnderTest):
        running = [t.submit(t.prompt(q), 400) for q in QUESTIONS * 2]
        await t.sink.until(lambda: all(t.sink.heard[i].ids for i in running))
        low, high = (t.submit(t.prompt(QUESTIONS[0]), 400, priority=p) for p in (0.1, 0.9))
        t.engine.abort(running[0])
        await t.sink.until(lambda: t.sink.heard[high].ids)
        assert t.sink.heard[low].ids == []
        for i in (low, high, *running):
            t.engine.abort(i)
        await t.sink.ended([low, high, *running])

    async def test_the_capacity_says_how_much_of_a_prompt_a_step_takes(self, t: UnderTest):
        assert t.capacity.chunk_tokens == self.options.prefill_chunk_tokens
        assert t.capacity.paged == (self.engine == "openvino")

    async def test_a_killed_engine_is_told_of_once(self):
        pool = self.pool()
        engine, sink = self.make(pool), RecordingSink()
        await engine.start(sink)
        try:
            self.interrupt(engine)
            prompt = load_tokenizer(self.tokenizer).encode(QUESTIONS[0])
            live = sink.submit(engine, prompt, 1500)
            await sink.until(lambda: len(sink.heard[live].ids) >= 2)
            why = self.kill(engine)
            await sink.until(lambda: sink.closed)
            assert why in sink.closed[0]
            with pytest.raises(EngineGone):
                sink.submit(engine, prompt, 5)
            assert engine.stats().running == 0
            assert await engine.drain(0.0)
        finally:
            await engine.close()
            await engine.close()
        await asyncio.sleep(0)
        assert len(sink.closed) == 1


@pytest.mark.asyncio(loop_scope="class")
class TestSimulated(EngineContract):
    engine = "simulated"
    tokenizer = "bytes"
    options = EngineOptions(pace_s=0.002, alphabet="unicode", eos_mean_tokens=30.0, prefill_chunk_tokens=64)


class TestSimulatedInline(TestSimulated):
    """The same core on the worker's own loop, as simulations run it."""

    @classmethod
    def make(cls, pool: Pool) -> Engine:
        spec = spec_of(pool, cls.options)
        core = make_core(spec.capacity, frozenset(spec.eos_ids), spec.options)
        return InlineEngine(core, spec.capabilities)

    def kill(self, engine: Any) -> str:
        engine.crash("told to")
        return "told to"

    def interrupt(self, engine: Any) -> None:
        """It has no process of its own."""


@pytest.mark.model
@pytest.mark.timeout(180)
@pytest.mark.asyncio(loop_scope="class")
class TestOpenVino(EngineContract):
    engine = "openvino"
    tokenizer = "smollm2"
    options = EngineOptions(exact=True, threads=1, prefill_chunk_tokens=128)
    not_offered = frozenset({"resume-sampled", "top-logprobs"})

    @pytest.mark.slow
    @each_of(life.CASES)
    async def test_the_kit_of_its_life(self, judge: Judge, case: Case):
        await super().test_the_kit_of_its_life(judge, case)
