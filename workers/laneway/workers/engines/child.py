"""The child process of an engine: its start, its socket, what it says on standard error, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import structlog

from laneway.workers.engines.frames import Frames, Report

HOST_MODULE = "laneway.workers.engines.host_main"  # what the process runs
KILL_AFTER_S = 3.0  # a process whose socket has closed and that still runs
EXIT_LOOK_S = 0.01
STDERR_AFTER_S = 0.5  # for the last words of an ended process
TAIL_LINES = 8
LINE_LENGTH_MAX = 400

log = structlog.get_logger(__name__)


class EngineChild(asyncio.Protocol):
    """Made by `spawn`; `ended` must then be awaited until it returns."""

    def __init__(self, on_report: Callable[[Report], None]) -> None:
        self._on_report = on_report
        self._frames = Frames()
        self._decode = msgspec.msgpack.Decoder(Report).decode
        self._transport: asyncio.WriteTransport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._lost = asyncio.Event()
        self._together: list[bytes | bytearray] | None = None  # frames to be written at once
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @classmethod
    async def spawn(cls, on_report: Callable[[Report], None]) -> EngineChild:
        child = cls(on_report)
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as unless_taken, theirs:
            unless_taken.enter_context(ours)
            child._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                HOST_MODULE,
                str(os.getpid()),
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a terminal's Ctrl-C is for the worker
            )
            ours.setblocking(False)
            child._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=ours)
            unless_taken.pop_all()
        return child

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, frame: bytes | bytearray) -> None:
        """Never blocks; what the process is too busy to read waits in the transport. Nothing after its end."""
        if self._together is not None:
            self._together.append(frame)
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Frames sent within it are written at once, at its end. Not to be nested."""
        frames: list[bytes | bytearray] = []
        self._together = frames
        try:
            yield
        finally:
            self._together = None
            if frames:
                self.send(b"".join(frames))

    def kill(self) -> None:
        """With all that it started: it leads a process group of its own."""
        if self._process is not None and self._process.returncode is None:
            self._kill_group(self._process.pid)

    def _kill_group(self, process_id: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process_id, signal.SIGKILL)

    async def ended(self) -> str:
        """Waits for the end of the process and says how it came."""
        assert self._process is not None
        async with asyncio.TaskGroup() as group:
            stderr = group.create_task(self._read_stderr())
            await self._lost.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_AFTER_S):
                    # Not wait(): that ends when standard error is closed, by all that the process had started as well.
                    while self._process.returncode is None:  # noqa: ASYNC110 - nothing tells of it
                        await asyncio.sleep(EXIT_LOOK_S)
            self._kill_group(self._process.pid)  # what outlives it holds its devices
            code = await self._process.wait()
            await asyncio.wait({stderr}, timeout=STDERR_AFTER_S)
            stderr.cancel()
        said = " | ".join(self._tail)
        return f"the engine process {_how(code)}" + (f"; its last words: {said}" if said else "")

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self._on_report(self._decode(frame))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()

    async def _read_stderr(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        rest = b""
        while data := await self._process.stderr.read(16 * 1024):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[:LINE_LENGTH_MAX]
            for line in lines:
                text = line.decode(errors="replace").strip()[:LINE_LENGTH_MAX]
                if text:
                    self._tail.append(text)
                    log.info("engine_said", line=text)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
