"""Plays a trace: each request at its time, turns of a session after each other, with a bound on what is open.

Decides only when which request begins, and holds what is open; what a request does is in `asking.py`. Time is the event
loop's. At most so many priority requests are open at a time, and as many callers of the other lanes who ask or come
again, and as many who follow a job; the rest waits as numbers, and not as tasks. Where there is no room for a priority
request it begins late, which is noted: the player leaves none out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

from laneway.cli.replaying.asking import Asking, Door, Manner, Pending
from laneway.cli.replaying.notes import PRIORITY, Notes
from laneway.cli.replaying.pacing import Due
from laneway.cli.replaying.prompts import Prompts
from laneway.core.fleet import StepTimes
from laneway.simulator.trace import Trace

LEAD_S = 0.5  # a good time before a trace begins: the first prompt is made
PULSE_S = 0.05
CALLS = 1000


class Player:
    """One pass over a trace. `doors`: one for each tenant, or one for all of them."""

    def __init__(
        self,
        trace: Trace,
        prompts: Prompts,
        doors: Sequence[Door],
        manner: Manner,
        *,
        calls: int = CALLS,
        times: StepTimes | None = None,
    ) -> None:
        self.notes = Notes(trace, self._on_end, times)
        self.began_s = 0.0
        self.stopped = False
        self._trace, self._prompts, self._doors, self._manner = trace, prompts, doors, manner
        self._streams, self._asks, self._follows = (asyncio.Semaphore(calls) for _ in range(3))
        self._due = Due(trace)
        self._due_changed = asyncio.Event()
        self._unasked: deque[int] = deque()  # requests of the other lanes that nobody has asked yet
        self._pending: deque[Pending] = deque()  # submitted jobs that nobody follows yet
        self._playing: asyncio.Task[None] | None = None

    async def play(self, begin_s: float) -> None:
        """The trace begins at `begin_s` on the loop's clock. Returns when every request has ended, or after stop()."""
        self.began_s = begin_s
        self._playing = asyncio.create_task(self._play())
        try:
            await self._playing
        except asyncio.CancelledError:
            if not self.stopped:
                raise

    def stop(self) -> None:
        """Ends it early: calls are cancelled, and what has not ended stays OPEN in the outcomes."""
        self.stopped = True
        if self._playing is not None:
            self._playing.cancel()

    def now_s(self) -> float:
        """Of the trace; negative before its begin."""
        return asyncio.get_running_loop().time() - self.began_s

    async def _play(self) -> None:
        asking = Asking(self._trace, self._manner, self.notes, self.began_s)
        async with asyncio.TaskGroup() as group:
            pulse = group.create_task(self._pulse())
            async with asyncio.TaskGroup() as requests:
                for _ in range(len(self._trace)):
                    due_s, request = await self._next()
                    self.notes.begins(request, due_s)
                    if self._trace.lane[request] == PRIORITY:
                        await self._streams.acquire()
                        requests.create_task(self._stream(asking, request))
                    else:
                        self._unasked.append(request)
                        if not self._asks.locked():
                            requests.create_task(self._submit(asking, requests))
            pulse.cancel()

    async def _next(self) -> tuple[float, int]:
        """The next request, once it is due."""
        while True:
            soonest = self._due.soonest()
            self._due_changed.clear()
            wait_s = None
            if soonest is not None:
                due_s, request = soonest
                self._prompts.text(request)  # at hand when its time comes
                wait_s = due_s - self.now_s()
                if wait_s <= 0.0:
                    return self._due.take()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._due_changed.wait()

    async def _stream(self, asking: Asking, request: int) -> None:
        """Has a place among the streams, and gives it back."""
        try:
            await asking.stream(self._door(request), request, self._prompts.text(request))
        finally:
            self._streams.release()

    async def _submit(self, asking: Asking, group: asyncio.TaskGroup) -> None:
        """Asks one request after the other, until none waits."""
        async with self._asks:
            while self._unasked:
                request = self._unasked.popleft()
                pending = await asking.submit(self._door(request), request, self._prompts.text(request))
                if pending is not None:
                    self._pending.append(pending)
                    if not self._follows.locked():
                        group.create_task(self._follow(asking))

    async def _follow(self, asking: Asking) -> None:
        """Takes after one submitted job the next, until none waits."""
        async with self._follows:
            while self._pending:
                await asking.follow(self._pending.popleft())

    def _door(self, request: int) -> Door:
        return self._doors[int(self._trace.tenant[request]) if len(self._doors) > 1 else 0]

    def _on_end(self, request: int, at_s: float) -> None:
        if self._due.ended(request, at_s):
            self._due_changed.set()

    async def _pulse(self) -> None:
        """How late the loop wakes up: with it, what is heard."""
        loop = asyncio.get_running_loop()
        while True:
            wakes_s = loop.time() + PULSE_S
            await asyncio.sleep(PULSE_S)
            self.notes.pulse(max(0.0, loop.time() - wakes_s))
