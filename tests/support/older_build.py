"""The build that an upgrade begins with: a wheel of the commit named in tests/compat, in an environment of its own."""

from __future__ import annotations

import io
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from laneway.cli.stack import Child, LocalStack, StackOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]
NAMED_IN = ROOT / "tests" / "compat" / "older_build.txt"


class NoHistory(Exception):
    """The commit is not here: no repository, or a shallow clone."""


@dataclass(frozen=True)
class OlderBuild:
    commit: str
    python: Path

    def run(self, program: str, *arguments: str) -> str:
        """What a Python program prints there."""
        return _run([str(self.python), "-c", program, *arguments], self.python.parent).decode()


def named_commit() -> str:
    lines = [line for line in NAMED_IN.read_text().splitlines() if line and not line.startswith("#")]
    (commit,) = lines
    return commit


def older_build(folder: Path) -> OlderBuild:
    """Builds and installs it; nothing is fetched. Raises NoHistory."""
    commit = named_commit()
    source, dist, environment = folder / "source", folder / "dist", folder / "environment"
    with tarfile.open(fileobj=io.BytesIO(_archive(commit))) as archive:
        archive.extractall(source, filter="data")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(dist), str(source)], folder)
    (wheel,) = dist.glob("*.whl")
    _run([sys.executable, "-m", "venv", "--without-pip", str(environment)], folder)
    python = environment / "bin" / "python"
    _run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], folder)
    # What it needs comes from the environment that runs this. A folder named by a .pth file comes after site-packages,
    # and the .pth files inside it, which name the source tree, are not read.
    (own,) = environment.glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return OlderBuild(commit, python)


def _archive(commit: str) -> bytes:
    git = ["git", "-C", str(ROOT)]
    try:
        known = subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, check=False)
    except FileNotFoundError:
        raise NoHistory("there is no git here") from None
    if known.returncode != 0:
        raise NoHistory(f"commit {commit[:12]} is not here: no git history, or a shallow clone")
    return _run([*git, "archive", "--format=tar", commit], ROOT)


def _run(command: list[str], folder: Path) -> bytes:
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


class OlderStack(LocalStack):
    """Every process but NATS begins as the older build; `upgrade` starts one anew as the present one."""

    def __init__(self, options: StackOptions, older: OlderBuild) -> None:
        super().__init__(options)
        self._older = older
        self._upgrading = False

    def _child(self, name: str, command: str, environment: Mapping[str, str], over: Mapping[str, object]) -> Child:
        child = super()._child(name, command, environment, over)
        if command == "provision" and self._upgrading:
            return child
        child.arguments[0] = str(self._older.python)
        child.environment.pop("PYTHONPATH", None)
        return child

    async def provision(self) -> None:
        """Makes the region what the present build needs, as its operator does before the processes are upgraded."""
        self._upgrading = True
        await self._provision()

    async def upgrade(self, name: str) -> Child:
        self.child(name).arguments[0] = sys.executable
        return await self.restart(name)

    def build_of(self, child: Child) -> str:
        return "older" if child.arguments[0] == str(self._older.python) else "present"
