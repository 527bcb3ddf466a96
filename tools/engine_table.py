"""Rewrites the tables of docs/engines.md: what each engine offers, which engine was held to which case of the
conformance kit, and with what.

    python tools/engine_table.py simulated openvino     runs the kit on these pools of engine_table.toml
    python tools/engine_table.py trtllm.json            takes a report of `laneway engines check --json` made elsewhere
    python tools/engine_table.py triton-ids.json        the same, as `python -m tests.support.triton_kit ids` prints it
    python tools/engine_table.py fake:trtllm.json       the same, but what passed was a stand-in for the engine
    python tools/engine_table.py                        brings abilities, cases and engines up to date, and runs nothing

A column is as its engine was last run; an engine that was never run, and a case that is newer, say `not run`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from laneway.runtime.catalogue import ENGINE_CAPABILITIES, TRITON_CAPABILITIES
from laneway.workers.conformance.kit import CASES, Outcome, Result

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "engines.md"
POOLS = Path(__file__).with_suffix(".toml")
BEGIN, END = "<!-- made by tools/engine_table.py -->\n", "<!-- end -->\n"
ABILITIES_BEGIN = "<!-- abilities, made by tools/engine_table.py -->\n"
# What each ability means to who reads the page; a number is a limit.
ABILITIES = {
    "logprobs": "log probability of each token",
    "top_logprobs": "most alternatives told of a token",
    "min_p": "min-p",
    "top_k": "top-k",
    "seed": "seeds",
    "penalties": "repetition, presence and frequency penalties",
    "logit_bias": "biases of single tokens",
    "n": "most answers to a prompt",
    "min_tokens": "least length of an answer",
    "ignore_eos": "going on past the end token",
    "tools": "tool calls",
    "json_schema": "answers that keep a JSON schema (trtllm: with `guided_decoding`)",
    "regex": "answers that match a regular expression",
    "grammar": "answers that keep a grammar",
    "adapters": "LoRA adapters (trtllm: with `adapters`)",
    "cache_salt": "a prefix cache for each salt",
    "image_input": "images in prompts",
    "embed": "embeddings",
    "score": "scores",
    "strict_isolation": "keeps strict isolation: steps are known, and prompts go in slices",
    "token_ids_in": "takes token ids; else text, tokenised anew, and no run goes on from ids",
    "token_ids_out": "gives token ids; else text, of which the worker makes ids",
    "exact": "same greedy text alone, in a batch and resumed (openvino: with `exact = true`)",
    "resumable_sampling": "seeds, penalties and least lengths hold for a run that goes on from ids; "
    "where not, such a run goes on from its beginning, or ends ABORTED once a caller has seen output",
    "prefix_cache": "keeps what prompts have in common",
    "priority_inside": "what waits inside is ordered by priority",
    "abort_steps": "steps until an abort is carried out; no: not known",
    "speculation_control": "drafting can be changed while it runs",
    "kv_figures": "tells its KV; else the settings are believed, and tokens counted",
}
# Triton's models are of three kinds, each with abilities of its own.
ENGINES = dict(
    sorted(
        [
            *((name, can) for name, can in ENGINE_CAPABILITIES.items() if name != "triton"),
            *((f"triton ({dialect})", can) for dialect, can in TRITON_CAPABILITIES.items()),
        ],
        key=lambda pair: pair[0],
    )
)
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
    page = f"{before}{BEGIN}{table(columns)}{END}{rest.partition(END)[2]}"
    before, _, rest = page.partition(ABILITIES_BEGIN)
    page = f"{before}{ABILITIES_BEGIN}{abilities()}{END}{rest.partition(END)[2]}"
    PAGE.write_text(page, encoding="utf-8")
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
    engines = list(ENGINES)
    rows = [["case", "what must hold", *(f"`{engine}`" for engine in engines)], ["---"] * (2 + len(engines))]
    for case in CASES:
        cells = [columns.get(engine, {}).get(case.name, NOT_RUN) for engine in engines]
        rows.append([f"`{case.name}`", case.holds, *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def abilities() -> str:
    """Each engine against each ability, as its adapter states them."""
    rows = [["ability", "meaning", *(f"`{engine}`" for engine in ENGINES)], ["---"] * (2 + len(ENGINES))]
    for name, meaning in ABILITIES.items():
        offered = [getattr(can, name) for can in ENGINES.values()]
        rows.append([f"`{name}`", meaning, *("yes" if each is True else str(each or "no") for each in offered)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
