"""`laneway config show`: every setting with its value and where the value came from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated

import typer

from laneway.cli.connect import JsonOption
from laneway.cli.console import EXIT_USAGE, fail, print_json, print_table
from laneway.cli.serve import ConfigOption, SetOption, flags_of
from laneway.core.errors import ConfigError

app = typer.Typer(help="Look at the settings.", no_args_is_help=True)

_CREDENTIAL = re.compile(r"//[^/@\s]+@")  # user:password@ in a URL


@app.command()
def show(
    prefix: Annotated[str, typer.Argument(help="Only settings whose name begins like this.")] = "",
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show each setting, its value, and its origin: flag, environment, file or default."""
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
