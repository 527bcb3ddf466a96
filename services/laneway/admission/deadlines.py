"""When the deadline of a stream's job is there. The time of jobs may be corrected while it is awaited, either way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from laneway.admission.streams import Stream
from laneway.core.clock import Clock

LOOK_GAP_S = 0.001  # between two looks at a deadline


class Deadlines:
    """Owns one timer a stream. `reached` is called once for each stream that was not forgotten before."""

    def __init__(self, clock: Clock, reached: Callable[[Stream], None]) -> None:
        self._clock = clock
        self._reached = reached
        self._timers: dict[Stream, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def watch(self, stream: Stream) -> None:
        left_s = stream.record.contract.deadline_s - self._clock.now()
        timer = asyncio.get_running_loop().call_later(max(LOOK_GAP_S, left_s), self._look, stream)
        self._timers[stream] = timer

    def _look(self, stream: Stream) -> None:
        if stream.record.contract.deadline_s <= self._clock.now():
            self._reached(stream)
        else:
            self.watch(stream)

    def forget(self, stream: Stream) -> None:
        timer = self._timers.pop(stream, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
