"""Commands for jobs that were given up: list them, run them again, remove them."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from laneway.cli import connect
from laneway.cli.connect import AddressOption, JsonOption, TimeoutOption, TokenOption
from laneway.cli.console import EXIT_FAILED, describe, fail, moment, print_json, print_table, run, say, seconds
from laneway.cli.job_view import verdict_sentence
from laneway.core.errors import LanewayError, Unavailable
from laneway.core.lanes import Lane

if TYPE_CHECKING:
    from laneway.client import DeadLetter

app = typer.Typer(
    no_args_is_help=True,
    help="Jobs that were given up after failed attempts: your own, or every tenant's for operators.",
)

LaneFilter = Annotated[Lane | None, typer.Option("--lane", "-l", help="Only jobs of this lane.")]
ReasonFilter = Annotated[str, typer.Option("--reason", help="Only jobs given up for this reason, such as POISON.")]
TenantFilter = Annotated[str, typer.Option("--tenant", help="Only jobs of this tenant; for operators.")]

COLUMNS = ("JOB", "REASON", "LANE", "AGE", "ATTEMPTS", "LAST WORKER", "TENANT", "MODEL", "PROMPT", "REQUEUE")


@app.command("list")
def list_letters(
    lane: LaneFilter = None,
    reason: ReasonFilter = "",
    tenant: TenantFilter = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most jobs to show.")] = 50,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """List the jobs that were given up, newest first. --json has the worker and time of each attempt."""

    async def work() -> None:
        async with connect.admission(address, token_file) as client:
            listed = client.list_dead_letters(
                lane=lane, reason=reason.upper(), tenant=tenant, limit=limit, timeout_s=timeout
            )
            found = [letter async for letter in listed]
        if as_json:
            print_json(found)
        else:
            print_table(COLUMNS, [_row(letter) for letter in found], empty="no dead letters")

    run(work)


def _row(letter: DeadLetter) -> tuple[object, ...]:
    return (
        letter.job_id,
        letter.reason,
        letter.lane,
        moment(letter.died_s).removesuffix(" ago"),
        len(letter.attempts),
        letter.attempts[-1].worker_id if letter.attempts else "",
        letter.tenant,
        letter.model,
        letter.prompt_tokens,
        "possible" if letter.requeueable else "impossible",
    )


@app.command()
def requeue(
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB", help="Jobs to run again.")],
    deadline: Annotated[
        float | None,
        typer.Option("--deadline", min=0.001, help="Seconds until the answer is due. Default: as many as the job had."),
    ] = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Run jobs again that were given up, and print the ids of the new ones. Safe to repeat."""

    async def work() -> int:
        done: list[dict[str, object]] = []
        failed = 0
        async with connect.admission(address, token_file) as client:
            for job_id in dict.fromkeys(job_ids):
                try:
                    new = await client.requeue_dead_letter(job_id, deadline_s=deadline, timeout_s=timeout)
                except Unavailable:
                    raise
                except LanewayError as error:  # of this job; the others may do
                    sentence = describe(error)
                    say(f"laneway: {sentence if job_id in sentence else f'{job_id}: {sentence}'}")
                    failed += 1
                    continue
                done.append({"job_id": job_id, "requeued_as": new.job_id, "verdict": new.verdict})
                if not as_json:
                    say(f"{job_id}: {verdict_sentence(new.verdict)}")
                    print(new.job_id)
        if as_json:
            print_json(done)
        return EXIT_FAILED if failed else 0

    run(work)


@app.command()
def purge(
    job_ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="JOB", help="Only these; without any, all that the options select."),
    ] = None,
    lane: LaneFilter = None,
    reason: ReasonFilter = "",
    tenant: TenantFilter = "",
    older_than: Annotated[
        float | None, typer.Option("--older-than", min=0.0, help="Only jobs given up more than so many seconds ago.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Remove dead letters for good. The records of the jobs stay until they expire."""
    chosen = _selection(lane, reason, tenant, older_than)
    if job_ids and chosen:
        raise typer.BadParameter("give either jobs or options that select them")
    if not job_ids and not yes:
        what = " ".join(["every dead letter", *chosen]) if chosen else "every dead letter that you may see"
        if not _confirmed(f"Remove {what}?"):
            fail("nothing was removed")
    before_s = time.time() - older_than if older_than is not None else None

    async def work() -> None:
        async with connect.admission(address, token_file) as client:
            purged = await client.purge_dead_letters(
                job_ids or None, lane=lane, reason=reason.upper(), tenant=tenant, before_s=before_s, timeout_s=timeout
            )
        if as_json:
            print_json({"purged": purged})
        else:
            print(f"{purged} dead letter{'' if purged == 1 else 's'} removed")

    run(work)


def _confirmed(question: str) -> bool:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _selection(lane: Lane | None, reason: str, tenant: str, older_than_s: float | None) -> list[str]:
    """What the options select, in words."""
    words = {
        f"of the {lane} lane": lane is not None,
        f"for the reason {reason.upper()}": bool(reason),
        f"of tenant {tenant}": bool(tenant),
        f"older than {seconds(older_than_s or 0.0)}": older_than_s is not None,
    }
    return [word for word, given in words.items() if given]
