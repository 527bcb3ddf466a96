"""One command for each service, and `provision`: settings from flags, environment and file, then the service itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from laneway.cli.console import EXIT_USAGE, fail
from laneway.core.errors import ConfigError

if TYPE_CHECKING:
    from laneway.runtime.lifecycle import Serve
    from laneway.runtime.settings import Settings

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", exists=True, dir_okay=False, help="Settings file; see config show.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="One setting; repeatable.")
]


def admission(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Run the admission service: the door that requests come in by."""
    settings = settings_of(config, set_)
    from laneway.admission.server import serve

    _run("admission", settings, serve, listen=settings.admission.listen)


def scheduler(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Run the scheduler service: the plan, and the release of parked jobs."""
    settings = settings_of(config, set_)
    from functools import partial

    from laneway.runtime.settings_source import SettingsSource
    from laneway.scheduler.server import serve

    source = SettingsSource(config, flags_of(set_))
    _run("scheduler", settings, partial(serve, source=source), listen=settings.scheduler.listen)


def routing(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Run the routing service: which region a request should run in."""
    settings = settings_of(config, set_)
    from laneway.routing.server import serve

    _run("routing", settings, serve, listen=settings.routing.listen)


def worker(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Run a worker: pulls jobs from the lanes and serves them with its engine."""
    settings = settings_of(config, set_)
    from laneway.workers.server import serve

    _run("worker", settings, serve)


def provision(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Create or update the streams, consumers and buckets of the region on NATS. Safe to repeat."""
    settings = settings_of(config, set_)
    _run("provision", settings, _provision)


def settings_of(config: Path | None, given: list[str] | None) -> Settings:
    """The settings of this process; ends it with status 2 if one is wrong."""
    from laneway.runtime.params import check_params
    from laneway.runtime.settings import load_settings

    try:
        settings = load_settings(config=config, flags=flags_of(given))
        check_params(settings.policy)
        return settings
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)


def flags_of(given: list[str] | None) -> dict[str, object]:
    flags: dict[str, object] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals or "." not in key:
            raise typer.BadParameter(f"a setting is SECTION.KEY=VALUE, not {text}")
        flags[key] = value
    return flags


def _run(name: str, settings: Settings, serve: Serve, *, listen: str = "") -> NoReturn:
    from laneway.runtime.auth import check_binding
    from laneway.runtime.lifecycle import run_service

    if listen:
        try:  # the server asks too, once it is connected to all else
            check_binding(listen, settings.admission, tls=bool(settings.grpc.tls_cert_file))
        except ConfigError as error:
            fail(f"{name}: {error}", EXIT_USAGE)
    raise typer.Exit(run_service(name, settings, serve))


async def _provision(settings: Settings, stop: object) -> None:
    from laneway.runtime.bus import Bus
    from laneway.runtime.catalogue import catalogue_of
    from laneway.runtime.provision import provision as provision_region

    catalogue = catalogue_of(settings)
    bus = await Bus.connect(settings.nats, name="provision", role="operator")
    try:
        changed = await provision_region(
            bus, settings.region.name, catalogue, settings.nats, ack_wait_s=settings.nats.ack_wait_s
        )
    finally:
        await bus.close()
    for line in changed or ["nothing to change"]:
        print(line)
