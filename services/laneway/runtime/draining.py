"""Whether this region keeps new work out: an operator's word, kept in the region's KV so that it outlives processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from laneway.core import subjects
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.kv import Key

KEY = "draining"
REFRESH_S = 15.0  # between looks at what a watch may have missed
_YES, _NO = b"true", b"false"

_log = structlog.get_logger(__name__)


class Draining:
    def __init__(self, bus: Bus, region: str, changed: Callable[[], None]) -> None:
        self.on = False
        self._key = Key(bus, subjects.plan_bucket(region), KEY)
        self._changed = changed

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        async with self._key.watch(self._take):
            await self.refresh()
            yield

    async def refresh(self) -> None:
        """For watches that missed a change. Raises a BusError."""
        self._take((await self._key.read()).data)

    async def keep_fresh(self) -> None:
        """Looks at intervals until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
            except BusError as error:
                _log.warning("region_draining_unknown", error=error.message)

    async def set(self, draining: bool) -> None:
        """Idempotent. Raises a BusError."""
        self._take(await self._key.change(lambda _: _YES if draining else _NO))

    def _take(self, data: bytes) -> None:
        on = data == _YES
        if on != self.on:
            _log.info("region_draining_changed", draining=on)
            self.on = on
            self._changed()
