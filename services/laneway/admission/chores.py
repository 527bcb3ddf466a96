"""Short work that outlives the call which caused it: clean-up after a caller left, hints to workers.

Every task is held, its failure is logged once, and closing waits for all, a bounded time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from laneway.core.errors import LanewayError
from laneway.runtime.logging import get_logger

log = get_logger("laneway.admission.chores")

T = TypeVar("T")


class Chores:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Runs to its end whoever stops waiting for it. Who awaits the task sees its error as well."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, LanewayError):
            log.error("chore_failed", chore=task.get_name(), exc_info=error)

    async def close(self, timeout_s: float) -> None:
        """Waits for what runs, then cancels the rest."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while self._tasks and loop.time() < until_s:  # one may start another
            await asyncio.wait(set(self._tasks), timeout=until_s - loop.time())
        late = set(self._tasks)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
