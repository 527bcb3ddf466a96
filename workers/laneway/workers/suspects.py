"""Jobs whose earlier attempts failed: the next one has the engine to itself.

An engine that dies takes every sequence with it, so a job that kills engines would bring innocent ones to their last
strike. A suspect therefore waits until nothing else runs, and nothing starts beside it. It does not wait for long,
since nothing else may start meanwhile: where it finds no gap it is given back, to try again later or elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAIT_S_MAX = 5.0


class Suspects:
    """At most one suspect at a time has, or waits for, the engine."""

    def __init__(self, others: Callable[[object], int], wait_s_max: float = WAIT_S_MAX) -> None:
        self._others = others  # how many runs there are beside this one
        self._wait_s_max = wait_s_max
        self._holder: object | None = None
        self._changed = asyncio.Event()

    @property
    def any(self) -> bool:
        """Whether nothing else may start."""
        return self._holder is not None

    async def alone(self, run: object) -> bool:
        """Returns True once the run is alone; False when another suspect came first, or others run on for too long."""
        if self._holder is not None and self._holder is not run:
            return False
        self._holder = run
        try:
            async with asyncio.timeout(self._wait_s_max):
                while self._others(run):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._holder = None
            return False
        return True

    def run_left(self, run: object) -> None:
        """A run, suspect or not, has left."""
        if self._holder is run:
            self._holder = None
        self._changed.set()
