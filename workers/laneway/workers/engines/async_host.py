"""The engine's own process, for an engine whose library is asynchronous: the frames of `host_main.py` on an event loop.

It needs no loop of steps: commands are handed to the engine as they come, and each of its reports is one frame. The
process ends when its worker says so or does, and when the engine is gone: its reason is the last word on standard
error, and so in what the worker tells of its end.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence

import msgspec

from laneway.core.errors import ConfigError
from laneway.workers.engines.frames import Abort, Close, Command, Failed, Frames, Ready, Report, Stepped, Submit, framed
from laneway.workers.engines.protocol import Engine, EngineStartError, EngineStats, SequenceStep


class AsyncHost(asyncio.Protocol):
    """A StepSink and the worker's end of the socket in one. Owns the engine, which `make` gives once the loop runs."""

    def __init__(self, make: Callable[[], Engine], frames: Frames, waiting: Iterable[bytes]) -> None:
        """`frames` has read what was sent so far; `waiting` are whole frames that nobody has taken yet."""
        self._make = make
        self._frames = frames
        self._waiting = list(waiting)  # until the engine can take them
        self._engine: Engine | None = None  # once it has started
        self._encoder = msgspec.msgpack.Encoder()
        self._decode = msgspec.msgpack.Decoder(Command).decode
        self._transport: asyncio.Transport | None = None
        self._received = 0
        self._over = asyncio.Event()
        self._reason = ""

    async def serve(self, channel: socket.socket) -> int:
        """Returns the exit code of the process."""
        channel.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=channel)
        try:
            engine = self._make()
            try:
                if not await self._started(engine):
                    return 0
                await self._over.wait()
            finally:
                await engine.close()
        except ConfigError as error:
            self._send(Failed(str(error)))
        finally:
            if self._transport is not None:
                self._transport.close()
            await asyncio.sleep(0)  # the last frame goes out
        if self._reason:
            print(self._reason, file=sys.stderr, flush=True)
        return 1 if self._reason else 0

    async def _started(self, engine: Engine) -> bool:
        try:
            capacity = await engine.start(self)
        except EngineStartError as error:
            if error.__cause__ is not None:
                traceback.print_exception(error.__cause__)  # the library's own words, for the log
            self._send(Failed(str(error)))
            return False
        self._send(Ready(capacity))
        self._engine = engine
        waiting, self._waiting = self._waiting, []
        for frame in waiting:
            self._take(frame)
        return True

    # --- StepSink ------------------------------------------------------------------------------------

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        self._send(Stepped(list(steps), stats, self._received))

    def on_closed(self, reason: str) -> None:
        self._reason = reason
        self._over.set()

    # --- asyncio.Protocol ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            if self._engine is None:
                self._waiting.append(frame)
            else:
                self._take(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._over.set()

    def _take(self, frame: bytes) -> None:
        assert self._engine is not None
        if self._over.is_set():
            return
        match self._decode(frame):
            case Submit(request):
                self._received += 1
                self._engine.submit(request)
            case Abort(request_id):
                self._engine.abort(request_id)
            case Close():
                self._over.set()

    def _send(self, report: Report) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(self._encoder, report))
