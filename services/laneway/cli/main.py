"""The `laneway` command: which words it knows. What they do is in the modules beside this one."""

from __future__ import annotations

from typing import Annotated

import typer

from laneway.cli import batch, calibrate, config, dead, engines, jobs, models, operate, serve
from laneway.cli.certs import certs
from laneway.cli.doctor import doctor
from laneway.cli.drill import drill
from laneway.cli.plan_view import plan
from laneway.cli.replay import replay
from laneway.cli.secrets import secrets
from laneway.cli.simulate import simulate
from laneway.cli.up import up

# One line for each paragraph: the help keeps line breaks.
HELP = (
    "Traffic control for LLM inference: one door, one lane per priority class, workers that pull.\n\n"
    '`laneway demo` shows it; `laneway up` runs it here; `laneway generate "Hello"` asks it. '
    "Commands find the stack that `up` runs on this machine; elsewhere name a service with --address or "
    "LANEWAY_ADDRESS, LANEWAY_SCHEDULER_ADDRESS, LANEWAY_ROUTING_ADDRESS.\n\n"
    "Exit codes: 0 done, 1 refused or failed, 2 wrong usage or setting, 130 interrupted."
)
CALLING, OPERATING, SERVING = "Jobs", "Operation", "Services"

app = typer.Typer(
    name="laneway",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"laneway {version('laneway')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel="Here")
def demo(
    fifo: Annotated[
        bool, typer.Option(envvar="FIFO", help="Run the same arrivals through one FIFO lane as well.")
    ] = True,
    keep: Annotated[
        bool, typer.Option(envvar="KEEP", help="Leave the stack up at the end, without the comparison.")
    ] = False,
) -> None:
    """Run the stack with a real model under a minute of mixed traffic, then with one FIFO lane: 2 to 4 minutes."""
    from laneway.cli.demo import demo as run_demo

    raise typer.Exit(run_demo(fifo=fifo, keep=keep))


app.command(rich_help_panel="Here")(up)
app.command(rich_help_panel="Here")(doctor)
app.add_typer(config.app, name="config", rich_help_panel="Here")
app.add_typer(calibrate.app, name="calibrate", rich_help_panel="Here")
app.add_typer(engines.app, name="engines", rich_help_panel="Here")
app.command(rich_help_panel="Here")(simulate)

for calling in (jobs.generate, jobs.submit, jobs.watch, jobs.cancel, jobs.quote, jobs.jobs, operate.explain):
    app.command(rich_help_panel=CALLING)(calling)
app.add_typer(batch.app, name="batch", rich_help_panel=CALLING)
for operating in (operate.lanes, operate.workers, operate.drain, operate.undrain, operate.pause, operate.resume):
    app.command(rich_help_panel=OPERATING)(operating)
app.command(rich_help_panel=OPERATING)(plan)
app.add_typer(dead.app, name="dead", rich_help_panel=OPERATING)
app.add_typer(models.app, name="models", rich_help_panel=OPERATING)

app.add_typer(operate.regions_app, name="regions", rich_help_panel=OPERATING)
app.command(rich_help_panel=OPERATING)(drill)
app.command(rich_help_panel=OPERATING)(replay)

for serving in (serve.admission, serve.scheduler, serve.routing, serve.worker, serve.provision, secrets, certs):
    app.command(rich_help_panel=SERVING)(serving)


def main() -> None:
    app()
