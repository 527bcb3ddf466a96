"""Commands of operators: what the region looks like, why a job is where it is, and taking parts out of service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from laneway.cli import connect
from laneway.cli.connect import JsonOption, RoutingOption, SchedulerOption, TimeoutOption, TokenOption
from laneway.cli.console import clock_time, moment, print_json, print_table, run, seconds
from laneway.cli.facts import fact_words
from laneway.core.lanes import Lane

if TYPE_CHECKING:
    from laneway.client import Region

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="Name of a worker, or of one incarnation.")]
RegionArgument = Annotated[str, typer.Argument(help="Name of a region, as `laneway regions` shows it.")]
LaneArgument = Annotated[Lane, typer.Argument(help="Which lane.")]


def lanes(
    as_json: JsonOption = False,
    timeout: TimeoutOption = None,
    address: SchedulerOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show what waits and runs in each lane."""

    async def work() -> None:
        async with connect.scheduler(address, token_file) as client:
            found = [lane async for lane in client.list_lanes(timeout_s=timeout)]
        if as_json:
            print_json(found)
            return
        columns = ("LANE", "POOL", "STATE", "READY", "RUNNING", "PARKED", "LIMIT", "NEXT DUE", "RELEASED")
        rows = [
            (
                lane.lane,
                lane.pool,
                "paused" if lane.paused else "open",
                lane.ready,
                lane.running,
                lane.parked,
                lane.limit or "",
                moment(lane.next_due_s),
                lane.released,
            )
            for lane in found
        ]
        print_table(columns, rows, empty="no lanes: no pool has been provisioned")

    run(work)


