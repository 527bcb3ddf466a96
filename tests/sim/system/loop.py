"""An event loop with virtual time, and processes in it that can be stopped or killed like those of an operating system.

Time jumps to the next timer whenever nothing is left to do. What runs belongs to the Process in whose context it was
started, with all tasks, timers and callbacks that come of it; what belongs to none always runs. Nothing here depends on
addresses in memory or on real time, so a run can be repeated exactly.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

TURNS_MAX = 20_000  # at one instant: more is a loop that never waits

_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Stuck(Exception):
    """Nothing would ever happen again, or time stands still."""


class SimTask(asyncio.Task[T]):
    """Sets of tasks have the same order in every run."""

    def __init__(self, coro: Coroutine[Any, Any, T], number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class Process:
    """A part of the program that lives and dies as one. What it does while it is stopped waits; when dead, nothing."""

    def __init__(self, name: str, loop: SimLoop) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self._loop = loop
        self._waiting: deque[asyncio.Handle] = deque()
        self._tasks: list[asyncio.Task[Any]] = []
        self.context = contextvars.copy_context()
        self.context.run(_process.set, self)

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped

    def start(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        return self._loop.create_task(work, name=name or self.name, context=self.context.copy())

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """From outside: as if something arrived here."""
        self._loop.call_soon(callback, *args, context=self.context)

    def stop(self) -> None:
        """As SIGSTOP: timers run out meanwhile."""
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        if self.alive:
            self._loop.run_later(self._waiting)

    def kill(self) -> None:
        """As SIGKILL: no clean-up runs."""
        self.alive = False

    def keep(self, handle: asyncio.Handle) -> None:
        """Also of the dead, whose tasks could not be ended without."""
        self._waiting.append(handle)

    def born(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        if len(self._tasks) > 500:
            self._tasks = [task for task in self._tasks if not task.done()]

    async def bury(self) -> None:
        """After everything: lets the tasks of a dead process end, whose clean-up must not reach anybody any more."""
        self.alive, self.stopped = True, False
        self._loop.run_later(self._waiting)
        for _ in range(20):
            left = [task for task in self._tasks if not task.done()]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=1.0)


def here() -> Process | None:
    """Whose code runs now."""
    return _process.get()


class SimLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._numbers = itertools.count(1)
        self.turns = 0
        self.faults: list[dict[str, Any]] = []  # of callbacks and tasks that nobody waits for
        self.set_exception_handler(lambda loop, fault: self.faults.append(fault))

    def time(self) -> float:
        return self._now_s

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:  # type: ignore[override]
        task: SimTask[Any] = SimTask(coro, next(self._numbers), loop=self, name=name, context=context)
        process = _process.get() if context is None else context.get(_process)
        if process is not None:
            process.born(task)
        return task

    def run_later(self, handles: deque[asyncio.Handle]) -> None:
        self._ready.extend(handles)  # type: ignore[attr-defined]  # of BaseEventLoop
        handles.clear()

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]  # of BaseEventLoop
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not ready:
            if not timers:
                raise Stuck("every task waits for ever")
            self._now_s = max(self._now_s, timers[0]._when)
            self.turns = 0
        while timers and timers[0]._when <= self._now_s:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        self.turns += 1
        if self.turns > TURNS_MAX:
            raise Stuck(f"time stands still at {self._now_s}: {[*ready][:4]}")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_process)
            if process is None or (process.alive and not process.stopped):
                handle._run()
            else:
                process.keep(handle)

    def _write_to_self(self) -> None:
        """There is no selector to wake."""

    def _process_events(self, event_list: object) -> None:
        """There are none."""


async def until(holds: Callable[[], object], every_s: float = 0.1) -> None:
    """Looks again and again: in virtual time that costs nothing but the looks."""
    while not holds():  # noqa: ASYNC110 - what is waited for is told by nobody
        await asyncio.sleep(every_s)


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs to its end on a loop of its own. Raises what ended in silence as well."""
    loop = SimLoop()
    try:
        result = loop.run_until_complete(work())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
    if loop.faults:
        raise AssertionError(f"a callback or task failed unseen: {loop.faults[0]}")
    return result
