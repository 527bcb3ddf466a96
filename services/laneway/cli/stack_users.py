"""Who may do what on the NATS of a local stack: the same users with the same rights as elsewhere."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from laneway.cli.secrets import make_nkeys
from laneway.core.errors import ConfigError

if TYPE_CHECKING:
    from laneway.runtime.local_nats import LocalUsers
    from laneway.runtime.settings import Settings

_USERS = {"provision": "operator"}  # of commands that are not called as their role
_OTHER_WAYS = (
    "USER",
    "PASSWORD_FILE",
    "TOKEN_FILE",
    "CREDENTIALS_FILE",
    "TLS_CA_FILE",
    "TLS_CERT_FILE",
    "TLS_KEY_FILE",
)


def nats_users(folder: Path, settings: Settings) -> LocalUsers:
    """A user for each role, whose seeds are in the folder. Who connects without a credential is a producer of the
    tenant `default`, unless there are tokens: as it is with calls."""
    from laneway.runtime.auth import load_tokens
    from laneway.runtime.local_nats import LocalUsers
    from laneway.runtime.rights import DEFAULT_TENANT, PLAIN_INBOX, producer_rights

    region, tokens_file = settings.region.name, settings.admission.tokens_file
    if not tokens_file:
        anonymous = producer_rights(region, DEFAULT_TENANT, inbox=PLAIN_INBOX)
        return LocalUsers(make_nkeys(folder, region, [DEFAULT_TENANT]), anonymous)
    tenants: set[str] = set()
    with contextlib.suppress(ConfigError):  # the services say what is wrong with it
        tenants = {caller.tenant for caller in load_tokens(tokens_file).values()}
    return LocalUsers(make_nkeys(folder, region, sorted(tenants)))


def nats_environment(folder: Path, command: str) -> dict[str, str]:
    """With which a command is its role's user. What the settings say of another NATS does not hold for this one."""
    return {
        **{f"LANEWAY_NATS__{way}": "" for way in _OTHER_WAYS},
        "LANEWAY_NATS__NKEY_FILE": str(folder / f"{_USERS.get(command, command)}.seed"),
    }
