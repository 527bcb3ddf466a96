"""`laneway up`: the whole stack in one terminal, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from laneway.cli.console import EXIT_FAILED, fail, say
from laneway.cli.endpoint import endpoint_file, remove_endpoint
from laneway.cli.serve import ConfigOption, SetOption, settings_of
from laneway.cli.stack import LocalStack, Progress, StackError, StackOptions
from laneway.cli.staying import announce, before, end_at_once, stay
from laneway.core.errors import ConfigError

NATS_PORT = 4222


def up(
    config: ConfigOption = None,
    set_: SetOption = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help="Engine of every model, whatever the settings say. simulated: no model file, made-up words, a token "
            "each 10 ms.",
        ),
    ] = "",
    workers: Annotated[int | None, typer.Option("--workers", min=0, help="Workers of each pool.")] = None,
    fixed_ports: Annotated[
        bool, typer.Option("--fixed-ports", help="Listen where the settings say, not on free ports.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder to keep jobs, settings and logs in; else they go at the end.")
    ] = None,
) -> None:
    """Run NATS, the services and the workers on this machine. Ctrl-C drains and stops all of it."""
    from laneway.runtime.config_load import find_file

    settings = settings_of(config, set_)
    if engine not in ("", "openvino", "simulated"):
        raise typer.BadParameter("the engine is openvino or simulated", param_hint="--engine")
    directory = data or Path(tempfile.mkdtemp(prefix="laneway-"))
    options = StackOptions(
        engine=engine,
        workers=workers,
        config=find_file(config, os.environ),
        settings=_tables(set_),
        directory=directory,
        stop_s_max=settings.process.drain_s + 5.0,
    )
    if fixed_ports:
        options = replace(
            options,
            nats_port=NATS_PORT,
            admission_listen=settings.admission.listen,
            scheduler_listen=settings.scheduler.listen,
            routing_listen=settings.routing.listen,
        )
    try:
        code = asyncio.run(_up(options, temporary=data is None))
    except (StackError, ConfigError) as error:
        say(f"logs are in {directory / 'logs'}")
        fail(str(error), EXIT_FAILED)
    if data is None and code == 0:
        shutil.rmtree(directory, ignore_errors=True)
    raise typer.Exit(code)


async def _up(options: StackOptions, *, temporary: bool) -> int:
    """Exit code 0 after Ctrl-C, 1 when a part ended by itself."""
    interrupted = asyncio.Event()
    stack = LocalStack(options, on_progress=_show)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _on_signal, stack, interrupted, temporary)
    say(f"starting; logs are in {stack.logs}")
    path = endpoint_file()
    try:
        starting = asyncio.create_task(stack.start())
        if not await before(starting, interrupted):
            say("stopped while starting")
            return 0
        announce(stack, path)
        say("ready: try `laneway generate 'Hello'` elsewhere; Ctrl-C stops everything")
        if not await stay(stack, interrupted):
            return EXIT_FAILED
        say("stopping; press Ctrl-C again to stop at once")
        return 0
    finally:
        remove_endpoint(path, os.getpid())
        await stack.stop()
        say("nothing is left running")


def _on_signal(stack: LocalStack, interrupted: asyncio.Event, temporary: bool) -> None:
    if interrupted.is_set():
        end_at_once(stack, temporary=temporary)
    interrupted.set()


def _show(step: Progress) -> None:
    if step.state in ("ready", "stopped"):
        say(f"  {step.part:16} {step.state:8} {step.detail}".rstrip())


def _tables(given: list[str] | None) -> dict[str, object]:
    """--set as nested tables, each value as TOML reads it, else as text."""
    import tomllib

    from laneway.cli.toml_text import merged, toml_text

    tables: dict[str, object] = {}
    for text in given or ():
        key, _, value = text.partition("=")
        try:
            table = tomllib.loads(f"{key} = {value}")
        except tomllib.TOMLDecodeError:
            table = tomllib.loads(f"{key} = {toml_text({'v': value}).partition(' = ')[2]}")
        tables = merged(tables, table)
    return tables
