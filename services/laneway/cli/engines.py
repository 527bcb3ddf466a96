"""`laneway engines`: whether a pool's engine keeps the contract that workers rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from laneway.cli.calibrate import chosen_pool
from laneway.cli.connect import JsonOption
from laneway.cli.console import EXIT_FAILED, EXIT_USAGE, fail, print_json, print_table, run, say
from laneway.cli.serve import ConfigOption, SetOption, settings_of
from laneway.core.errors import ConfigError

if TYPE_CHECKING:
    from laneway.core.catalogue import Pool
    from laneway.runtime.settings import Settings
    from laneway.workers.conformance.kit import Report

app = typer.Typer(help="Judge an engine by itself.", no_args_is_help=True)


@app.callback()
def engines() -> None:
    pass


@app.command("check")
def check(
    pool: Annotated[str, typer.Option("--pool", help="Whose engine; the first of the settings if not given.")] = "",
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the conformance kit on a pool's engine: each case, and what was seen where one failed.

    Needs no NATS and no service. Takes seconds to minutes, starts the engine three times, and kills it on purpose.

    Exits 1 when a case failed. What the engine does not offer is said, and never counts as passed.
    """
    settings = settings_of(config, set_)
    chosen = chosen_pool(settings, pool)

    async def work() -> int:
        report = await _judged(settings, chosen)
        if as_json:
            print_json({"engine": chosen.engine, "results": report.results})
        else:
            rows = [(result.case, result.outcome, result.message) for result in report.results]
            print_table(("case", "outcome", "seen"), rows, empty="no case was run", folded=("seen",))
        if report.failed:
            say(f"laneway: {len(report.failed)} of {len(report.results)} cases failed: {', '.join(report.failed)}")
            return EXIT_FAILED
        return 0

    run(work)


async def _judged(settings: Settings, pool: Pool) -> Report:
    from laneway.runtime.logging import set_up_logging
    from laneway.workers.conformance.kit import run_kit
    from laneway.workers.conformance.subject import subject_of
    from laneway.workers.engines.protocol import EngineStartError

    set_up_logging("engines", level="error", form=settings.process.log_format)
    try:
        subject = subject_of(pool, settings.engine_options_of(pool.name))
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)
    say(f"starting the {pool.engine} engine of pool {pool.name}")
    try:
        return await run_kit(subject, tell=lambda name: say(f"  {name}"))
    except EngineStartError as error:
        fail(str(error), EXIT_FAILED)
