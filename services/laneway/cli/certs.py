"""`laneway certs`: an authority of one's own and certificates that it signs, for development and tests.

For production take certificates from wherever the others come from: settings name files, whoever made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from laneway.cli.console import EXIT_USAGE, fail
from laneway.core.errors import ConfigError


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made if it is not there, for you alone to read.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host", metavar="NAME[,NAME]", help="A server, by the names or addresses it is called by; repeatable."
        ),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option("--client", metavar="NAME", help="A caller, for mutual TLS; repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make all anew, with a new authority.")] = False,
) -> None:
    """Make a certificate authority and certificates for development. What is there is kept."""
    try:
        made = make_certs(folder, hosts=host or ["localhost"], clients=client or [], force=force)
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)
    for path in made:
        print(path)


def make_certs(folder: Path, *, hosts: Sequence[str], clients: Sequence[str] = (), force: bool = False) -> list[Path]:
    """DIR/ca.pem and ca.key, <host>.pem and .key, clients/<name>.pem and .key; returns the files of this call.

    A host may have several names, separated by commas: the first names its files. Raises ConfigError: the package is
    missing, a name is none, or what is there cannot be used.
    """
    try:
        from laneway.cli import certificates
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        raise ConfigError("making certificates needs the package cryptography: pip install 'laneway[local]'") from None
    return certificates.make(folder, hosts=hosts, clients=clients, force=force)
