"""What every engine promises its worker: one class of tests, run against the simulated engine and the real one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
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
from laneway.workers.engines.host import EngineGone, ProcessEngine
from laneway.workers.engines.protocol import Engine, EngineCapacity
from laneway.workers.engines.registry import spec_of
from laneway.workers.engines.simulated import make_core
from laneway.workers.engines.simulated_inline import InlineEngine
from laneway.workers.text import TextAssembler
from tests.support.engines import Heard, RecordingSink

CONTEXT_LENGTH = 2048
SLOTS = 16
QUESTIONS = (
    "Why is the sky blue?",
    "Name three primes.",
    "Write one line of Python that prints 7.",
    "What is the capital of France?",
    "Tell me a very short story about a road.",
    "List the colours of a traffic light.",
    "What is 12 times 12?",
    "Say good morning in Spanish.",
)


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
    long_prompt: int  # tokens that take many steps to prefill

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
    pool = pool_of(kind.engine, kind.tokenizer)
    engine, sink = kind.make(pool), RecordingSink()
    capacity = await engine.start(sink)
    yield UnderTest(engine, sink, capacity, load_tokenizer(kind.tokenizer), kind.long_prompt)
    assert await engine.drain(20.0)
    await engine.close()
    assert sink.closed == []


class EngineContract:
    engine: ClassVar[str]
    tokenizer: ClassVar[str]
    options: ClassVar[EngineOptions]
    long_prompt: ClassVar[int]

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

    async def test_tokens_come_step_by_step_and_end_once(self, t: UnderTest):
        heard = await t.run(t.prompt(QUESTIONS[0]), 12, logprobs=True)
        assert len(heard.ids) == len(heard.logprobs) == 12
        assert heard.calls >= 12
        assert heard.finish is FinishReason.LENGTH
        assert all(p <= 0.0 for p in heard.logprobs)

    async def test_all_sequences_of_a_step_come_together(self, t: UnderTest):
        before = t.sink.calls
        heard = await t.sink.ended([t.submit(t.prompt(q), 10) for q in QUESTIONS])
        assert sum(len(h.ids) for h in heard) == 80
        assert t.sink.calls - before < 40

    async def test_one_token_can_be_asked_for(self, t: UnderTest):
        heard = await t.run(t.prompt(QUESTIONS[1]), 1)
        assert (len(heard.ids), heard.finish) == (1, FinishReason.LENGTH)

    async def test_company_in_the_batch_changes_no_token(self, t: UnderTest):
        alone = [(await t.run(t.prompt(q), 12)).ids for q in QUESTIONS]
        ids = [t.submit(t.prompt(q), 12 if n < len(QUESTIONS) else 20) for n, q in enumerate(QUESTIONS * 2)]
        together = await t.sink.ended(ids)
        assert [h.ids for h in together[: len(QUESTIONS)]] == alone
        assert [h.ids[:12] for h in together[len(QUESTIONS) :]] == alone

    async def test_a_seed_gives_the_same_text_alone_and_among_other_seeds(self, t: UnderTest):
        prompt, draw = t.prompt(QUESTIONS[4]), {"temperature": 1.0, "top_k": 20}
        alone = [(await t.run(prompt, 16, seed=7, **draw)).ids for _ in range(2)]
        seeds = (1, 7, 2, 2**40 + 7, 7, None)
        first = [t.submit(prompt, 16, seed=seed, **draw) for seed in seeds]
        await t.sink.until(lambda: len(t.sink.heard[first[0]].ids) >= 4)
        later = t.submit(prompt, 16, seed=7, **draw)  # joins while the others draw
        heard = [h.ids for h in await t.sink.ended([*first, later])]
        assert alone[0] == alone[1] == heard[1] == heard[4] == heard[6]
        assert len({tuple(ids) for ids in heard}) == 5, "other seeds, and none, draw otherwise"

    async def test_a_run_resumed_from_its_ids_goes_on_as_if_uninterrupted(self, t: UnderTest):
        prompt = t.prompt(QUESTIONS[4])
        whole = (await t.run(prompt, 24)).ids
        parts = await t.sink.ended([t.submit(prompt + whole[:kept], 24 - kept) for kept in (1, 9, 23)])
        assert [p.ids for p in parts] == [whole[1:], whole[9:], whole[23:]]

    async def test_a_stop_token_ends_a_run_and_is_not_given_out(self, t: UnderTest):
        prompt = t.prompt(QUESTIONS[2])
        whole = (await t.run(prompt, 12)).ids
        heard = await t.run(prompt, 12, stop_token_ids=(whole[6],), logprobs=True)
        assert heard.ids == whole[: whole.index(whole[6])]
        assert heard.finish is FinishReason.STOP

    async def test_an_answer_ends_by_itself_without_its_end_token(self, t: UnderTest):
        heard = await t.run(t.prompt("Say hello in one word."), 300, ignore_eos=False, logprobs=True)
        assert heard.finish is FinishReason.STOP
        assert heard.ids
        assert not t.tokenizer.eos_ids & set(heard.ids)

    async def test_the_context_length_itself_fits_and_one_more_does_not(self, t: UnderTest):
        prompt = t.prompt(QUESTIONS[0])
        room = t.capacity.context_length - len(prompt)
        fits = t.submit(prompt, room)
        await t.sink.until(lambda: t.sink.heard[fits].ids)
        t.engine.abort(fits)
        refused = await t.run(prompt, room + 1)
        assert refused.finish is FinishReason.ERROR
        assert str(t.capacity.context_length) in refused.message
        assert (await t.sink.ended(fits))[0].finish is FinishReason.CANCELLED

    async def test_bad_input_harms_only_itself(self, t: UnderTest):
        good = t.prompt(QUESTIONS[5])
        expected = (await t.run(good, 8)).ids
        vocabulary = t.capacity.vocabulary_size
        bad = [
            t.submit([], 8),
            t.submit(good, 0),
            t.submit(good, -1),
            t.submit([*good, vocabulary], 8),
            t.submit([-1], 8),
            t.submit(good, 8, stop_token_ids=(vocabulary,)),
            t.submit(good, 8, temperature=float("nan")),
            t.submit(good, 8, top_p=0.0, temperature=1.0),
            t.submit(good, 8, min_p=float("inf"), temperature=1.0),
        ]
        for _ in range(2):
            bad.append(t.submit(good, 0))
            assert (await t.run(good, 8)).ids == expected
        for heard in await t.sink.ended(bad):
            assert heard.finish is FinishReason.ERROR
            assert heard.ids == []
            assert heard.message
            assert not any(word in heard.message for word in ("/", ".cpp", "Check", "Traceback"))

    async def test_what_the_pool_does_not_offer_is_refused_and_what_it_offers_runs(self, t: UnderTest):
        can, prompt = t.engine.capabilities(), t.prompt(QUESTIONS[3])
        uses: dict[str, tuple[dict[str, Any], bool]] = {
            "min_p": ({"min_p": 0.05, "temperature": 0.7}, can.min_p),
            "min_p of 1": ({"min_p": 1.0, "temperature": 0.7}, can.min_p),
            "top_k": ({"top_k": 1, "temperature": 2.0}, can.top_k),
            "top_p": ({"top_p": 1e-9, "temperature": 1.0}, True),
            "a tiny temperature": ({"temperature": 1e-12}, True),
            "seed": ({"seed": 2**40, "temperature": 1.0}, can.seed),
            "a seed that greedy ignores": ({"seed": 5}, True),
            "penalties": (
                {"repetition_penalty": 1.3, "presence_penalty": -2.0, "frequency_penalty": 2.0},
                can.penalties,
            ),
            "min_tokens": ({"min_tokens": 4, "ignore_eos": False}, can.min_tokens),
            "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, can.top_logprobs >= 2),
            "logit_bias": ({"logit_bias": {97: 1.0}}, can.logit_bias),
            "json_schema": ({"json_schema": "{}"}, can.json_schema),
            "adapter": ({"adapter": "x"}, can.adapters),
            "cache_salt": ({"cache_salt": "x"}, can.cache_salt),
        }
        heard = await t.sink.ended([t.submit(prompt, 4, **changes) for changes, _ in uses.values()])
        ran = {name: h.finish is not FinishReason.ERROR for name, h in zip(uses, heard, strict=True)}
        assert ran == {name: offered for name, (_, offered) in uses.items()}

    async def test_an_abort_stops_a_sequence_within_a_step(self, t: UnderTest):
        doomed = t.submit(t.prompt(QUESTIONS[0]), 1500)
        await t.sink.until(lambda: len(t.sink.heard[doomed].ids) >= 3)
        calls = t.sink.calls
        t.engine.abort(doomed)
        (heard,) = await t.sink.ended(doomed)
        assert heard.finish is FinishReason.CANCELLED
        assert t.sink.calls - calls <= 3  # what was on its way, the step that ran, and the one that says so
        await self.check_at_rest(t)

    async def test_an_abort_during_prefill_frees_the_engine(self, t: UnderTest):
        doomed = t.submit([65 + n % 7 for n in range(t.long_prompt)], 5)
        calls = t.sink.calls
        await t.sink.until(lambda: t.sink.calls >= calls + 2)  # of many more steps
        assert t.sink.stats.prefilling_tokens > 0
        t.engine.abort(doomed)
        (heard,) = await t.sink.ended(doomed)
        assert (heard.finish, heard.ids) == (FinishReason.CANCELLED, [])
        await self.check_at_rest(t)

    async def test_an_abort_in_the_queue_never_runs(self, t: UnderTest):
        running = [t.submit(t.prompt(q), 400) for q in QUESTIONS * 2]
        await t.sink.until(lambda: all(t.sink.heard[i].ids for i in running))
        queued = t.submit(t.prompt(QUESTIONS[0]), 5)
        calls = t.sink.calls
        await t.sink.until(lambda: t.sink.calls >= calls + 2)
        assert t.sink.stats.queued == 1
        t.engine.abort(queued)
        (heard,) = await t.sink.ended(queued)
        assert (heard.finish, heard.ids) == (FinishReason.CANCELLED, [])
        for i in running:
            t.engine.abort(i)
        await t.sink.ended(running)
        await self.check_at_rest(t)

    async def test_two_hundred_aborts_at_once_leave_nothing_behind(self, t: UnderTest):
        ids = [t.submit(t.prompt(q), 300) for q in QUESTIONS * 25]
        await t.sink.until(lambda: any(t.sink.heard[i].ids for i in ids))
        for i in ids:
            t.engine.abort(i)
        heard = await t.sink.ended(ids)
        assert {h.finish for h in heard} == {FinishReason.CANCELLED}
        await self.check_at_rest(t)
        assert len((await t.run(t.prompt(QUESTIONS[0]), 3)).ids) == 3

    async def test_unknown_and_ended_ids_can_be_aborted(self, t: UnderTest):
        ended = t.submit(t.prompt(QUESTIONS[0]), 2)
        await t.sink.ended(ended)
        for request_id in (ended, 2**50):
            t.engine.abort(request_id)
        assert len((await t.run(t.prompt(QUESTIONS[1]), 2)).ids) == 2

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

    async def test_a_prompt_seen_before_comes_from_the_cache(self, t: UnderTest):
        assert t.engine.capabilities().prefix_cache
        prompt = [70 + n * n % 11 for n in range(700)]
        first, again = await t.run(prompt, 4), await t.run(prompt, 4)
        assert first.ids == again.ids
        assert (first.cached_tokens, again.cached_tokens > 300) == (0, True)

    async def test_a_prompt_seen_before_comes_from_the_cache_also_behind_one_that_is_new(self, t: UnderTest):
        known = [71 + n * n % 13 for n in range(700)]
        await t.run(known, 4)
        new = [t.submit([72 + (n * n + i) % (17 + i) for n in range(700)], 4) for i in range(2)]
        again = t.submit(known, 4)
        heard = await t.sink.ended([*new, again])
        assert [h.cached_tokens > 300 for h in heard] == [False, False, True]
        assert heard[0].cached_tokens == heard[1].cached_tokens == 0

    async def test_drain_tells_whether_something_still_runs(self, t: UnderTest):
        assert await t.engine.drain(0.0)
        live = t.submit(t.prompt(QUESTIONS[0]), 1500)
        assert not await t.engine.drain(0.01)
        t.engine.abort(live)
        assert await t.engine.drain(20.0)
        assert t.sink.heard[live].finish is FinishReason.CANCELLED

    async def test_characters_of_several_tokens_come_whole(self, t: UnderTest):
        heard = await t.run(t.tokenizer.encode(self.wide_prompt), 40)
        assembler = TextAssembler(t.tokenizer.token_bytes)
        chunks = [assembler.feed([i]).text for i in heard.ids]
        whole = b"".join(map(t.tokenizer.token_bytes, heard.ids)).decode(errors="replace")
        assert "".join(chunks) + assembler.flush() == whole
        assert any(len(c.encode()) > 1 for c in whole.rstrip("�"))
        assert not any("�" in c for c in chunks)

    async def test_what_is_on_its_way_is_counted(self, t: UnderTest):
        prompt = t.prompt(QUESTIONS[0])
        before = t.engine.stats()
        ids = [t.submit(prompt, 2) for _ in range(3)]
        stats = t.engine.stats()
        assert stats.queued == before.queued + 3
        assert stats.prefilling_tokens == before.prefilling_tokens + 3 * len(prompt)
        await t.sink.ended(ids)
        await self.check_at_rest(t)

    async def test_statistics_say_what_the_steps_did(self, t: UnderTest):
        before = t.engine.stats()
        prompts = [[80 + (n * n + k) % 13 for n in range(300)] for k in range(3)]
        ids = [t.submit(prompt, 40) for prompt in prompts]
        await t.sink.until(lambda: all(len(t.sink.heard[i].ids) >= 2 for i in ids))
        assert t.sink.stats.decoding == 3
        await t.sink.ended(ids)
        after = t.engine.stats()
        assert after.prefilled_tokens - before.prefilled_tokens == 900
        assert after.decoded_tokens - before.decoded_tokens == 120
        assert after.decoding == 0
        assert after.steps > before.steps
        assert after.busy_s > before.busy_s
        await t.run(prompts[0], 2)
        again = t.engine.stats().prefilled_tokens - after.prefilled_tokens
        assert 0 < again <= t.capacity.chunk_tokens, "what the cache has is not computed"

    async def test_the_capacity_says_how_much_of_a_prompt_a_step_takes(self, t: UnderTest):
        assert t.capacity.chunk_tokens == self.options.prefill_chunk_tokens
        assert t.capacity.paged == (self.engine == "openvino")

    wide_prompt: ClassVar[str]

    async def check_at_rest(self, t: UnderTest) -> None:
        assert await t.engine.drain(20.0)
        stats = t.engine.stats()
        assert (stats.running, stats.queued, stats.prefilling_tokens, stats.kv_tokens_used) == (0, 0, 0, 0)

    async def test_a_killed_engine_is_told_of_once(self):
        pool = pool_of(self.engine, self.tokenizer)
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
    long_prompt = 2000
    wide_prompt = "any"


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
    long_prompt = 2000
    wide_prompt = "漢字 漢字 漢字 漢字 漢字 漢字 漢字 漢字"
