"""The compose files are what docker compose can read, with GPUs too, and what they need is there. Needs no engine."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.stack.composed import ROOT

pytestmark = pytest.mark.stack

GPU_SERVICES = {"cpu": {"worker"}, "trtllm": {"worker-trtllm"}, "triton": {"triton", "worker-triton"}}
COMMON = {"nats", "provision", "admission", "scheduler", "routing"}


@pytest.fixture(autouse=True)
def _has_compose(docker: None) -> None:
    """The plugin comes with the engine."""


def config(*files: str, profile: str = "") -> dict[str, Any]:
    command = ["docker", "compose", *(word for file in files for word in ("-f", file)), "--profile", profile]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LANEWAY_", "COMPOSE_"))}
    done = subprocess.run(
        [*command, "config", "--format", "json"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "compose warns of what it ignores"
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_the_compose_file_runs_every_service_and_two_schedulers():
    services = config("docker-compose.yml")["services"]
    assert set(services) == {*COMMON, "worker"}
    assert services["scheduler"]["deploy"]["replicas"] == 2


@pytest.mark.parametrize("profile", GPU_SERVICES)
def test_with_gpus_the_workers_of_the_profile_take_the_place_of_the_cpu_worker(profile: str):
    services = config("docker-compose.yml", "compose.gpu.yml", profile=profile)["services"]
    assert set(services) == COMMON | GPU_SERVICES[profile]
    on_gpus = {
        name
        for name, service in services.items()
        if "devices" in service.get("deploy", {}).get("resources", {}).get("reservations", {})
    }
    assert on_gpus == GPU_SERVICES[profile] & {"worker-trtllm", "triton"}


def test_the_image_is_made_from_what_docker_is_given():
    given = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    copied = set[str]()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if match := re.fullmatch(r"COPY (?!--from)(.*) \S+", line):
            copied |= set(match[1].split())
    assert copied <= given
    assert [name for name in copied if not Path(ROOT, name).exists()] == []
