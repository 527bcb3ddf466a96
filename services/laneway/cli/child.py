"""One child process of the local stack: started, awaited, stopped within a bound, and never left behind.

Owns the process group of the child (so that helpers of the child go with it), its log file and its ready file. Knows
nothing of what the child does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.03
LOG_TAIL_LINES = 12
LOG_TAIL_BYTES = 8192
KILL_WAIT_S = 5.0
_TETHER = Path(__file__).with_name("tether.py")


class StackError(Exception):
    """A part of the local stack did not start, or ended on its own; the message shows the end of its log."""


@dataclass(frozen=True, slots=True)
class ReadyNote:
    """What a service writes once it can serve."""

    address: str = ""
    metrics: str = ""
    pid: int = 0


class Child:
    """A process in a session of its own, tethered to this one. Not restarted by itself; start() may be called again
    after it ended."""

    def __init__(
        self, name: str, arguments: Sequence[str], *, environment: Mapping[str, str], log: Path, ready_file: Path | None
    ) -> None:
        self.name = name
        self.arguments = list(arguments)
        self.environment = dict(environment)
        self.log = log
        self.ready_file = ready_file
        self.stopping = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id of the last start; 0 before the first."""
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def exit_status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs or before it was started."""
        return self._process.returncode if self._process else None

    async def start(self) -> None:
        if self.alive:
            raise StackError(f"{self.name} already runs as process {self.pid}")
        if self.ready_file is not None:
            self.ready_file.unlink(missing_ok=True)
        self.stopping = False
        tether = [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid())]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *tether,
                *self.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                # Ctrl-C in the terminal must reach the stack alone: it stops its children in order.
                start_new_session=True,
            )

    async def ready(self, timeout_s: float) -> ReadyNote:
        """Waits for the ready file. StackError with the end of the log if the child ends or takes too long."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout_s
        while True:
            note = self._read_note()
            if note is not None:
                return note
            if not self.alive:
                raise StackError(
                    f"{self.name} ended with status {self.exit_status} before it was ready{self.log_tail()}"
                )
            if loop.time() >= give_up:
                raise StackError(f"{self.name} was not ready within {timeout_s:g} s{self.log_tail()}")
            await asyncio.sleep(POLL_S)

    async def wait(self) -> int:
        """Waits for the end and returns the exit status."""
        if self._process is None:
            raise StackError(f"{self.name} was never started")
        return await self._process.wait()

    async def stop(self, grace_s: float) -> int | None:
        """SIGTERM, then SIGKILL to the whole group after `grace_s`. Nothing of the group runs afterwards."""
        self.stopping = True
        if self._process is None:
            return None
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # one that was stopped would not notice
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            # Also after a clean end: a helper that outlived its parent goes too. Pids are not reused that soon.
            self.kill_group()
        async with asyncio.timeout(KILL_WAIT_S):
            return await self._process.wait()

    def kill(self) -> None:
        """SIGKILL to the process itself, as an out-of-memory killer would: its helpers must notice on their own."""
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process; nothing happens if it has ended."""
        if not self.alive:
            return
        # Not Process.send_signal: it polls first, and may take the exit status away from asyncio's own waiter.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """SIGKILL to whatever of the process's session still runs."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def log_tail(self) -> str:
        """The last lines of the log, indented and with a heading; empty if there are none."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        except OSError:
            return ""
        if not lines:
            return ""
        return f"; the end of {self.log}:\n" + "\n".join(f"    {line}" for line in lines)

    def _read_note(self) -> ReadyNote | None:
        if self.ready_file is None:
            return ReadyNote(pid=self.pid)
        try:
            found = json.loads(self.ready_file.read_text())
        except (OSError, ValueError):
            return None
        return ReadyNote(str(found.get("address", "")), str(found.get("metrics", "")), int(found.get("pid", 0)))
