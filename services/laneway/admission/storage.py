"""How full the queue's storage is, polled. What is not known is None, and admission refuses on it."""

from __future__ import annotations

import asyncio

from laneway.core.clock import Clock
from laneway.runtime.bus import BusError
from laneway.runtime.lanes import LaneStore
from laneway.runtime.logging import get_logger

POLLS_MISSED_MAX = 3  # then the last answer counts as unknown

log = get_logger("laneway.admission.storage")


class StorageWatch:
    def __init__(self, lanes: LaneStore, clock: Clock, poll_s: float) -> None:
        self._lanes = lanes
        self._clock = clock
        self._poll_s = poll_s
        self._used: float | None = None
        self._read_s = 0.0

    def used(self) -> float | None:
        """0 to 1, or None when it has not been read for a while."""
        if self._clock.monotonic() - self._read_s > POLLS_MISSED_MAX * self._poll_s:
            return None
        return self._used

    async def poll(self) -> None:
        """Raises a BusError."""
        used = await self._lanes.storage_used()
        self._used, self._read_s = used, self._clock.monotonic()

    async def run(self) -> None:
        while True:
            try:
                await self.poll()
            except BusError as error:
                log.warning("storage_unknown", error=error.message)
            await asyncio.sleep(self._poll_s)
