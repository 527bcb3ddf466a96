"""A process starts, says that it is ready, stops when told, and its exit code says how it went."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import asyncio, sys
from laneway.core.errors import ConfigError, Unavailable
from laneway.runtime import lifecycle
from laneway.runtime.lifecycle import announce_ready, run_service
from laneway.runtime.settings import load_settings

async def serve(settings, stop):
    kind = sys.argv[1]
    if kind == "config":
        raise ConfigError("nats.url is wrong")
    if kind == "group":
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(Unavailable("no NATS server answers")))
    if kind == "bug":
        raise KeyError("x")
    announce_ready(settings, "test", "127.0.0.1:1", metrics="127.0.0.1:2")
    await stop.wait()
    print("stopping", flush=True)
    if kind in ("stuck", "overrun"):
        await asyncio.sleep(60)

async def fail(error):
    raise error

if sys.argv[1] == "overrun":
    lifecycle.CLEAN_UP_S = 0.1
sys.exit(run_service("test", load_settings(), serve))
"""


class Service:
    def __init__(self, kind: str, tmp_path: Path, **environ: str) -> None:
        self.ready_file = tmp_path / "ready.json"
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={
                "PYTHONPATH": ":".join(sys.path),
                "LANEWAY_PROCESS__READY_FILE": str(self.ready_file),
                "LANEWAY_PROCESS__LOG_FORMAT": "json",
                **environ,
            },
        )

    def line(self, event: str) -> dict[str, Any]:
        """The log line of an event, waiting for it."""
        assert self.process.stderr is not None
        for text in self.process.stderr:
            if text.startswith("{") and (line := json.loads(text))["event"] == event:
                return line
        raise AssertionError(f"no {event}")

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=20)
        return self.process.returncode, err


@pytest.fixture
def start(tmp_path):
    started: list[Service] = []

    def start_one(kind: str, **environ: str) -> Service:
        started.append(Service(kind, tmp_path, **environ))
        return started[-1]

    yield start_one
    for service in started:
        service.process.kill()
        service.process.wait(10)
        for pipe in (service.process.stdout, service.process.stderr):
            if pipe:
                pipe.close()


def test_no_module_changes_the_signals_of_who_imports_it():
    """Whoever is started from here inherits it: a program that ignores Ctrl-C from its birth never learns of it."""
    module = "laneway.workers.engines.host_main"
    probe = f"import signal; before = signal.getsignal(2); import {module}; assert signal.getsignal(2) is before"
    subprocess.run([sys.executable, "-c", probe], check=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_is_ready_and_stops_when_told(start, number):
    service = start("good")
    service.line("service_ready")
    assert json.loads(service.ready_file.read_text()) == {
        "service": "test", "address": "127.0.0.1:1", "metrics": "127.0.0.1:2", "pid": service.process.pid,
    }  # fmt: skip
    service.process.send_signal(number)
    assert service.process.stdout.readline() == "stopping\n"
    assert service.end()[0] == 0
    assert not service.ready_file.exists()


def test_a_second_signal_ends_it_at_once(start):
    service = start("stuck")
    service.line("service_ready")
    service.process.send_signal(signal.SIGTERM)
    assert service.process.stdout.readline() == "stopping\n"
    service.process.send_signal(signal.SIGTERM)
    assert service.end()[0] == 128 + signal.SIGTERM


def test_a_drain_that_never_ends_is_cut_off(start):
    service = start("overrun", LANEWAY_PROCESS__DRAIN_S="0")
    service.line("service_ready")
    service.process.send_signal(signal.SIGTERM)
    service.line("drain_overran")
    assert service.end()[0] == 1


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("config", 2, "laneway test: nats.url is wrong\n"),
        ("group", 1, "laneway test: no NATS server answers\n"),
        ("bug", 1, "laneway test: failed: KeyError: 'x'\n"),
    ],
)
def test_a_failure_is_one_clear_line_and_a_code(start, kind, code, said):
    returned, err = start(kind).end()
    assert returned == code
    assert err.endswith(said)
    assert ("service_failed" in err) == (kind == "bug")
