"""Whether this process can hear NATS at all: an echo to itself each PROBE_S.

A connection that looks open says little: a stopped server is noticed only after two missed pings, and a process that
was itself stopped notices nothing. Whoever concludes something from silence asks here first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from laneway.runtime.bus import Bus, BusError

PROBE_S = 0.5
SILENCE_S_MAX = 1.5  # without an echo for this long, nothing may be concluded from silence


class LinkWatch:
    """Echoes through the server. `on_gap` is called when the link is sound again after a gap.

    The gaps are measured on the event loop's time: they are about this process and its socket, not about leases.
    """

    def __init__(self, bus: Bus, on_gap: Callable[[], None]) -> None:
        self._bus = bus
        self._on_gap = on_gap
        self._echo_s = 0.0
        self._subscription: Subscription | None = None
        self._unregister: list[Callable[[], None]] = []
        self._cut = False  # from the loss of the connection until on_gap was called for it
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        inbox = self._bus.nc.new_inbox()

        def echoed(_: Msg) -> None:
            gap_s, self._echo_s = loop.time() - self._echo_s, loop.time()
            if gap_s > SILENCE_S_MAX:
                self._on_gap()

        self._subscription = await self._bus.listen(inbox, echoed)
        self._unregister = [self._bus.on_disconnect(self._lost), self._bus.on_reconnect(self._regained)]
        self._echo_s = loop.time()
        self._task = asyncio.create_task(self._probe(inbox), name="link-probe")

    def _lost(self) -> None:
        self._cut = True

    def _regained(self) -> None:
        """A gap, however short. The connection looks open some moments before this is called."""
        self._on_gap()
        self._cut = False

    async def _probe(self, inbox: str) -> None:
        while True:
            if self._bus.connected:
                with contextlib.suppress(BusError):
                    await self._bus.emit(inbox, b"")
            await asyncio.sleep(PROBE_S)

    def sound(self) -> bool:
        """Whether an echo came within SILENCE_S_MAX, and on_gap was called for every loss of the connection."""
        return (
            self._bus.connected and not self._cut and asyncio.get_running_loop().time() - self._echo_s <= SILENCE_S_MAX
        )

    async def close(self) -> None:
        for unregister in self._unregister:
            unregister()
        await self._bus.unsubscribe(self._subscription)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
