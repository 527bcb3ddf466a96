"""How far a replay is: one line that changes in a terminal, a line now and then elsewhere. On standard error."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from laneway.cli.replaying.fleet_watch import FleetWatch
from laneway.cli.replaying.player import Player
from laneway.simulator.outcomes import End
from laneway.simulator.trace import Trace

PLAIN_EVERY_S = 10.0
LOOK_EVERY_S = 0.25


class Progress:
    """`async with Progress(...)`: shown until the block ends."""

    def __init__(self, console: Console, what: str, player: Player, trace: Trace, watch: FleetWatch) -> None:
        self._console, self._what, self._player, self._watch = console, what, player, watch
        self._requests, self._span_s = len(trace), trace.span_s
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._showing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        self._showing = asyncio.create_task(self._show())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._showing is not None:
            self._showing.cancel()
        if self._console.is_terminal:
            self._live.stop()

    async def _show(self) -> None:
        while True:
            if self._console.is_terminal:
                self._live.update(Text(self._line()), refresh=True)
                await asyncio.sleep(LOOK_EVERY_S)
            else:
                self._console.print(self._line(), highlight=False, markup=False, soft_wrap=True)
                await asyncio.sleep(PLAIN_EVERY_S)

    def _line(self) -> str:
        notes = self._player.notes
        at_s = max(0.0, self._player.now_s())
        ends = notes.outcomes.end
        bad = sum(int((ends == end).sum()) for end in (End.REFUSED, End.EXPIRED, End.FAILED))
        return (
            f"{self._what}: {at_s:.0f} of {self._span_s:.0f} s, {notes.begun} of {self._requests} asked,"
            f" {notes.begun - notes.ended} open, {bad} refused, expired or failed; {self._watch.workers} workers"
        )
