"""`laneway models`: what is served, and what of it is resident where: a pool a line, and a line for each worker that is
not ready, with its reason. `laneway models pull` fetches the small model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from laneway.cli import connect
from laneway.cli.connect import JsonOption, SchedulerOption, TimeoutOption, TokenOption
from laneway.cli.console import fail, print_json, print_table, run, say
from laneway.core.selectors import GENERAL_RANK

if TYPE_CHECKING:
    from laneway.client import Model, Worker

app = typer.Typer(invoke_without_command=True)

COLUMNS = ("MODEL", "POOL", "WORKERS", "SLOTS", "KV", "ENGINE", "PRECISION", "PRICE", "TAKES", "CONTEXT", "WEIGHTS")
STATES = {"READY": "ready", "STARTING": "loading", "DRAINING": "draining", "BROKEN": "unhealthy"}
SERVING = ("READY", "DRAINING")  # their slots and KV hold something


@app.callback()
def list_models(
    context: typer.Context,
    abilities: Annotated[bool, typer.Option("--abilities", help="Show what each pool offers instead.")] = False,
    as_json: JsonOption = False,
    timeout: TimeoutOption = None,
    address: SchedulerOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show the models that are served and what is resident where, or fetch the small model."""
    if context.invoked_subcommand is not None:
        return

    async def work() -> None:
        async with connect.scheduler(address, token_file) as client:
            models = [model async for model in client.list_models(timeout_s=timeout)]
            workers = [worker async for worker in client.list_workers(timeout_s=timeout)]
        if as_json:
            print_json(with_residents(models, workers))
            return
        if abilities:
            offers = [(f"{model.name}/{model.tier}", model.pool, ", ".join(model.capabilities)) for model in models]
            print_table(("MODEL", "POOL", "ABILITIES"), offers, empty="no models", folded=["ABILITIES"])
            return
        rows = [row_of(model, _of(model, workers)) for model in models]
        print_table(COLUMNS, rows, empty="no models", folded=["WORKERS", "TAKES"])
        for line in trouble(workers):
            say(line)

    run(work)


def row_of(model: Model, workers: Sequence[Worker]) -> tuple[object, ...]:
    serving = [worker for worker in workers if worker.state in SERVING]
    engines = sorted({worker.engine for worker in workers}) or [model.engine]
    return (
        f"{model.name}/{model.tier}",
        model.pool,
        _counted(model, workers),
        f"{sum(worker.running for worker in serving)}/{sum(worker.slots for worker in serving)}" if serving else "",
        _kv(serving),
        ", ".join(engines),
        model.precision,
        price(model),
        "" if model.selector.rank == GENERAL_RANK else model.selector.words(),
        model.context_length,
        model.weights,
    )


def price(model: Model) -> str:
    """Of a million tokens of prompts and answers, and of a worker's second."""
    tokens = (model.price_per_million_prompt_tokens, model.price_per_million_completion_tokens)
    said = [f"{tokens[0]:g} + {tokens[1]:g} /M"] if any(tokens) else []
    if model.price_per_device_s:
        said.append(f"{model.price_per_device_s:g} /s")
    return ", ".join(said)


def trouble(workers: Iterable[Worker]) -> list[str]:
    """A line for each worker that is not ready: how far it is, and why."""
    return [
        f"{worker.name} of {worker.pool} is {_state(worker)}{f': {worker.detail}' if worker.detail else ''}"
        for worker in workers
        if worker.state != "READY"
    ]


def with_residents(models: Iterable[Model], workers: Sequence[Worker]) -> list[dict[str, object]]:
    """Each pool with its live workers."""
    import msgspec

    return [{**msgspec.to_builtins(model), "resident": msgspec.to_builtins(_of(model, workers))} for model in models]


def _of(model: Model, workers: Iterable[Worker]) -> list[Worker]:
    return [worker for worker in workers if worker.pool == model.pool]


def _counted(model: Model, workers: Sequence[Worker]) -> str:
    """Such as "1 of 2 ready, 1 loading 40 %"."""
    ready = sum(worker.state == "READY" for worker in workers)
    others = Counter(_state(worker) for worker in workers if worker.state != "READY")
    if not workers:
        return f"none of {model.planned_workers}"
    said = [f"{ready} of {model.planned_workers} ready", *(f"{count} {state}" for state, count in others.items())]
    return ", ".join(said)


def _state(worker: Worker) -> str:
    state = STATES.get(worker.state, worker.state.lower())
    return f"{state} {100 * worker.load_progress:.0f} %" if worker.load_progress else state


def _kv(workers: Sequence[Worker]) -> str:
    """Used of what there is; "~": an engine does not tell, and its tokens are counted."""
    total = sum(worker.kv_tokens for worker in workers)
    if not total:
        return ""
    counted = any("kv_figures" not in worker.capabilities for worker in workers)
    return f"{'~' if counted else ''}{100 * sum(worker.kv_tokens_used for worker in workers) / total:.0f} %"


@app.command("pull")
def pull_model(name: Annotated[str, typer.Argument(help="A model that Laneway knows.")] = "smollm2") -> None:
    """Download the small model (about 90 MB) into your cache, unless it is on this machine; print its path."""
    from laneway.core.errors import ConfigError
    from laneway.runtime.model_files import SMOLLM2, find, pull

    if name != SMOLLM2.name:
        raise typer.BadParameter(f"Laneway knows {SMOLLM2.name}; other models are files that settings name")
    try:
        path = find(SMOLLM2)
        say(f"{SMOLLM2.file} is on this machine already")
    except ConfigError:
        try:
            megabytes = SMOLLM2.download_bytes // 1_000_000
            say(f"downloading {SMOLLM2.file} ({SMOLLM2.licence}), about {megabytes} MB; this may take minutes")
            path = pull(SMOLLM2)
        except ConfigError as error:
            fail(str(error))
    print(path)
