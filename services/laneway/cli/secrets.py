"""`laneway secrets`: keys, tokens and the NATS configuration of a region, in a folder that only its owner can read.

What is secret is made once and kept; `nats.conf` and `tokens.toml` follow from it and are written anew each time, so
that a tenant can be added or a new release's rights taken over by running the command again.
"""

from __future__ import annotations

import hashlib
import json
import secrets as random_bytes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laneway.cli import private_files
from laneway.cli.console import EXIT_USAGE, fail
from laneway.core.errors import ConfigError

if TYPE_CHECKING:
    from laneway.runtime.nats_users import NatsUser

SERVICE_HOSTS = ("admission", "scheduler", "routing")  # as containers call them
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
    nats_host: Annotated[
        list[str] | None, typer.Option("--nats-host", help="Name that NATS' certificate is for; repeatable.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A service, by the name it is called by; repeatable.")
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Make certificates too, as `laneway certs` does, and have NATS speak TLS.")
    ] = False,
    mutual_tls: Annotated[
        bool, typer.Option("--mutual-tls", help="As --tls, and NATS asks who connects for a certificate.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Make new keys and tokens; the present ones end.")] = False,
) -> None:
    """Make the NATS users, tokens and configuration of a region. Safe to repeat: what is secret is kept."""
    wanted = SecretsOptions(
        region=region,
        tenants=tuple(dict.fromkeys(tenant or ("default",))),
        nats_listen=nats_listen,
        nats_store=nats_store,
        seen_as=seen_as,
        tls=tls or mutual_tls,
        mutual_tls=mutual_tls,
        nats_hosts=tuple(nats_host or ()),
        hosts=tuple(host or SERVICE_HOSTS),
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
    mutual_tls: bool = False
    nats_hosts: tuple[str, ...] = ()
    hosts: tuple[str, ...] = SERVICE_HOSTS


def make_secrets(folder: Path, options: SecretsOptions, *, force: bool = False) -> list[Path]:
    """Writes the folder; returns its files. ConfigError where a name is none, or a kept file is not what it should."""
    from laneway.core.ids import is_token

    for option, name in (("--region", options.region), *(("--tenant", tenant) for tenant in options.tenants)):
        if not is_token(name):
            raise ConfigError(f"{option} {name!r}: a name is 1 to 64 of A-Z a-z 0-9 _ -")
    if OPERATOR_TENANT in options.tenants:
        raise ConfigError(f"--tenant {OPERATOR_TENANT}: operators' own token has that name")
    private_files.make_folder(folder)
    certificates = _certificates(folder, options, force=force) if options.tls else ""
    users = make_nkeys(folder / "nkeys", options.region, options.tenants, force=force)
    tokens = _tokens(folder / "tokens", options.tenants, force=force)
    private_files.write(folder / "tokens.toml", tokens)
    private_files.write(folder / "nats.conf", _nats_config(options, users, certificates))
    return sorted(path for path in folder.rglob("*") if path.is_file())


def make_nkeys(folder: Path, region: str, tenants: Sequence[str], *, force: bool = False) -> list[NatsUser]:
    """A seed for each role and for the producers of each tenant, made unless it is there; and who that makes."""
    from laneway.runtime.nats_users import NatsUser, new_seed, public_key
    from laneway.runtime.rights import SERVICES, Role, producer_name, producer_rights, service_rights

    private_files.make_folder(folder)
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
    private_files.make_folder(folder)
    text = "# Who may call the services. The tokens themselves are in tokens/.\n"
    for tenant in (*tenants, OPERATOR_TENANT):
        token = _kept(folder / f"{tenant}.token", random_bytes.token_urlsafe(32) + "\n", force).strip()
        role = "operator" if tenant == OPERATOR_TENANT else "tenant"
        digest = hashlib.sha256(token.encode()).hexdigest()
        text += f'\n[[token]]\ntenant = "{tenant}"\nrole = "{role}"\nsha256 = "{digest}"\n'
    return text


def _certificates(folder: Path, options: SecretsOptions, *, force: bool) -> str:
    """Certificates of NATS, of the services, and of all that connect; returns what NATS' configuration says of them."""
    from laneway.cli.certs import make_certs
    from laneway.runtime.rights import SERVICES, Role, producer_name

    nats = options.nats_hosts or ("localhost",)
    clients = [*(role.value for role in (*SERVICES, Role.OPERATOR)), *map(producer_name, options.tenants)]
    make_certs(folder / "certs", hosts=[",".join(nats), *options.hosts], clients=clients, force=force)
    seen_as = f"{options.seen_as or folder.absolute()}/certs"
    lines = {
        "cert_file": f"{seen_as}/{nats[0]}.pem",
        "key_file": f"{seen_as}/{nats[0]}.key",
        "ca_file": f"{seen_as}/ca.pem",
    }
    text = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in lines.items())
    return f"tls {{\n{text}{'  verify: true' + chr(10) if options.mutual_tls else ''}}}\n"


def _nats_config(options: SecretsOptions, users: Sequence[NatsUser], certificates: str) -> str:
    from laneway.runtime.nats_users import account_block

    accounts = account_block(users, storage_bytes=NATS_FILE_BYTES, memory_bytes=NATS_MEMORY_BYTES)
    return f"""\
# Made by `laneway secrets`; run it again rather than change this.
server_name: {json.dumps(f"laneway-{options.region}")}
listen: {options.nats_listen}
http: 127.0.0.1:8222
jetstream {{
  store_dir: {json.dumps(options.nats_store)}
  max_file_store: {NATS_FILE_BYTES}
  max_memory_store: {NATS_MEMORY_BYTES}
}}
{certificates}{accounts}"""


def _kept(path: Path, new: str, force: bool) -> str:
    """What the file holds; written first where it is not there, or by force."""
    if path.exists() and not force:
        return path.read_text(encoding="utf-8")
    private_files.write(path, new)
    return new
