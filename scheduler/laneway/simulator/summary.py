"""Verdicts as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from laneway.simulator.judge import Verdict
from laneway.simulator.report.rows import lane_rows


def summary_table(verdicts: Iterable[Verdict]) -> Table:
    """A row for each policy, load and lane: means over seeds, counts as sums."""
    rows = lane_rows(verdicts)
    loads = any(row.load is not None for row in rows)
    table = Table(caption="* of fewer than 2,000 requests at a seed" if any(row.few for row in rows) else None)
    for name in ("policy", *(("load",) if loads else ()), "lane"):
        table.add_column(name)
    for name in ("offered", "kept", "refused", "left", "TTFT p50", "p99", "TPOT p50", "p99", "requests/s", "tokens/s"):
        table.add_column(name, justify="right")
    before = None
    for row in rows:
        if before not in (None, (row.policy, row.load)):
            table.add_section()
        before = (row.policy, row.load)
        mark = "*" if row.few else ""
        cells = [_plain(row.policy), *(["" if row.load is None else f"{row.load:g}"] if loads else []), row.lane]
        cells += [f"{row.offered:,}", f"{100.0 * row.attainment:.1f} %", f"{row.refused:,}", f"{row.left:,}"]
        cells += [_ms(row.ttft_p50_s), _ms(row.ttft_p99_s, mark), _ms(row.tpot_p50_s), _ms(row.tpot_p99_s, mark)]
        cells += [f"{row.goodput_requests_per_s:,.2f}", f"{row.goodput_tokens_per_s:,.0f}"]
        table.add_row(*cells)
    return table


def _plain(name: str) -> str:
    """Not read as rich's markup."""
    return name.replace("[", "\\[")


def _ms(value_s: float | None, mark: str = "") -> str:
    return "" if value_s is None else f"{1000.0 * value_s:,.1f} ms{mark}"
