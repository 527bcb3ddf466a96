"""Cases of what an engine is given: prompts as long as its context, longer ones, bad ones, and ones it has seen."""

from __future__ import annotations

from typing import Any

from laneway.core.lanes import FinishReason
from laneway.workers.conformance.case import NotOffered, case, expect
from laneway.workers.conformance.listener import CACHED_WITHIN_PROMPT, OUR_WORDS
from laneway.workers.conformance.rig import QUESTIONS, Rig

PREFIX_TOKENS = 700  # of a prompt that is to be found again; many blocks of any engine's cache
FOUND_TOKENS_MIN = 300


@case("context-fits", "Prompt and max_tokens may fill the context length")
async def context_fits(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[0])
    fits = rig.submit(prompt, rig.lasting(prompt, tokens=rig.capacity.context_length))
    heard = rig.listener.heard[fits]
    await rig.until(lambda: bool(heard.ids) or heard.finish is not None, "for the first ids")
    expect(heard.finish is not FinishReason.ERROR, f"it was refused: {heard.message}")
    await rig.stop([fits])


@case("context-exceeded", "What does not fit the context is refused with the context length, never cut")
async def context_exceeded(rig: Rig) -> None:
    length = rig.capacity.context_length
    prompt = rig.prompt(QUESTIONS[0])
    for prompt_ids, max_tokens in (
        (prompt, length - len(prompt) + 1),
        (rig.fresh_prompt(length), 1),
        (rig.fresh_prompt(length + 100), 1),
    ):
        heard = await rig.run(prompt_ids, max_tokens)
        what = f"a prompt of {len(prompt_ids)} tokens with max_tokens {max_tokens} in a context of {length}"
        expect(heard.finish is FinishReason.ERROR, f"{what} ended with {heard.finish}")
        expect(not heard.ids, f"{what} gave ids")
        expect(str(length) in heard.message, f"the refusal does not name the context length: {heard.message!r}")


@case("prompt-whole", "All of a prompt is computed; no part is left out silently")
async def prompt_whole(rig: Rig) -> None:
    before = rig.engine.stats()
    tokens = min(300, rig.capacity.context_length - 4)
    heard = await rig.ended([rig.submit(rig.fresh_prompt(tokens), 2) for _ in range(2)])
    cached = sum(each.cached_tokens for each in heard)
    await rig.settle(lambda: rig.engine.stats().prefilled_tokens - before.prefilled_tokens + cached >= 2 * tokens)
    after = rig.engine.stats()
    if not after.prefilled_tokens:
        raise NotOffered("the engine does not count prompt tokens")
    computed = after.prefilled_tokens - before.prefilled_tokens + cached
    # An engine may count what an earlier case began a moment later.
    expect(computed >= 2 * tokens, f"two prompts of {tokens} tokens: {computed} were computed or found")


@case("bad-input-alone", "A request that cannot be run ends with ERROR and harms no other, also the second time")
async def bad_input_alone(rig: Rig) -> None:
    good = rig.prompt(QUESTIONS[5])
    expected = (await rig.run(good, 8)).ids
    for _ in range(2):
        bad = {name: rig.submit(ids, tokens, **changes) for name, ids, tokens, changes in _bad_requests(rig, good)}
        answer = (await rig.run(good, 8)).ids
        expect(rig.same(answer, expected), "a good request beside bad ones was answered otherwise")
        for name, heard in zip(bad, await rig.ended(bad.values()), strict=True):
            expect(heard.finish is FinishReason.ERROR, f"{name} ended with {heard.finish}")
            expect(not heard.ids, f"{name} gave ids")


def _bad_requests(rig: Rig, good: list[int]) -> list[tuple[str, list[int], int, dict[str, Any]]]:
    vocabulary = rig.capacity.vocabulary_size
    return [
        ("an empty prompt", [], 8, {}),
        ("max_tokens of 0", good, 0, {}),
        ("max_tokens below 0", good, -1, {}),
        ("an id beyond the vocabulary", [*good, vocabulary], 8, {}),
        ("an id below 0", [-1], 8, {}),
        ("a stop id beyond the vocabulary", good, 8, {"stop_token_ids": (vocabulary,)}),
        ("a temperature that is no number", good, 8, {"temperature": float("nan")}),
        ("a temperature below 0", good, 8, {"temperature": -0.1}),
        ("a top_p of 0", good, 8, {"top_p": 0.0, "temperature": 1.0}),
        ("a min_p without an end", good, 8, {"min_p": float("inf"), "temperature": 1.0}),
    ]


@case(OUR_WORDS, "A refusal says why in our words, and nothing of a library's insides")
async def errors_in_our_words(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[5])
    await rig.ended([rig.submit(ids, tokens, **changes) for _, ids, tokens, changes in _bad_requests(rig, prompt)])


@case(CACHED_WITHIN_PROMPT, "Cached tokens are told of with the first ids, and are no more than the prompt has")
async def cached_within_prompt(rig: Rig) -> None:
    prompt = rig.fresh_prompt(min(2 * PREFIX_TOKENS, rig.capacity.context_length - 4))
    for _ in range(2):
        await rig.run(prompt, 3)


@case("prefix-found", "A prompt seen before is found in the cache, and the answer is the same", needs=("prefix_cache",))
async def prefix_found(rig: Rig) -> None:
    tokens = min(PREFIX_TOKENS, rig.capacity.context_length - 4)
    known = rig.fresh_prompt(tokens)
    first = await rig.run(known, 4)
    expect(first.cached_tokens == 0, f"{first.cached_tokens} tokens of a new prompt were said to be cached")
    new = [rig.submit(rig.fresh_prompt(tokens), 4) for _ in range(2)]  # it is found also behind these
    *others, again = await rig.ended([*new, rig.submit(known, 4)])
    expect(not any(each.cached_tokens for each in others), "tokens of new prompts were said to be cached")
    least = min(FOUND_TOKENS_MIN, tokens // 2)
    expect(again.cached_tokens > least, f"{again.cached_tokens} of {tokens} tokens were found again")
    expect(rig.same(again.ids, first.ids), "the answer with cached tokens is another")


CASES = (
    context_fits,
    context_exceeded,
    prompt_whole,
    bad_input_alone,
    errors_in_our_words,
    cached_within_prompt,
    prefix_found,
)
