"""How many dead letters a region keeps, polled for its gauges. Nothing is decided by it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from laneway.runtime import metrics
from laneway.runtime.bus import BusError
from laneway.runtime.dead_letters import DeadLetterDepth, DeadLetterStore
from laneway.runtime.logging import get_logger

POLL_S = 10.0

log = get_logger("laneway.admission.dead_letters")


class DeadLetterWatch:
    def __init__(self, store: DeadLetterStore, poll_s: float = POLL_S) -> None:
        self._store = store
        self._poll_s = poll_s
        self._depth: DeadLetterDepth | None = None

    async def run(self) -> None:
        while True:
            try:
                self._depth = await self._store.depth()
            except BusError as error:
                self._depth = None
                log.warning("dead_letters_unknown", error=error.message)
            await asyncio.sleep(self._poll_s)

    @contextmanager
    def gauges(self) -> Iterator[None]:
        """Shows what was found last while open; nothing while that is unknown."""

        def letters() -> list[metrics.Sample]:
            return [({}, float(self._depth.letters))] if self._depth is not None else []

        def size() -> list[metrics.Sample]:
            return [({}, float(self._depth.size_bytes))] if self._depth is not None else []

        with (
            metrics.live_gauge("laneway_dead_letters_kept_jobs", "Dead letters that are kept.", (), letters),
            metrics.live_gauge("laneway_dead_letters_kept_bytes", "Storage of dead letters.", (), size),
        ):
            yield
