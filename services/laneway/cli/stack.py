"""The whole of Laneway on this machine, as child processes: for `laneway up`, the demo, tests and benchmarks.

Owns the order in which parts start and stop, their settings files, logs and the store, and that nothing is left
running. Knows the services only by their commands and ready files.

    async with LocalStack(StackOptions(engine="simulated", workers=2)) as stack:
        async with Client(stack.addresses.admission) as client: ...
        stack.workers[0].kill()
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from laneway.cli.child import POLL_S, Child, ReadyNote, StackError
from laneway.cli.stack_users import nats_environment, nats_users
from laneway.cli.toml_text import merged, toml_text

if TYPE_CHECKING:
    from laneway.runtime.local_nats import LocalUsers
    from laneway.runtime.settings import ModelSettings, NatsSettings, Settings

__all__ = ["Addresses", "Child", "LocalStack", "Progress", "StackError", "StackOptions"]

NATS_STOP_S = 5.0
SERVES_S_MAX = 10.0  # from the last part being ready to the first plan at the door
LOOPBACK = "127.0.0.1:0"  # port 0: any that is free
_DEFAULT_MODEL = {"name": "chat"}  # of the settings


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What to run. Settings are nested mappings shaped like laneway.toml."""

    engine: str = ""  # of every model, with this engine's own tokenizer; empty: as configured
    workers: int | None = None  # of each pool; None: as configured
    config: Path | None = None  # the laneway.toml to begin with
    settings: Mapping[str, object] = field(default_factory=dict)  # over it, for every process
    # over that, by service ("admission", "scheduler", "routing", "worker") or by process name ("chat-small-1")
    process_settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    ack_wait_s: Mapping[str, float] = field(default_factory=dict)  # by lane
    directory: Path | None = None  # settings and logs; None: a temporary one, removed at the end
    store: Path | None = None  # the queue's files; None: inside `directory`
    nats_port: int = 0  # 0: any that is free
    nats_config: str = ""  # more for nats-server's own file, such as leaf nodes
    admission_listen: str = LOOPBACK
    scheduler_listen: str = LOOPBACK
    routing_listen: str = LOOPBACK
    token: str = ""  # the stack's own, where the door asks for one; without it start() cannot wait until jobs are taken
    start_s_max: float = 120.0  # for each part
    stop_s_max: float = 15.0  # for each part; then it is killed


