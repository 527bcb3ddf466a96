"""A local stack that stays up for other terminals: how it is found, what is said, and what ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from laneway.cli.console import EXIT_FAILED, say
from laneway.cli.endpoint import Endpoint, read_endpoint, write_endpoint
from laneway.cli.stack import LocalStack, StackError

T = TypeVar("T")
FOLLOW_S = 1.0  # between looks at the settings file


def announce(stack: LocalStack, path: Path) -> None:
    """Writes the endpoint file, unless it names another stack that runs, and says how to reach this one."""
    addresses = stack.addresses
    other = read_endpoint(path)
    if other is not None and other.pid != os.getpid():
        say(f"another stack runs (process {other.pid}); for this one: export LANEWAY_ADDRESS={addresses.admission}")
        say(f"  LANEWAY_SCHEDULER_ADDRESS={addresses.scheduler} LANEWAY_ROUTING_ADDRESS={addresses.routing}")
        return
    endpoint = Endpoint(
        os.getpid(), addresses.admission, addresses.scheduler, addresses.routing, addresses.nats, str(stack.logs)
    )
    write_endpoint(endpoint, path)
    say(f"other terminals find this stack by {path}")


async def stay(stack: LocalStack, interrupted: asyncio.Event) -> bool:
    """Returns on Ctrl-C with True, or when a part ended by itself that the stack cannot do without, with False.

    A worker that died is not the end: its jobs go to another.
    """
    following = asyncio.create_task(_follow_config(stack))
    try:
        return await _stay(stack, interrupted)
    finally:
        following.cancel()


async def _follow_config(stack: LocalStack) -> None:
    """The processes have copies of the settings file: the scheduler's is made anew when that changes."""
    path = stack.options.config
    seen = path.read_bytes() if path is not None else b""
    while path is not None:
        await asyncio.sleep(FOLLOW_S)
        with contextlib.suppress(OSError):  # an editor may be about to put another in its place
            if (content := path.read_bytes()) != seen:
                stack.follow_config()
                seen = content


async def _stay(stack: LocalStack, interrupted: asyncio.Event) -> bool:
    ended = asyncio.create_task(stack.ended())
    if not await before(ended, interrupted):
        return True
    child = ended.result()
    say(f"laneway: {child.name} ended with status {child.exit_status}{child.log_tail()}")
    if child not in stack.workers:
        return False
    say("the rest of the stack goes on; Ctrl-C stops it")
    await interrupted.wait()
    return True


async def before(task: asyncio.Task[T], interrupted: asyncio.Event) -> bool:
    """Waits for the task or Ctrl-C; True if the task was done first. An error of the task is raised."""
    waiting = asyncio.create_task(interrupted.wait())
    both: set[asyncio.Task[Any]] = {task, waiting}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for each in both:
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError, StackError):
            await task


def end_at_once(stack: LocalStack | None, *, temporary: bool) -> NoReturn:
    """Kills every process of the stack and this one. `temporary`: its folder goes as well."""
    if stack is not None:
        for child in stack.children:
            child.kill_group()
        if temporary:
            shutil.rmtree(stack.directory, ignore_errors=True)
    say("laneway: stopped at once; running jobs were cut off")
    os._exit(EXIT_FAILED)
