"""Pulls of one priority job each that are held open at the server, so that such a job needs no bell and no round trip.

Each has a free slot of its own. Who wants that slot has the pull let go first: it is off the server before anything
else is asked for, so that no two jobs are ever claimed for one slot.
"""

from __future__ import annotations

from collections.abc import Callable

from laneway.core.clock import Clock
from laneway.runtime.puller import Delivery
from laneway.workers.sources import Source

HELD_PULL_S = 1.0  # how long the server holds a pull


class HeldPulls:
    """`heard` is called when a pull has ended; before, what it brought is offered to `offer`, which may take it."""

    def __init__(self, clock: Clock, heard: Callable[[], None], offer: Callable[[Source, Delivery], bool]) -> None:
        self._clock = clock
        self._heard = heard
        self._offer = offer
        self._open: list[Source] = []
        self.sources: frozenset[Source] = frozenset()  # whose pulls are open, or not collected yet

    @property
    def slots(self) -> int:
        """Free slots that jobs may still come for."""
        return sum(source.puller is not None and source.puller.held for source in self._open)

    def hold(self, source: Source) -> None:
        """Opens a pull. The source has no other open."""
        assert source.puller is not None
        source.held_s = self._clock.monotonic()
        self._open.append(source)
        self.sources = frozenset(self._open)
        source.puller.hold(HELD_PULL_S, self._heard, lambda delivery: self._offer(source, delivery))

    def ended(self) -> list[Source]:
        """Those to collect."""
        return [source for source in self._open if source.puller is not None and not source.puller.held]

    async def collect(self, source: Source, retry_s: float) -> list[Delivery]:
        """What a pull that ended has brought, unless that was taken. After a failure the source rests for `retry_s`:
        the next pull might end at once as well."""
        assert source.puller is not None
        deliveries = await source.puller.collect()
        self._open.remove(source)
        self.sources = frozenset(self._open)
        source.hear_trouble()
        if source.trouble:
            source.hold_from_s = self._clock.monotonic() + retry_s
        return deliveries

    def let_go(self, wanted: Source | None = None) -> None:
        """Ends one open pull: that of `wanted`, or the one that was opened first. It is to be collected then."""
        for source in self._open:
            if source.puller is not None and source.puller.held and wanted in (None, source):
                source.puller.let_go()
                return
