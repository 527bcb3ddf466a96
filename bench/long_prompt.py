"""One 8,000-token priority prompt among 16 chats: what it costs the chats, in slices and whole.

The engine is simulated with the measured step times of an 8B model on an H100 (profile h100-8b-fp8), 512 prompt tokens
a step at most. In each trial 16 chats (200-token prompts, 200 to 300 tokens out) stream; the long prompt comes when
they have their first tokens. A prompt of 8,000 tokens is 16 chunks, each of which makes a step longer: about 140 ms in
all, of 1.2 s that a chat takes.

The chats are promised CHAT_TPOT_FACTOR times the TPOT that they have alone (measured first), which the long prompt
would break if it were submitted whole beside short answers; so the worker slices it. The last row has slices off. The
long prompt's own TTFT is the price, and is shown. Worker and real NATS, real time; arms take turns.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from report import Bar, Report, main, percentile
from worker_load import Call, Promise, WorkerHere, site_with_worker

from laneway.core.lanes import Lane

MODEL: dict[str, object] = {
    "engine": "simulated", "tokenizer": "bytes", "slots": 32, "context_length": 16_384, "kv_tokens": 1_000_000,
    "engine_options": {"profile": "h100-8b-fp8", "prefill_chunk_tokens": 512},
}  # fmt: skip
CHATS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 200, (200, 300)
LONG_TOKENS, LONG_OUTPUT_TOKENS, LONG_TTFT_TARGET_S = 8_000, 16, 5.0
CHAT_TPOT_FACTOR = 1.15
TRIALS = 12
TPOT_RATIO_MAX = 1.25


@dataclass(frozen=True)
class Arm:
    name: str
    long: bool
    policy: Mapping[str, object] = field(default_factory=dict)


ARMS = (
    Arm("without it", False),
    Arm("in slices", True),
    Arm("whole", True, {"slices": False}),
)


@dataclass
class Found:
    chats: list[Call] = field(default_factory=list)
    long: list[Call] = field(default_factory=list)


class Load:
    def __init__(self, place: WorkerHere) -> None:
        self._place = place
        self._random = random.Random(1)
        self.promise = Promise(1.0, 0.1)

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(97, 123) for _ in range(tokens))

    async def trial(self, arm: Arm, found: Found) -> None:
        self._place.policy(**arm.policy)
        site = self._place.site
        chats = [
            await site.submit(
                Lane.PRIORITY, self._prompt(PROMPT_TOKENS), self._random.randint(*OUTPUT_TOKENS), self.promise
            )
            for _ in range(CHATS)
        ]
        async with asyncio.timeout(60.0):
            while any(chat.tokens < 8 for chat in chats):  # noqa: ASYNC110 - what is waited for comes from NATS
                await asyncio.sleep(0.005)
            if arm.long:
                promise = Promise(LONG_TTFT_TARGET_S, 1.0)
                found.long.append(await site.run(Lane.PRIORITY, self._prompt(LONG_TOKENS), LONG_OUTPUT_TOKENS, promise))
            for chat in chats:
                await chat.done.wait()
        found.chats += chats
        await self._place.empty()


async def measure(smoke: bool) -> Report:
    found = {arm.name: Found() for arm in ARMS}
    async with site_with_worker(MODEL) as place:
        load = Load(place)
        warm = Found()
        for arm in ARMS[:2]:  # it learns what a step costs
            await load.trial(arm, warm)
        lone_s = percentile([chat.tpot_s for chat in warm.chats[:CHATS]], 50)
        load.promise = Promise(1.0, CHAT_TPOT_FACTOR * lone_s)
        for _ in range(1 if smoke else TRIALS):
            for arm in ARMS:
                await load.trial(arm, found[arm.name])
    rows, figures = [], dict[str, float]()
    base = percentile([chat.tpot_s for chat in found[ARMS[0].name].chats], 99)
    for name, each in found.items():
        key = name.replace(" ", "_")
        tpots, gaps = [chat.tpot_s for chat in each.chats], [chat.gap_s for chat in each.chats]
        for q in (50, 99):
            figures[f"{key}_tpot_p{q}_ms"] = 1000 * percentile(tpots, q)
        figures[f"{key}_tpot_p99_ratio"] = percentile(tpots, 99) / base
        figures[f"{key}_gap_p99_ms"] = 1000 * percentile(gaps, 99)
        own = f"{1000 * percentile([call.ttft_s for call in each.long], 50):.0f}" if each.long else ""
        shown = " / ".join(f"{figures[f'{key}_tpot_p{q}_ms']:.2f}" for q in (50, 99))
        ratio, gap = f"{figures[f'{key}_tpot_p99_ratio']:.2f}", f"{figures[f'{key}_gap_p99_ms']:.1f}"
        rows.append([name, str(len(each.chats)), shown, ratio, gap, own])
    ratio = figures["in_slices_tpot_p99_ratio"]
    bars = [] if smoke else [Bar("the chats' TPOT p99 against without it", ratio, TPOT_RATIO_MAX, "times")]
    counts = {
        f"tokens of the chats, {name}": (sum(c.tokens for c in each.chats), sum(c.wanted for c in each.chats))
        for name, each in found.items()
    }
    columns = ["8,000 tokens", "chats", "TPOT p50 / p99 ms", "p99 ratio", "longest gap p99 ms", "its own TTFT ms"]
    note = f"the chats' TPOT target: {1000 * load.promise.tpot_target_s:.2f} ms"
    return Report("A long prompt among chats, H100 / 8B", columns, rows, figures, bars, counts, [note])


if __name__ == "__main__":
    main(measure, __doc__ or "")
