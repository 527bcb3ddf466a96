"""`docs/mechanisms.md`: each mechanism has tests, and they exist."""

from __future__ import annotations

import pytest

from tests.unit.test_faults import ROOT, trouble_of

PAGE = (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")][2:]


def test_every_mechanism_has_a_row_of_its_own():
    assert len(ROWS) >= 25
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_tests_of_a_mechanism_exist(row: list[str]):
    _, tests = row
    names = [name.strip("`") for name in tests.split("<br>")]
    assert names
    assert [trouble for name in names if (trouble := trouble_of(name))] == []
