"""`laneway replay`: plays a trace against a running stack, as its callers would, and says what they got.

Calls RPCs alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laneway.cli import connect
from laneway.cli.connect import AddressOption, JsonOption, TokenOption
from laneway.cli.console import EXIT_INTERRUPTED, EXIT_USAGE, fail, print_json, print_table, run, say
from laneway.core.errors import ConfigError

if TYPE_CHECKING:
    from laneway.cli.replaying.play import Replay
    from laneway.client import Client
    from laneway.simulator.trace import Trace


class Caches(StrEnum):
    COLD = "cold"
    WARM = "warm"


SchedulerAddress = Annotated[
    str | None,
    typer.Option(
        "--scheduler-address",
        envvar="LANEWAY_SCHEDULER_ADDRESS",
        metavar="HOST:PORT",
        help="Scheduler service to ask what the workers do.",
    ),
]
TraceOption = Annotated[
    Path, typer.Option("--trace", metavar="FILE", exists=True, dir_okay=False, help="The trace to play.")
]
ModelOption = Annotated[str, typer.Option("--model", "-m", help="A model of the catalogue, or model/tier.")]
SpeedOption = Annotated[
    float, typer.Option("--speed", min=0.001, max=1000.0, help="Arrivals and think times so many times as fast.")
]
DividePromptOption = Annotated[
    float, typer.Option("--divide-prompt", min=1.0, help="Prompts so many times shorter, for small machines.")
]
DivideOutputOption = Annotated[
    float, typer.Option("--divide-output", min=1.0, help="Answers so many times shorter, for small machines.")
]
CachesOption = Annotated[
    Caches, typer.Option("--caches", help="cold: nobody has met these prompts; warm: played twice, judged once.")
]
CallsOption = Annotated[
    int, typer.Option("--at-once", min=1, max=100_000, help="Most calls open; requests beyond begin late.")
]
ProfileOption = Annotated[
    str | None, typer.Option("--profile", help="Of the engines, by name or file: says what answers are worth.")
]
TokensOption = Annotated[
    Path | None,
    typer.Option(
        "--tokens",
        metavar="FOLDER",
        exists=True,
        file_okay=False,
        help="Holds a token file for each tenant of the trace, with its name; else all call with one token.",
    ),
]


def replay(
    trace_file: TraceOption,
    model: ModelOption = "chat",
    speed: SpeedOption = 1.0,
    divide_prompt: DividePromptOption = 1.0,
    divide_output: DivideOutputOption = 1.0,
    caches: CachesOption = Caches.COLD,
    calls: CallsOption = 1000,
    profile: ProfileOption = None,
    tokens: TokensOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of what is drawn: waits before a retry.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Leave the figures there too.")] = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    scheduler_address: SchedulerAddress = None,
    token_file: TokenOption = None,
) -> None:
    """Play a trace against a running stack: each request at its time, with its contract and its caller's patience.

    Answers have the trace's lengths, and prompts that share blocks share text. Ctrl-C ends it in order, with the
    figures so far.
    """
    if importlib.util.find_spec("numpy") is None:
        fail("a replay needs numpy: pip install 'laneway[simulate]'", EXIT_USAGE)

    async def work() -> int:
        from rich.console import Console

        from laneway.cli.replaying.play import Options, Replay
        from laneway.cli.replaying.played import as_played
        from laneway.cli.traces import trace_from
        from laneway.runtime.engine_profile import load_profile, step_times

        told = trace_from(trace_file, ttft_s=math.inf, tpot_s=math.inf, deadline_s=math.inf)
        trace = as_played(told, speed=speed, divide_prompt=divide_prompt, divide_output=divide_output)
        options = Options(
            model=model,
            calls=calls,
            warm=caches is Caches.WARM,
            seed=seed,
            times=step_times(load_profile(profile)) if profile else None,
            parameters={
                "speed": speed, "divide_prompt": divide_prompt, "divide_output": divide_output,
                "caches": caches.value, "at_once": calls, "profile": profile or "",
            },
        )  # fmt: skip
        async with contextlib.AsyncExitStack() as opened:
            scheduler = await opened.enter_async_context(connect.scheduler(scheduler_address, token_file))
            clients = await _clients(opened, trace, tokens, address, token_file)
            played = Replay(trace, clients, scheduler, options, Console(stderr=True), say)
            return await _play(played, out, as_json=as_json)

    run(work)


async def _clients(
    opened: contextlib.AsyncExitStack, trace: Trace, tokens: Path | None, address: str | None, token_file: Path | None
) -> list[Client]:
    """One for each tenant where there are tokens of theirs, else one for all."""
    files = [token_file] if tokens is None else [tokens / tenant for tenant in trace.tenants]
    missing = [file.name for file in files if tokens is not None and file is not None and not file.is_file()]
    if missing:
        raise ConfigError(f"{tokens} has no token file for {', '.join(missing[:5])}; the trace has these tenants")
    return [await opened.enter_async_context(connect.admission(address, file)) for file in files]


async def _play(replay: Replay, out: Path | None, *, as_json: bool) -> int:
    """The first Ctrl-C ends the replay in order, a second one at once."""
    from laneway.cli.replaying.summary import COLUMNS, document, rows, sentences, summary_of, write_report

    task = asyncio.current_task()
    assert task is not None

    def interrupted() -> None:
        if replay.stopped:
            task.cancel()
        else:
            say("stopping: what is open is cancelled; press Ctrl-C again to stop at once")
            replay.stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted)
    played, keeping = await replay.run()
    if out is not None:
        write_report(played, keeping, out)
    if as_json:
        print_json(document(played, keeping))
    else:
        print_table(COLUMNS, rows(summary_of(played)), empty="nothing was asked")
        for sentence in sentences(played, keeping):
            say(sentence)
    return EXIT_INTERRUPTED if replay.stopped else 0
