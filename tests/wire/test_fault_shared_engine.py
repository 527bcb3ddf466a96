"""Many callers share one engine, and some leave in the middle: the others get their own text, and the engine lives."""

from __future__ import annotations

import pytest

from laneway.core.catalogue import Pool
from laneway.core.lanes import FinishReason
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.host import ProcessEngine
from laneway.workers.engines.registry import spec_of
from tests.support.engines import RecordingSink

CALLERS = 8
LEAVING = (2, 5)
STAYING = tuple(n for n in range(CALLERS) if n not in LEAVING)
TOKENS = 12
OPTIONS = {
    "simulated": ("bytes", EngineOptions(pace_s=0.002)),
    "openvino": ("smollm2", EngineOptions(exact=True, threads=1, prefill_chunk_tokens=128)),
}


def pool_of(engine: str, tokenizer: str) -> Pool:
    return Pool(
        name="shared", model="chat", tier="small", engine=engine, context_length=1024, slots=CALLERS, workers=1,
        vocabulary_size=load_tokenizer(tokenizer).vocabulary_size, kv_tokens=8192, tokenizer=tokenizer,
        capabilities=capabilities_of(engine, exact=True),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["simulated", pytest.param("openvino", marks=[pytest.mark.model, pytest.mark.slow])])
async def test_eight_at_once_keep_their_own_text_when_two_leave_in_the_middle(kind: str):
    tokenizer, options = OPTIONS[kind]
    prompts = [load_tokenizer(tokenizer).encode(f"Story number {n}: once upon a time") for n in range(CALLERS)]
    engine, sink = ProcessEngine(spec_of(pool_of(kind, tokenizer), options)), RecordingSink()
    await engine.start(sink)
    try:
        alone = [(await sink.run(engine, prompts[n], TOKENS)).ids for n in STAYING]
        leaving = [sink.submit(engine, prompts[n], 900) for n in LEAVING]
        staying = [sink.submit(engine, prompts[n], TOKENS) for n in STAYING]
        await sink.until(lambda: all(len(sink.heard[i].ids) >= 3 for i in leaving + staying))
        assert sink.live() == {*leaving, *staying}, "all of them are in the middle"
        for request_id in leaving:
            engine.abort(request_id)
        assert [heard.ids for heard in await sink.ended(staying)] == alone
        assert [heard.finish for heard in await sink.ended(leaving)] == [FinishReason.CANCELLED] * len(LEAVING)
        assert (await sink.run(engine, prompts[0], TOKENS)).ids == alone[0], "the engine lives"
        assert sink.closed == []
    finally:
        await engine.close()
