"""The simulated engine on its worker's own event loop, in that loop's time: for simulations, where time is virtual.

Commands take effect between steps, as they do in an engine's process; a step's output comes at its end.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext

import msgspec

from laneway.core.catalogue import Capabilities
from laneway.core.lanes import FinishReason
from laneway.workers.engines.checks import check_abilities
from laneway.workers.engines.protocol import (
    EngineCapacity,
    EngineGone,
    EngineRequest,
    EngineStats,
    SequenceStep,
    StepSink,
)
from laneway.workers.engines.simulated import InjectedCrash, InjectedHang, SimulatedCore, StepOutcome


class InlineEngine:
    """An Engine over a core. `crash` and `hang` do what they say."""

    def __init__(self, core: SimulatedCore, capabilities: Capabilities, *, load_s: float = 0.0) -> None:
        self._core = core
        self._capabilities = capabilities
        self._load_s = load_s
        self._sink: StepSink | None = None
        self._commands: list[EngineRequest | int] = []  # to submit; the id of one to abort
        self._live: set[int] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._step: asyncio.TimerHandle | None = None  # under way
        self._begin: asyncio.Handle | None = None
        self._hangs = False
        self._gone = False
        self._stats = EngineStats()

    async def start(self, sink: StepSink) -> EngineCapacity:
        await asyncio.sleep(self._load_s)
        self._sink = sink
        return self._core.capacity

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def submit(self, request: EngineRequest) -> None:
        if self._gone or self._sink is None:
            raise EngineGone("the engine is not running")
        self._live.add(request.id)
        self._idle.clear()
        self._commands.append(request)
        self._wake()

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()  # what is submitted in one turn of the loop is together in any case

    def abort(self, request_id: int) -> None:
        if request_id in self._live:
            self._commands.append(request_id)
            self._wake()

    def stats(self) -> EngineStats:
        """The last step's count, and what waits for the next."""
        waiting = [command for command in self._commands if not isinstance(command, int)]
        return msgspec.structs.replace(
            self._stats,
            queued=self._stats.queued + len(waiting),
            prefilling_tokens=self._stats.prefilling_tokens + sum(len(request.prompt_ids) for request in waiting),
        )

    async def drain(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return not self._live
        return True

    async def close(self) -> None:
        self._end()

    def crash(self, reason: str) -> None:
        """The engine dies now."""
        if not self._gone and self._sink is not None:
            self._end()
            self._sink.on_closed(reason)

    def hang(self) -> None:
        """No step ends any more."""
        self._hangs = True

    # --- steps ---------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._step is None and self._begin is None and not self._gone:
            self._begin = asyncio.get_running_loop().call_soon(self._next_step)

    def _next_step(self) -> None:
        self._begin = None
        refused = self._take_commands()
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        outcome = StepOutcome(now_s, [], self._stats)
        if self._core.busy():
            try:
                outcome = self._core.step(now_s)
            except InjectedCrash as fault:
                return self.crash(str(fault))
            except InjectedHang:
                return self.hang()
        outcome.steps.extend(refused)
        if not self._hangs and (outcome.steps or self._core.busy()):
            self._step = loop.call_at(outcome.ends_s, self._stepped, outcome)
        return None

    def _take_commands(self) -> list[SequenceStep]:
        commands, self._commands = self._commands, []
        refused: list[SequenceStep] = []
        for command in commands:
            if isinstance(command, int):
                self._core.abort(command)
                continue
            try:
                check_abilities(command, self._capabilities)
                self._core.add(command)
            except ValueError as error:
                refused.append(SequenceStep(command.id, [], finish=FinishReason.ERROR, message=str(error)))
        return refused

    def _stepped(self, outcome: StepOutcome) -> None:
        self._step = None
        if self._hangs:
            return
        self._stats = outcome.stats
        self._live.difference_update(step.id for step in outcome.steps if step.finish is not None)
        if not self._live:
            self._idle.set()
        if self._sink is not None:
            self._sink.on_step(outcome.steps, self.stats())
        if self._commands or self._core.busy():
            self._wake()

    def _end(self) -> None:
        self._gone = True
        for handle in (self._step, self._begin):
            if handle is not None:
                handle.cancel()
        self._step = self._begin = None
        self._commands.clear()
        self._live.clear()
        self._idle.set()
        self._stats = msgspec.structs.replace(
            self._stats, running=0, queued=0, prefilling_tokens=0, kv_tokens_used=0, decoding=0
        )
