"""The engine's own process: takes commands between steps, computes, and reports each step in one frame.

An abort that has arrived takes effect before the next step. An idle engine waits on the socket and costs nothing.
Where a request for one token has ended, the worker may have another for the very next step (a slice of a prompt
follows the one before): it gets a moment to say so, or every second step would go without. The process ends when its
worker does: by the kernel's signal, and when the socket closes. Ctrl-C is the worker's business. Engines whose
libraries are asynchronous are served by `async_host.py` instead.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # before the slow imports: a Ctrl-C must not end the engine meanwhile
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import asyncio
import contextlib
import ctypes
import os
import select
import socket
import sys
import traceback

import msgspec

from laneway.core.catalogue import Capabilities
from laneway.core.errors import ConfigError
from laneway.core.lanes import FinishReason
from laneway.workers.engines.async_host import AsyncHost
from laneway.workers.engines.checks import check_abilities
from laneway.workers.engines.frames import Abort, Close, Command, Failed, Frames, Ready, Report, Stepped, Submit, framed
from laneway.workers.engines.protocol import EngineStartError, EngineStats, SequenceStep, StepEngine
from laneway.workers.engines.registry import ASYNC_ENGINES, EngineSpec, make_async_engine, make_step_engine

PR_SET_PDEATHSIG = 1
READ_BYTES = 256 * 1024
FOLLOW_S = 0.002  # until the next step, for what follows a request for one token; a step takes 10 ms and more


def main() -> None:
    worker_pid, descriptor = int(sys.argv[1]), int(sys.argv[2])
    die_with(worker_pid)
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)  # what a library prints goes to the worker's log
    with socket.socket(fileno=descriptor) as channel, contextlib.suppress(WorkerGone):
        raise SystemExit(EngineProcess(channel).run())


class WorkerGone(Exception):
    """The worker closed its end or ended."""


class EngineProcess:
    """Owns the channel and the engine."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._frames = Frames()
        self._waiting: list[bytes] = []  # frames read and not yet taken
        self._encoder = msgspec.msgpack.Encoder()
        self._commands = msgspec.msgpack.Decoder(Command)
        self._received = 0
        self._refused: list[SequenceStep] = []  # to be reported with the next step, or at once when there is none
        self._stats = EngineStats()
        self._one_token: set[int] = set()  # requests for one token that have not ended

    def run(self) -> int:
        """Returns the exit code."""
        spec = msgspec.msgpack.decode(self._next_frame(), type=EngineSpec)
        if spec.engine in ASYNC_ENGINES:
            _be_nice(spec)
            return asyncio.run(
                AsyncHost(lambda: make_async_engine(spec), self._frames, self._waiting).serve(self._channel)
            )
        engine = self._start(spec)
        if engine is None:
            return 0
        try:
            while self._take_commands(engine, spec.capabilities):
                steps, self._refused = self._refused, []
                if engine.busy():
                    computed, self._stats = engine.step()
                    steps += computed
                elif not steps:
                    continue
                self._report(Stepped(steps, self._stats, self._received))
                ended = self._one_token & {step.id for step in steps if step.finish is not None}
                self._one_token -= ended
                if ended and engine.busy():
                    select.select([self._channel], [], [], FOLLOW_S)
        finally:
            engine.close()
        return 0

    def _start(self, spec: EngineSpec) -> StepEngine | None:
        _be_nice(spec)
        try:
            engine = make_step_engine(spec)
            capacity = engine.load()
        except (EngineStartError, ConfigError) as error:
            if error.__cause__ is not None:
                traceback.print_exception(error.__cause__)  # the library's own words, for the log
            self._report(Failed(str(error)))
            return None
        self._report(Ready(capacity))
        return engine

    def _take_commands(self, engine: StepEngine, capabilities: Capabilities) -> bool:
        """Takes what has arrived; waits for the first command when there is nothing to compute. False: close."""
        self._read(wait=not engine.busy())
        frames, self._waiting = self._waiting, []
        for frame in frames:
            match self._commands.decode(frame):
                case Submit(request):
                    self._received += 1
                    try:
                        check_abilities(request, capabilities)
                        engine.add(request)
                        if request.max_tokens == 1:
                            self._one_token.add(request.id)
                    except ValueError as error:
                        message = str(error)
                        self._refused.append(SequenceStep(request.id, [], finish=FinishReason.ERROR, message=message))
                case Abort(request_id):
                    engine.abort(request_id)
                case Close():
                    return False
        return True

    def _next_frame(self) -> bytes:
        self._read(wait=True)
        return self._waiting.pop(0)

    def _read(self, *, wait: bool) -> None:
        """Reads whatever is there; with `wait`, until there is a whole frame. Raises WorkerGone at the end."""
        while True:
            try:
                flags = 0 if wait and not self._waiting else socket.MSG_DONTWAIT
                data = self._channel.recv(READ_BYTES, flags)
            except BlockingIOError:
                return
            except OSError as error:
                raise WorkerGone from error
            if not data:
                raise WorkerGone
            self._waiting += self._frames.feed(data)

    def _report(self, report: Report) -> None:
        try:
            self._channel.sendall(framed(self._encoder, report))
        except OSError as error:
            raise WorkerGone from error


def _be_nice(spec: EngineSpec) -> None:
    if spec.options.nice:
        os.nice(spec.options.nice)


def die_with(worker_pid: int) -> None:
    """The kernel kills this process when its worker ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != worker_pid:
        raise SystemExit("the worker ended before its engine process had started")


if __name__ == "__main__":
    main()
