"""What is to happen at a time: a heap that somebody else's clock empties."""

import asyncio
import contextvars
import heapq
import itertools
from collections.abc import Callable
from typing import Protocol


class WallClock(Protocol):
    def now(self) -> float: ...


class Timer:
    __slots__ = ("callback", "when_s")

    def __init__(self, when_s: float, callback: Callable[[], None]) -> None:
        self.when_s = when_s
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Timers:
    """Events of one instant happen in the order in which they were asked for."""

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self.on_earlier: Callable[[], None] = lambda: None  # there is an event before what was the first

    def at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(when_s, callback)
        earlier = not self._heap or when_s < self._heap[0][0]
        heapq.heappush(self._heap, (when_s, next(self._numbers), timer))
        if earlier:
            self.on_earlier()
        return timer

    def next_s(self) -> float | None:
        """When the next event is due."""
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def run_due(self) -> int:
        """Runs what is due by the clock, and what that makes due; returns how many there were."""
        count = 0
        while (next_s := self.next_s()) is not None and next_s <= self._clock.now():
            callback = heapq.heappop(self._heap)[2].callback
            assert callback is not None
            callback()
            count += 1
        return count


class LoopClock:
    """A laneway.core.clock.Clock that goes as the running event loop's time does: virtual where that is."""

    def __init__(self, at_zero_s: float = 1_800_000_000.0) -> None:
        self._at_zero_s = at_zero_s  # wall time when the loop's is 0

    def now(self) -> float:
        return self._at_zero_s + asyncio.get_running_loop().time()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


class LoopDriver:
    """Runs a server's events on the event loop, whose time (virtual or not) runs as the server's clock does."""

    def __init__(self, timers: Timers, clock: WallClock, run_due: Callable[[], int]) -> None:
        self._timers = timers
        self._clock = clock
        self._run_due = run_due
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()  # not that of whoever asks for an event
        self._handle: asyncio.TimerHandle | None = None
        timers.on_earlier = self._arm
        self._arm()

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        next_s = self._timers.next_s()
        if next_s is not None:
            # From a turn of its own: an event must not happen in the middle of what asked for it.
            after_s = max(0.0, next_s - self._clock.now())
            self._handle = self._loop.call_later(after_s, self._run, context=self._context)

    def _run(self) -> None:
        self._handle = None
        next_s = self._timers.next_s()
        if self._run_due() or (next_s is not None and next_s > self._clock.now()):
            self._arm()
        # Else the server is paused or dead, and says when it is not.

    def close(self) -> None:
        self._timers.on_earlier = lambda: None
        if self._handle is not None:
            self._handle.cancel()
