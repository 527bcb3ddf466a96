"""Cases of aborts, in whatever state a sequence is."""

from __future__ import annotations

from laneway.core.lanes import FinishReason
from laneway.workers.conformance.case import NotOffered, case, expect
from laneway.workers.conformance.rig import QUESTIONS, Rig

ABORTS = 200
UNKNOWN_ID = 2**50
PREFILL_STEPS_MIN = 5  # of a prompt that is to be met while it is prefilled


@case("abort-queued", "An abort in the queue: the sequence never runs")
async def abort_queued(rig: Rig) -> None:
    slots, prompt = rig.capacity.slots, rig.prompt(QUESTIONS[0])
    tokens = rig.lasting(prompt, slots, 400)
    running = [rig.submit(prompt, tokens) for _ in range(slots)]
    await rig.until(lambda: all(rig.ids(i) for i in running), "for all slots to run")
    queued = rig.submit(prompt, 5)
    calls = rig.listener.calls
    await rig.until(lambda: rig.listener.calls >= calls + 2, "for two steps")
    full = rig.listener.live.issuperset(running)
    (heard,) = await rig.stop([queued])
    await rig.stop(running)
    if not full:
        raise NotOffered(f"{slots} runs of {tokens} tokens were too short to fill all slots")
    expect(not heard.ids, "a sequence ran although all slots were taken")
    rig.expect_cancelled(heard)
    await rig.expect_rest()


@case("abort-prefilling", "An abort while its prompt is computed frees the engine")
async def abort_prefilling(rig: Rig) -> None:
    tokens = min(2000, rig.capacity.context_length - 5, rig.capacity.kv_tokens - 5)
    if tokens < PREFILL_STEPS_MIN * rig.capacity.chunk_tokens:
        raise NotOffered(f"a prompt of {tokens} tokens takes too few steps of {rig.capacity.chunk_tokens}")
    before, prompt = rig.engine.stats().prefilled_tokens, rig.fresh_prompt(tokens)
    doomed = rig.submit(prompt, rig.lasting(prompt))
    calls = rig.listener.calls
    if rig.capacity.chunk_tokens:
        await rig.until(lambda: rig.listener.calls >= calls + 2, "for two steps of a prompt")
    (heard,) = await rig.stop([doomed])
    rig.expect_cancelled(heard)
    await rig.expect_rest()
    if rig.capacity.chunk_tokens:  # else the engine may have been through with it by then
        expect(not heard.ids, "a sequence that was aborted while prefilling gave ids")
        computed = rig.engine.stats().prefilled_tokens - before
        expect(computed < tokens, f"all {tokens} tokens of the prompt were computed")


@case("abort-decoding", "An abort stops a decoding sequence within a step, and frees what it held")
async def abort_decoding(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[0])
    doomed = rig.submit(prompt, rig.lasting(prompt))
    await rig.until(lambda: len(rig.ids(doomed)) >= 3, "for three ids")
    calls = rig.listener.calls
    (heard,) = await rig.stop([doomed])
    rig.expect_cancelled(heard)
    calls = rig.listener.calls - calls
    expect(calls <= rig.subject.abort_calls, f"the end came with call {calls} after the abort")
    await rig.expect_rest()


@case("abort-finished", "An abort of what has just finished, or finishes meanwhile, changes nothing")
async def abort_finished(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[0])
    expected = (await rig.run(prompt, 4)).ids
    rig.listener.on_end = rig.engine.abort  # within the very call that tells of the end
    try:
        for _ in range(2):
            answer = (await rig.run(prompt, 4)).ids
            expect(rig.same(answer, expected), "a run after an abort of an ended one was answered otherwise")
    finally:
        rig.listener.on_end = None
    (raced,) = await rig.stop([rig.submit(prompt, 1)])
    expect(raced.finish in (FinishReason.LENGTH, FinishReason.STOP, FinishReason.CANCELLED), f"{raced.finish}")
    await rig.expect_rest()


@case("abort-unknown", "An abort of an id that is unknown or has ended harms nobody")
async def abort_unknown(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[0])
    ended = rig.submit(prompt, 2)
    await rig.ended([ended])
    others = [rig.submit(rig.prompt(question), 12) for question in QUESTIONS[1:4]]
    await rig.until(lambda: all(rig.ids(i) for i in others), "for the others to run")
    for request_id in (ended, UNKNOWN_ID):
        rig.engine.abort(request_id)
    for heard in await rig.ended(others):
        kept_on = heard.finish is FinishReason.LENGTH or (heard.finish is FinishReason.STOP and not rig.can.ignore_eos)
        expect(kept_on, f"another run ended with {heard.finish}")


@case("abort-200", "200 aborts at once leave nothing behind: a recount is zero, and the next request runs")
async def abort_200(rig: Rig) -> None:
    prompts = [rig.prompt(question) for question in QUESTIONS]
    each = [prompts[n % len(prompts)] for n in range(ABORTS)]
    ids = [rig.submit(prompt, rig.lasting(prompt, tokens=120)) for prompt in each]
    await rig.until(lambda: any(rig.ids(i) for i in ids), "for the first ids of many")
    ended = await rig.stop(ids)
    went_on = sum(heard.finish is not FinishReason.CANCELLED for heard in ended)
    # Those in the batch may have been through on a busy machine, before their aborts came.
    expect(went_on <= min(rig.capacity.slots, ABORTS // 10), f"{went_on} of {ABORTS} aborted runs went on to their end")
    await rig.expect_rest()
    expect(bool((await rig.run(prompts[0], 3)).ids), "the next request gave no ids")


CASES = (abort_queued, abort_prefilling, abort_decoding, abort_finished, abort_unknown, abort_200)
