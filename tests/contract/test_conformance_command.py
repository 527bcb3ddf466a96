"""`laneway engines check`, and the table of what was run in docs/engines.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from laneway.core.catalogue import Capabilities
from laneway.runtime.catalogue import ENGINE_CAPABILITIES
from laneway.workers.conformance.kit import CASES
from tests.contract.test_conformance import PLANTED
from tools import engine_table

POOLS = str(engine_table.POOLS)
NAMES = [case.name for case in CASES]
PAGE = engine_table.PAGE.read_text(encoding="utf-8")


def check(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it sets the logging of its process up, once for all."""
    command = [sys.executable, "-m", "laneway.cli", "engines", "check", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_sound_engine_passes_and_its_report_makes_a_column():
    result = check("--config", POOLS, "--pool", "simulated", "--json")
    assert result.returncode == 0, result.stderr
    assert [case["case"] for case in json.loads(result.stdout)["results"]] == NAMES
    engine, column = engine_table.column_of(result.stdout.encode())
    assert (engine, set(column)) == ("simulated", set(NAMES))
    assert {name for name, cell in column.items() if cell != "real"} == {"resume-sampled"}, "it is not offered"
    _, column = engine_table.column_of(result.stdout.encode(), fake=True)
    assert set(column.values()) == {"fake", "not offered"}


def test_an_engine_that_breaks_is_told_of_case_by_case(tmp_path: Path):
    config = tmp_path / "laneway.toml"
    config.write_text(
        '[[models]]\nname = "chat"\nengine = "simulated"\nengine_options = { pace_s = 0.001, fault_crash_step = 60 }\n'
    )
    result = check("--config", str(config))
    assert result.returncode == 1
    assert re.search(r"^length-exact +failed +the engine ended \(.*fault_crash_step", result.stdout, re.MULTILINE)
    assert re.search(r"^restart +passed", result.stdout, re.MULTILINE)
    assert f"of {len(NAMES)} cases failed: length-exact" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pool", "none"], "there is no pool none; known: chat-small"),
        (["--set", "nats.replicas=2"], "replicas"),
    ],
)
def test_a_wrong_pool_or_setting_ends_with_2(words: list[str], said: str):
    result = check(*words)
    assert result.returncode == 2
    assert said in result.stderr


def test_an_engine_that_does_not_start_says_what_to_do(tmp_path: Path):
    config = tmp_path / "laneway.toml"
    config.write_text('[[models]]\nname = "chat"\nengine = "simulated"\nengine_options = { profile = "nowhere" }\n')
    result = check("--config", str(config))
    assert result.returncode != 0
    assert 'profile = "nowhere": no such profile' in result.stderr


def test_the_table_of_the_page_has_every_case_and_engine():
    table = PAGE.partition(engine_table.BEGIN)[2].partition(engine_table.END)[0]
    assert table == engine_table.table(engine_table.columns_of(PAGE)), "run: python tools/engine_table.py"
    assert re.findall(r"^\| `([a-z0-9-]+)` ", table, re.MULTILINE) == NAMES
    assert set(engine_table.columns_of(PAGE)) == set(engine_table.ENGINES)
    assert {name.partition(" ")[0] for name in engine_table.ENGINES} == set(ENGINE_CAPABILITIES)


def test_the_page_has_every_ability_of_every_engine():
    assert set(engine_table.ABILITIES) == set(Capabilities.__struct_fields__)
    table = PAGE.partition(engine_table.ABILITIES_BEGIN)[2].partition(engine_table.END)[0]
    assert table == engine_table.abilities(), "run: python tools/engine_table.py"


def test_the_table_says_what_was_run_and_nothing_else():
    columns = engine_table.columns_of(PAGE)
    cells = {cell for column in columns.values() for cell in column.values()}
    assert cells <= {"real", "fake", "not offered", "not run"}, "no case that failed is left on the page"
    assert {name for name, cell in columns["simulated"].items() if cell != "real"} == {"resume-sampled"}
    assert {name for name, cell in columns["openvino"].items() if cell != "real"} == {"resume-sampled", "top-logprobs"}


def test_a_case_or_an_engine_that_is_newer_was_not_run():
    columns = {"simulated": {NAMES[0]: "real"}}
    rows = engine_table.columns_of(f"{engine_table.BEGIN}{engine_table.table(columns)}{engine_table.END}")
    assert rows["simulated"][NAMES[0]] == "real"
    assert rows["simulated"][NAMES[1]] == rows["openvino"][NAMES[0]] == "not run"


def test_the_page_counts_the_planted_defects():
    assert f"{len(PLANTED)} planted defects" in PAGE
    assert len(PLANTED) >= 15
