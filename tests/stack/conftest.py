"""The composed stack for the tests of this folder, and at the end what starting it took and what its kills cost."""

from collections.abc import Iterator

import pytest

from tests.stack.composed import Composed
from tests.stack.docker import docker_engine
from tests.stack.kills import Kill, table

report = pytest.StashKey[list[str]]()
kills = pytest.StashKey[list[Kill]]()


@pytest.fixture(scope="session")
def docker() -> Iterator[None]:
    with docker_engine():
        yield


@pytest.fixture(scope="session")
def composed(docker: None, request: pytest.FixtureRequest) -> Iterator[Composed]:
    """The stack at its second start. Taken down at the end; the logs are kept if a test failed."""
    failed_before = request.session.testsfailed
    stack = Composed()
    stack.prepare()
    whole = False
    try:
        stack.start_twice()
        lines = request.config.stash.setdefault(report, [])
        lines += [f"{what:14}{took_s:6.1f} s" for what, took_s in stack.took_s.items()]
        lines.append(f"during the second start others used {stack.others_share:.0%} of the machine")
        yield stack
        whole = request.session.testsfailed == failed_before
    finally:
        if not whole:
            request.config.stash.setdefault(report, []).append(f"logs are in {stack.keep_logs()}")
        stack.down()


@pytest.fixture
def kill_report(request: pytest.FixtureRequest) -> list[Kill]:
    return request.config.stash.setdefault(kills, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(report, [])
    if found := config.stash.get(kills, []):
        lines = [*lines, "", *table(found)]
    if lines:
        terminalreporter.section("stack")
        for line in lines:
            terminalreporter.line(line)
