"""Cases of an engine's statistics: recounts of what is live, and counts since the start."""

from __future__ import annotations

from laneway.workers.conformance.case import NotOffered, case, expect
from laneway.workers.conformance.listener import COUNTS_GROW, COUNTS_TRUE, RECOUNT
from laneway.workers.conformance.rig import QUESTIONS, Rig

REST_IS_ZERO = "rest-is-zero"


@case(RECOUNT, "After every call running and queued sequences are as many as are live")
async def recount(rig: Rig) -> None:
    prompts = [rig.prompt(question) for question in QUESTIONS]
    ids = [rig.submit(prompt, 4 + n) for n, prompt in enumerate(prompts * 2)]
    await rig.until(lambda: any(rig.ids(i) for i in ids), "for the first ids")
    await rig.stop(ids[::3])
    await rig.ended(ids)


@case(COUNTS_GROW, "Counts since the start (steps, time in them, tokens) only grow")
async def counts_grow(rig: Rig) -> None:
    before = rig.engine.stats()
    await rig.ended([rig.submit(rig.prompt(question), 6) for question in QUESTIONS[:3]])
    if rig.engine.stats().busy_s:
        await rig.settle(lambda: rig.engine.stats().busy_s > before.busy_s and rig.engine.stats().steps > before.steps)
    after = rig.engine.stats()
    if not after.steps:
        raise NotOffered("the engine does not count its steps")
    expect(after.steps > before.steps, "no step was counted while three sequences ran")
    if after.busy_s:  # else it does not time them
        expect(after.busy_s > before.busy_s, "no time was counted while three sequences ran")


@case(COUNTS_TRUE, "Decoded tokens equal the ids given; what the cache has is not counted as computed")
async def counts_true(rig: Rig) -> None:
    before = rig.engine.stats()
    tokens = min(300, rig.capacity.context_length - 40)
    prompts = [rig.fresh_prompt(tokens) for _ in range(3)]
    ids = [rig.submit(prompt, 40) for prompt in prompts]
    await rig.until(lambda: all(len(rig.ids(i)) >= 2 for i in ids), "for all to decode")
    told, decoding = rig.listener.stats.decoding, sum(i in rig.listener.live for i in ids)
    heard = await rig.ended(ids)
    after = rig.engine.stats()
    if not after.decoded_tokens:
        raise NotOffered("the engine does not count tokens")
    expect(told == decoding, f"{told} decoding sequences were told of; there were {decoding}")
    decoded, came = after.decoded_tokens - before.decoded_tokens, sum(len(each.ids) for each in heard)
    expect(decoded == came, f"{decoded} decoded tokens were told of; {came} ids came")
    again = await rig.run(prompts[0], 2)
    computed = rig.engine.stats().prefilled_tokens - after.prefilled_tokens
    # An engine may not know what its cache had before the first token: one step's room more is no error.
    most = tokens - again.cached_tokens + rig.capacity.chunk_tokens
    expect(computed <= most, f"{computed} computed tokens of a prompt with {again.cached_tokens} of {tokens} cached")


@case(REST_IS_ZERO, "With no live sequence nothing is running, queued or held")
async def rest_is_zero(rig: Rig) -> None:
    await rig.ended([rig.submit(rig.prompt(question), 5) for question in QUESTIONS])
    await rig.expect_rest()


@case("submitted-is-counted", "A request is counted as queued from its submission on, with its prompt's tokens")
async def submitted_is_counted(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[0])
    before = rig.engine.stats()
    ids = [rig.submit(prompt, 2) for _ in range(3)]
    stats = rig.engine.stats()
    expect(stats.queued == before.queued + 3, f"{stats.queued - before.queued} of 3 submitted requests are counted")
    counted = stats.prefilling_tokens - before.prefilling_tokens
    expect(counted == 3 * len(prompt), f"{counted} of {3 * len(prompt)} prompt tokens are counted")
    await rig.ended(ids)


CASES = (recount, counts_grow, counts_true, rest_is_zero, submitted_is_counted)
