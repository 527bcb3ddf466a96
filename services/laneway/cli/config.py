"""`laneway config show`: every setting with its value and where the value came from; or what is in force."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from laneway.cli import connect
from laneway.cli.connect import JsonOption, SchedulerOption, TokenOption
from laneway.cli.console import EXIT_FAILED, EXIT_USAGE, fail, print_json, print_table, run, say
from laneway.cli.plan_view import policy_lines
from laneway.cli.serve import ConfigOption, SetOption, flags_of
from laneway.core.errors import ConfigError

app = typer.Typer(help="Look at the settings.", no_args_is_help=True)

_CREDENTIAL = re.compile(r"//[^/@\s]+@")  # user:password@ in a URL


@app.command()
def show(
    prefix: Annotated[str, typer.Argument(help="Only settings whose name begins like this.")] = "",
    config: ConfigOption = None,
    set_: SetOption = None,
    live: Annotated[
        bool, typer.Option("--live", help="Only [policy], as the region's scheduler publishes it.")
    ] = False,
    as_json: JsonOption = False,
    address: SchedulerOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show each setting, its value, and its origin: flag, environment, file or default."""
    if live:
        _show_live(prefix, as_json=as_json, address=address, token_file=token_file)
    import msgspec

    from laneway.runtime.settings import load_settings_with_origins

    try:
        loaded = load_settings_with_origins(config=config, flags=flags_of(set_))
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)
    values = msgspec.to_builtins(loaded.settings)
    found = [
        {"key": key, "value": _shown(value), "origin": loaded.origins.get(key, "default")}
        for key, value in _leaves(values)
        if key.startswith(prefix)
    ]
    _print(found, as_json=as_json)


def _show_live(prefix: str, *, as_json: bool, address: str | None, token_file: Path | None) -> NoReturn:
    async def work() -> None:
        async with connect.scheduler(address, token_file) as client:
            plan = await client.get_plan()
        policy = plan.policy
        if not policy.version:
            fail("the scheduler publishes no parameters: each service has its own", EXIT_FAILED)
        if not policy.json:
            fail(f"version {policy.version} is in force; its values are shown to operators", EXIT_FAILED)
        origin = f"version {policy.version}"
        values = {"policy": json.loads(policy.json)}
        _print(
            [
                {"key": key, "value": value, "origin": origin}
                for key, value in _leaves(values)
                if key.startswith(prefix)
            ],
            as_json=as_json,
        )
        for line in policy_lines(plan)[1:]:
            say(line)

    run(work)


def _print(found: list[dict[str, object]], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        print_table(
            ("KEY", "VALUE", "ORIGIN"),
            [(row["key"], _words(row["value"]), row["origin"]) for row in found],
            empty="no such setting",
            folded=["VALUE", "ORIGIN"],
        )


def _leaves(table: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{key}.")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
            for number, item in enumerate(value):
                yield from _leaves(item, f"{key}[{number}].")
        else:
            yield key, value


def _shown(value: object) -> object:
    return _CREDENTIAL.sub("//…@", value) if isinstance(value, str) else value


def _words(value: object) -> str:
    """As the settings file would have it, but for text without its quotes."""
    if value is None:
        return "unset"
    return value if isinstance(value, str) else json.dumps(value)
