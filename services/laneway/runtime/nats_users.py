"""Users of a nats-server: nkeys made here, and the part of a server's configuration that gives them their rights.

An nkey is a pair of keys: the server's configuration holds the public one, the client keeps the seed in a file and
signs what the server sends. So nothing in the configuration, or on the wire, lets anybody in.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import nkeys

from laneway.core.errors import ConfigError
from laneway.runtime.rights import Rights

ACCOUNT = "LANEWAY"


@dataclass(frozen=True, slots=True)
class NatsUser:
    name: str  # for readers of the file
    public_key: str
    rights: Rights


def new_seed() -> str:
    """The secret half of a new user's key."""
    return str(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode())


def public_key(seed: str) -> str:
    """What the server knows of a user. ConfigError where the text is no seed of a user."""
    try:
        pair = nkeys.from_seed(bytearray(seed.strip().encode()))
        found = bytes(pair.public_key).decode()
        pair.wipe()
    except (nkeys.NkeysError, ValueError) as error:
        raise ConfigError(f"not the seed of an nkey: {error or type(error).__name__}") from None
    if not found.startswith("U"):
        raise ConfigError("the seed is of an nkey that is no user's; a user's begins with SU")
    return found


def account_block(
    users: Sequence[NatsUser],
    *,
    storage_bytes: int,
    memory_bytes: int,
    anonymous: Rights | None = None,
) -> str:
    """The `accounts` of a configuration: one, with JetStream and these users. `anonymous`: what those may do who
    connect without a credential; by default they are turned away."""
    lines = [
        "accounts {",
        f"  {ACCOUNT} {{",
        f"    jetstream {{ max_file: {storage_bytes}, max_mem: {memory_bytes} }}",
        "    users: [",
    ]
    for user in users:
        lines += [
            f"      # {user.name}",
            f"      {{ nkey: {user.public_key}, permissions: {_permissions(user.rights)} }}",
        ]
    if anonymous is not None:
        password = _quoted(os.urandom(16).hex())  # of a user that nobody logs in as: the server does it
        lines.append(f"      {{ user: anonymous, password: {password}, permissions: {_permissions(anonymous)} }}")
    lines += ["    ]", "  }", "}"]
    if anonymous is not None:
        lines.append("no_auth_user: anonymous")
    return "\n".join(lines) + "\n"


def _permissions(rights: Rights) -> str:
    publish, subscribe = _list(rights.publish), _list(rights.subscribe)
    return f"{{\n        publish: {{ allow: {publish} }}\n        subscribe: {{ allow: {subscribe} }}\n      }}"


def _list(subjects: Iterable[str]) -> str:
    lines = "".join(f"\n          {_quoted(subject)}" for subject in dict.fromkeys(subjects))
    return f"[{lines}\n        ]"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
