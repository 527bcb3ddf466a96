"""Interactive calls and bulk work together on the engine of a pool: whether it serves, and what one costs the other.

The pool is an entry of [[models]] in the file that LANEWAY_CONFIG names: the one that BENCH_POOL names, or the first;
without a file, a simulated one. Its worker runs in a process of its own, on real NATS and with the default policy. A
quarter of its slots is interactive callers, who ask again after a moment; bulk jobs of long prompts always wait. First
the callers are alone, then bulk is there as well. It is short and has no bars: it says what this engine does on this
host (tools/gpu_acceptance.sh). Counts have to be right: every call gets each of its tokens, once.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from report import Report, main, percentile
from worker_load import Call, Promise, WorkerApart, site_with_process

from laneway.core.lanes import Lane
from laneway.runtime.catalogue import pool_of
from laneway.runtime.settings import ModelSettings
from laneway.runtime.tokenizer import load_tokenizer

SIMULATED: dict[str, object] = {
    "engine": "simulated", "tokenizer": "bytes", "slots": 16, "context_length": 4096, "kv_tokens": 65_536,
    "engine_options": {"pace_s": 0.005, "prefill_chunk_tokens": 256},
}  # fmt: skip
OURS = ("name", "tier", "pool", "workers", "queue_length")  # keys of a pool that the bench gives itself
ROUND_S, SMOKE_ROUND_S, RUN_IN_S = 20.0, 1.0, 2.0
START_S = 1800.0  # of an engine that compiles and warms up before it serves
PROMPT_TOKENS, TOKENS, THINK_S = 200, (32, 96), 0.2
BULK_PROMPT_TOKENS, BULK_TOKENS, BULK_WAITING = 2_000, 32, 2.0  # jobs that wait, for each slot
PROMISE, BULK_PROMISE = Promise(1.0, 0.05), Promise(600.0, 10.0)
WORDS = "The quick brown fox jumps over the lazy dog while seven wizards quietly mix potions under a pale moon"


@dataclass
class Found:
    calls: list[Call] = field(default_factory=list)
    bulk: list[Call] = field(default_factory=list)
    took_s: float = 0.0


class Load:
    def __init__(self, place: WorkerApart, model: Mapping[str, object]) -> None:
        self._place = place
        self._random = random.Random(1)
        pool = pool_of(msgspec.convert({"name": "chat", **model}, ModelSettings))
        self._slots = pool.slots
        self._room = pool.context_length - max(BULK_TOKENS, TOKENS[1])
        self._ids = sorted(set(load_tokenizer(pool.tokenizer).encode(WORDS)))

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._random.choice(self._ids) for _ in range(min(tokens, self._room)))

    async def round(self, took_s: float, *, bulk: bool) -> Found:
        """Returns when all of it has ended."""
        found = Found(took_s=took_s)
        ends_s = time.monotonic() + took_s
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, self._slots // 4)):
                group.create_task(self._callers(ends_s, found))
            for _ in range(round(BULK_WAITING * self._slots) if bulk else 0):
                group.create_task(self._bulk(ends_s, found))
        return found

    async def _callers(self, ends_s: float, found: Found) -> None:
        while time.monotonic() < ends_s:
            tokens = self._random.randint(*TOKENS)
            found.calls.append(await self._place.site.run(Lane.PRIORITY, self._prompt(PROMPT_TOKENS), tokens, PROMISE))
            await asyncio.sleep(self._random.expovariate(1.0 / THINK_S))

    async def _bulk(self, ends_s: float, found: Found) -> None:
        while time.monotonic() < ends_s:
            call = await self._place.site.run(Lane.BATCH, self._prompt(BULK_PROMPT_TOKENS), BULK_TOKENS, BULK_PROMISE)
            if call.last_s <= ends_s:
                found.bulk.append(call)


def model_of(config: str, pool: str) -> dict[str, object]:
    """The entry of [[models]], without what the bench says itself."""
    if not config:
        return SIMULATED
    entries = tomllib.loads(Path(config).read_text(encoding="utf-8")).get("models", [])
    for entry in entries:
        if pool in ("", entry.get("pool") or f"{entry['name']}-{entry.get('tier', 'small')}"):
            return {key: value for key, value in entry.items() if key not in OURS}
    raise SystemExit(f"{config} has no pool {pool or 'at all'}")


async def measure(smoke: bool) -> Report:
    model = model_of(os.environ.get("LANEWAY_CONFIG", ""), os.environ.get("BENCH_POOL", ""))
    round_s = SMOKE_ROUND_S if smoke else ROUND_S
    async with site_with_process(model, start_s=START_S) as place:
        load = Load(place, model)
        await load.round(0.0 if smoke else RUN_IN_S, bulk=not smoke)
        alone = await load.round(round_s, bulk=False)
        mixed = await load.round(round_s, bulk=True)
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    for name, found in (("alone", alone), ("with bulk", mixed)):
        key, row = name.replace(" ", "_"), [name, str(len(found.calls))]
        for what in ("ttft_s", "tpot_s"):
            values = [getattr(call, what) for call in found.calls]
            for q in (50, 99):
                figures[f"{key}_{what[:4]}_p{q}_ms"] = 1000 * percentile(values, q)
            row.append(" / ".join(f"{1000 * percentile(values, q):.1f}" for q in (50, 99)))
        figures[f"{key}_tokens_per_s"] = sum(call.tokens for call in (*found.calls, *found.bulk)) / found.took_s
        figures[f"{key}_bulk_prompt_tokens_per_s"] = sum(call.prompt_tokens for call in found.bulk) / found.took_s
        row += [f"{figures[f'{key}_{what}_per_s']:,.0f}" for what in ("tokens", "bulk_prompt_tokens")]
        rows.append(row)
    every = [call for found in (alone, mixed) for call in (*found.calls, *found.bulk)]
    counts = {"tokens": (sum(call.tokens for call in every), sum(call.wanted for call in every))}
    columns = ["", "calls", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "tokens/s", "bulk prompt tokens/s"]
    return Report(f"Calls and bulk on {model['engine']}", columns, rows, figures, [], counts)


if __name__ == "__main__":
    main(measure, __doc__ or "", limit_s=START_S + 600.0)
