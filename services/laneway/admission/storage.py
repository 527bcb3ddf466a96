"""How full the queue's storage is, polled. What is not known is None, and admission refuses on it."""

from __future__ import annotations

import asyncio

from laneway.core.clock import Clock
from laneway.runtime.bus import ApiError, BusError, NotPermitted
from laneway.runtime.lanes import LaneStore
from laneway.runtime.logging import get_logger
from laneway.runtime.objects import ObjectStore

POLLS_MISSED_MAX = 3  # then the last answer counts as unknown
ANSWER_S_MAX = 2.0  # is waited for, or as long as to the next poll where that is longer
AGAIN_S = 0.5  # to the next poll after one without an answer

log = get_logger("laneway.admission.storage")


class StorageWatch:
    def __init__(self, lanes: LaneStore, objects: ObjectStore, clock: Clock, poll_s: float) -> None:
        self._lanes = lanes
        self._objects = objects
        self._clock = clock
        self._poll_s = poll_s
        self._used: float | None = None
        self._objects_used: float | None = None
        self._read_s = 0.0

    def used(self) -> float | None:
        """0 to 1, or None when it has not been read for a while."""
        if self._clock.monotonic() - self._read_s > POLLS_MISSED_MAX * self._poll_s:
            return None
        return self._used

    def objects_used(self) -> float | None:
        """The same of the object store alone, against its own limit."""
        return None if self.used() is None else self._objects_used

    async def poll(self) -> None:
        """Raises a BusError."""
        used = await self._lanes.storage_used()
        self._used, self._read_s = used, self._clock.monotonic()
        try:
            self._objects_used = await self._objects.used()
        except (ApiError, NotPermitted):  # streams or rights of an older release: what needs the store hears it there
            self._objects_used = None

    async def run(self) -> None:
        while True:
            wait_s = self._poll_s
            try:
                async with asyncio.timeout(max(ANSWER_S_MAX, self._poll_s)):
                    await self.poll()
            except (BusError, TimeoutError) as error:
                log.warning("storage_unknown", error=error.message if isinstance(error, BusError) else "no answer")
                # Who was asked may have died: everything is refused until another has answered.
                wait_s = min(self._poll_s, AGAIN_S)
            await asyncio.sleep(wait_s)
