"""Runs a step engine in a process of its own and gives the worker the `Engine` port to it.

It owns the process from start to end, the socket to it, and the set of live requests. A crash of the process is one
call of the sink's `on_closed`; `close` ends the process without one. All of it happens on the worker's event loop; the
frame of a step costs it a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AbstractContextManager, nullcontext

import msgspec
import structlog

from laneway.core.catalogue import Capabilities
from laneway.workers.engines.child import EngineChild
from laneway.workers.engines.frames import Abort, Close, Failed, Ready, Report, Stepped, Submit, framed
from laneway.workers.engines.protocol import (
    EngineCapacity,
    EngineGone,
    EngineRequest,
    EngineStartError,
    EngineStats,
    StepSink,
)
from laneway.workers.engines.registry import EngineSpec

CLOSE_GRACE_S = 3.0

log = structlog.get_logger(__name__)


class ProcessEngine:
    """An Engine whose computing happens in a child process. Started once; a new one is made after a crash."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._encoder = msgspec.msgpack.Encoder()
        self._child: EngineChild | None = None
        self._sink: StepSink | None = None
        self._ready: asyncio.Future[EngineCapacity] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._live: set[int] = set()
        self._on_the_way: deque[int] = deque()  # prompt lengths of submitted requests the process has not taken in
        self._submitted = 0
        self._stats = EngineStats()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._gone = False

    async def start(self, sink: StepSink) -> EngineCapacity:
        if self._child is not None or self._closing:
            raise RuntimeError("an engine is started once")
        self._sink = sink
        self._ready = asyncio.get_running_loop().create_future()
        timeout_s = self._spec.options.start_timeout_s
        started = False
        try:
            async with asyncio.timeout(timeout_s):
                self._child = await EngineChild.spawn(self._on_report)
                self._watch = asyncio.create_task(self._watch_process(self._child), name="engine-watch")
                self._child.send(framed(self._encoder, self._spec))
                capacity = await self._ready
                started = True
                return capacity
        except TimeoutError:
            raise EngineStartError(
                f"the {self._spec.engine} engine was not ready after {timeout_s:g} s; raise start_timeout_s in "
                "engine_options if this host is slow"
            ) from None
        finally:
            if not started:
                await self._end(grace_s=0.0)

    def capabilities(self) -> Capabilities:
        return self._spec.capabilities

    def submit(self, request: EngineRequest) -> None:
        """Raises EngineGone once the sink has been told of the engine's end."""
        child = self._running()
        self._live.add(request.id)
        self._idle.clear()
        self._submitted += 1
        self._on_the_way.append(len(request.prompt_ids))
        child.send(framed(self._encoder, Submit(request)))

    def together(self) -> AbstractContextManager[None]:
        return self._child.together() if self._child is not None else nullcontext()

    def abort(self, request_id: int) -> None:
        if request_id in self._live and self._child is not None:
            self._child.send(framed(self._encoder, Abort(request_id)))

    def stats(self) -> EngineStats:
        """The process's last count, and what is on its way to it."""
        if not self._on_the_way:
            return self._stats
        return msgspec.structs.replace(
            self._stats,
            queued=self._stats.queued + len(self._on_the_way),
            prefilling_tokens=self._stats.prefilling_tokens + sum(self._on_the_way),
        )

    async def drain(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return not self._live
        return True

    async def close(self) -> None:
        """Ends the process; live sequences end without a further word. May be called again, also at once."""
        await self._end(grace_s=CLOSE_GRACE_S)

    @property
    def process_id(self) -> int | None:
        """Of the engine's process, once there is one."""
        return self._child.process_id if self._child is not None else None

    async def _end(self, grace_s: float) -> None:
        self._closing = True
        if self._child is not None and self._watch is not None:
            self._child.send(framed(self._encoder, Close()))
            await asyncio.wait({self._watch}, timeout=grace_s)
            self._child.kill()
            await self._watch
        self._end_all()

    def _running(self) -> EngineChild:
        if self._child is None or self._gone or self._closing:
            raise EngineGone("the engine is not running")
        return self._child

    def _on_report(self, report: Report) -> None:
        match report:
            case Stepped(steps, stats, received):
                while self._on_the_way and self._submitted - len(self._on_the_way) < received:
                    self._on_the_way.popleft()
                self._stats = stats
                for step in steps:
                    if step.finish is not None:
                        self._live.discard(step.id)
                if not self._live:
                    self._idle.set()
                if self._sink is not None and not self._closing:
                    self._sink.on_step(steps, self.stats())
            case Ready(capacity):
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(capacity)
            case Failed(message):
                if self._ready is not None and not self._ready.done():
                    self._ready.set_exception(EngineStartError(message))

    async def _watch_process(self, child: EngineChild) -> None:
        """Waits for the end of the process, however it comes, and tells whoever waits for it."""
        reason = await child.ended()
        self._end_all()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineStartError(f"the {self._spec.engine} engine did not start: {reason}"))
        elif self._sink is not None and not self._closing:
            log.warning("engine_process_ended", engine=self._spec.engine, reason=reason)
            self._sink.on_closed(reason)

    def _end_all(self) -> None:
        self._gone = True
        self._live.clear()
        self._on_the_way.clear()
        self._stats = msgspec.structs.replace(
            self._stats, running=0, queued=0, prefilling_tokens=0, kv_tokens_used=0, decoding=0
        )
        self._idle.set()
