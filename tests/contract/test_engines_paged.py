"""Engines that hand KV out as answers grow: what does not fit together is evicted and ends with the same ids."""

from __future__ import annotations

from typing import Any

import pytest

from laneway.core.catalogue import Pool
from laneway.core.lanes import FinishReason
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.registry import make_engine
from tests.support.engines import RecordingSink

KV_TOKENS = 512
TOKENS = 160
QUESTIONS = (
    b"Why is the sky blue, and the sea as well?",
    b"Name three primes and say how you know.",
    b"Tell me a story about a road that never ends.",
    b"List the colours of a traffic light, and why.",
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "tokenizer", "options"),
    [
        ("simulated", "bytes", {"pace_s": 0.001, "paged": True}),
        pytest.param("openvino", "smollm2", {"exact": True}, marks=[pytest.mark.model, pytest.mark.slow]),
    ],
)
async def test_what_outgrows_the_kv_together_ends_with_the_ids_it_has_alone(
    name: str, tokenizer: str, options: dict[str, Any]
):
    pool = Pool(
        name="tight",
        model="chat",
        tier="small",
        engine=name,
        context_length=KV_TOKENS,
        vocabulary_size=load_tokenizer(tokenizer).vocabulary_size,
        slots=len(QUESTIONS),
        workers=1,
        kv_tokens=KV_TOKENS,
        tokenizer=tokenizer,
        capabilities=capabilities_of(name, exact=True),
    )
    engine, sink = make_engine(pool, EngineOptions(**options)), RecordingSink()
    try:
        capacity = await engine.start(sink)
        assert capacity.paged
        prompts = [tuple(question) for question in QUESTIONS]  # ids of some words, whatever they spell
        assert sum(len(prompt) + TOKENS for prompt in prompts) > capacity.kv_tokens
        alone = [(await sink.run(engine, prompt, TOKENS)).ids for prompt in prompts]
        together = await sink.ended([sink.submit(engine, prompt, TOKENS) for prompt in prompts])
    finally:
        await engine.close()
    assert [heard.finish for heard in together] == [FinishReason.LENGTH] * len(prompts)
    assert [heard.ids for heard in together] == alone
