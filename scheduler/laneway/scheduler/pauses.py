"""Which lanes an operator has paused: kept in KV, so that it outlives schedulers and every scheduler sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import structlog

from laneway.core import subjects
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus
from laneway.runtime.kv import Key

KEY = "paused"

_log = structlog.get_logger(__name__)


class Pauses:
    def __init__(self, bus: Bus, region: str, changed: Callable[[], None]) -> None:
        self.lanes: frozenset[Lane] = frozenset()
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

    async def set(self, lane: Lane, paused: bool) -> None:
        """Idempotent. Raises a BusError."""

        def edit(data: bytes) -> bytes:
            lanes = set(_lanes(data))
            (lanes.add if paused else lanes.discard)(lane)
            return msgspec.json.encode(sorted(lanes))

        self._take(await self._key.change(edit))

    def _take(self, data: bytes) -> None:
        lanes = _lanes(data)
        if lanes != self.lanes:
            _log.info("pauses_changed", paused=sorted(lane.value for lane in lanes))
            self.lanes = lanes
            self._changed()


def _lanes(data: bytes) -> frozenset[Lane]:
    if not data:
        return frozenset()
    try:
        return frozenset(msgspec.json.decode(data, type=list[Lane]))
    except msgspec.DecodeError:
        _log.error("paused_key_unreadable")
        return frozenset()
