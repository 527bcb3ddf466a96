"""Walking through a stream's messages of one filter a page at a time, those written last first, with bounded reads.

Where each subject holds one message, as with job records, a message that is written again moves to the end of the
stream, behind a walk that goes down. So a walk goes down from where the stream ended when it began, and then up through
what was written since: nothing that was there throughout is missed, and what changed meanwhile is given again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from laneway.runtime.bus import Bus
from laneway.runtime.reading import StoredMessage, next_from_leader

READERS = 8  # requests of a walk on their way at once
SEQUENCE_LAST = 2**63  # no stream comes this far
WIDEN = 4  # a range of the stream that held little is followed by one so much wider


@dataclass(frozen=True, slots=True)
class Place:
    """How far a walk has come: all of [before, up] has been given; below is to come first, then what is above."""

    before: int
    up: int

    def __str__(self) -> str:
        return f"{self.before}.{self.up}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Raises ValueError."""
        before, up = map(int, text.split("."))
        if not (0 <= before <= SEQUENCE_LAST and 0 <= up < SEQUENCE_LAST):
            raise ValueError("no stream has such a sequence")
        return cls(before, up)


class Walk:
    """Over one stream and filter."""

    def __init__(self, bus: Bus, stream: str, subject_filter: str) -> None:
        self._bus = bus
        self._stream = stream
        self._filter = subject_filter

    async def start(self) -> Place:
        info = await self._bus.api(f"STREAM.INFO.{self._stream}", {})
        last = int(info["state"]["last_seq"])
        return Place(last + 1, last)

    async def step(self, place: Place, count: int) -> tuple[list[StoredMessage], Place]:
        """At most `count` messages, and the place after them; none at the end."""
        found, before = await self._down(place.before, count)
        if found:
            return found, replace(place, before=before)
        some = await self._upwards(place.up + 1, None, count)
        return some, Place(before, some[-1].sequence if some else place.up)

    async def at_end(self, place: Place) -> bool:
        first = await next_from_leader(self._bus, self._stream, self._filter, 1)
        if first is None or first.sequence < place.before:
            return first is None
        return await next_from_leader(self._bus, self._stream, self._filter, place.up + 1) is None

    async def _down(self, before: int, count: int) -> tuple[list[StoredMessage], int]:
        """The last `count` messages before a sequence, newest first, and the sequence of the last of them."""
        found: list[StoredMessage] = []
        width = count
        crowd = 0  # from this sequence on there are more than need be read; 0: not known
        while len(found) < count and before > 1:
            low = max(1, before - width)
            if crowd and before - crowd > count:
                low = (crowd + before) // 2
            elif crowd:
                low, crowd = crowd, 0
            some = await self._between(low, before, 2 * count)
            if some is None:
                crowd = low
                continue
            found += reversed(some)
            before = low
            if len(some) < count and not crowd:
                width *= WIDEN
        if len(found) > count:
            del found[count:]
            before = found[-1].sequence
        return found, before

    async def _between(self, low: int, before: int, most: int) -> list[StoredMessage] | None:
        """The messages of [low, before) in stream order, or None where there are more than need be read."""
        part = -(-(before - low) // max(1, min(READERS, most // 16)))
        bounds = [(at, min(at + part, before)) for at in range(low, before, part)]
        each = most // len(bounds) + 1
        parts = await asyncio.gather(*(self._upwards(at, end, each) for at, end in bounds))
        # A part that is full and narrow holds all there can be.
        full = any(len(some) == each and end - at > each for some, (at, end) in zip(parts, bounds, strict=True))
        return None if full else [message for some in parts for message in some]

    async def _upwards(self, low: int, before: int | None, most: int) -> list[StoredMessage]:
        """The first messages of [low, before) in stream order."""
        found: list[StoredMessage] = []
        while len(found) < most and (before is None or low < before):
            message = await next_from_leader(self._bus, self._stream, self._filter, low)
            if message is None or (before is not None and message.sequence >= before):
                break
            found.append(message)
            low = message.sequence + 1
        return found
