"""`laneway simulate`: a trace under virtual time, on engines of a profile, with Laneway and with its rivals."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laneway.cli.connect import JsonOption
from laneway.cli.console import EXIT_USAGE, fail, print_json, print_table, run, say
from laneway.core.errors import ConfigError
from laneway.core.lanes import Isolation

if TYPE_CHECKING:
    from laneway.simulator.outcomes import Run

TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", exists=True, help="Of Laneway's own format, or a recorded one."),
]
WorkloadOption = Annotated[
    str | None, typer.Option("--workload", metavar="NAME", help="A scenario in place of a trace, such as chat.")
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="FOLDER", exists=True, file_okay=False, help="Recorded traces of scenarios; else made up."
    ),
]
LoadOption = Annotated[float, typer.Option("--load", min=0.001, help="Of a scenario, times its own rate.")]
SpanOption = Annotated[
    float | None, typer.Option("--span", min=1.0, metavar="SECONDS", help="Of a scenario, in place of its own.")
]
PoliciesOption = Annotated[
    str, typer.Option("--policies", metavar="NAME,...", help="Which to play; 'all' plays every one that is known.")
]
SpeedOption = Annotated[float, typer.Option("--speed", min=0.001, help="The trace's time so many times as fast.")]
WorkersOption = Annotated[int, typer.Option("--workers", min=1, help="Of the fleet; most, where they are sought.")]
ProfileOption = Annotated[str, typer.Option("--profile", help="Of the engines, by name or file.")]
ChunkOption = Annotated[int, typer.Option("--chunk", min=16, help="Prompt tokens of one step, at most.")]
SlotsOption = Annotated[int, typer.Option("--slots", min=1, help="Sequences of one worker, at most.")]
TtftOption = Annotated[
    float, typer.Option("--ttft", min=0.001, metavar="SECONDS", help="Promised where the trace promises nothing.")
]
TpotOption = Annotated[
    float, typer.Option("--tpot", min=0.0001, metavar="SECONDS", help="Promised where the trace promises nothing.")
]
BatchOption = Annotated[
    int, typer.Option("--batch", min=0, metavar="JOBS", help="Batch jobs beside the trace, all there at its begin.")
]
IsolationOption = Annotated[Isolation, typer.Option("--isolation", help="Of Laneway's priority requests.")]
FindOption = Annotated[
    float | None,
    typer.Option(
        "--find-workers",
        min=0.01,
        max=1.0,
        metavar="SHARE",
        help="Find the fewest workers, --workers at most, with which this share of each lane is kept.",
    ),
]


def simulate(
    trace_file: TraceOption = None,
    workload: WorkloadOption = None,
    data: DataOption = None,
    load: LoadOption = 1.0,
    span_s: SpanOption = None,
    policies: PoliciesOption = "laneway,strict,fifo",
    speed: SpeedOption = 1.0,
    workers: WorkersOption = 4,
    profile: ProfileOption = "h100-8b-fp8",
    chunk: ChunkOption = 512,
    slots: SlotsOption = 64,
    ttft_s: TtftOption = 0.5,
    tpot_s: TpotOption = 0.03,
    batch: BatchOption = 0,
    isolation: IsolationOption = Isolation.SLO,
    find_workers: FindOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of all that is drawn.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Play a trace under virtual time: what Laneway and others would make of it on so many accelerators.

    KEPT is the share of all requests, refused ones included, that were answered within their promises. Batch work is
    promised an end within a day.
    """
    if importlib.util.find_spec("numpy") is None:
        fail("a simulation needs numpy: pip install 'laneway[simulate]'", EXIT_USAGE)

    async def work() -> None:
        from laneway.cli.traces import scenario, trace_from, with_batch
        from laneway.runtime.engine_profile import load_profile
        from laneway.runtime.settings import PolicySettings
        from laneway.simulator.columns import with_blocks_of
        from laneway.simulator.playing import play
        from laneway.simulator.scaling import compressed
        from laneway.simulator.setup import BLOCK_TOKENS, EngineSize
        from laneway.simulator.world import FleetParams

        if (trace_file is None) == (workload is None):
            raise ConfigError("either --trace or --workload says what is played")
        if workload is not None:
            trace = scenario(workload, data, seed=seed, load=load, span_s=span_s)
        else:
            assert trace_file is not None
            trace = trace_from(trace_file, ttft_s=ttft_s, tpot_s=tpot_s, deadline_s=3600.0)
        trace = with_batch(trace if speed == 1.0 else compressed(trace, speed), batch)
        trace = with_blocks_of(trace, BLOCK_TOKENS)
        size, engines = EngineSize(slots=slots, chunk_tokens=chunk), load_profile(profile)
        settings = PolicySettings(isolation=isolation.value)

        def played(name: str, fleet: int) -> Run:
            began_s = time.monotonic()
            params = FleetParams(workers=fleet)
            try:
                found = play(name, trace, engines, params, size=size, settings=settings, seed=seed)
            except ValueError as error:
                raise ConfigError(f"{name}: {error}") from None
            say(f"{name}: {len(trace)} requests on {fleet} workers in {time.monotonic() - began_s:.1f} s")
            return found

        if find_workers is not None:
            _show_fewest(_names(policies), played, find_workers, workers, as_json=as_json)
        else:
            _show([played(name, workers) for name in _names(policies)], as_json=as_json)

    run(work)


