"""What every engine promises, of the adapter `trtllm` around a `tensorrt_llm` that was generated from upstream's
API-stability references, at three versions. The real library was never run: see docs/engines.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.lanes import FinishReason
from laneway.runtime.engine_options import EngineOptions
from laneway.workers.conformance.rig import QUESTIONS
from tests.contract.test_engines import EngineContract, UnderTest, judge, pool_of, t
from tests.support.trtllm_site import TrtllmSite

__all__ = ["judge", "t"]  # the fixtures

CHUNK_TOKENS = 64


class TrtllmContract(EngineContract):
    engine = "trtllm"
    tokenizer = "bytes"
    options: ClassVar[EngineOptions] = EngineOptions()
    version: ClassVar[str]
    # Its sampler keeps no seed for each request.
    not_offered = frozenset({"resume-sampled", "seed-repeats-alone", "seed-repeats-in-company", "seeds-differ"})

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def site(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            site = TrtllmSite(tmp_path_factory.mktemp("trtllm"), cls.version, patch)
            cls.options = site.options(llm={"max_num_tokens": CHUNK_TOKENS})
            yield

    async def test_the_capacity_says_how_much_of_a_prompt_a_step_takes(self, t: UnderTest):
        assert (t.capacity.chunk_tokens, t.capacity.block_tokens, t.capacity.paged) == (CHUNK_TOKENS, 32, False)

    async def test_tokens_come_step_by_step_and_end_once(self, t: UnderTest):
        """Two that came in one go are told together."""
        heard = await t.run(t.prompt(QUESTIONS[0]), 40, logprobs=True)
        assert len(heard.ids) == len(heard.logprobs) == 40
        assert 4 <= heard.calls <= 41
        assert heard.finish is FinishReason.LENGTH
        assert all(p <= 0.0 for p in heard.logprobs)


@pytest.mark.asyncio(loop_scope="class")
class TestTrtllm14(TrtllmContract):
    version = "1.4"


class WithoutPriority(TrtllmContract):
    """Who came first is first."""

    not_offered = TrtllmContract.not_offered | {"priority-first"}

    async def test_higher_priority_leaves_the_queue_first(self, t: UnderTest):
        running = [t.submit(t.prompt(q), 400) for q in QUESTIONS * 2]
        await t.sink.until(lambda: all(t.sink.heard[i].ids for i in running))
        low, high = (t.submit(t.prompt(QUESTIONS[0]), 400, priority=p) for p in (0.1, 0.9))
        t.engine.abort(running[0])
        await t.sink.until(lambda: t.sink.heard[low].ids)
        assert t.sink.heard[high].ids == []
        for i in (low, high, *running):
            t.engine.abort(i)
        await t.sink.ended([low, high, *running])

    @classmethod
    def lacks(cls) -> dict[str, object]:
        return {"penalties": False, "priority_inside": False}

    @classmethod
    def pool(cls) -> Pool:
        """What this version cannot do is refused at its start, whatever the pool says; the kit asks for less."""
        pool = pool_of(cls.engine, cls.tokenizer)
        return replace(pool, capabilities=replace(pool.capabilities, **cls.lacks()))


@pytest.mark.asyncio(loop_scope="class")
class TestTrtllm12(WithoutPriority):
    version = "1.2"


@pytest.mark.asyncio(loop_scope="class")
class TestTrtllm10(WithoutPriority):
    """Log probabilities are numbers here, and what was cached is not told."""

    version = "1.0"
    not_offered = WithoutPriority.not_offered | {"top-logprobs", "prefix-found"}

    @classmethod
    def lacks(cls) -> dict[str, object]:
        return super().lacks() | {"top_logprobs": 0, "cache_salt": False, "prefix_cache": False}
