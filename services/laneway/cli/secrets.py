"""`laneway secrets`: keys, tokens and the NATS configuration of a region, in a folder that only its owner can read.

What is secret is made once and kept; `nats.conf` and `tokens.toml` follow from it and are written anew each time, so
that a tenant can be added or a new release's rights taken over by running the command again.
"""

from __future__ import annotations

import hashlib
import os
import secrets as random_bytes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laneway.cli.console import EXIT_USAGE, fail
from laneway.core.errors import ConfigError

if TYPE_CHECKING:
    from laneway.runtime.nats_users import NatsUser

OPERATOR_TENANT = "operator"
NATS_FILE_BYTES = 8 * 1024**3
NATS_MEMORY_BYTES = 256 * 1024**2


def secrets(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made if it is not there, for you alone to read.")],
    region: Annotated[str, typer.Option("--region", help="Region whose subjects the users may use.")] = "local",
    tenant: Annotated[
        list[str] | None, typer.Option("--tenant", help="Tenant with a token and a NATS user; repeatable.")
    ] = None,
    nats_listen: Annotated[str, typer.Option("--nats-listen", help="host:port of NATS.")] = "0.0.0.0:4222",
    nats_store: Annotated[
        str, typer.Option("--nats-store", help="Folder of NATS' own files, as it sees it.")
    ] = "/data",
    seen_as: Annotated[
        str, typer.Option("--seen-as", help="Where NATS and the services see DIR, as in a container; else its path.")
    ] = "",
    tls: Annotated[
        bool, typer.Option("--tls", help="Make certificates too (laneway certs), and have NATS ask.")
    ] = False,
    nats_host: Annotated[
        list[str] | None, typer.Option("--nats-host", help="Name that NATS' certificate is for; repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make new keys and tokens; the present ones end.")] = False,
) -> None:
    """Make the NATS users, tokens and configuration of a region. Safe to repeat: what is secret is kept."""
    wanted = SecretsOptions(
        region=region,
        tenants=tuple(tenant or ("default",)),
        nats_listen=nats_listen,
        nats_store=nats_store,
        seen_as=seen_as,
        tls=tls,
        nats_hosts=tuple(nats_host or ()),
    )
    try:
        made = make_secrets(folder, wanted, force=force)
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)
    for path in made:
        print(path)


@dataclass(frozen=True, slots=True)
class SecretsOptions:
    region: str = "local"
    tenants: tuple[str, ...] = ("default",)
    nats_listen: str = "0.0.0.0:4222"
    nats_store: str = "/data"
    seen_as: str = ""
    tls: bool = False
    nats_hosts: tuple[str, ...] = ()


def make_secrets(folder: Path, options: SecretsOptions, *, force: bool = False) -> list[Path]:
    """Writes the folder; returns its files. ConfigError where a name is none, or a kept file is not what it should."""
    from laneway.core.ids import check_token

    check_token(options.region, "--region")
    for tenant in options.tenants:
        check_token(tenant, "--tenant")
    _folder(folder)
    users = make_nkeys(folder / "nkeys", options.region, options.tenants, force=force)
    tokens = _tokens(folder / "tokens", options.tenants, force=force)
    _write(folder / "tokens.toml", tokens)
    _write(folder / "nats.conf", _nats_config(options, users))
    return sorted(path for path in folder.rglob("*") if path.is_file())


def make_nkeys(folder: Path, region: str, tenants: Sequence[str], *, force: bool = False) -> list[NatsUser]:
    """A seed for each role and for the producers of each tenant, made unless it is there; and who that makes."""
    from laneway.runtime.nats_users import NatsUser, new_seed, public_key
    from laneway.runtime.rights import SERVICES, Role, producer_name, producer_rights, service_rights

    _folder(folder)
    wanted = {role.value: service_rights(role, region) for role in (*SERVICES, Role.OPERATOR)}
    wanted |= {producer_name(tenant): producer_rights(region, tenant) for tenant in tenants}
    users = []
    for name, rights in wanted.items():
        path = folder / f"{name}.seed"
        seed = _kept(path, new_seed() + "\n", force)
        try:
            users.append(NatsUser(name, public_key(seed), rights))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}; remove it, or use --force") from None
    return users


def _tokens(folder: Path, tenants: Sequence[str], *, force: bool) -> str:
    """A token for each tenant and one for operators; returns the tokens file, which holds only their sums."""
    _folder(folder)
    text = "# Who may call the services. The tokens themselves are in tokens/.\n"
    for tenant in (*tenants, OPERATOR_TENANT):
        token = _kept(folder / f"{tenant}.token", random_bytes.token_urlsafe(32) + "\n", force).strip()
        role = "operator" if tenant == OPERATOR_TENANT else "tenant"
        digest = hashlib.sha256(token.encode()).hexdigest()
        text += f'\n[[token]]\ntenant = "{tenant}"\nrole = "{role}"\nsha256 = "{digest}"\n'
    return text


def _nats_config(options: SecretsOptions, users: Sequence[NatsUser]) -> str:
    import msgspec

    from laneway.runtime.nats_users import account_block

    accounts = account_block(users, storage_bytes=NATS_FILE_BYTES, memory_bytes=NATS_MEMORY_BYTES)
    return f"""\
# Made by `laneway secrets`; run it again rather than change this.
server_name: {msgspec.json.encode(f"laneway-{options.region}").decode()}
listen: {options.nats_listen}
http: 127.0.0.1:8222
jetstream {{
  store_dir: {msgspec.json.encode(options.nats_store).decode()}
  max_file_store: {NATS_FILE_BYTES}
  max_memory_store: {NATS_MEMORY_BYTES}
}}
{accounts}"""


def _folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made a folder of one's own: {error.strerror}") from None


def _kept(path: Path, new: str, force: bool) -> str:
    """What the file holds; written first where it is not there, or by force."""
    if path.exists() and not force:
        return path.read_text(encoding="utf-8")
    _write(path, new)
    return new


def _write(path: Path, text: str) -> None:
    """All or nothing, readable by its owner alone from the first byte."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)
