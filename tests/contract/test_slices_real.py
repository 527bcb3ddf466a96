"""Slices of long prompts on the real embedded engine: the same answer, and first tokens that do not wait for it all."""

from __future__ import annotations

import asyncio

import pytest

from laneway.core.lanes import Lane
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.outcomes import Kind, Outcome
from tests.support.budgeted import EngineYard, pool_of

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(180)]

OPTIONS = EngineOptions(exact=True, threads=1, prefill_chunk_tokens=128)


async def test_a_prompt_in_slices_gives_the_same_answer_and_holds_no_first_token_up():
    tokenizer = load_tokenizer("smollm2")
    pool = pool_of(
        slots=8,
        engine="openvino",
        tokenizer="smollm2",
        vocabulary_size=tokenizer.vocabulary_size,
        kv_tokens=16_384,
        context_length=4096,
        capabilities=capabilities_of("openvino", exact=True),
        prefill_tokens_per_s=2000.0,
        decode_tokens_per_s=60.0,
    )
    yard = await EngineYard(pool, OPTIONS).start()
    words = tokenizer.encode("The road to the north goes along a river, over hills and through many a dark wood. ")
    prompt = [token_id for n in range(60) for token_id in (*tokenizer.encode(f"{n}. "), *words)][:1000]
    try:
        talk = yard.submit(Lane.PRIORITY, tokenizer.encode("Tell me a story."), 2000, tpot_target_s=0.2)
        await asyncio.sleep(1.0)
        call = yard.submit(Lane.BATCH, prompt, 12)
        asked = []
        while call.outcome is None:
            asked.append(yard.submit(Lane.PRIORITY, tokenizer.encode("Why is the sky blue?"), 4, ttft_target_s=2.0))
            await yard.until(asked[-1])
        entry = call.generation._entry
        assert entry is not None
        assert entry.slices >= 6
        assert call.outcome.kind is Kind.FINISHED
        assert call.generation.transcript.cached_tokens == 0
        assert yard.debt_max <= 1.0
        talk.end(Outcome(Kind.STOPPED))
        await talk.generation.gone()
        alone = await EngineYard(pool, OPTIONS, slices=False, interference_budget=False).start()
        try:
            whole = alone.submit(Lane.BATCH, prompt, 12)
            await asyncio.sleep(0)
            late = alone.submit(Lane.PRIORITY, tokenizer.encode("Why is the sky blue?"), 4, ttft_target_s=2.0)
            await alone.until(whole, late)
            assert whole.generation.transcript.ids == call.generation.transcript.ids
            assert min(c.ttft_s for c in asked) < late.ttft_s  # by how much is for a benchmark to say
        finally:
            await alone.engine.close()
    finally:
        await yard.engine.close()
