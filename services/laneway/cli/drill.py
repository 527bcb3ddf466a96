"""`laneway drill`: what Laneway promises, tried against a running stack; exit 1 when a promise was not kept.

Calls RPCs alone. Says what it will do before it does it, and leaves nothing behind but the records of its jobs, which
go when their time is over.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from laneway.cli import connect
from laneway.cli.connect import AddressOption, JsonOption, TokenOption
from laneway.cli.console import EXIT_FAILED, describe, print_json, print_table, run, say, seconds
from laneway.cli.drill_jobs import JOB_DRILLS
from laneway.cli.drill_parts import DRAIN_DRILL, kill_drill
from laneway.cli.drill_play import CLEAN_UP_S_MAX, LABEL, Drill, Outcome, Play, Skipped, clean_up
from laneway.cli.endpoint import address_of, endpoint_file, read_endpoint
from laneway.core.errors import LanewayError

DRILL_S_MAX = 300.0  # of one drill; then it is broken
JOBS = 60

SAFE = (*JOB_DRILLS, DRAIN_DRILL)
NAMES = ", ".join(drill.name for drill in SAFE)

SchedulerAddress = Annotated[
    str | None,
    typer.Option(
        "--scheduler-address",
        envvar="LANEWAY_SCHEDULER_ADDRESS",
        metavar="HOST:PORT",
        help="Scheduler service to call.",
    ),
]


def drill(
    only: Annotated[list[str] | None, typer.Argument(metavar="NAME", help=f"Only these: {NAMES}.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="A model of the catalogue, or model/tier.")] = "chat",
    jobs: Annotated[int, typer.Option("--jobs", min=3, max=10_000, help="Jobs to count in `accept`.")] = JOBS,
    kill: Annotated[
        bool,
        typer.Option("--kill", help="Also kill -9 a worker of the stack that `laneway up` runs here. It stays dead."),
    ] = False,
    as_json: JsonOption = False,
    address: AddressOption = None,
    scheduler_address: SchedulerAddress = None,
    token_file: TokenOption = None,
) -> None:
    """Try what Laneway promises against a running stack; exit 1 when a promise is broken.

    Each drill says what it will do, and takes some seconds. Nobody else's job is touched.
    A worker is drained and, where it is empty, the batch lane paused; both are taken back.
    """
    unknown = sorted(set(only or ()) - {each.name for each in SAFE})
    if unknown:
        raise typer.BadParameter(f"there is no drill {', '.join(unknown)}; there are {NAMES}", param_hint="NAME")
    wanted = [each for each in SAFE if not only or each.name in only]
    if kill:
        found = read_endpoint(endpoint_file())
        wanted.append(kill_drill(found, address_of("scheduler", scheduler_address)))

    async def work() -> int:
        outcomes, run_label = await _drill(wanted, model, jobs, address, scheduler_address, token_file)
        held = all(outcome.held for outcome in outcomes)
        if as_json:
            print_json({"run": run_label, "held": held, "drills": [asdict(outcome) for outcome in outcomes]})
        else:
            _show(outcomes)
        return 0 if held else EXIT_FAILED

    run(work)


async def _drill(
    wanted: Sequence[Drill],
    model: str,
    jobs: int,
    address: str | None,
    scheduler_address: str | None,
    token_file: Path | None,
) -> tuple[list[Outcome], str]:
    run_label = secrets.token_hex(4)
    outcomes: list[Outcome] = []
    async with (
        connect.admission(address, token_file) as client,
        connect.scheduler(scheduler_address, token_file) as scheduler,
    ):
        await client.quote(model=model, token_ids=[1], max_tokens=1)  # nothing answers: said at once, as one line
        say(f"drills at {client.address}, model {model}; the jobs have the label {LABEL}={run_label}")
        try:
            for number, each in enumerate(wanted, 1):
                say(f"{number}/{len(wanted)} {each.name}: {each.intent.format(jobs=jobs)}")
                play = Play(client, scheduler, model, run_label, jobs, Outcome(each.name), say)
                outcomes.append(await _one(each, play))
        finally:
            async with asyncio.timeout(CLEAN_UP_S_MAX):
                if left := await clean_up(client, run_label):
                    say(f"cancelled {left} jobs of these drills that had not ended")
    return outcomes, run_label


async def _one(drill: Drill, play: Play) -> Outcome:
    outcome, began_s = play.outcome, time.monotonic()
    try:
        async with asyncio.timeout(DRILL_S_MAX):
            await drill.play(play)
    except* Skipped as skipped:
        outcome.skipped = str(skipped.exceptions[0])
    except* LanewayError as errors:
        for error in errors.exceptions:
            play.expect(False, describe(error) if isinstance(error, LanewayError) else str(error))
    except* TimeoutError:
        play.expect(False, f"it did not end within {seconds(DRILL_S_MAX)}")
    outcome.took_s = round(time.monotonic() - began_s, 3)
    for promise in outcome.broken:
        say(f"  broken: {promise}")
    return outcome


def _show(outcomes: Sequence[Outcome]) -> None:
    rows = [
        (
            outcome.name,
            "skipped" if outcome.skipped else "held" if outcome.held else "BROKEN",
            seconds(outcome.took_s),
            outcome.skipped or "; ".join(outcome.broken or outcome.found),
        )
        for outcome in outcomes
    ]
    print_table(("DRILL", "PROMISE", "TOOK", "FOUND"), rows, empty="no drills", folded=["FOUND"])
