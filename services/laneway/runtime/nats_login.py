"""Who we are for a NATS server, from the settings, and what it means when a server does not take us."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TypedDict

from nats.aio.client import ServerVersion

from laneway.core.errors import ConfigError, Unavailable
from laneway.runtime.connecting import NO_TLS
from laneway.runtime.nats_users import public_key
from laneway.runtime.settings import NatsSettings
from laneway.runtime.tls import certificate_wanted, handshake_failure, nats_context

SERVER_VERSION_MIN = (2, 15)


# --- who we are ------------------------------------------------------------------------------------


class Credentials(TypedDict):
    """Arguments of the client's connect."""

    user: str | None
    password: str | None
    token: str | None
    user_credentials: str | None
    nkeys_seed_str: str | None
    tls: ssl.SSLContext | None


def credential_options(settings: NatsSettings) -> Credentials:
    """Raises ConfigError, which names the setting whose file cannot be used."""
    return Credentials(
        user=settings.user or None,
        password=_secret(settings.password_file, "nats.password_file"),
        token=_secret(settings.token_file, "nats.token_file"),
        user_credentials=settings.credentials_file or None,
        nkeys_seed_str=_nkey_seed(settings.nkey_file),
        tls=nats_context(settings),
    )


def _secret(path: str, setting: str) -> str | None:
    if not path:
        return None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip() or None
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error


def _nkey_seed(path: str) -> str | None:
    if not path:
        return None
    seed = _secret(path, "nats.nkey_file") or ""
    try:
        public_key(seed)
    except ConfigError as error:
        raise ConfigError(f"nats.nkey_file: {path}: {error}") from None
    return seed


# --- what a failure means --------------------------------------------------------------------------


def check_version(version: ServerVersion, where: str) -> None:
    """ConfigError where the server is too old."""
    if (version.major, version.minor) < SERVER_VERSION_MIN:
        raise ConfigError(
            f"nats-server {version} at {where} is too old: Laneway needs 2.15 or newer for message schedules;"
            " upgrade it, or point nats.url at another"
        )


def no_jetstream(where: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"JetStream is off for this account at {where}: start nats-server with -js, or enable jetstream"
        f" in the account ({error})"
    )


def inbox_refused(where: str, inbox: str) -> ConfigError:
    return ConfigError(
        f"NATS at {where} does not let this user hear its answers, on {inbox}: nats.nkey_file is that of another role"
    )


def connect_failure(url: str, seen: list[Exception], *, wants_certificate: bool = False) -> Exception:
    """`wants_certificate`: the server asks for one, and tells by hanging up that it does not like what it got."""
    texts = [str(error) or type(error).__name__ for error in seen]
    refused = next((text for text in texts if "authorization" in text.lower()), "")
    text = refused or texts[-1]
    if refused:
        return ConfigError(
            f"NATS at {url} refused our credentials; check nats.nkey_file (or nats.user and password_file, token_file,"
            f" credentials_file), and that this server knows them ({text})"
        )
    for each in texts:
        if each == NO_TLS:
            return ConfigError(
                f"NATS at {url} speaks no TLS, which nats.tls_ca_file, tls_cert_file or a tls:// URL asks for: set up"
                " tls in its configuration, or take them away"
            )
        if why := handshake_failure("nats", f"NATS at {url}", each):
            return ConfigError(f"{why} ({each})")
    if wants_certificate:
        return ConfigError(f"{certificate_wanted('nats', f'NATS at {url}')} ({text})")
    return Unavailable(f"no NATS server answers at {url} ({text}); start one with `laneway up`, or set nats.url")
