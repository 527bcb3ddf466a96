"""Bulk prompts beside bursts of interactive requests, under virtual time: what bench/mixed_live.py measures live,
without the noise of a machine. H100 with an 8B model, prompts in chunks of 512, the default policy."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from laneway.core.lanes import Lane
from laneway.runtime.metrics import exposition
from tests.support.budgeted import EngineYard, p99, pool_of

pytestmark = [pytest.mark.looptime, pytest.mark.slow]

PER_S, CV, SPAN_S = 20.0, 3.0, 40.0
PING_S = 2.0
PROMISE = {"ttft_target_s": 1.0, "tpot_target_s": 0.03}
GRANTED, PROTECTED = "laneway_worker_lower_granted_tokens_total", "laneway_worker_protected_seconds_total"


def shown(name: str) -> float:
    lines = [line for line in exposition().decode().splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def unique(random: Random, tokens: int) -> tuple[int, ...]:
    return tuple(random.randrange(97, 123) for _ in range(tokens))


async def beside(seed: int, *, bulk: bool, bursts: bool = True) -> tuple[float, float, float, float]:
    """99th percentile TTFT of interactive requests, bulk prompt tokens, and what the budget paid out in which time."""
    random, loop = Random(seed), asyncio.get_running_loop()
    yard = await EngineYard(pool_of()).start()
    before = shown(GRANTED), shown(PROTECTED)
    ends_s = loop.time() + SPAN_S
    if bulk:
        for _ in range(int(SPAN_S * 32)):
            yard.lower.append((Lane.BATCH, unique(random, 2000), 16, {}))
        yard.pull()
    shape = 1.0 / CV**2
    arrivals = Random(seed)  # the same with bulk and without
    while bursts and loop.time() < ends_s:
        await asyncio.sleep(arrivals.gammavariate(shape, 1.0 / (PER_S * shape)))
        tokens = arrivals.randint(32, 96)
        if yard.seats.slots_free:
            yard.submit(Lane.PRIORITY, unique(random, 200), tokens, **PROMISE)
    while loop.time() < ends_s:  # without bursts: one short request in a while keeps the guard awake
        yard.submit(Lane.PRIORITY, unique(random, 32), 1, **PROMISE)
        await asyncio.sleep(min(PING_S, ends_s - loop.time()))
    yard.lower.clear()
    computed = sum(len(call.job.task.prompt_ids) for call in yard.of(Lane.BATCH) if call.tokens_s)
    paid = shown(GRANTED) - before[0], shown(PROTECTED) - before[1]
    await yard.until(*yard.calls)
    asked = yard.of(Lane.PRIORITY)
    return p99([call.ttft_s for call in asked]) if asked else 0.0, float(computed), *paid


async def test_bursts_wait_little_longer_beside_bulk_and_bulk_gets_what_the_budget_pays_out():
    _, lone, *_ = await beside(9, bulk=True, bursts=False)
    lone_per_s = lone / SPAN_S
    ratios, computed, allowed = [], 0.0, 0.0
    for seed in range(3):
        alone_s, *_ = await beside(seed, bulk=False)
        ttft_s, tokens, granted, protected_s = await beside(seed, bulk=True)
        ratios.append(ttft_s / alone_s)
        computed += tokens
        allowed += min(lone, granted + lone_per_s * max(0.0, SPAN_S - protected_s))
    assert max(ratios) <= 1.3
    assert computed >= 0.95 * allowed
