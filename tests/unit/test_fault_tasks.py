"""No task of ours is left to the garbage collector, since the loop holds only a weak reference to it; and none goes on
though it was cancelled, as one does that waits by Python 3.11's asyncio.wait_for for what comes at that very moment."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPAWNS = ("create_task", "ensure_future")


def unheld(source: str) -> list[int]:
    """Lines that make a task and drop it. A task group holds its own; everybody else must keep what is returned."""
    tree = ast.parse(source)
    groups = {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name) and ast.unparse(item.context_expr).endswith("TaskGroup()")
    }
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Attribute) and called.attr in SPAWNS:
                owner = ast.unparse(called.value)
                if owner not in groups and not owner.endswith("group"):
                    lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("asyncio.create_task(work())", [1]),
        ("asyncio.get_running_loop().create_task(work())", [1]),
        ("asyncio.ensure_future(work())", [1]),
        ("task = asyncio.create_task(work())", []),
        ("async def f():\n async with asyncio.TaskGroup() as jobs:\n  jobs.create_task(work())", []),
        ("async def f(group):\n group.create_task(work())", []),
    ],
)
def test_a_dropped_task_is_found(source: str, lines: list[int]):
    assert unheld(source) == lines


def modules() -> list[Path]:
    found = [m for root in ("services", "scheduler", "workers") for m in (ROOT / root / "laneway").rglob("*.py")]
    assert len(found) > 50
    return found


def test_every_task_has_somebody_who_holds_it():
    found = {str(m.relative_to(ROOT)): unheld(m.read_text(encoding="utf-8")) for m in modules()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_wait_swallows_a_cancellation():
    """asyncio.timeout does not: use that. A scheduler that had lost its term went on with its work for ever."""
    assert [str(m.relative_to(ROOT)) for m in modules() if "wait_for(" in m.read_text(encoding="utf-8")] == []
