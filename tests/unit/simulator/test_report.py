"""The report: one page that needs nothing else, the document with all that it shows, the plots and the table."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from laneway.core.errors import ConfigError
from laneway.core.lanes import Lane
from laneway.simulator.outcomes import End, Run
from laneway.simulator.report.figures import About, Report
from laneway.simulator.report.gathering import report_of
from laneway.simulator.report.page import page
from laneway.simulator.report.plots import plots
from laneway.simulator.report.writing import decoded, encoded, write_report
from laneway.simulator.summary import summary_table
from tests.unit.simulator.test_judge import BATCH, DEFERRABLE, TIMES, run_of

pytestmark = pytest.mark.slow  # plots are drawn


EVIL = "<script>alert('x')</script> & co"
PNG = b"\x89PNG\r\n\x1a\n"


def played(policy: str, seed: int, *, jobs: int = 8, late: int = 0, notes: tuple[str, ...] = ()) -> Run:
    """Twenty chats of which `late` miss, one that is refused, one deferrable request, and so many jobs done."""
    chats: list[dict[str, Any]] = [{"asked_s": at * 2.0, "end_s": at * 2.0 + 0.3} for at in range(20)]
    for chat in chats[:late]:
        chat["first_s"] = chat["asked_s"] + 0.9
        chat["end_s"] = chat["asked_s"] + 1.0
    refused = {"asked_s": 40.0, "end": End.REFUSED, "first_s": math.nan, "end_s": 41.0, "tokens": 0}
    later = {"ttft_s": math.inf, "tpot_s": math.inf, "deadline_s": 50.0, "end_s": 40.0 + seed / 10.0}
    work = [{"lane": BATCH, "prompt": 1000 + 50 * seed} | later] * jobs
    run = run_of([*chats, refused, {"lane": DEFERRABLE} | later, *work])
    return replace(run, policy=policy, seed=seed, trace=replace(run.trace, notes=notes))


def made(**changes: Any) -> Report:
    runs = [
        played(policy, seed, jobs=jobs, late=late)
        for policy, jobs, late in (("ours", 8, 0), ("silo", 4, 0), ("alone", 0, 0), ("greedy", 16, 3))
        for seed in (1, 2, 3)
    ]
    known: dict[str, Any] = {"loads": [0.7] * len(runs), "silo": "silo", "alone": "alone"}
    return report_of(runs, TIMES, About("A night's work", commit="abc123", machine="2 cores"), **(known | changes))


def test_rows_pool_seeds_and_refusals_have_missed():
    rows = {(row.policy, row.lane): row for row in made().lanes}
    ours = rows["ours", "priority"]
    assert (ours.seeds, ours.offered, ours.refused) == (3, 63, 3)
    assert ours.attainment == pytest.approx(20 / 21)
    assert rows["greedy", "priority"].attainment == pytest.approx(17 / 21)
    assert ours.few


def test_a_harvest_at_the_cost_of_others_does_not_count_and_its_ratio_is_paired():
    bars = {bar.policy: bar for bar in made().harvest}
    assert bars["ours"].counts
    assert bars["ours"].ratio is not None
    assert bars["ours"].ratio.low == pytest.approx(2.0), "twice the silo's at each seed, however big its jobs"
    assert bars["greedy"].counts is False
    assert bars["greedy"].ratio is not None
    assert bars["greedy"].ratio.high == 0.0
    assert bars["greedy"].why == "priority attains 81.0%, less than 95.2%"
    assert "alone" not in bars


def test_without_a_silo_nothing_is_said_of_equality():
    assert {bar.counts for bar in made(silo=None, alone=None).harvest} == {None}


def test_curves_are_shares_of_what_was_offered():
    curve = next(curve for curve in made().curves if (curve.policy, curve.measure) == ("ours", "ttft"))
    assert curve.share[-1] == pytest.approx(20 / 21)
    assert curve.promised_s == 0.5
    assert curve.share == sorted(curve.share)


def test_attainment_over_time_is_pooled_over_seeds_and_blank_where_nothing_was_asked():
    line = next(line for line in made().attainment if (line.policy, line.lane) == ("greedy", "priority"))
    assert line.at_s == [5.0, 15.0, 25.0, 35.0, 45.0]
    assert line.share == [pytest.approx(0.4), 1.0, 1.0, 1.0, 0.0]


def test_the_document_is_read_back_as_it_was():
    report = made()
    assert decoded(encoded(report)) == report


def test_the_page_shows_what_the_document_holds_and_refers_to_nothing_outside(tmp_path: Path):
    report = made()
    target = write_report(report, tmp_path / "new" / "folder")
    text = target.read_text(encoding="utf-8")
    shown = unescape(text)
    for row in report.lanes:
        assert f"<b>{100 * row.attainment:.1f} %</b>" in shown
    for bar in report.harvest:
        assert f"{bar.value:,.4g}" in shown
    for expected in (
        "A night's work",
        "abc123",
        "2 cores",
        "by hand",
        "preemptions 3",
        "chunk",
        "priority attains 81.0%",
    ):
        assert expected in shown
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\(", re.sub(r"base64,[^\"]+", "", text))
    written = {path.name for path in target.parent.iterdir()}
    pictures = {"attainment.png", "cdf-priority.png", "cdf-deferrable.png", "cdf-batch.png", "usage.png",
                "harvest.png", "cost.png"}  # fmt: skip
    assert written == pictures | {"report.html", "report.json"}
    assert text.count("data:image/png;base64,") == len(pictures)
    assert decoded((target.parent / "report.json").read_bytes()) == report


def test_names_and_notes_are_escaped():
    run = played(EVIL, 1, notes=(EVIL,))
    run.parameters[EVIL] = EVIL
    run.counts[EVIL] = 1.0
    run = replace(run, trace=replace(run.trace, name=EVIL, tenants=(EVIL,)))
    text = page(report_of([run], TIMES, About(EVIL, commit=EVIL, notes=(EVIL,))), {EVIL: (EVIL, PNG)})
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 10


def test_goodput_is_drawn_against_load_where_there_are_two():
    runs = [played("ours", 1), played("ours", 1)]
    drawn = plots(report_of(runs, TIMES, About("t"), loads=[0.5, 0.9]))
    assert "goodput" in drawn
    assert all(png.startswith(PNG) for _, png in drawn.values())


def test_only_runs_at_the_load_shown_are_plotted_over_time():
    runs = [played("ours", 1), played("ours", 1, late=20)]
    report = report_of(runs, TIMES, About("t"), loads=[0.5, 0.9], load_shown=0.9)
    assert report.attainment[0].share[0] == 0.0
    assert [row.load for row in report.fleets] == [0.5, 0.9]


def test_a_report_of_an_empty_trace_is_made(tmp_path: Path):
    assert write_report(report_of([run_of([])], TIMES, About("nothing")), tmp_path).exists()


def test_a_missing_plotting_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"laneway\[simulate\]"):
        write_report(made(), tmp_path)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(report_of([run_of([])], TIMES, About("nothing")), tmp_path / "file" / "folder")


def test_a_report_needs_runs_and_their_loads():
    with pytest.raises(ValueError, match="needs a run"):
        report_of([], TIMES, About("t"))
    with pytest.raises(ValueError, match="as many loads"):
        report_of([played("ours", 1)], TIMES, About("t"), loads=[])
    with pytest.raises(ValueError, match="has the load"):
        report_of([played("ours", 1)], TIMES, About("t"), load_shown=0.5)


def test_the_table_has_a_row_for_each_policy_and_lane_and_marks_thin_quantiles():
    console = Console(width=160, record=True, force_terminal=False)
    console.print(summary_table(made().verdicts))
    text = console.export_text()
    assert text.count(Lane.PRIORITY.value) == 4
    assert "95.2 %" in text
    assert "100.0 ms*" in text
    assert "0.7" in text


def test_a_name_is_not_markup_in_the_table():
    console = Console(width=160, record=True)
    console.print(summary_table(report_of([played("[red]x", 1)], TIMES, About("t")).verdicts))
    assert "[red]x" in console.export_text()
