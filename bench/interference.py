"""What long batch prompts do to priority streams on the real engine (OpenVINO, SmolLM2-135M), and what the interference
budget and its slices do about it.

Four priority streams in a closed loop (60-token prompts, 16 to 128 tokens out), and batch jobs that always wait
(2,000-token prompts, 16 out). No two prompts are alike, so that nothing comes from the prefix cache but slices. Arms:

- priority alone, and batch alone (whole prompts, one at a time, which an engine of two cores computes fastest);
- whole prompts and no budget: four batch prompts may be in the engine at once, as an engine is used without us;
- the budget with whole prompts, and the budget with slices, which is the default.

The contract of the priority work is TPOT_FACTOR times the TPOT that it has alone on this machine (measured first, its
10th percentile, so that a disturbed minute makes no lax contract) and a fixed TTFT target: the budget is told what to
keep, and what it keeps is measured. Batch tokens are those that the engine computed (its own count) less those of
priority prompts; its share is of the rate that batch alone has.

It runs on a worker and real NATS, without a door: both would use the two cores that the engine computes on, and would
put their noise into every arm alike. Arms take turns in rounds, so that noise of the machine hits all of them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from report import Bar, Report, main, percentile
from worker_load import Call, Promise, WorkerHere, site_with_worker

from laneway.core.lanes import Lane

STREAMS, PROMPT_TOKENS = 4, 60
OUTPUT_TOKENS = (16, 128)
BATCH_PROMPT_TOKENS, BATCH_TOKENS, BATCH_WAITING = 2_000, 16, 4
ROUNDS, WARM_UP_S = 5, 12.0
TPOT_FACTOR, TTFT_TARGET_S = 2.0, 0.25
BATCH_PROMISE = Promise(600.0, 10.0)
SHARE_MIN, TTFT_RATIO_MAX, TPOT_RATIO_MAX = 0.20, 1.5, 2.0
LIMIT_S = 1200.0
MODEL: dict[str, object] = {
    "engine": "openvino", "slots": 16, "context_length": 4096, "kv_tokens": 16_384,
}  # fmt: skip
SMOKE_MODEL: dict[str, object] = {
    "engine": "simulated", "tokenizer": "bytes", "slots": 16, "context_length": 4096, "kv_tokens": 65_536,
    "engine_options": {"pace_s": 0.002, "prefill_chunk_tokens": 512},
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    name: str
    priority: bool
    batch: bool
    round_s: float  # of each round
    policy: Mapping[str, object] = field(default_factory=dict)


WHOLE = {"interference_budget": False, "slices": False}
ARMS = (
    Arm("priority alone", True, False, 14.0),
    Arm("batch alone", False, True, 6.0, WHOLE),
    Arm("whole prompts, no budget", True, True, 16.0, {**WHOLE, "lower_lane_prefills_max": 4}),
    Arm("budget, whole prompts", True, True, 20.0, {"slices": False}),
    Arm("budget, slices", True, True, 20.0),
)
ALONE, BATCH_ALONE, OURS = ARMS[0].name, ARMS[1].name, ARMS[-1].name


@dataclass
class Found:
    calls: list[Call] = field(default_factory=list)
    batch_tokens: int = 0
    batch_jobs: int = 0
    took_s: float = 0.0

    def values(self, what: str) -> list[float]:
        return [getattr(call, what) for call in self.calls]


class Load:
    """Prompts that nobody has had before, and those who ask them."""

    def __init__(self, place: WorkerHere, vocabulary: int) -> None:
        self._place = place
        self._random = random.Random(1)
        self._vocabulary = vocabulary
        self.tpot_target_s = 0.1

    def prompt(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(97, self._vocabulary) for _ in range(tokens))

    async def run(self, arm: Arm, took_s: float, found: Found) -> None:
        """One round of an arm; returns when its last job has ended."""
        place = self._place
        place.policy(**arm.policy)
        began_s, before = time.monotonic(), place.prefilled_tokens
        ends_s = began_s + took_s
        async with asyncio.TaskGroup() as group:
            if arm.priority:
                for _ in range(STREAMS):
                    group.create_task(self._stream(ends_s, found))
            batch = group.create_task(self._batch(ends_s, found)) if arm.batch else None
            await asyncio.sleep(max(0.0, ends_s - time.monotonic()))
            found.took_s += time.monotonic() - began_s
            asked = place.prefilled_tokens - before
            found.batch_tokens += asked - sum(call.prompt_tokens for call in found.calls if call.first_s >= began_s)
            if batch is not None:
                await batch
        await place.empty()

    async def _stream(self, ends_s: float, found: Found) -> None:
        promise = Promise(TTFT_TARGET_S, self.tpot_target_s)
        while time.monotonic() < ends_s:
            tokens = self._random.randint(*OUTPUT_TOKENS)
            found.calls.append(await self._place.site.run(Lane.PRIORITY, self.prompt(PROMPT_TOKENS), tokens, promise))

    async def _batch(self, ends_s: float, found: Found) -> None:
        """Some always wait; what did not begin by the end runs to its end."""

        async def one() -> None:
            while time.monotonic() < ends_s:
                await self._place.site.run(Lane.BATCH, self.prompt(BATCH_PROMPT_TOKENS), BATCH_TOKENS, BATCH_PROMISE)
                found.batch_jobs += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(BATCH_WAITING):
                group.create_task(one())


async def measure(smoke: bool) -> Report:
    arms = [Arm(arm.name, arm.priority, arm.batch, 0.8, arm.policy) for arm in ARMS] if smoke else list(ARMS)
    found = {arm.name: Found() for arm in arms}
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(site_with_worker(SMOKE_MODEL if smoke else MODEL))
        load = Load(place, 122 if smoke else 40_000)
        warm = Found()
        await load.run(arms[0], 0.5 if smoke else WARM_UP_S, warm)
        load.tpot_target_s = TPOT_FACTOR * percentile(warm.values("tpot_s"), 10)
        await load.run(arms[-1], 0.5 if smoke else WARM_UP_S, Found())  # the step fit learns what a prompt costs
        for _ in range(1 if smoke else ROUNDS):
            for arm in arms:
                await load.run(arm, arm.round_s, found[arm.name])
    return _report(found, load.tpot_target_s, smoke)


def _report(found: dict[str, Found], tpot_target_s: float, smoke: bool) -> Report:
    figures: dict[str, float] = {"tpot_target_ms": 1000 * tpot_target_s}
    rows: list[list[str]] = []
    lone = found[BATCH_ALONE].batch_tokens / found[BATCH_ALONE].took_s
    for name, each in found.items():
        key = name.replace(" ", "_").replace(",", "")
        rate = each.batch_tokens / each.took_s
        row = [name, str(len(each.calls))]
        for what in ("ttft_s", "tpot_s"):
            values = each.values(what)
            for q in (50, 99):
                if values:
                    figures[f"{key}_{what[:4]}_p{q}_ms"] = 1000 * percentile(values, q)
            row.append(" / ".join(f"{1000 * percentile(values, q):.1f}" for q in (50, 99)) if values else "")
        figures[f"{key}_batch_tokens_per_s"] = rate
        shown = name != ALONE
        rows.append([*row, f"{rate:,.0f}" if shown else "", f"{100 * rate / max(lone, 1e-9):.0f} %" if shown else ""])
    counts = {
        f"tokens of {name}": (sum(call.tokens for call in each.calls), sum(call.wanted for call in each.calls))
        for name, each in found.items()
    }
    bars: list[Bar] = []
    if not smoke:
        alone, ours = found[ALONE], found[OURS]
        figures["batch_share"] = ours.batch_tokens / ours.took_s / lone
        for what in ("ttft_s", "tpot_s"):
            ratio = percentile(ours.values(what), 99) / percentile(alone.values(what), 99)
            figures[f"{what[:4]}_p99_ratio"] = ratio
        bars = [
            Bar("batch prompt tokens against batch alone", figures["batch_share"], SHARE_MIN, "times", at_least=True),
            Bar("priority TTFT p99 against alone", figures["ttft_p99_ratio"], TTFT_RATIO_MAX, "times"),
            Bar("priority TPOT p99 against alone", figures["tpot_p99_ratio"], TPOT_RATIO_MAX, "times"),
        ]
    columns = ["", "priority jobs", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "batch prompt tokens/s", "of alone"]
    note = f"priority contract: TPOT {1000 * tpot_target_s:.1f} ms, TTFT {1000 * TTFT_TARGET_S:.0f} ms"
    return Report("Interference of batch prompts", columns, rows, figures, bars, counts, [note])


if __name__ == "__main__":
    main(measure, __doc__ or "", limit_s=LIMIT_S)
