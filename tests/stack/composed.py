"""The compose file's services as one project of its own: started, looked into, broken and taken down."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "stack"  # ignored by git
PROJECT, IMAGE, TENANT = "laneway-stack-test", "laneway:stack-test", "demo"
WORKERS, SLOTS = 3, 4  # of each worker; fewer places than jobs, so that some are parked
UID = 10001  # of the image
BUILD_S_MAX, UP_S_MAX, DOWN_S_MAX = 1800.0, 300.0, 120.0
POLL_S = 0.1
# The main process and not the container: `docker kill` would count as a wish, and nothing would be restarted. Each
# container's first process is docker's init, and its one child is the service.
KILL_MAIN = "kill -9 $(cat /proc/1/task/1/children)"
CPU_USED = "cat /sys/fs/cgroup/cpu.stat 2>/dev/null || cat /sys/fs/cgroup/cpuacct/cpuacct.usage"  # cgroup 2 or 1


@dataclass(frozen=True, slots=True)
class Container:
    id: str
    name: str
    service: str

    def inspect(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(output("docker", "inspect", self.id))
        return found[0]

    def kill_main_process(self) -> Callable[[], float]:
        """kill -9. Gives what waits until docker has restarted it and it is healthy: that returns the seconds."""
        before = self.inspect()["RestartCount"]
        began_s = time.monotonic()
        # 137: the container went before the shell that did it had ended.
        output("docker", "exec", self.id, "sh", "-c", KILL_MAIN, allowed=(0, 137))

        def back() -> float:
            while not self._restarted_since(before):
                assert time.monotonic() - began_s < UP_S_MAX, f"{self.name} did not come back"
                time.sleep(POLL_S)
            return time.monotonic() - began_s

        return back

    def _restarted_since(self, count: int) -> bool:
        found = self.inspect()
        return found["RestartCount"] > count and found["State"].get("Health", {}).get("Status") == "healthy"

    def cpu_s(self) -> float:
        """CPU time that it has used since it was started."""
        words = output("docker", "exec", self.id, "sh", "-c", CPU_USED).split()
        return int(words[1]) / 1e6 if words[0] == "usage_usec" else int(words[0]) / 1e9

    def log(self) -> list[dict[str, Any]]:
        """Its log lines that are JSON."""
        done = subprocess.run(["docker", "logs", self.id], capture_output=True, text=True, check=True)
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]


@dataclass(frozen=True, slots=True)
class Leader:
    container: Container
    epoch: int
    since_s: float  # Unix


class Composed:
    """The project. Times are in `took_s`, by what took them."""

    def __init__(self) -> None:
        self.took_s: dict[str, float] = {}
        self.others_share = 0.0  # of the machine's CPU time, that others used during the second start
        self.exit_codes: dict[str, int] = {}  # of containers that were told to stop
        self.secrets = FOLDER / "secrets"
        self.environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": PROJECT,
            "COMPOSE_FILE": os.pathsep.join(("docker-compose.yml", "tests/stack/compose.producer.yml")),
            "LANEWAY_IMAGE": IMAGE,
            "LANEWAY_PORT": "0",  # a free one
            "LANEWAY_SECRETS": str(self.secrets),
            "LANEWAY_SETTINGS": str(FOLDER / "laneway.toml"),
        }

    def prepare(self) -> None:
        """Secrets of this run, readable by the containers' user, and settings for so many workers."""
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(parents=True)
        output(sys.executable, "-m", "laneway.cli", "secrets", str(self.secrets), "--tenant", TENANT)
        if os.getuid() == 0:
            for path in (self.secrets, *self.secrets.rglob("*")):
                os.chown(path, UID, UID)
        else:
            self.environment |= {"LANEWAY_UID": str(os.getuid()), "LANEWAY_GID": str(os.getgid())}
        settings = (ROOT / "deploy" / "laneway.toml").read_text()
        for written, wanted in (("workers = 1", f"workers = {WORKERS}"), ("slots = 8", f"slots = {SLOTS}")):
            assert written in settings
            settings = settings.replace(written, wanted)
        (FOLDER / "laneway.toml").write_text(settings)

    def compose(self, *arguments: str, timeout_s: float = UP_S_MAX) -> str:
        return output("docker", "compose", *arguments, environment=self.environment, timeout_s=timeout_s)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self.took_s[what] = time.monotonic() - began_s

    def start_twice(self) -> None:
        """Builds, starts, stops as an operator would, and starts again on the same volume."""
        self.down()
        with self.timed("build"):
            self.compose("build", timeout_s=BUILD_S_MAX)
        with self.timed("first start"):
            self._up()
        with self.timed("stop"):
            self.compose("stop", timeout_s=DOWN_S_MAX)
        self.exit_codes = {each.name: each.inspect()["State"]["ExitCode"] for each in self.containers()}
        if any(self.exit_codes.values()):
            self.keep_logs("logs-of-first-start")
        self.compose("down", timeout_s=DOWN_S_MAX)
        cpu = MachineCpu()
        with self.timed("second start"):
            self._up()
        busy_s, all_s = cpu.used_s()
        ours_s = sum(each.cpu_s() for each in self.containers() if each.service != "provision")
        self.others_share = max(0.0, busy_s - ours_s) / all_s

    def _up(self) -> None:
        self.compose("up", "--detach", "--wait", "--wait-timeout", f"{UP_S_MAX:g}", "--scale", f"worker={WORKERS}")

    def down(self) -> None:
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5", timeout_s=DOWN_S_MAX)

    def keep_logs(self, name: str = "logs") -> Path:
        folder = FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "containers.txt").write_text(self.compose("ps", "--all"))
        for each in self.containers():
            with (folder / f"{each.name}.log").open("wb") as file:
                subprocess.run(
                    ["docker", "logs", "--timestamps", each.id], stdout=file, stderr=subprocess.STDOUT, check=False
                )
        return folder

    def containers(self, *services: str) -> list[Container]:
        """Those that exist, running or not."""
        rows = self.compose("ps", "--all", "--format", "{{.ID}} {{.Name}} {{.Service}}", *services).splitlines()
        return [Container(*row.split()) for row in rows]

    def container_of(self, worker_id: str) -> Container:
        """A worker's name begins with its host's, which docker makes of the container's id."""
        return next(each for each in self.containers("worker") if worker_id.startswith(each.id[:12]))

    def leader(self) -> Leader:
        """The scheduler that took the latest term."""
        return max(
            (
                Leader(each, line["epoch"], datetime.fromisoformat(line["timestamp"]).timestamp())
                for each in self.containers("scheduler")
                for line in each.log()
                if line.get("event") == "leadership_taken"
            ),
            key=lambda term: term.epoch,
        )

    def address(self) -> str:
        """Where the door is published on this host."""
        return self.compose("port", "admission", "7070").strip()

    def token(self, who: str = TENANT) -> str:
        return (self.secrets / "tokens" / f"{who}.token").read_text().strip()


def output(
    *command: str, environment: dict[str, str] | None = None, timeout_s: float = 60.0, allowed: tuple[int, ...] = (0,)
) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode in allowed, f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


class MachineCpu:
    """CPU time of this machine from now on."""

    def __init__(self) -> None:
        self._began = self._look()

    def used_s(self) -> tuple[float, float]:
        """What was used by anybody, and what there was."""
        (busy, all_), (busy_before, all_before) = self._look(), self._began
        per_s = os.sysconf("SC_CLK_TCK")
        return (busy - busy_before) / per_s, max(1, all_ - all_before) / per_s

    @staticmethod
    def _look() -> tuple[int, int]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
