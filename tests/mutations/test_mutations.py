"""Each guard, taken away, makes a test fail: what docs/faults.md names as tests would notice the fault."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations.guards import GUARDS, Guard
from tests.unit.test_faults import ROWS

ROOT = Path(__file__).resolve().parents[2]
IMPORT_ROOTS = ("protos", "services", "scheduler", "workers")
REPORTS_MIN = 15
TEST_S_MAX = 30  # what waits longer for what the guard would have brought has failed
TIMEOUT_S = 60
TESTS_FAILED = 1  # of pytest; any other status says that the test could not be run

each_guard = pytest.mark.parametrize(
    "guard", GUARDS, ids=lambda guard: f"{guard.report}-{guard.what.replace(' ', '-')}"
)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source, to be changed."""
    copy = tmp_path_factory.mktemp("source")
    for root in IMPORT_ROOTS:
        shutil.copytree(ROOT / root, copy / root, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def test_there_is_a_guard_for_enough_reports():
    assert len({guard.report for guard in GUARDS}) >= REPORTS_MIN


@each_guard
def test_a_guard_stands_where_the_list_says_and_its_test_is_one_of_the_reports(guard: Guard):
    assert (ROOT / guard.path).read_text(encoding="utf-8").count(guard.old) == 1
    (row,) = (row for row in ROWS if row.number == guard.report)
    assert guard.test in row.tests


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
@each_guard
def test_without_its_guard_a_fault_is_noticed(copied: Path, guard: Guard):
    changed = copied / guard.path
    sound = changed.read_text(encoding="utf-8")
    changed.write_text(sound.replace(guard.old, guard.new), encoding="utf-8")
    try:
        ran = run_test(copied, guard.test)
    finally:
        changed.write_text(sound, encoding="utf-8")
    assert ran.returncode == TESTS_FAILED, ran.stdout + ran.stderr
    assert " failed" in ran.stdout


def run_test(source: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Runs a test of this tree against the source in another place."""
    first = os.pathsep.join(str(source / root) for root in IMPORT_ROOTS)
    environment = {**os.environ, "PYTHONPATH": first, "PYTHONDONTWRITEBYTECODE": "1"}
    options = ("-q", "-x", "--tb=line", "-p", "no:cacheprovider", "-p", "no:randomly", f"--timeout={TEST_S_MAX}")
    command = [sys.executable, "-m", "pytest", *options, test]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