def workers(
    pool: Annotated[str, typer.Option("--pool", help="Only workers of this pool.")] = "",
    as_json: JsonOption = False,
    timeout: TimeoutOption = None,
    address: SchedulerOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show the live workers."""

    async def work() -> None:
        async with connect.scheduler(address, token_file) as client:
            found = [worker async for worker in client.list_workers(pool=pool, timeout_s=timeout)]
        if as_json:
            print_json(found)
            return
        columns = (
            "WORKER",
            "STATE",
            "HOME",
            "SLOTS",
            "KV",
            "JOBS",
            "PREFILL/S",
            "DECODE/S",
            "TPOT P95",
            "THETA",
            "LOWER/S",
            "POOL",
            "ENGINE",
            "PID",
        )
        rows = [
            (
                worker.name,
                f"{worker.state} ({worker.detail})" if worker.detail else worker.state,
                worker.home,
                f"{worker.running}/{worker.slots}",
                f"{100 * worker.kv_tokens_used / worker.kv_tokens:.0f} %" if worker.kv_tokens else "",
                worker.jobs_done,
                round(worker.prefill_tokens_per_s),
                round(worker.decode_tokens_per_s),
                seconds(worker.priority_tpot_p95_s) if worker.priority_tpot_p95_s else "",
                f"{worker.theta:.2f}" if worker.theta else "",
                round(worker.lower_tokens_per_s) or "",
                worker.pool,
                worker.engine,
                worker.process_id,
            )
            for worker in found
        ]
        print_table(columns, rows, empty="no live workers", folded=["STATE"])

    run(work)


regions_app = typer.Typer(invoke_without_command=True)


def explain(
    job_id: Annotated[str, typer.Argument(help="Job to explain.")],
    as_json: JsonOption = False,
    timeout: TimeoutOption = None,
    address: SchedulerOption = None,
    token_file: TokenOption = None,
) -> None:
    """Say why a job is where it is: verdict, release, claim, end."""

    async def work() -> None:
        async with connect.scheduler(address, token_file) as client:
            found = await client.explain_job(job_id, timeout_s=timeout)
        if as_json:
            print_json(found)
            return
        print(f"{found.job_id} is {found.state}")
        for step in found.steps:
            facts = fact_words(step.facts.items())
            said = f": {step.facts['message']}" if "message" in step.facts else ""
            line = " ".join(word for word in (step.actor, step.action, step.reason) if word)
            print(f"{clock_time(step.at_s):>12}  {line}{said}{f' ({facts})' if facts else ''}")

    run(work)


def drain(
    worker: WorkerArgument,
    timeout: TimeoutOption = None,
    address: SchedulerOption = None,
    token_file: TokenOption = None,
) -> None:
    """Let a worker finish what it runs and take nothing new."""

    async def work() -> None:
        async with connect.scheduler(address, token_file) as client:
            await client.drain_worker(worker, timeout_s=timeout)
        print(f"{worker} is draining; undo with: laneway undrain {worker}")

    run(work)


def undrain(
    worker: WorkerArgument,
    timeout: TimeoutOption = None,
    address: SchedulerOption = None,
    token_file: TokenOption = None,
) -> None:
    """Let a drained worker take work again."""

    async def work() -> None:
        async with connect.scheduler(address, token_file) as client:
            await client.undrain_worker(worker, timeout_s=timeout)
        print(f"{worker} takes work again")

    run(work)


def pause(
    lane: LaneArgument,
    timeout: TimeoutOption = None,
    address: SchedulerOption = None,
    token_file: TokenOption = None,
) -> None:
    """Stop releases and pulls of a lane. Admission goes on to hold."""

    async def work() -> None:
        async with connect.scheduler(address, token_file) as client:
            await client.pause_lane(lane, timeout_s=timeout)
        print(f"the {lane} lane is paused; undo with: laneway resume {lane}")

    run(work)


def resume(
    lane: LaneArgument,
    timeout: TimeoutOption = None,
    address: SchedulerOption = None,
    token_file: TokenOption = None,
) -> None:
    """Open a paused lane again."""

    async def work() -> None:
        async with connect.scheduler(address, token_file) as client:
            await client.resume_lane(lane, timeout_s=timeout)
        print(f"the {lane} lane is open")

    run(work)


@regions_app.callback()
def list_regions(
    context: typer.Context,
    as_json: JsonOption = False,
    timeout: TimeoutOption = None,
    address: RoutingOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show the regions as this one sees them, or drain one."""
    if context.invoked_subcommand is not None:
        return

    async def work() -> None:
        async with connect.routing(address, token_file) as client:
            found = [region async for region in client.list_regions(timeout_s=timeout)]
        if as_json:
            print_json(found)
            return
        columns = ("REGION", "STATE", "MODEL", "WORKERS", "FREE", "TTFT", "BACKLOG", "ROUND TRIP")
        rows = [row for region in found for row in _region_rows(region)]
        print_table(columns, rows, empty="no regions")

    run(work)


@regions_app.command("drain")
def drain_region(
    region: RegionArgument,
    timeout: TimeoutOption = None,
    address: RoutingOption = None,
    token_file: TokenOption = None,
) -> None:
    """Keep new work out of a region; what it accepted goes on."""

    async def work() -> None:
        async with connect.routing(address, token_file) as client:
            await client.drain_region(region, timeout_s=timeout)
        print(f"region {region} is draining; undo with: laneway regions undrain {region}")

    run(work)


@regions_app.command("undrain")
def undrain_region(
    region: RegionArgument,
    timeout: TimeoutOption = None,
    address: RoutingOption = None,
    token_file: TokenOption = None,
) -> None:
    """Let a drained region take work again."""

    async def work() -> None:
        async with connect.routing(address, token_file) as client:
            await client.undrain_region(region, timeout_s=timeout)
        print(f"region {region} takes work again")

    run(work)


def _region_rows(region: Region) -> list[tuple[object, ...]]:
    state = "draining" if region.draining else "healthy" if region.healthy else "unhealthy"
    trip = "" if region.round_trip_s is None else seconds(region.round_trip_s)
    if not region.models:
        return [(region.region, state, "", "", "", "", "", trip)]
    return [
        (
            region.region,
            state,
            f"{model.model}/{model.tier}",
            model.workers,
            model.free_slots,
            "" if model.ttft_eta_s is None else seconds(model.ttft_eta_s),
            "" if model.batch_eta_s is None else seconds(model.batch_eta_s),
            trip,
        )
        for model in region.models
    ]
