"""The conformance kit through a real Triton server: the small real model behind the tensors of each dialect."""

from __future__ import annotations

import pytest

from tests.support.triton_kit import kit_report
from tools import engine_table

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]


@pytest.mark.parametrize("dialect", ["llmapi", "bls", "ids"])
async def test_the_kit_says_of_each_dialect_what_the_page_does(dialect: str):
    """The page's table is made of such a run."""
    report = await kit_report(dialect)
    assert report.failed == [], [result for result in report.results if result.case in report.failed]
    cells = {result.case: engine_table.CELLS.get(result.outcome, engine_table.REAL) for result in report.results}
    page = engine_table.PAGE.read_text(encoding="utf-8")
    assert cells == engine_table.columns_of(page)[f"triton ({dialect})"]
