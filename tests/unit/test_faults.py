"""`docs/faults.md`: every report has one row, and a row names tests that exist or a part that still owes them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from laneway.workers.conformance.kit import CASES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
REPORTS, SMALLER = 29, 12
NOTHING = "—"


@dataclass(frozen=True)
class Row:
    number: str
    reports: str
    kind: str
    tests: tuple[str, ...]
    open: str

    @property
    def owed_by(self) -> set[str]:
        _, _, parts = self.open.partition("Owed by: ")
        return set(filter(None, parts.split(", ")))


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[Row]:
    found = []
    for line in section(title).strip().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 5, line
        number, reports, kind, tests, still_open = cells
        names = () if tests == NOTHING else tuple(name.strip("`") for name in tests.split("<br>"))
        found.append(Row(number, reports, kind, names, still_open))
    return found


ROWS = rows("Reports") + rows("Smaller findings")
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)


@cache
def functions(path: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a module and the methods of its classes, as pytest names them."""
    found = {}
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        within, members = (f"{node.name}::", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
        for member in members:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                found[within + member.name] = member
    return found


def trouble_of(name: str) -> str:
    """What is wrong with the name of a test, perhaps with a case of the conformance kit; empty if it is one."""
    path, _, function = name.partition("::")
    function, _, case = function.removesuffix("]").partition("[")
    if case and case not in {known.name for known in CASES}:
        return f"the conformance kit has no case {case}"
    if not re.fullmatch(r"tests/(\w+/)+test_\w+\.py", path) or not (ROOT / path).is_file():
        return f"{path} is no module of tests"
    test = functions(path).get(function)
    if test is None or not test.name.startswith("test_"):
        return f"{path} has no test {function}"
    if any("skip" in mark or "xfail" in mark for mark in map(ast.unparse, test.decorator_list)):
        return f"{function} is switched off"
    return ""


def test_every_report_has_one_row():
    assert [row.number for row in rows("Reports")] == [str(n) for n in range(1, REPORTS + 1)]
    assert [row.number for row in rows("Smaller findings")] == [f"S{n}" for n in range(1, SMALLER + 1)]


@each_row
def test_a_row_says_whose_report_it_is_and_of_what_kind(row: Row):
    names = row.reports.split(", ")
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+( \(PR\))?", name) for name in names), row.reports
    assert len(set(names)) == len(names)
    assert len(row.kind) > 20


@each_row
def test_the_tests_of_a_row_exist(row: Row):
    assert [trouble for name in row.tests if (trouble := trouble_of(name))] == []
    assert len(set(row.tests)) == len(row.tests)


@each_row
def test_a_row_names_tests_or_who_owes_them_and_says_what_is_missing(row: Row):
    parts = set(re.findall(r"^- ([a-z ]+):", section("Parts that owe"), re.MULTILINE))
    assert row.owed_by <= parts
    if not row.tests:
        assert row.owed_by
    elif row.open != NOTHING:
        assert row.open.startswith("partly: ")
        assert row.owed_by


def test_every_part_of_the_list_owes_something():
    listed = re.findall(r"^- ([a-z ]+):", section("Parts that owe"), re.MULTILINE)
    assert set(listed) == set().union(*(row.owed_by for row in ROWS))
    assert len(set(listed)) == len(listed) == section("Parts that owe").count("\n- ")


@pytest.mark.parametrize(
    ("name", "trouble"),
    [
        ("tests/unit/test_faults.py::test_every_report_has_one_row", ""),
        ("tests/unit/test_faults.py::test_nothing_of_this_name", "has no test"),
        ("tests/unit/test_faults.py::trouble_of", "has no test"),
        ("tests/unit/test_faults.py", "has no test"),
        ("tests/unit/test_gone.py::test_x", "no module of tests"),
        ("tests/contract/test_engines.py::EngineContract::test_the_kit", ""),
        ("tests/contract/test_engines.py::EngineContract::test_the_kit[abort-200]", ""),
        ("tests/contract/test_engines.py::EngineContract::test_the_kit[abort-some]", "no case"),
        ("tests/contract/test_engines.py::test_the_kit", "has no test"),
    ],
)
def test_a_name_that_is_no_test_is_found(name: str, trouble: str):
    found = trouble_of(name)
    assert (trouble in found) if trouble else not found