def _show(runs: list[Run], *, as_json: bool) -> None:
    from laneway.cli.replaying.summary import COLUMNS, rows, summary_of

    if as_json:
        print_json([_document(each) for each in runs])
        return
    lines = [(each.policy, *row) for each in runs for row in rows(summary_of(each))]
    print_table(("POLICY", *COLUMNS), lines, empty="the trace has no request")
    for each in runs:
        say(f"{each.policy}: {_work(each)}")


def _show_fewest(
    names: list[str], played: Callable[[str, int], Run], share: float, most: int, *, as_json: bool
) -> None:
    """The capacity that a promise takes, by policy."""
    from laneway.cli.replaying.summary import summary_of
    from laneway.simulator.sizing import fewest

    found: list[tuple[str, int | None, str]] = []
    for name in names:
        kept: dict[int, str] = {}

        def holds(workers: int, name: str = name, kept: dict[int, str] = kept) -> bool:
            lanes = summary_of(played(name, workers))
            kept[workers] = ", ".join(f"{lane.lane} {100 * lane.kept:.1f} %" for lane in lanes)
            return all(lane.kept >= share for lane in lanes)

        workers = fewest(holds, most)
        found.append((name, workers, kept[most if workers is None else workers]))
    if as_json:
        print_json([{"policy": name, "workers": workers, "kept": kept} for name, workers, kept in found])
        return
    lines = [(name, f"more than {most}" if workers is None else workers, kept) for name, workers, kept in found]
    print_table(("POLICY", "WORKERS", "KEPT WITH THESE"), lines, empty="there is no policy")


def _names(policies: str) -> list[str]:
    from laneway.simulator.playing import policies as known

    if policies == "all":
        return list(known())
    names = [name.strip() for name in policies.split(",") if name.strip()]
    unknown = [name for name in names if name not in known()]
    if unknown or not names:
        raise ConfigError(f"--policies: there is no {unknown[0] if unknown else 'name'!r}; known: {', '.join(known())}")
    return names


def _work(run: Run) -> str:
    usage = run.usage
    span_s = usage.every_s * max(1, len(usage.busy))
    tokens = ", ".join(
        f"{lane} {value / span_s:,.0f}"
        for lane, value in zip(("priority", "deferrable", "batch"), usage.tokens.sum(axis=0), strict=True)
        if value
    )
    busy = f"engines busy {100 * float(usage.busy.mean()):.0f} % of the time" if len(usage.busy) else "nothing ran"
    return f"{busy}; output tokens a second: {tokens or 'none'}"


def _document(run: Run) -> dict[str, object]:
    from dataclasses import asdict

    from laneway.cli.replaying.summary import summary_of

    return {
        "policy": run.policy,
        "trace": run.trace.name,
        "notes": run.trace.notes,
        "seed": run.seed,
        "lanes": [asdict(lane) for lane in summary_of(run)],
        "counts": run.counts,
        "usage": {
            "every_s": run.usage.every_s,
            "workers": float(run.usage.workers.mean()) if len(run.usage.workers) else 0.0,
            "busy": float(run.usage.busy.mean()) if len(run.usage.busy) else 0.0,
            "device_s": run.usage.device_s.sum(axis=0).tolist(),
        },
        "parameters": run.parameters,
    }
