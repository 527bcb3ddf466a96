"""The table at the end of the demo: promised and got, lane by lane, beside the single FIFO lane."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from laneway.cli.demo.outcome import LaneSummary, RunResult, summarise
from laneway.cli.demo.script import (
    BATCH_WITHIN_S,
    DEFERRABLE_WITHIN_S,
    PRIORITY_TPOT_S,
    PRIORITY_TTFT_S,
)
from laneway.core.lanes import LANES, Lane

PROMISES = {
    Lane.PRIORITY: f"TTFT ≤ {PRIORITY_TTFT_S:g} s, TPOT ≤ {PRIORITY_TPOT_S * 1000:g} ms",
    Lane.DEFERRABLE: f"done in {DEFERRABLE_WITHIN_S:g} s",
    Lane.BATCH: f"done in {BATCH_WITHIN_S:g} s",
}
TRY_NEXT = (
    "laneway up                                        # the same stack, yours to use",
    'laneway generate --lane priority "Why is the sky blue?"   # in a second terminal',
    'laneway submit --lane batch "Describe a lighthouse." && laneway jobs',
)
TRY_NEXT_HERE = (  # while the stack stays up
    'laneway generate --lane priority "Why is the sky blue?"   # in a second terminal',
    'laneway submit --lane batch "Describe a lighthouse." && laneway jobs',
    "laneway workers && laneway lanes",
)


def print_report(console: Console, runs: Sequence[RunResult]) -> None:
    """Fits 80 columns: three percentiles share a cell."""
    table = Table(title="Promised and got (p50/p95/p99)", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in ("lane", "run", "kept", "TTFT s", "TPOT ms", "completion s", "tokens"):
        table.add_column(name, justify="left" if name in ("lane", "run") else "right", no_wrap=True)
    summaries = [(run.name, summarise(run.outcomes)) for run in runs]
    for i, lane in enumerate(LANES):
        for name, rows in summaries:
            row = rows[i]
            table.add_row(
                lane.value,
                name,
                f"{row.in_time}/{row.sent - row.refused}",
                _three(row.ttft_s, 1.0, 1),
                _three(row.tpot_s, 1000.0, 0),
                _three(row.completion_s, 1.0, 1),
                str(row.tokens),
            )
        table.add_section()
    console.print(table)
    console.print("Promised: " + "; ".join(f"{lane.value} {PROMISES[lane]}" for lane in LANES), highlight=False)
    for run in runs:
        console.print(_totals(run, summarise(run.outcomes)), highlight=False)


def _three(values: tuple[float, float, float] | None, factor: float, digits: int) -> str:
    return "/".join(f"{v * factor:.{digits}f}" for v in values) if values else "-"


def _totals(run: RunResult, rows: Sequence[LaneSummary]) -> str:
    tokens = sum(row.tokens for row in rows)
    used = f", engines busy {100 * run.utilisation:.0f} % of the time" if run.utilisation is not None else ""
    resumed = f", {run.resumed} jobs taken over after the kill" if run.resumed else ""
    refused = sum(row.refused for row in rows)
    refusals = f", {refused} refused" if refused else ""
    sent = sum(row.sent for row in rows)
    return f"{run.name}: {sent} requests{refusals}, {tokens} tokens in {run.length_s:.0f} s{used}{resumed}"
