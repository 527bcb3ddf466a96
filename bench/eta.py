"""Do the doors' estimates hold: the 90 % bounds of verdicts, and the times at which refused callers are told to come.

Ten minutes of traffic in three lanes run against a whole region in virtual time (tests/sim/replay): door, scheduler
and workers are the product's own, on one NATS in memory; engines are simulated steps, whose answers are as long as the
trace says and nobody is told before. A refused caller comes again exactly when it was told to, up to three times.

- bursty: made up, gamma gaps (CV 2.5), log-normal lengths, a load that swings by 40 %;
- overload: the same at 1.6 times what the pool can do, where many are refused: it is about the retries alone, since
  what is promised while a queue only grows ends by its deadlines;
- recorded: the busiest ten minutes of a chat service (azure-2023-conv), where LANEWAY_DATA_DIR names a folder that has
  traces/excerpts. Its lengths are divided by 8, since the simulated accelerator is small.

What counts as a completion, and as covered: policy/calibration.py. Time is virtual, so the machine's load changes
nothing; one seed gives one run.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from report import Bar, Report, main

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the simulated region

from laneway.core.lanes import LANES
from tests.sim.replay.traffic import Wish, bursty, recorded
from tests.sim.replay.world import replay

WORKERS, SLOTS, SEED = 2, 8, 2
SPAN_S, SMOKE_S = 600.0, 30.0
COVERED = (0.85, 0.95)
KEPT_MIN = 0.8
TRACE = Path("traces/excerpts/azure-2023-conv-10min.csv")


@dataclass(frozen=True)
class Figures:
    """Of one workload: (good, all) by what is counted."""

    name: str
    asked: int
    counts: dict[str, tuple[int, int]]


def measured(name: str, span_s: float) -> Figures:
    """One workload, in a process of its own."""
    wishes = traffic(name, span_s)
    replayed = replay(wishes, seed=SEED, workers=WORKERS, slots=SLOTS)
    counts = {"retries": replayed.retries()}
    for of in ("completion", "ttft"):
        covered = replayed.coverage(of)
        counts |= {f"{lane.value} {of}": covered.get(lane, (0, 0)) for lane in LANES}
    first = [told for told in replayed.told if not told.retry]
    counts["accepted at once"] = sum(told.accepted for told in first), len(first)
    return Figures(name, len(wishes), counts)


def traffic(name: str, span_s: float) -> list[Wish]:
    if name == "recorded":
        path = Path(os.environ["LANEWAY_DATA_DIR"]) / TRACE
        return recorded(path, seed=SEED, shrink_in=8.0, shrink_out=8.0, pace=1.0, span_s=span_s)
    return bursty(seed=SEED, per_s={"bursty": 8.0, "overload": 12.0}[name], cv=2.5, span_s=span_s)


async def measure(smoke: bool) -> Report:
    names = ["bursty", "overload"]
    if (Path(os.environ.get("LANEWAY_DATA_DIR", "")) / TRACE).is_file():
        names.append("recorded")
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        run = partial(measured, span_s=SMOKE_S if smoke else SPAN_S)
        found = await asyncio.gather(*(loop.run_in_executor(pool, run, name) for name in names))
    report = Report(
        "Bounds and retry times over ten minutes of traffic",
        ["workload", "counted", "good", "of", "share"],
        [],
        {},
        notes=["completion, ttft: within the 90 % bound; retries: accepted, of those made exactly at the stated time"],
    )
    for figures in found:
        for what, (good, of) in figures.counts.items():
            report.rows.append([figures.name, what, str(good), str(of), f"{good / of:.3f}" if of else "-"])
            if of:
                report.figures[f"{figures.name} {what}"] = good / of
        report.counts[f"{figures.name}: answered at least once"] = figures.counts["accepted at once"][1], figures.asked
        report.bars += _bars(figures)
    return report


def _bars(figures: Figures) -> list[Bar]:
    bars: list[Bar] = []
    for lane in LANES if figures.name != "overload" else ():
        covered, of = figures.counts[f"{lane.value} completion"]
        if of:
            name = f"{figures.name}, {lane.value}: completions covered"
            bars += [Bar(name, covered / of, COVERED[0], "", at_least=True), Bar(name, covered / of, COVERED[1], "")]
    accepted, of = figures.counts["retries"]
    if of:
        name = f"{figures.name}: retries accepted at the stated time"
        bars.append(Bar(name, accepted / of, KEPT_MIN, "", at_least=True))
    return bars


if __name__ == "__main__":
    main(measure, __doc__ or "", limit_s=3600.0)
