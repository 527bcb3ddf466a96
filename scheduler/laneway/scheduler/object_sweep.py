"""Takes away objects that nobody refers to, long before they expire: those whose job has no record, and puts that were
never finished. What has a record stays, and expires a day after it.

Works on names alone, which say when an object was made and how long its job's record is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.objects import ObjectName
from laneway.runtime import metrics
from laneway.runtime.bus import Bus
from laneway.runtime.objects import KEPT_BEYOND_S, ListedObject, ObjectStore
from laneway.runtime.reading import subject_list

SWEEP_EVERY_S = 600.0
ORPHAN_S = 3600.0  # an object is stored before its job's record, by a minute at most
LOOKS_MAX = 1_000  # records that one sweep looks for; the next goes on behind them
CONCURRENT_MAX = 8

_log = structlog.get_logger(__name__)
_swept = metrics.counter("laneway_objects_swept_total", "Objects that nobody referred to.", ("reason",))


def verdict_on(listed: ListedObject, now_s: float) -> str | None:
    """Why an object is to go; "" where its record decides; None where it stays. Pure."""
    name = listed.name
    if now_s < name.made_s + ORPHAN_S:
        return None
    if not listed.whole:
        return "incomplete"
    if now_s >= name.until_s + KEPT_BEYOND_S:  # it should have expired by itself
        return "expired"
    # A record that was there may be gone by now: its object has a day left.
    return "" if now_s < name.until_s else None


class ObjectSweep:
    """Runs while its scheduler leads. `lists`: a connection for what would hold up others on the same one."""

    def __init__(
        self, bus: Bus, region: str, clock: Clock, *, may_act: Callable[[], bool], lists: Bus | None = None
    ) -> None:
        self._bus = bus
        self._region = region
        self._clock = clock
        self._may_act = may_act
        self._objects = ObjectStore(bus, region, clock=clock)
        self._listing = ObjectStore(lists or bus, region, clock=clock)
        self._after: tuple[str, ...] = ()  # whose turn it was last

    async def sweep(self) -> None:
        """One look at all objects. Raises a BusError; what is left comes up at the next."""
        now_s = self._clock.now()
        asked: list[ObjectName] = []
        for listed in await self._listing.listed():
            why = verdict_on(listed, now_s)
            if why:
                await self._remove(listed.name, why)
            elif why is not None:
                asked.append(listed.name)
        await self._remove_orphans(self._turn(asked))

    def _turn(self, names: list[ObjectName]) -> list[ObjectName]:
        """LOOKS_MAX of them, behind those of the last time."""
        names.sort(key=lambda name: name.tokens)
        later = [name for name in names if name.tokens > self._after]
        turn = (later + names[: len(names) - len(later)])[:LOOKS_MAX]
        self._after = turn[-1].tokens if turn else ()
        return turn

    async def _remove_orphans(self, names: list[ObjectName]) -> None:
        for first in range(0, len(names), CONCURRENT_MAX):
            some = names[first : first + CONCURRENT_MAX]
            known = await asyncio.gather(*map(self._has_record, some))
            for name, has_record in zip(some, known, strict=True):
                if not has_record:
                    await self._remove(name, "orphan")

    async def _has_record(self, name: ObjectName) -> bool:
        """By the stream's leader, and without the record's body."""
        record = subjects.record(self._region, name.tenant, name.job_id)
        return bool(await subject_list(self._bus, subjects.jobs_stream(self._region), record))

    async def _remove(self, name: ObjectName, reason: str) -> None:
        if not self._may_act():
            return
        await self._objects.remove(name)
        _swept.labels(reason=reason).inc()
        _log.info("object_swept", job_id=name.job_id, kind=name.kind, reason=reason)
