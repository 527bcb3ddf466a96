"""What the demo shows while it runs: lanes, workers, the chat's time to first token against its bound, and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from laneway.cli.demo.script import PRIORITY_TTFT_S
from laneway.client.values import LaneStatus, Worker
from laneway.core.lanes import LANES

_BARS = "▁▂▃▄▅▆▇█"
EVENTS_SHOWN = 6
PLAIN_EVERY_S = 5.0


@dataclass(slots=True)
class Board:
    """What is on show; the runs write it, the screen reads it."""

    title: str = ""
    elapsed_s: float = 0.0
    lanes: Sequence[LaneStatus] = ()
    workers: Sequence[Worker] = ()
    dead: set[str] = field(default_factory=set)  # worker names that were killed
    ttfts_s: deque[float] = field(default_factory=lambda: deque(maxlen=60))
    ended: int = 0
    accepted: int = 0
    saying: str = ""  # tail of the chat that streams now
    events: deque[str] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))
    told: int = 0  # events so far, those that are no longer kept included

    def tell(self, text: str) -> None:
        self.told += 1
        self.events.append(f"{self.elapsed_s:5.1f} s  {text}")


class Screen:
    """Draws a board: live in a terminal, as lines elsewhere."""

    def __init__(self, console: Console, board: Board) -> None:
        self._console, self.board = console, board
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=8, transient=True)
        self._plain_due_s = 0.0
        self._shown = 0  # events printed so far

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh()
        if self._console.is_terminal:
            self._live.stop()

    def refresh(self) -> None:
        """Called a few times a second; outside a terminal prints news and, now and then, a line of state."""
        if self._console.is_terminal:
            return
        new = min(self.board.told - self._shown, len(self.board.events))
        for event in list(self.board.events)[len(self.board.events) - new :]:
            self._console.print(event, highlight=False, markup=False)
        self._shown = self.board.told
        if self.board.elapsed_s >= self._plain_due_s:
            self._plain_due_s = self.board.elapsed_s + PLAIN_EVERY_S
            self._console.print(self._line(), highlight=False, markup=False)

    def _line(self) -> str:
        board = self.board
        lanes = ", ".join(f"{s.lane.value} {s.running} running {s.ready + s.parked} waiting" for s in board.lanes)
        last = f"{board.ttfts_s[-1] * 1000:.0f} ms" if board.ttfts_s else "none yet"
        return f"{board.elapsed_s:5.1f} s  {lanes or 'starting'}; last chat TTFT {last}"

    def _draw(self) -> RenderableType:
        board = self.board
        head = Text(f"{board.title}   {board.elapsed_s:4.1f} s   ended {board.ended} of {board.accepted} accepted")
        saying = Text(board.saying[-300:].replace("\n", " "), style="italic")
        return Panel(Group(head, self._lanes(), self._ttft(), saying, *map(Text, board.events)), title="Laneway")

    def _lanes(self) -> Table:
        table = Table(expand=True, box=None)
        for name in ("lane", "running", "ready", "parked", "worker", "state", "slots", "KV"):
            table.add_column(name, justify="left" if name in ("lane", "worker", "state") else "right")
        lanes = {s.lane: s for s in self.board.lanes}
        workers = list(self.board.workers)
        for i in range(max(len(LANES), len(workers))):
            lane = lanes.get(LANES[i]) if i < len(LANES) else None
            left = [lane.lane.value, str(lane.running), str(lane.ready), str(lane.parked)] if lane else [""] * 4
            right = self._worker(workers[i]) if i < len(workers) else [""] * 4
            table.add_row(*left, *right)
        return table

    def _worker(self, worker: Worker) -> list[str]:
        state = "killed" if worker.name in self.board.dead else worker.state.lower()
        kv = f"{100 * worker.kv_tokens_used / worker.kv_tokens:.0f} %" if worker.kv_tokens else ""
        return [worker.name, state, f"{worker.running}/{worker.slots}", kv]

    def _ttft(self) -> Text:
        ttfts = list(self.board.ttfts_s)
        if not ttfts:
            return Text("chat TTFT: waiting for the first token")
        top = max(PRIORITY_TTFT_S, *ttfts)
        bars = "".join(_BARS[min(7, int(8 * t / top))] for t in ttfts)
        late = sum(t > PRIORITY_TTFT_S for t in ttfts)
        text = Text(f"chat TTFT {bars} last {ttfts[-1] * 1000:.0f} ms, promised {PRIORITY_TTFT_S * 1000:.0f} ms")
        text.append(f", {late} later" if late else ", all kept", style="yellow" if late else "green")
        return text
