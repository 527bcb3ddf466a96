"""When a reader is woken: at once, or a moment later together with the next pieces, since writes are what costs.

By the time since the stream's last piece: the first and the last never wait, priority waits only where many streams
share the door (docs/policy.md, reference measurement of the token path).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from msgspec import Struct, field

from laneway.admission.streams import Stream
from laneway.core.clock import Clock
from laneway.core.lanes import Lane

HELD_TICK_S = 0.01  # how exactly held pieces leave


class HoldLimits(Struct, frozen=True):
    hold_s: Mapping[Lane, float] = field(default_factory=dict)  # least time between two pieces of a stream
    priority_streams: int = 0  # with fewer a write costs nobody anything, and priority is not held


class Flusher:
    def __init__(self, limits: HoldLimits, clock: Clock, streams: Callable[[], int]) -> None:
        self._limits = limits
        self._clock = clock
        self._streams = streams  # how many there are
        self._held: dict[Stream, float] = {}  # whose reader is woken later, and when
        self._timer: asyncio.TimerHandle | None = None

    def flush(self, stream: Stream, now_s: float) -> None:
        lane = stream.record.contract.lane
        hold_s = self._limits.hold_s.get(lane, 0.0)
        if lane is Lane.PRIORITY and self._streams() < self._limits.priority_streams:
            hold_s = 0.0
        if now_s - stream.flushed_s >= hold_s - HELD_TICK_S / 2:
            self._held.pop(stream, None)
            stream.flushed_s = now_s
            stream.flush()
        elif stream not in self._held:
            self._held[stream] = stream.flushed_s + hold_s
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(HELD_TICK_S, self._tick)

    def _tick(self) -> None:
        """One timer for all held streams: one each would cost as much as the writes that holding saves."""
        now_s = self._clock.monotonic()
        for stream in [s for s, due_s in self._held.items() if due_s <= now_s + HELD_TICK_S / 2]:
            del self._held[stream]
            stream.flushed_s = now_s
            stream.flush()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HELD_TICK_S, self._tick) if self._held else None

    def forget(self, stream: Stream) -> None:
        self._held.pop(stream, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
