"""`laneway up`: the whole stack in one terminal, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from laneway.cli.console import EXIT_FAILED, fail, say
from laneway.cli.endpoint import Endpoint, endpoint_file, read_endpoint, remove_endpoint, write_endpoint
from laneway.cli.serve import ConfigOption, SetOption, settings_of
from laneway.cli.stack import LocalStack, Progress, StackError, StackOptions
from laneway.core.errors import ConfigError

NATS_PORT = 4222

T = TypeVar("T")


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
        if not await _before(starting, interrupted):
            say("stopped while starting")
            return 0
        _announce(stack, path)
        ended = asyncio.create_task(stack.ended())
        if await _before(ended, interrupted):
            child = ended.result()
            say(f"laneway: {child.name} ended with status {child.exit_status}{child.log_tail()}")
            return await _outlive(stack, interrupted) if child in stack.workers else EXIT_FAILED
        say("stopping; press Ctrl-C again to stop at once")
        return 0
    finally:
        remove_endpoint(path, os.getpid())
        await stack.stop()
        say("nothing is left running")


async def _outlive(stack: LocalStack, interrupted: asyncio.Event) -> int:
    """A worker that died is not the end: its jobs go to another. The rest runs on until Ctrl-C."""
    say("the rest of the stack goes on; Ctrl-C stops it")
    await interrupted.wait()
    return 0


async def _before(task: asyncio.Task[T], interrupted: asyncio.Event) -> bool:
    """Waits for the task or Ctrl-C; True if the task was done first. An error of the task is raised."""
    waiting = asyncio.create_task(interrupted.wait())
    both: set[asyncio.Task[Any]] = {task, waiting}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, StackError):
        await task
    return False


def _on_signal(stack: LocalStack, interrupted: asyncio.Event, temporary: bool) -> None:
    if not interrupted.is_set():
        interrupted.set()
        return
    for child in stack.children:
        child.kill_group()
    if temporary:
        shutil.rmtree(stack.directory, ignore_errors=True)
    say("laneway: stopped at once; running jobs were cut off")
    os._exit(EXIT_FAILED)


def _announce(stack: LocalStack, path: Path) -> None:
    addresses = stack.addresses
    other = read_endpoint(path)
    if other is not None and other.pid != os.getpid():
        say(f"another stack runs (process {other.pid}); for this one: export LANEWAY_ADDRESS={addresses.admission}")
        say(f"  LANEWAY_SCHEDULER_ADDRESS={addresses.scheduler} LANEWAY_ROUTING_ADDRESS={addresses.routing}")
    else:
        endpoint = Endpoint(
            os.getpid(), addresses.admission, addresses.scheduler, addresses.routing, addresses.nats, str(stack.logs)
        )
        write_endpoint(endpoint, path)
        say(f"other terminals find this stack by {path}")
    say("ready: try `laneway generate 'Hello'` elsewhere; Ctrl-C stops everything")


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
