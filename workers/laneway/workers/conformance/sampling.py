"""Cases of what a request may ask for: log probabilities, seeds, and that nothing asked for is ignored."""

from __future__ import annotations

from typing import Any

from laneway.core.lanes import FinishReason
from laneway.workers.conformance.case import case, expect
from laneway.workers.conformance.listener import LOGPROB_PER_ID, TOP_LOGPROBS
from laneway.workers.conformance.rig import QUESTIONS, Rig

SEED = 7


@case(LOGPROB_PER_ID, "Each id has one log probability where they are asked for", needs=("logprobs",))
async def logprob_per_id(rig: Rig) -> None:
    heard = await rig.run(rig.prompt(QUESTIONS[0]), 12, logprobs=True)
    expect(len(heard.logprobs) == len(heard.ids), f"{len(heard.logprobs)} log probabilities, {len(heard.ids)} ids")


@case(TOP_LOGPROBS, "Each id has as many alternatives as were asked for", needs=("logprobs", "top_logprobs"))
async def top_logprobs(rig: Rig) -> None:
    heard = await rig.run(rig.prompt(QUESTIONS[0]), 8, logprobs=True, top_logprobs=rig.can.top_logprobs)
    expect(len(heard.top) == len(heard.ids), f"alternatives of {len(heard.top)} ids; {len(heard.ids)} came")


@case("seed-repeats-alone", "A seed gives the same text each time", needs=("seed",))
async def seed_repeats_alone(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[4])
    texts = {tuple((await rig.run(prompt, 16, seed=SEED, **_drawing(rig))).ids) for _ in range(3)}
    expect(len(texts) == 1, f"three runs with one seed gave {len(texts)} texts")


@case("seed-repeats-in-company", "A seed gives the same text among other seeds", needs=("seed", "exact"))
async def seed_repeats_in_company(rig: Rig) -> None:
    prompt, drawing = rig.prompt(QUESTIONS[4]), _drawing(rig)
    alone = (await rig.run(prompt, 16, seed=SEED, **drawing)).ids
    first = [rig.submit(prompt, 16, seed=seed, **drawing) for seed in (1, SEED, 2, SEED)]
    await rig.until(lambda: len(rig.ids(first[0])) >= 4, "for the first ids of a batch")
    later = rig.submit(prompt, 16, seed=SEED, **drawing)  # joins while the others draw
    heard = await rig.ended([first[1], first[3], later])
    differing = sum(each.ids != alone for each in heard)
    expect(not differing, f"{differing} of {len(heard)} runs with one seed differ from the one alone")


@case("seeds-differ", "Another seed, and none, draws otherwise", needs=("seed",))
async def seeds_differ(rig: Rig) -> None:
    prompt, drawing = rig.prompt(QUESTIONS[4]), _drawing(rig)
    seeds = (1, 2, SEED, 2**40 + SEED, None)
    heard = await rig.ended([rig.submit(prompt, 16, seed=seed, **drawing) for seed in seeds])
    texts = {tuple(each.ids) for each in heard}
    expect(len(texts) == len(seeds), f"{len(seeds)} seeds gave {len(texts)} texts")


@case("abilities-kept", "What is offered runs; what is not is refused, never ignored")
async def abilities_kept(rig: Rig) -> None:
    prompt, can = rig.prompt(QUESTIONS[3]), rig.can
    uses: dict[str, tuple[dict[str, Any], bool]] = {
        "min_p": ({"min_p": 0.05, "temperature": 0.7}, can.min_p),
        "min_p of 1": ({"min_p": 1.0, "temperature": 0.7}, can.min_p),
        "top_k": ({"top_k": 1, "temperature": 2.0}, can.top_k),
        "a tiny top_p": ({"top_p": 1e-9, "temperature": 1.0}, True),
        "a tiny temperature": ({"temperature": 1e-12}, True),
        "seed": ({"seed": 2**40, "temperature": 1.0}, can.seed),
        "a seed that greedy ignores": ({"seed": 5}, True),
        "penalties": ({"repetition_penalty": 1.3, "presence_penalty": -2.0, "frequency_penalty": 2.0}, can.penalties),
        "min_tokens": ({"min_tokens": 4, "ignore_eos": False}, can.min_tokens),
        "ignore_eos": ({"ignore_eos": True}, can.ignore_eos),
        "logprobs": ({"logprobs": True}, can.logprobs),
        "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, can.logprobs and can.top_logprobs >= 2),
        "logit_bias": ({"logit_bias": {prompt[-1]: 1.0}}, can.logit_bias),
        "json_schema": ({"json_schema": '{"type": "object"}'}, can.json_schema),
        "cache_salt": ({"cache_salt": "x"}, can.cache_salt),
        "adapter": ({"adapter": "one that is not there"}, False),
    }
    heard = await rig.ended([rig.submit(prompt, 4, **changes) for changes, _ in uses.values()])
    for (name, (_, offered)), each in zip(uses.items(), heard, strict=True):
        ran = each.finish is not FinishReason.ERROR
        expect(ran or not offered, f"{name} is offered and was refused: {each.message}")
        expect(offered or not ran, f"{name} is not offered and was not refused")


def _drawing(rig: Rig) -> dict[str, Any]:
    return {"temperature": 1.0} | ({"top_k": 20} if rig.can.top_k else {})


CASES = (logprob_per_id, top_logprobs, seed_repeats_alone, seed_repeats_in_company, seeds_differ, abilities_kept)
