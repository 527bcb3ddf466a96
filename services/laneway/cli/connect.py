"""Options that every calling command has, and clients made from them. A failed connection says how to mend it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laneway.cli.console import describe, say, seconds
from laneway.cli.endpoint import address_of
from laneway.core.errors import ConfigError, LanewayError, Unavailable

if TYPE_CHECKING:
    import grpc

    from laneway.client import Client, RoutingClient, SchedulerClient

SAID_WAIT_S = 1.0  # a wait that a person would wonder about

AddressOption = Annotated[
    str | None,
    typer.Option("--address", envvar="LANEWAY_ADDRESS", metavar="HOST:PORT", help="Admission service to call."),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--address", envvar="LANEWAY_SCHEDULER_ADDRESS", metavar="HOST:PORT", help="Scheduler service to call."
    ),
]
RoutingOption = Annotated[
    str | None,
    typer.Option("--address", envvar="LANEWAY_ROUTING_ADDRESS", metavar="HOST:PORT", help="Routing service to call."),
]
TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", envvar="LANEWAY_TOKEN_FILE", help="File that holds the token to call with."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
TimeoutOption = Annotated[float | None, typer.Option("--timeout", min=0.001, help="Seconds after which to give up.")]


@asynccontextmanager
async def admission(given: str | None, token_file: Path | None) -> AsyncIterator[Client]:
    from laneway.client import Client

    address, token, credentials = address_of("admission", given), _token(token_file), _credentials()
    async with Client(address, token=token, credentials=credentials, on_retry=_say_retry) as client:
        with _hint("LANEWAY_ADDRESS"):
            yield client


@asynccontextmanager
async def scheduler(given: str | None, token_file: Path | None) -> AsyncIterator[SchedulerClient]:
    from laneway.client import SchedulerClient

    address, token, credentials = address_of("scheduler", given), _token(token_file), _credentials()
    async with SchedulerClient(address, token=token, credentials=credentials, on_retry=_say_retry) as client:
        with _hint("LANEWAY_SCHEDULER_ADDRESS"):
            yield client


@asynccontextmanager
async def routing(given: str | None, token_file: Path | None) -> AsyncIterator[RoutingClient]:
    from laneway.client import RoutingClient

    address, token, credentials = address_of("routing", given), _token(token_file), _credentials()
    async with RoutingClient(address, token=token, credentials=credentials, on_retry=_say_retry) as client:
        with _hint("LANEWAY_ROUTING_ADDRESS"):
            yield client


@contextmanager
def _hint(variable: str) -> Iterator[None]:
    """Adds what a person at the command line can do when nothing answers at all."""
    try:
        yield
    except Unavailable as error:
        if error.reason == "NO_SERVICE" and not isinstance(error.__cause__, Unavailable):  # else one inside has said it
            mend = f"start a stack with: laneway up; or name another address with --address or {variable}"
            raise Unavailable(f"{error.message}; {mend}", reason=error.reason, job_id=error.job_id) from error
        raise


def _credentials() -> grpc.ChannelCredentials | None:
    """TLS, where the settings of this directory or LANEWAY_GRPC__TLS_CA_FILE say whom to trust."""
    from laneway.runtime.settings import load_settings
    from laneway.runtime.tls import client_credentials

    return client_credentials(load_settings().grpc)


def _say_retry(error: LanewayError, wait_s: float) -> None:
    if wait_s >= SAID_WAIT_S:
        say(f"laneway: {describe(error)}; waiting {seconds(wait_s)}")


def _token(token_file: Path | None) -> str | None:
    if token_file is None:
        return None
    try:
        return token_file.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the token file {token_file} cannot be read: {why}") from None
