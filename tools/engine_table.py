"""Rewrites the table of docs/engines.md: which engine was held to which case of the conformance kit, and with what.

    python tools/engine_table.py simulated openvino     runs the kit on these pools of engine_table.toml
    python tools/engine_table.py trtllm.json            takes a report of `laneway engines check --json` made elsewhere
    python tools/engine_table.py fake:trtllm.json       the same, but what passed was a stand-in for the engine
    python tools/engine_table.py                        brings cases and engines up to date, and runs nothing

A column is as its engine was last run; an engine that was never run, and a case that is newer, say `not run`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from laneway.runtime.catalogue import ENGINE_CAPABILITIES
from laneway.workers.conformance.kit import CASES, Outcome, Result

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "engines.md"
POOLS = Path(__file__).with_suffix(".toml")
BEGIN, END = "<!-- made by tools/engine_table.py -->\n", "<!-- end -->\n"
NOT_RUN, REAL, FAKE = "not run", "real", "fake"
CELLS = {Outcome.NOT_OFFERED: "not offered", Outcome.FAILED: "failed"}
FAKE_PREFIX = "fake:"

Columns = dict[str, dict[str, str]]  # engine: case: cell


class Judged(msgspec.Struct):
    """What `laneway engines check --json` prints."""

    engine: str
    results: list[Result]


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    columns = columns_of(page)
    for name in sys.argv[1:]:
        fake = name.startswith(FAKE_PREFIX)
        engine, column = column_of(report_of(name.removeprefix(FAKE_PREFIX)), fake=fake)
        columns[engine] = column
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table(columns)}{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


def report_of(name: str) -> bytes:
    """Of a file that holds one, or of a run on a pool."""
    if name.endswith(".json"):
        return Path(name).read_bytes()
    command = [
        sys.executable,
        "-m",
        "laneway.cli",
        "engines",
        "check",
        "--config",
        str(POOLS),
        "--pool",
        name,
        "--json",
    ]
    return subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout


def column_of(report: bytes, *, fake: bool = False) -> tuple[str, dict[str, str]]:
    """The engine that a report is of, and its cells."""
    judged = msgspec.json.decode(report, type=Judged)
    passed = FAKE if fake else REAL
    return judged.engine, {result.case: CELLS.get(result.outcome, passed) for result in judged.results}


def columns_of(page: str) -> Columns:
    """What the page's table says now."""
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in page.partition(BEGIN)[2].partition(END)[0].splitlines()
    ]
    if not rows:
        return {}
    heads, _, *body = rows
    return {engine: {row[0]: row[at] for row in body} for at, engine in enumerate(heads) if at > 1}


def table(columns: Columns) -> str:
    engines = sorted(ENGINE_CAPABILITIES)
    rows = [["case", "what must hold", *(f"`{engine}`" for engine in engines)], ["---"] * (2 + len(engines))]
    for case in CASES:
        cells = [columns.get(engine, {}).get(case.name, NOT_RUN) for engine in engines]
        rows.append([f"`{case.name}`", case.holds, *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
