"""How the command speaks: results to standard output, everything else to standard error, one line for an error.

Exit codes: 0 done; 1 the service refused or something failed; 2 the command line or a setting is wrong; 130 Ctrl-C.
Heavy modules are imported where they are used: a command that fails at its first word should fail at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from laneway.core.errors import ConfigError, LanewayError

if TYPE_CHECKING:
    from rich.console import Console

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

COLUMN_GAP = 2
FOLDED_WIDTH_MIN = 12


def run(work: Callable[[], Coroutine[Any, Any, int | None]]) -> NoReturn:
    """Runs a command's coroutine and ends the process with its exit code. Errors become one line."""
    import asyncio
    import signal

    async def interruptible() -> int | None:
        task = asyncio.current_task()
        assert task is not None
        # Through the loop, which then wakes up whichever thread the signal came to: asyncio.run alone would notice a
        # Ctrl-C that came to one of gRPC's threads only with the next event, and an idle stream has none.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        return await work()

    try:
        code = asyncio.run(interruptible()) or 0
    except LanewayError as error:
        fail(describe(error), EXIT_FAILED)
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)
    except (KeyboardInterrupt, asyncio.CancelledError):
        fail("stopped", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output left, as `head` does
        sys.stderr.close()
        code = EXIT_FAILED
    raise typer.Exit(code)


def fail(sentence: str, code: int = EXIT_FAILED) -> NoReturn:
    say(f"laneway: {sentence}")
    raise typer.Exit(code)


def describe(error: LanewayError) -> str:
    """One line: what happened, then what a caller can act on."""
    parts = [error.reason]
    if error.field and error.field not in error.message:
        parts.append(f"field {error.field}")
    if error.phase is not None:
        parts.append(f"while in {error.phase}")
    if error.retry_after_s is not None:
        parts.append(f"try again in {seconds(error.retry_after_s)}")
    if error.job_id:
        parts.append(f"job {error.job_id}")
    message = " ".join(error.message.split()).rstrip(".")
    return f"{message} ({', '.join(parts)})"


def say(line: str) -> None:
    """A line for people, on standard error."""
    print(line, file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """One JSON document on standard output; dataclasses and enums included."""
    import msgspec

    print(json.dumps(msgspec.to_builtins(value), indent=2, ensure_ascii=False))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str, folded: Sequence[str] = ()
) -> None:
    """A table on standard output; a sentence on standard error if there is nothing to show.

    Columns come in order of importance: a terminal that is too narrow loses the last ones, so that names stay whole
    and can be copied. Only cells of the `folded` columns may take several lines.
    """
    if not rows:
        say(empty)
        return
    from rich.table import Table

    console = output()
    fitting = _columns_that_fit(columns, rows, folded, console.width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns[:fitting]):
        numeric = all(isinstance(row[i], int | float) for row in rows)
        whole = name not in folded and fitting > 1
        table.add_column(name, justify="right" if numeric else "left", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(str(cell) for cell in row[:fitting]))
    console.print(table)
    if fitting < len(columns):
        say(f"(no room for {', '.join(columns[fitting:])}; --json has them)")


def _columns_that_fit(
    columns: Sequence[str], rows: Sequence[Sequence[object]], folded: Sequence[str], width: int
) -> int:
    """How many of the first columns a line holds; at least one."""
    used = -COLUMN_GAP
    for i, name in enumerate(columns):
        widest = max(len(name), *(len(str(row[i])) for row in rows))
        used += COLUMN_GAP + (min(widest, max(len(name), FOLDED_WIDTH_MIN)) if name in folded else widest)
        if used > width:
            return max(1, i)
    return len(columns)


def output() -> Console:
    """Standard output: colours in a terminal only, and lines as long as they are elsewhere."""
    from rich.console import Console

    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 400)


# --- words for values ------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """A span as people say it."""
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.0f} h" if value < 172_800 else f"{value / 86_400:.0f} days"


def moment(unix_s: float, now_s: float | None = None) -> str:
    """A wall time relative to now; empty for none."""
    if not unix_s:
        return ""
    span_s = unix_s - (time.time() if now_s is None else now_s)
    return f"in {seconds(span_s)}" if span_s >= 0 else f"{seconds(-span_s)} ago"


def clock_time(unix_s: float) -> str:
    """A wall time of day with milliseconds, local."""
    return f"{time.strftime('%H:%M:%S', time.localtime(unix_s))}.{int(unix_s % 1 * 1000):03d}" if unix_s else ""
