"""How every benchmark is called and how it speaks: a table for people, --json, --check, --smoke.

A benchmark returns rows (figures for the table) and bars (figures that must keep to a limit). `--check` exits 1
when a bar is missed and prints the figures last. `--smoke` runs a short version and checks counts only, never time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Bar:
    """A figure with the most it may be, or the least."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass
class Report:
    title: str
    columns: list[str]
    rows: list[list[str]]
    figures: dict[str, float]
    bars: list[Bar] = field(default_factory=list)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> (got, expected)
    notes: list[str] = field(default_factory=list)


def percentile(values: list[float], q: float) -> float:
    """Nearest-rank percentile, q in 0..100."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * q // 100))
    return ordered[int(rank) - 1]


def machine() -> dict[str, object]:
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
        "cpu": _cpu_name(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or "unknown"


def main(measure: Callable[[bool], Awaitable[Report]], description: str, *, limit_s: float = 600.0) -> None:
    """Parses the flags, runs `measure(smoke)` for `limit_s` at most, prints, and exits."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit 1 when a stated bar is missed")
    parser.add_argument("--smoke", action="store_true", help="a short run that checks counts only")
    options = parser.parse_args()
    before = machine()
    report = uvloop.run(_measured(measure, options.smoke, limit_s))
    if options.json:
        shown = {"title": report.title, "figures": report.figures, "bars": [asdict(b) for b in report.bars]}
        shown |= {"counts": report.counts, "machine": before, "commit": _commit()}
        print(json.dumps(shown))
    else:
        _print_table(report, before)
    failed = [name for name, (got, expected) in report.counts.items() if got != expected]
    for name in failed:
        got, expected = report.counts[name]
        print(f"wrong count: {name} is {got}, expected {expected}", file=sys.stderr)
    if options.check and not options.smoke:
        missed = [bar for bar in report.bars if not bar.met]
        for bar in report.bars:
            print(f"{'missed' if bar in missed else 'met'}: {bar.name} {bar.value:.2f} {bar.unit} (bar {bar.limit:g})")
        failed += [bar.name for bar in missed]
    sys.exit(1 if failed else 0)


async def _measured(measure: Callable[[bool], Awaitable[Report]], smoke: bool, limit_s: float) -> Report:
    async with asyncio.timeout(limit_s):
        return await measure(smoke)


def _print_table(report: Report, before: dict[str, object]) -> None:
    console = Console()
    table = Table(title=report.title)
    for i, column in enumerate(report.columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in report.rows:
        table.add_row(*row)
    console.print(table)
    for note in report.notes:
        console.print(note)
    console.print(f"{_commit()}, {before['cores']} cores, load {before['load_1m']}, {before['cpu']}")
