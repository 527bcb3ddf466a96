"""`laneway simulate` as people type it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from laneway.cli.main import app

LINES = [
    {"arrival_s": 0.05 * n, "prompt_tokens": 400, "output_tokens": 40, "ttft_s": 0.5, "tpot_s": 0.03} for n in range(60)
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "made-up.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return str(path)


def simulate(trace: str, *arguments: str) -> Result:
    return command("--trace", trace, *arguments)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_policies_are_played_beside_each_other_on_one_trace(trace: str):
    shown = simulate(trace, "--policies", "laneway,fifo", "--workers", "1", "--batch", "5", "--json")
    assert shown.exit_code == 0, shown.output
    laneway, fifo = json.loads(shown.stdout)
    assert [laneway["policy"], fifo["policy"]] == ["laneway", "fifo"]
    for run in (laneway, fifo):
        assert {lane["lane"]: lane["ends"]["done"] for lane in run["lanes"]} == {"priority": 60, "batch": 5}
        assert sum(run["usage"]["device_s"]) > 0.0
    table = simulate(trace, "--policies", "strict", "--workers", "1")
    assert table.exit_code == 0
    assert "KEPT" in table.stdout
    assert "engines busy" in table.stderr


def test_a_recorded_trace_is_known_by_its_head_and_promised_what_is_said(tmp_path: Path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    (run,) = json.loads(simulate(str(path), "--policies", "laneway", "--ttft", "0.0011", "--json").stdout)
    (lane,) = run["lanes"]
    assert (lane["lane"], lane["asked"], lane["kept"]) == ("priority", 2, 0.0), (
        "nobody has a token within a millisecond"
    )
    (run,) = json.loads(simulate(str(path), "--policies", "laneway", "--ttft", "5", "--json").stdout)
    assert run["lanes"][0]["kept"] == 1.0


def test_prompts_that_share_blocks_of_any_size_meet_them_in_the_cache(tmp_path: Path):
    """Recorded blocks have 16, 64 or 512 tokens, and engines have their own."""
    path = tmp_path / "shared.jsonl"
    blocks = list(range(100, 125))  # of 16 tokens: all of the prompt
    path.write_text("".join(json.dumps(line | {"blocks": blocks}) + "\n" for line in LINES))
    (run,) = json.loads(simulate(str(path), "--policies", "laneway", "--workers", "1", "--json").stdout)
    assert run["lanes"][0]["cached_share"] > 0.85


def test_a_scenario_is_played_by_its_name_and_made_up_where_nothing_is_recorded():
    (run,) = json.loads(command("--workload", "chat", "--span", "10", "--policies", "strict", "--json").stdout)
    assert run["trace"] == "chat"
    assert any("made up" in note for note in run["notes"])
    assert run["lanes"][0]["asked"] > 50
    unknown = command("--workload", "lottery")
    assert (unknown.exit_code, "'lottery' is no workload" in unknown.output) == (2, True)


def test_either_a_trace_or_a_scenario_is_to_be_named(trace: str):
    for arguments in ((), ("--trace", trace, "--workload", "chat")):
        shown = command(*arguments)
        assert (shown.exit_code, "either --trace or --workload" in shown.output) == (2, True)


def test_the_fewest_workers_are_found_or_said_to_be_too_few(trace: str, tmp_path: Path):
    found = json.loads(
        simulate(trace, "--policies", "fifo", "--find-workers", "0.99", "--workers", "4", "--json").stdout
    )
    assert [(each["policy"], each["workers"]) for each in found] == [("fifo", 1)]
    hasty = tmp_path / "hasty.jsonl"
    hasty.write_text(json.dumps(LINES[0] | {"ttft_s": 0.001}) + "\n")
    hopeless = simulate(str(hasty), "--policies", "fifo", "--find-workers", "0.99", "--workers", "2")
    assert "more than 2" in hopeless.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--policies", "lottery"), "there is no 'lottery'"),
        (("--policies", ","), "there is no"),
        (("--profile", "abacus"), "abacus"),
        (("--workers", "0"), "--workers"),
    ],
)
def test_what_cannot_be_played_is_said_in_a_line_and_names_the_option(
    trace: str, arguments: tuple[str, ...], says: str
):
    shown = simulate(trace, *arguments)
    assert shown.exit_code == 2
    assert says in shown.output
    assert "Traceback" not in shown.output


def test_a_file_of_no_known_format_is_named_with_its_line(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("buy milk\n")
    shown = simulate(str(path))
    assert shown.exit_code == 2
    assert "notes.txt, line 1" in shown.output


@pytest.mark.parametrize("policy", ["laneway", "fifo"])
def test_a_request_that_fits_no_engine_is_refused(tmp_path: Path, policy: str):
    path = tmp_path / "huge.jsonl"
    path.write_text(json.dumps({"arrival_s": 0.0, "prompt_tokens": 5_000_000, "output_tokens": 1}) + "\n")
    (run,) = json.loads(simulate(str(path), "--policies", policy, "--json").stdout)
    assert run["lanes"][0]["ends"]["refused"] == 1
