"""Interactive bursts and bulk work on one worker: what bulk costs the interactive callers, and whether it gets what the
interference budget allows.

The engine is simulated with the measured step times of an 8B model on an H100 (profile h100-8b-fp8), prefill included,
512 prompt tokens a step at most. Interactive requests come in bursts (gamma distributed gaps, CV 3, 20 a second,
200-token prompts, 32 to 96 tokens out, TPOT target 30 ms, TTFT target 1 s); bulk jobs of 2,000-token prompts always
wait. The worker runs in a process of its own, on real NATS and in real time, with the default policy. Every round asks
the same arrivals of both arms, with and without bulk, one after the other.

What the same budget allows alone. While an interactive request is in the engine the budget pays out a rate of bulk
prompt tokens, and the worker counts what it paid out (`granted`, the integral of that rate over the time in which it
protects somebody), used or not. In the rest of the time only the guard of first tokens is in bulk's way: slices of at
most a chunk, since the next burst may come. What bulk alone gets then is measured in this run: an idle worker, the same
bulk, and one request of one token every two seconds, which keeps the guard awake (`lone` tokens a second). So

    allowed = granted + lone x (time - protected time),    at most lone x time

and bulk is held to 0.95 of it. What bulk alone gets without any interactive request, in whole prompts, is told as well:
the difference to `lone` is the price of being ready for the next burst. The row without a budget shows what whole
prompts do to the same arrivals.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from report import Bar, Report, main, percentile
from worker_load import Call, Promise, WorkerApart, site_with_process

from laneway.core.lanes import Lane

MODEL: dict[str, object] = {
    "engine": "simulated", "tokenizer": "bytes", "slots": 64, "context_length": 16_384, "kv_tokens": 1_000_000,
    "engine_options": {"profile": "h100-8b-fp8", "prefill_chunk_tokens": 512},
}  # fmt: skip
PER_S, CV = 20.0, 3.0
PROMPT_TOKENS, OUTPUT_TOKENS = 200, (32, 96)
BULK_PROMPT_TOKENS, BULK_TOKENS, BULK_WAITING = 2_000, 16, 24
PROMISE, BULK_PROMISE = Promise(1.0, 0.03), Promise(600.0, 10.0)
ROUNDS, ROUND_S, LONE_S = 6, 12.0, 6.0
PINGS = [(at_s, 1) for at_s in (0.0, 2.0, 4.0)]
RUN_IN_S = 0.5  # bulk is under way when a round begins
RECENT_S = 5.5  # after that the guard sleeps
TTFT_RATIO_MAX, SHARE_MIN = 1.3, 0.95
GRANTED, PROTECTED = "laneway_worker_lower_granted_tokens_total", "laneway_worker_protected_seconds_total"
NO_BUDGET = {"interference_budget": False, "slices": False, "lower_lane_prefills_max": 4}


@dataclass
class Found:
    calls: list[Call] = field(default_factory=list)
    bulk_tokens: int = 0  # of prompts
    allowed_tokens: float = 0.0
    took_s: float = 0.0

    def values(self, what: str) -> list[float]:
        return [getattr(call, what) for call in self.calls]


def arrivals(seed: int, took_s: float) -> list[tuple[float, int]]:
    """When each interactive request comes, and how many tokens it asks for."""
    draw = random.Random(seed)
    shape = 1.0 / CV**2
    found, at_s = [], draw.expovariate(PER_S)
    while at_s < took_s:
        found.append((at_s, draw.randint(*OUTPUT_TOKENS)))
        at_s += draw.gammavariate(shape, 1.0 / (PER_S * shape))
    return found


class Load:
    def __init__(self, place: WorkerApart) -> None:
        self._place = place
        self._random = random.Random(1)
        self.lone_per_s = 0.0

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(97, 123) for _ in range(tokens))

    async def round(self, asked: Sequence[tuple[float, int]], took_s: float, found: Found, *, bulk: bool) -> None:
        """Returns when all of it has ended. Bulk counts by the prompts that were computed in time."""
        began_s = time.monotonic() + (RUN_IN_S if bulk else 0.0)
        ends_s = began_s + took_s
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(self._bulk(began_s, ends_s)) for _ in range(BULK_WAITING if bulk else 0)]
            await asyncio.sleep(max(0.0, began_s - time.monotonic()))
            before = await self._counted()
            for at_s, tokens in asked:
                group.create_task(self._ask(began_s + at_s, tokens, found))
            await asyncio.sleep(max(0.0, ends_s - time.monotonic()))
            after = await self._counted()
        granted, protected_s = (late - early for late, early in zip(after, before, strict=True))
        found.took_s += took_s
        found.bulk_tokens += sum(task.result() for task in waiting)
        free_s = took_s - min(took_s, protected_s)
        found.allowed_tokens += min(granted + self.lone_per_s * free_s, self.lone_per_s * took_s)

    async def _counted(self) -> tuple[float, float]:
        return await self._place.metric(GRANTED), await self._place.metric(PROTECTED)

    async def _ask(self, at_s: float, tokens: int, found: Found) -> None:
        prompt = self._prompt(PROMPT_TOKENS)
        await asyncio.sleep(max(0.0, at_s - time.monotonic()))
        found.calls.append(await self._place.site.run(Lane.PRIORITY, prompt, tokens, PROMISE))

    async def _bulk(self, begins_s: float, ends_s: float) -> int:
        """Prompt tokens of its jobs that had their first token between these."""
        done = 0
        while time.monotonic() < ends_s:
            call = await self._place.site.run(Lane.BATCH, self._prompt(BULK_PROMPT_TOKENS), BULK_TOKENS, BULK_PROMISE)
            done += call.prompt_tokens * (begins_s <= call.first_s <= ends_s)
        return done


async def _arms(
    policy: Mapping[str, object],
    smoke: bool,
    mixed: Found,
    lone: Found,
    *,
    alone: Found | None = None,
    whole: Found | None = None,
) -> None:
    """Rounds of one worker; `alone`: without bulk; `whole`: bulk alone without any interactive request."""
    round_s = 0.8 if smoke else ROUND_S
    async with site_with_process(MODEL, policy) as place:
        load = Load(place)
        if not smoke:
            await load.round(arrivals(99, round_s), round_s, Found(), bulk=True)  # it learns what a step costs
        await load.round(PINGS, 0.5 if smoke else LONE_S, lone, bulk=True)
        load.lone_per_s = lone.bulk_tokens / lone.took_s
        if whole is not None:
            await asyncio.sleep(0.0 if smoke else RECENT_S)
            await load.round((), 0.5 if smoke else LONE_S, whole, bulk=True)
        for number in range(1 if smoke else ROUNDS):
            asked = arrivals(number, round_s)
            if alone is not None:
                await load.round(asked, round_s, alone, bulk=False)
            await load.round(asked, round_s, mixed, bulk=True)


async def measure(smoke: bool) -> Report:
    alone, mixed, free, lone, whole = Found(), Found(), Found(), Found(), Found()
    await _arms({}, smoke, mixed, lone, alone=alone, whole=whole)
    if not smoke:
        await _arms(NO_BUDGET, smoke, free, Found())
    rows: list[list[str]] = []
    figures = {
        "lone_bulk_tokens_per_s": lone.bulk_tokens / lone.took_s,
        "whole_bulk_tokens_per_s": whole.bulk_tokens / whole.took_s,
    }
    arms = (("interactive alone", alone), ("with bulk", mixed), ("with bulk, no budget", free))
    for name, each in arms[: 2 if smoke else 3]:
        key, row = name.replace(" ", "_").replace(",", ""), [name, str(len(each.calls))]
        for what in ("ttft_s", "tpot_s"):
            for q in (50, 99):
                figures[f"{key}_{what[:4]}_p{q}_ms"] = 1000 * percentile(each.values(what), q)
            row.append(" / ".join(f"{1000 * percentile(each.values(what), q):.1f}" for q in (50, 99)))
        rate, allowed = each.bulk_tokens / each.took_s, each.allowed_tokens / each.took_s
        figures[f"{key}_bulk_tokens_per_s"] = rate
        row += [f"{rate:,.0f}" if rate else "", f"{allowed:,.0f}" if each is mixed else ""]
        rows.append(row)
    figures["ttft_p99_ratio"] = percentile(mixed.values("ttft_s"), 99) / percentile(alone.values("ttft_s"), 99)
    figures["bulk_share"] = mixed.bulk_tokens / max(1.0, mixed.allowed_tokens)
    bars = [
        Bar("interactive TTFT p99 against alone", figures["ttft_p99_ratio"], TTFT_RATIO_MAX, "times"),
        Bar("bulk prompt tokens against what the budget allows", figures["bulk_share"], SHARE_MIN, "times", True),
    ]
    counts = {
        "interactive requests with bulk": (len(mixed.calls), len(alone.calls)),
        "tokens with bulk": (sum(c.tokens for c in mixed.calls), sum(c.tokens for c in alone.calls)),
    }
    if not smoke:
        counts["interactive requests with bulk, no budget"] = (len(free.calls), len(alone.calls))
    columns = ["", "requests", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "bulk prompt tokens/s", "allowed"]
    note = (
        f"bulk alone: {figures['lone_bulk_tokens_per_s']:,.0f} prompt tokens/s with the guard awake, "
        f"{figures['whole_bulk_tokens_per_s']:,.0f} in whole prompts"
    )
    return Report("Bursts and bulk, H100 / 8B", columns, rows, figures, [] if smoke else bars, counts, [note])


if __name__ == "__main__":
    main(measure, __doc__ or "")
