"""Builds the wheel, installs it alone into a fresh environment and looks at what arrived."""

import json
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORT_ROOTS = ("protos", "services", "scheduler", "workers")

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(300)]

IMPORT_EVERY_PACKAGE = """
import importlib, json, pkgutil, sys
import laneway
found = {"laneway": [laneway.__file__, list(laneway.__path__)]}
packages = [name for _, name, is_package in pkgutil.walk_packages(laneway.__path__, "laneway.") if is_package]
for name in packages:
    found[name] = [importlib.import_module(name).__file__, []]
json.dump(found, sys.stdout)
"""

CALLER = """
from typing import assert_type

from laneway.client import Client, Job, LaneSaturated, LanewayError, Lane, RetryParams, Submitted, Worker
from laneway.client import sync


async def ask(client: Client) -> list[Job]:
    async with client.generate(model="chat", prompt="Hi", lane=Lane.PRIORITY, max_tokens=8) as stream:
        async for chunk in stream:
            assert_type(chunk.text, str)
        assert_type(stream.finished.ttft_s, float | None)
    assert_type(await client.submit(model="chat", prompt="Hi", lane="batch"), Submitted)
    return [job async for job in client.list_jobs(lane=Lane.BATCH)]


def ask_at_once(client: sync.Client) -> list[Job]:
    try:
        with client.generate(model="chat", prompt="Hi", lane=Lane.PRIORITY, max_tokens=8) as stream:
            for chunk in stream:
                assert_type(chunk.text, str)
            assert_type(stream.texts(), dict[int, str])
    except LaneSaturated as error:
        assert_type(error.retry_after_s, float | None)
    assert_type(client.submit(model="chat", prompt="Hi", lane="batch"), Submitted)
    return list(client.list_jobs(lane=Lane.BATCH))


def look() -> list[Worker]:
    with sync.SchedulerClient("127.0.0.1:7071", retry_budget=RetryParams.never()) as scheduler:
        with scheduler.watch_plan() as plans:
            assert_type(next(plans).epoch, int)
        return list(scheduler.list_workers())
"""
MISUSE = """
from laneway.client.sync import Client


def ask(client: Client) -> int:
    client.submit(model="chat", max_tokens="many")
    return client.get_job("job")
"""


@dataclass(frozen=True)
class Installed:
    wheel: Path
    environment: Path

    @property
    def names(self) -> list[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.namelist()

    def run(self, *command: str) -> str:
        # Outside the source tree, so that nothing is imported from there.
        done = subprocess.run(
            [str(self.environment / "bin" / command[0]), *command[1:]],
            cwd=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("packaging")
    dist = folder / "dist"
    run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), str(ROOT))
    (wheel,) = dist.glob("*.whl")
    environment = folder / "environment"
    run_python("-m", "venv", "--without-pip", str(environment))
    python = environment / "bin" / "python"
    run_python("-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    # What Laneway needs comes from the environment that runs this test. A folder named by a .pth file comes after
    # site-packages, and the .pth files inside it, which name the source tree, are not read.
    (own,) = environment.glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(wheel, environment)


def run_python(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def files_below_portions(pattern: str) -> set[str]:
    return {
        path.relative_to(ROOT / root).as_posix()
        for root in IMPORT_ROOTS
        for path in (ROOT / root / "laneway").rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_every_package_of_every_portion_imports_from_the_wheel(installed: Installed):
    found = json.loads(installed.run("python", "-c", IMPORT_EVERY_PACKAGE))
    file, portions = found.pop("laneway")
    assert file is None
    assert len(portions) == 1
    expected = {name.removesuffix("/__init__.py").replace("/", ".") for name in files_below_portions("__init__.py")}
    assert set(found) == expected
    assert [file for file, _ in found.values() if not file.startswith(str(installed.environment))] == []


def test_the_wheel_holds_every_stub_and_proto(installed: Installed):
    for pattern in ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi", "*.proto"):
        expected = files_below_portions(pattern)
        assert expected
        assert {name for name in installed.names if Path(name).match(pattern)} == expected


def test_the_wheel_holds_every_file(installed: Installed):
    assert {name for name in installed.names if name.startswith("laneway/")} == files_below_portions("*")


def test_every_package_of_the_wheel_is_typed(installed: Installed):
    packages = {name.split("/")[1] for name in installed.names if name.startswith("laneway/") and name.count("/") > 1}
    assert packages
    assert [package for package in packages if f"laneway/{package}/py.typed" not in installed.names] == []


def test_a_strictly_typed_caller_is_clean_and_its_mistakes_are_found(installed: Installed, tmp_path: Path):
    def mypy(*programs: Path) -> tuple[int, str]:
        # Apart from our own settings, and from the source tree.
        arguments = ("--strict", "--config-file=", "--python-executable", str(installed.environment / "bin" / "python"))
        done = subprocess.run(
            [sys.executable, "-m", "mypy", *arguments, *map(str, programs)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    programs = [tmp_path / "caller.py", *(tmp_path / file.name for file in (ROOT / "examples").glob("*.py"))]
    for program in programs:
        source = ROOT / "examples" / program.name
        program.write_text(source.read_text(encoding="utf-8") if source.exists() else CALLER, encoding="utf-8")
    code, said = mypy(*programs)
    assert code == 0, said
    (tmp_path / "misuse.py").write_text(MISUSE, encoding="utf-8")
    code, said = mypy(tmp_path / "misuse.py")
    assert code == 1
    assert "[typeddict-item]" in said or "[arg-type]" in said, said
    assert "[return-value]" in said, said


def test_the_namespace_has_no_module_of_its_own_in_the_wheel(installed: Installed):
    assert [name for name in installed.names if name.startswith("laneway/") and name.count("/") == 1] == []


def test_the_wheel_brings_its_licence(installed: Installed):
    licences = {Path(name).name for name in installed.names if "/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}


def test_the_installed_command_runs(installed: Installed):
    assert "laneway" in installed.run("laneway", "--version")
    assert "generate" in installed.run("laneway", "--help")
