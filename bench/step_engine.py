"""How many requests a second one core simulates, with the simulator's engine alone.

Chats come at random to one worker of the packaged H100 profile (log-normal lengths of 1,000 and 130 tokens on average,
64 places), and it is driven as the world of the simulator drives it: submitted to at each arrival, asked for events
whenever it says. Nothing else is simulated. Processor time counts, so that the load of the machine matters little.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from report import Bar, Report, main

from laneway.runtime.engine_profile import load_profile
from laneway.runtime.step_price import ProfilePrice
from laneway.simulator.engine import DONE, Engine, Work

REQUESTS, SMOKE_REQUESTS = 100_000, 500
PER_S_MIN = 20_000.0
SLOTS, BLOCK_TOKENS, MAX_TOKENS = 64, 32, 1000
PROMPT_TOKENS, PROMPT_SIGMA = 1000.0, 0.8
OUTPUT_TOKENS, OUTPUT_SIGMA = 130.0, 0.7
SHARED, SHARED_BLOCKS = 500, 16  # prompts begin with one of so many texts


@dataclass(frozen=True)
class Case:
    name: str
    per_s: float
    chunk_tokens: int = 512
    paged: bool = False
    prefixes: bool = False


CASES = (
    Case("light", 10.0),
    Case("steady", 25.0),
    Case("overloaded", 35.0),
    Case("paged", 25.0, paged=True),
    Case("chunks of 2,048", 25.0, chunk_tokens=2048),
    Case("prefix cache", 25.0, prefixes=True),
)


def arrivals(case: Case, count: int, random: Random) -> Iterator[tuple[float, Work]]:
    at_s = 0.0
    for i in range(count):
        at_s += random.expovariate(case.per_s)
        prompt, output = (
            max(1, round(random.lognormvariate(math.log(mean) - sigma * sigma / 2.0, sigma)))
            for mean, sigma in ((PROMPT_TOKENS, PROMPT_SIGMA), (OUTPUT_TOKENS, OUTPUT_SIGMA))
        )
        blocks = None
        if case.prefixes:
            text, whole = random.randrange(SHARED), prompt // BLOCK_TOKENS
            blocks = [text * SHARED_BLOCKS + j for j in range(min(whole, SHARED_BLOCKS))]
            blocks += [10**9 + i * 10**4 + j for j in range(whole - len(blocks))]
        yield at_s, Work(i, prompt, output, prompt + max(output, MAX_TOKENS), 0.0, blocks)


def run(case: Case, count: int) -> tuple[float, int, int, Engine]:
    """Seconds of processor time, answers that ended, times it was asked for events."""
    profile = load_profile("h100-8b-fp8")
    kv_tokens = profile.kv_capacity_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    engine = Engine(
        ProfilePrice(profile), slots=SLOTS, kv_tokens=kv_tokens, chunk_tokens=case.chunk_tokens,
        block_tokens=BLOCK_TOKENS, paged=case.paged, prefix_blocks=kv_tokens // BLOCK_TOKENS if case.prefixes else 0,
    )  # fmt: skip
    coming = [*arrivals(case, count, Random(1)), (math.inf, None)]
    ended = asked = 0
    begin_s = time.process_time()
    for at_s, work in coming:
        while (next_s := engine.next_s) < at_s:
            asked += 1
            for event in engine.advance(next_s):
                ended += event.kind == DONE
        if work is not None:
            engine.submit(work, at_s)
    return time.process_time() - begin_s, ended, asked, engine


async def measure(smoke: bool) -> Report:
    count = SMOKE_REQUESTS if smoke else REQUESTS
    report = Report(
        "Simulated requests a second of one core, engine alone",
        ["case", "arrivals/s", "requests/s", "us each", "asked each", "steps each", "decode batch"],
        [],
        {},
    )
    for case in CASES:
        spent_s, ended, asked, engine = run(case, count)
        per_s = count / max(spent_s, 1e-9)
        batch = (engine.decoded_tokens - count) / engine.steps
        figures = (f"{case.per_s:g}", f"{per_s:,.0f}", f"{1e6 / per_s:.1f}", f"{asked / count:.2f}")
        report.rows.append([case.name, *figures, f"{engine.steps / count:.1f}", f"{batch:.0f}"])
        report.figures[f"{case.name}_per_s"] = per_s
        report.counts[f"{case.name}: ended"] = ended, count
        report.bars.append(Bar(f"requests/s, {case.name}", per_s, PER_S_MIN, "/s", at_least=True))
    return report


if __name__ == "__main__":
    main(measure, __doc__ or "")