@dataclass(frozen=True, slots=True)
class Addresses:
    """host:port of each service; empty before it runs."""

    nats: str = ""  # a nats:// URL
    admission: str = ""
    scheduler: str = ""
    routing: str = ""
    metrics: Mapping[str, str] = field(default_factory=dict)  # by process name


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of starting or stopping, for people."""

    part: str
    state: str  # starting, ready, stopping, stopped
    detail: str = ""


class LocalStack:
    """One region: nats-server, scheduler, routing, admission and workers. Not safe for concurrent start and stop."""

    def __init__(
        self, options: StackOptions | None = None, *, on_progress: Callable[[Progress], None] | None = None
    ) -> None:
        self.options = options or StackOptions()
        self.addresses = Addresses()
        self.directory = self.options.directory or Path(tempfile.mkdtemp(prefix="laneway-"))
        self.nats: Child | None = None
        self.services: dict[str, Child] = {}  # scheduler, routing, admission
        self.workers: list[Child] = []  # every one ever started, the dead included
        self._on_progress = on_progress or (lambda _: None)
        self._worker_count: dict[str, int] = {}
        self._users: LocalUsers

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def children(self) -> list[Child]:
        """Every process ever started, in the order of starting."""
        first = [self.nats] if self.nats else []
        return [*first, *self.services.values(), *self.workers]

    async def start(self) -> None:
        """Starts everything and returns once all of it is ready. StackError tells what failed, with its log."""
        for folder in ("logs", "settings", "ready"):
            (self.directory / folder).mkdir(parents=True, exist_ok=True)
        settings = self._resolved()
        models = self._models()
        self._users = nats_users(self.nkeys, settings)
        await self._start_nats()
        await self._provision()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._start_service("scheduler", self.options.scheduler_listen))
                group.create_task(self._start_service("routing", self.options.routing_listen))
                group.create_task(self._start_service("admission", self.options.admission_listen))
                for model in models:
                    for _ in range(model.workers):
                        group.create_task(self.add_worker(model.pool_name))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors  # the first; the others were cancelled for it
        await self._serves(settings, [f"{model.name}/{model.tier}" for model in models if model.workers])

    async def add_worker(self, pool: str = "", *, settings: Mapping[str, object] | None = None) -> Child:
        """Starts one more worker of a pool (default: the first) and waits until it is ready."""
        pool = pool or self._models()[0].pool_name
        number = self._worker_count[pool] = self._worker_count.get(pool, 0) + 1
        name = f"{pool}-{number}"
        environment = {"LANEWAY_WORKER__NAME": name, "LANEWAY_WORKER__POOL": pool}
        child = self._child(name, "worker", environment, settings or {})
        self.workers.append(child)
        await self._bring_up(child)
        return child

    async def restart(self, name: str) -> Child:
        """Starts a part again that was stopped or killed, at the address that it had."""
        child = self.child(name)
        if child.alive:
            await child.stop(self.options.stop_s_max)
        if child is self.nats:
            await child.start()
            await self._nats_url(child)
        else:
            await self._bring_up(child)
        return child

    def child(self, name: str) -> Child:
        """The process of that name: "nats", a service, or a worker such as "chat-small-1"."""
        for child in self.children:
            if child.name == name:
                return child
        raise StackError(f"the stack has no part {name}; it has {', '.join(c.name for c in self.children)}")

    async def ended(self) -> Child:
        """Waits until some part ends that nobody stopped, and returns it."""
        while True:
            for child in self.children:
                if child.exit_status is not None and not child.stopping:
                    return child
            await asyncio.sleep(POLL_S * 10)

    async def stop(self) -> None:
        """Stops admission, workers, scheduler, routing and the queue, in this order; each is killed after a bound.
        Nothing of the stack runs afterwards. May be called twice."""
        try:
            await self._stop_all([c for c in (self.services.get("admission"),) if c])
            await self._stop_all(self.workers)
            await self._stop_all([c for c in (self.services.get("scheduler"),) if c])
            await self._stop_all([c for c in (self.services.get("routing"),) if c])
            await self._stop_all([self.nats] if self.nats else [], NATS_STOP_S)
        finally:
            for child in self.children:
                child.kill_group()
            if self.options.directory is None:
                shutil.rmtree(self.directory, ignore_errors=True)

    async def _start_nats(self) -> None:
        from laneway.runtime.local_nats import find_nats_server

        arguments = self._nats_arguments(self.options.nats_port)
        self.nats = Child(
            "nats",
            [str(find_nats_server()), *arguments],
            environment=os.environ,
            log=self.logs / "nats.log",
            ready_file=None,
        )
        self._on_progress(Progress("nats", "starting"))
        await self.nats.start()
        url = await self._nats_url(self.nats)
        self.addresses = replace(self.addresses, nats=url)
        # A restart must find the same port: the services keep the URL.
        self.nats.arguments[1:] = self._nats_arguments(int(url.rsplit(":", 1)[1]))
        self._on_progress(Progress("nats", "ready", url))

    def _nats_arguments(self, port: int) -> list[str]:
        from laneway.runtime.local_nats import nats_arguments

        store = self.options.store or self.directory / "store"
        return nats_arguments(
            store, port=port, ports_file_dir=self.directory / "ready", users=self._users, extra=self.options.nats_config
        )

    def nats_settings(self, user: str) -> NatsSettings:
        """To connect to the stack's NATS as one of its users: a role, or a tenant's producer ("producer-acme")."""
        from laneway.runtime.settings import NatsSettings

        return NatsSettings(url=self.addresses.nats, nkey_file=str(self.nkeys / f"{user}.seed"))

    @property
    def nkeys(self) -> Path:
        """The seeds of all users of the stack's NATS."""
        return self.directory / "nkeys"

    async def _nats_url(self, nats: Child) -> str:
        from laneway.runtime.local_nats import read_ports_file

        give_up = time.monotonic() + self.options.start_s_max
        while (url := read_ports_file(self.directory / "ready", nats.pid)) is None:
            if not nats.alive:
                raise StackError(f"nats-server ended with status {nats.exit_status}{nats.log_tail()}")
            if time.monotonic() >= give_up:
                raise StackError(f"nats-server was not ready within {self.options.start_s_max:g} s{nats.log_tail()}")
            await asyncio.sleep(POLL_S)
        return url

    async def _provision(self) -> None:
        self._on_progress(Progress("provision", "starting"))
        child = self._child("provision", "provision", {}, {})
        await child.start()
        try:
            async with asyncio.timeout(self.options.start_s_max):
                status = await child.wait()
        except TimeoutError:
            raise StackError(f"provisioning took too long{child.log_tail()}") from None
        finally:
            await child.stop(1.0)
        if status != 0:
            raise StackError(f"provisioning failed with status {status}{child.log_tail()}")
        self._on_progress(Progress("provision", "ready"))

    async def _start_service(self, name: str, listen: str) -> None:
        variable = f"LANEWAY_{name.upper()}__LISTEN"
        child = self.services[name] = self._child(name, name, {variable: listen}, {})
        note = await self._bring_up(child)
        child.environment[variable] = note.address  # a restart keeps the port: callers know it
        match name:
            case "admission":
                self.addresses = replace(self.addresses, admission=note.address)
            case "scheduler":
                self.addresses = replace(self.addresses, scheduler=note.address)
            case _:
                self.addresses = replace(self.addresses, routing=note.address)

    async def _bring_up(self, child: Child) -> ReadyNote:
        self._on_progress(Progress(child.name, "starting"))
        await child.start()
        note = await child.ready(self.options.start_s_max)
        self.addresses = replace(self.addresses, metrics={**self.addresses.metrics, child.name: note.metrics})
        self._on_progress(Progress(child.name, "ready", note.address))
        return note

    async def _stop_all(self, children: list[Child], grace_s: float | None = None) -> None:
        grace_s = self.options.stop_s_max if grace_s is None else grace_s

        async def stop(child: Child) -> None:
            self._on_progress(Progress(child.name, "stopping"))
            status = await child.stop(grace_s)
            self._on_progress(Progress(child.name, "stopped", "" if status == 0 else f"status {status}"))

        async with asyncio.TaskGroup() as group:
            for child in children:
                if child.alive:
                    group.create_task(stop(child))
                else:
                    child.stopping = True

    def follow_config(self) -> None:
        """Hands the settings file as it is now to the scheduler, which takes it up or says what is wrong with it."""
        assert self.options.config is not None, "there is no settings file"
        try:
            text = self._settings_of("scheduler", "scheduler", {})
        except tomllib.TOMLDecodeError:
            text = self.options.config.read_text(encoding="utf-8")
        self._settings_file("scheduler").write_text(text, encoding="utf-8")

    def _settings_file(self, name: str) -> Path:
        return self.directory / "settings" / f"{name}.toml"

    def _settings_of(self, name: str, command: str, over: Mapping[str, object]) -> str:
        settings = self._settings()
        for layer in (self.options.process_settings.get(command), self.options.process_settings.get(name), over):
            settings = merged(settings, layer or {})
        return toml_text(settings)

    def _child(self, name: str, command: str, environment: Mapping[str, str], over: Mapping[str, object]) -> Child:
        ready_file = self.directory / "ready" / f"{name}.json"
        settings_file = self._settings_file(name)
        settings_file.write_text(self._settings_of(name, command, over), encoding="utf-8")
        # What the stack decides goes by environment, which wins over any file.
        own = {
            "LANEWAY_CONFIG": str(settings_file),
            "LANEWAY_NATS__URL": self.addresses.nats,
            **nats_environment(self.nkeys, command),
            "LANEWAY_PROCESS__READY_FILE": str(ready_file),
            "LANEWAY_PROCESS__METRICS_LISTEN": LOOPBACK,
            **environment,
        }
        return Child(
            name,
            [sys.executable, "-m", "laneway.cli", command],
            environment={**os.environ, **own},
            log=self.logs / f"{name}.log",
            ready_file=None if command == "provision" else ready_file,
        )

    def _settings(self) -> dict[str, object]:
        """The settings common to every process, as laneway.toml would have them."""
        settings: dict[str, object] = {}
        if self.options.config is not None:
            with self.options.config.open("rb") as file:
                settings = tomllib.load(file)
        settings = merged(settings, self.options.settings)
        if self.options.ack_wait_s:
            waits = {f"ack_wait_{lane}_s": seconds for lane, seconds in self.options.ack_wait_s.items()}
            settings = merged(settings, {"nats": waits})
        if self.options.engine:
            settings["models"] = _with_engine(settings.get("models", [_DEFAULT_MODEL]), self.options.engine)
        return settings

    def _resolved(self) -> Settings:
        """The common settings as the processes will have them."""
        from laneway.runtime.settings import load_settings

        file = self.directory / "settings" / "stack.toml"
        file.write_text(toml_text(self._settings()), encoding="utf-8")
        return load_settings(config=file)

    def _models(self) -> tuple[ModelSettings, ...]:
        """What the stack serves, with the number of workers that it starts for each."""
        from msgspec.structs import replace as changed

        models = self._resolved().models
        if self.options.workers is None:
            return models
        return tuple(changed(model, workers=self.options.workers) for model in models)

    async def _serves(self, settings: Settings, names: list[str]) -> None:
        """Waits until the door has heard of the workers: it refuses what no worker could serve."""
        from laneway.client import Client, PermissionDenied, Unauthenticated, VerdictKind
        from laneway.runtime.tls import client_credentials

        async def refusal(client: Client, name: str) -> str:
            try:
                verdict = (await client.quote(model=name, token_ids=[1], max_tokens=1, lane="priority")).verdict
            except (Unauthenticated, PermissionDenied):
                return ""  # it answers; what it would tell others we cannot see
            return "" if verdict.kind is not VerdictKind.REFUSED else f"{verdict.message} ({verdict.reason})"

        give_up = time.monotonic() + SERVES_S_MAX
        token, credentials = self.options.token or None, client_credentials(settings.grpc)
        async with Client(self.addresses.admission, token=token, credentials=credentials) as client:
            for name in names:
                while why := await refusal(client, name):
                    if time.monotonic() >= give_up:
                        raise StackError(f"all parts run, and {name} is still refused: {why}")
                    await asyncio.sleep(POLL_S)


def _with_engine(models: object, engine: str) -> object:
    """Every model on that engine. A tokenizer that was named for another one goes: its file may not be here."""
    if not isinstance(models, list):
        return models  # refused with its name when the settings are read
    out: list[object] = []
    for model in models:
        if isinstance(model, Mapping) and model.get("engine", "openvino") != engine:
            kept = {key: value for key, value in model.items() if key not in ("tokenizer", "vocabulary_size")}
            out.append({**kept, "engine": engine})
        else:
            out.append(model)
    return out
