"""How far the clock of NATS is from ours: parked jobs fire by the server's clock, and their times are ours."""

from __future__ import annotations

import asyncio

from laneway.runtime.bus import Bus, BusError
from laneway.runtime.logging import get_logger

POLL_S = 15.0

log = get_logger("laneway.admission.skew")


class SkewWatch:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.skew_s = 0.0  # NATS time minus ours, as last measured

    async def poll(self) -> None:
        """Raises a BusError."""
        self.skew_s = await self._bus.server_skew_s()

    async def run(self) -> None:
        """Measures until cancelled; a clock that is not answered about is taken to run as before."""
        while True:
            try:
                await self.poll()
            except BusError as error:
                log.warning("skew_unknown", error=error.message)
            await asyncio.sleep(POLL_S)
