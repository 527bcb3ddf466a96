"""For every test run: what it left out and what runs that, and no event loop before a test makes one."""

import asyncio
from collections import Counter
from typing import Any

import pytest

# In this order: a test with several marks counts under the first.
COMMAND_OF_MARK = {
    "stack": "make stack",
    "soak": "make soak",
    "packaging": "make check",
    "drill": "make check",
    "slow": "make check",
    "fast": "make test",
}

left_out = pytest.StashKey[Counter[str]]()
LEFT_OUT = "left_out"  # under this name a process that runs a share of the tests tells the first one what it left out


def pytest_configure(config: pytest.Config) -> None:
    config.stash[left_out] = Counter()
    # looptime asks for the thread's loop around tests that have none. Without this, the first such question makes a
    # loop that nobody closes; with it, the answer is that there is none.
    asyncio.set_event_loop(None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    told: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if told is not None:
        counts = session.config.stash[left_out]
        told[LEFT_OUT] = dict(counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each process collects all tests, so that one of them knows all that is left out."""
    told = getattr(node, "workeroutput", {}).get(LEFT_OUT)
    if told:
        node.config.stash[left_out] = Counter(told)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    collected = list(items)
    result = yield
    selected = set(items)
    config.stash[left_out].update(kind_of(item) for item in collected if item not in selected)
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash[left_out]
    if counts:
        terminalreporter.section("left out")
        for kind, command in COMMAND_OF_MARK.items():
            if counts[kind]:
                terminalreporter.line(f"{counts[kind]} {kind} ({command})")


def kind_of(item: pytest.Item) -> str:
    return next((mark for mark in COMMAND_OF_MARK if item.get_closest_marker(mark)), "fast")
