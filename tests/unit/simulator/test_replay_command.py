"""What `laneway replay` reads and says, without a stack."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from laneway.cli.main import app
from laneway.cli.replaying.notes import Keeping
from laneway.cli.replaying.source import read_lines
from laneway.cli.replaying.summary import COLUMNS, document, rows, sentences, summary_of, write_report
from laneway.core.errors import ConfigError
from laneway.core.lanes import LANES, Lane
from laneway.simulator.outcomes import End, Outcomes, Run, Usage
from tests.support.traces import asked, trace

KEPT_UP = Keeping(4, 0, late_p50_s=0.001, late_p99_s=0.002, late_most_s=0.003, lower_late_most_s=0.0, pulse_p99_s=0.0)
LATE = replace(KEPT_UP, late=1, late_p99_s=0.5, late_most_s=0.5)


def run_of(*ends: End, ttft_s: float = 0.1, tpot_s: float = 0.01, end_s: float = 1.0, workers: float = 2.0) -> Run:
    """Requests with a promise of 200 ms, 20 ms and 10 s, which all got the same."""
    whole = trace(*(asked(output_tokens=11, ttft_s=0.2, tpot_s=0.02, deadline_s=10.0) for _ in ends))
    outcomes = Outcomes.of_size(len(ends))
    outcomes.end[:] = ends
    outcomes.asked_s[:] = 0.0
    outcomes.first_s[:] = ttft_s
    outcomes.end_s[:] = ttft_s + 10 * tpot_s if end_s == 1.0 else end_s
    outcomes.tokens[:] = 11
    outcomes.cached_tokens[:] = 10
    lanes = np.zeros((1, len(LANES)))
    usage = Usage(5.0, np.array([workers]), np.array([0.5]), lanes, lanes, lanes, np.array([math.nan]))
    return Run("laneway, live", 1, whole, outcomes, usage)


def kept(run: Run) -> float:
    (lane,) = summary_of(run)
    return lane.kept


def test_kept_counts_over_all_that_was_asked_for_and_only_what_was_done():
    assert kept(run_of(End.DONE, End.DONE, End.REFUSED, End.LEFT)) == 0.5


def test_kept_is_what_was_within_every_promise():
    assert kept(run_of(End.DONE)) == 1.0
    assert kept(run_of(End.DONE, ttft_s=0.21)) == 0.0
    assert kept(run_of(End.DONE, tpot_s=0.021)) == 0.0
    assert kept(run_of(End.DONE, tpot_s=0.001, end_s=10.5)) == 0.0


def test_a_lane_has_its_ends_and_quantiles():
    (lane,) = summary_of(run_of(End.DONE, End.EXPIRED))
    assert (lane.lane, lane.asked, lane.ends["done"], lane.ends["expired"]) == ("priority", 2, 1, 1)
    assert (lane.ttft_p50_s, lane.tpot_p99_s) == pytest.approx((0.1, 0.01))
    assert lane.cached_share == 0.25
    assert len(rows([lane])[0]) == len(COLUMNS)


def test_a_lane_in_which_nothing_was_done_has_no_quantiles():
    (lane,) = summary_of(run_of(End.REFUSED))
    assert (lane.ttft_p50_s, lane.tpot_p50_s, lane.cached_share) == (None, None, 0.0)


def test_a_replay_that_could_not_keep_up_says_so_first_of_all():
    said = sentences(run_of(End.DONE), LATE)
    assert "DID NOT KEEP UP" in said[-1]
    assert "kept up" in sentences(run_of(End.DONE), KEPT_UP)[-1]
    assert document(run_of(End.DONE), LATE)["player"]["kept_up"] is False  # type: ignore[index]


def test_what_nobody_saw_of_the_fleet_is_none():
    assert document(run_of(End.DONE, workers=math.nan), KEPT_UP)["usage"] == {
        "every_s": 5.0, "workers": None, "busy": 0.5, "kv": None,
    }  # fmt: skip


def test_the_figures_are_left_in_a_folder_that_is_made(tmp_path: Path):
    run = run_of(End.DONE)
    write_report(run, KEPT_UP, tmp_path / "one" / "two")
    left = json.loads((tmp_path / "one" / "two" / "replay.json").read_text())
    assert left == json.loads(json.dumps(document(run, KEPT_UP)))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        write_report(run_of(End.DONE), KEPT_UP, tmp_path / "file" / "inside")


# --- files -------------------------------------------------------------------------------------------


def write(folder: Path, *lines: str) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_line_says_of_a_request_what_the_trace_needs_and_no_more(tmp_path: Path):
    found = read_lines(
        write(
            tmp_path,
            '{"arrival_s": 0.5, "prompt_tokens": 10, "output_tokens": 3}',
            "",
            '{"arrival_s": 1, "prompt_tokens": 20, "output_tokens": 4, "lane":"batch", "tenant":"a", "deadline_s": 6}',
        )
    )
    assert (found.name, len(found), found.tenants) == ("mine", 2, ("a", "default"))
    assert found.lane.tolist() == [LANES.index(Lane.PRIORITY), LANES.index(Lane.BATCH)]
    assert found.deadline_s.tolist() == [math.inf, 6.0]
    assert found.prefixes is None


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "line 1.*prompt_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "lane": "slow"}', "line 1.*lane"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "what": 1}', "line 1.*what"),
        ("no json", "line 1"),
    ],
)
def test_a_bad_line_is_named(line: str, named: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=named):
        read_lines(write(tmp_path, line))


def test_arrivals_that_decrease_are_no_trace(tmp_path: Path):
    lines = (f'{{"arrival_s": {at_s}, "prompt_tokens": 1, "output_tokens": 1}}' for at_s in (2, 1))
    with pytest.raises(ConfigError, match="decreases"):
        read_lines(write(tmp_path, *lines))


def test_tenants_without_a_token_are_named(tmp_path: Path):
    path = write(tmp_path, '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "tenant": "acme"}')
    result = CliRunner().invoke(app, ["replay", "--trace", str(path), "--tokens", str(tmp_path)])
    assert result.exit_code == 2
    assert "acme" in result.stderr


def test_a_trace_that_is_not_there_is_wrong_usage(tmp_path: Path):
    assert CliRunner().invoke(app, ["replay", "--trace", str(tmp_path / "none.jsonl")]).exit_code == 2
