"""How a process of Laneway starts, says that it is ready, is told to stop, and ends with a meaningful exit code."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from laneway.core.errors import ConfigError, LanewayError
from laneway.runtime.auth import check_metrics_binding
from laneway.runtime.exception_groups import leaf_errors
from laneway.runtime.logging import get_logger, set_up_logging
from laneway.runtime.settings import Settings

log = get_logger("laneway.lifecycle")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
# New containers between collections of the three generations. Python's own (700, 10, 10) costs a service a tenth of
# its CPU, for cycles that it hardly makes.
GC_THRESHOLDS = (10_000, 20, 20)
CLEAN_UP_S = 10.0  # beyond process.drain_s, for closing connections; then the process ends itself

Serve = Callable[[Settings, asyncio.Event], Awaitable[None]]


def run_service(name: str, settings: Settings, serve: Serve) -> int:
    """Runs `serve(settings, stop)` until it returns; gives the process's exit code.

    SIGTERM or SIGINT sets `stop`, and serve drains and returns. A second one ends the process at once.
    """
    set_up_logging(name, level=settings.process.log_level, form=settings.process.log_format)
    try:
        uvloop.run(_supervise(name, settings, serve))
    except BaseException as error:  # noqa: BLE001 - the outermost edge
        return _report(name, error)
    finally:
        withdraw_ready(settings)
    return EXIT_OK


async def _supervise(name: str, settings: Settings, serve: Serve) -> None:
    check_metrics_binding(settings.process)
    gc.collect()
    gc.freeze()  # what was imported stays: no collection need look at it again
    gc.set_threshold(*GC_THRESHOLDS)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, number, stop)
    log.info("service_started", process_id=os.getpid(), region=settings.region.name)
    serving = asyncio.ensure_future(serve(settings, stop))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            limit_s = settings.process.drain_s + CLEAN_UP_S
            await asyncio.wait({serving}, timeout=limit_s)
            if not serving.done():
                log.error("drain_overran", limit_s=limit_s)
                _exit_now(EXIT_FAILED)
        await serving
    finally:
        stopping.cancel()
        serving.cancel()
    log.info("service_stopped")


def _on_signal(number: signal.Signals, stop: asyncio.Event) -> None:
    if stop.is_set():
        log.warning("service_killed", signal=number.name)
        _exit_now(128 + number)
    log.info("service_stopping", signal=number.name)
    stop.set()


def _exit_now(code: int) -> None:
    sys.stderr.flush()
    os._exit(code)


def _report(name: str, error: BaseException) -> int:
    leaves = list(leaf_errors(error))
    for leaf in leaves:
        if isinstance(leaf, ConfigError):
            print(f"laneway {name}: {leaf}", file=sys.stderr)
            return EXIT_CONFIG
    if leaves and all(isinstance(leaf, LanewayError) for leaf in leaves):
        print(f"laneway {name}: {leaves[0]}", file=sys.stderr)
        return EXIT_FAILED
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit):
        raise error
    log.error("service_failed", exc_info=error)
    print(f"laneway {name}: failed: {type(leaves[0]).__name__}: {leaves[0]}", file=sys.stderr)
    return EXIT_FAILED


# --- ready file ------------------------------------------------------------------------------------


def announce_ready(settings: Settings, service: str, address: str = "", *, metrics: str = "") -> None:
    """Says that the service can serve: in the ready file where one is set (written atomically), and in the log."""
    if settings.process.ready_file:
        _write_ready(Path(settings.process.ready_file), service, address, metrics)
    log.info("service_ready", address=address, metrics=metrics)


def _write_ready(path: Path, service: str, address: str, metrics: str) -> None:
    content = {"service": service, "address": address, "metrics": metrics, "pid": os.getpid()}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"process.ready_file = {str(path)!r} cannot be written: {error.strerror}") from None


def withdraw_ready(settings: Settings) -> None:
    """Removes our own ready file."""
    if not settings.process.ready_file:
        return
    path = Path(settings.process.ready_file)
    try:
        if json.loads(path.read_text(encoding="utf-8")).get("pid") == os.getpid():
            path.unlink(missing_ok=True)
    except (OSError, ValueError):  # never written, or not ours
        return
