"""Who is calling: from the bearer token, or, where no tokens are configured, from the peer being on this host.

Identity never comes from another header or from a body. A tokens file holds SHA-256 sums or paths, never a token:

    [[token]]
    sha256 = "9f86d0…"          # or value_file = "/run/secrets/acme"
    tenant = "acme"
    role = "tenant"             # or "operator"
    lanes = ["batch"]           # empty: all
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import tomllib
from collections.abc import Iterable
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from laneway.core.errors import ConfigError, PermissionDenied, Unauthenticated
from laneway.core.lanes import LANES, Lane
from laneway.runtime.settings import AdmissionSettings, ProcessSettings, Section, Slug, read_secret

Role = Literal["tenant", "operator"]
DEFAULT_TENANT = "default"


class Caller(Struct, frozen=True):
    tenant: str
    role: Role = "tenant"
    lanes: frozenset[Lane] = frozenset(LANES)


_caller: ContextVar[Caller] = ContextVar("laneway_caller")


def current_caller() -> Caller:
    """The caller of the call that this task handles."""
    try:
        return _caller.get()
    except LookupError:
        raise Unauthenticated from None


def set_caller(caller: Caller) -> None:
    """For the edges that authenticate (gRPC, HTTP, ingest) and for tests."""
    _caller.set(caller)


def require_operator() -> Caller:
    caller = current_caller()
    if caller.role != "operator":
        raise PermissionDenied("this call is for operators", reason="OPERATOR_ONLY")
    return caller


def require_lane(caller: Caller, lane: Lane) -> None:
    if lane not in caller.lanes:
        allowed = ", ".join(sorted(caller.lanes)) or "none"
        raise PermissionDenied(
            f"the credential does not allow the {lane} lane; allowed: {allowed}",
            reason="LANE_NOT_ALLOWED",
            field="spec.contract.lane",
        )


class Authenticator:
    """Maps a call's metadata and peer to a Caller, or raises Unauthenticated."""

    def __init__(self, tokens: dict[bytes, Caller] | None, *, insecure_remote: bool = False) -> None:
        self._tokens = tokens
        self._insecure_remote = insecure_remote

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]], peer: str) -> Caller:
        if self._tokens is None:
            if is_loopback(peer):
                return Caller(DEFAULT_TENANT, "operator")
            if self._insecure_remote:
                return Caller(DEFAULT_TENANT)
            raise Unauthenticated("only callers on this host may call: no tokens are configured")
        digest = hashlib.sha256(_bearer(metadata)).digest()
        for known, caller in self._tokens.items():
            if hmac.compare_digest(known, digest):
                return caller
        raise Unauthenticated("the token is not known")


def load_authenticator(settings: AdmissionSettings) -> Authenticator:
    """From the tokens file; every service takes the same one. ConfigError says what is wrong with the file."""
    tokens = load_tokens(settings.tokens_file) if settings.tokens_file else None
    return Authenticator(tokens, insecure_remote=settings.insecure_remote)


def check_binding(listen: str, settings: AdmissionSettings, *, tls: bool = False) -> None:
    """Refuses to serve other hosts without credentials."""
    if is_loopback_host(listen.rpartition(":")[0]) or settings.insecure_remote or (settings.tokens_file and tls):
        return
    parts = {"tokens (admission.tokens_file)": bool(settings.tokens_file), "TLS (grpc.tls_cert_file)": tls}
    missing = [name for name, given in parts.items() if not given]
    raise ConfigError(
        f"{listen} can be reached from other hosts, but there is no {' and no '.join(missing)}; "
        "listen on 127.0.0.1, give what is missing, or set admission.insecure_remote = true behind a firewall"
    )


def check_metrics_binding(settings: ProcessSettings) -> None:
    """Refuses to show other hosts the metrics, unless told to."""
    host = settings.metrics_listen.rpartition(":")[0]
    if host and not is_loopback_host(host) and not settings.metrics_remote:
        raise ConfigError(
            f"process.metrics_listen = {settings.metrics_listen!r} can be reached from other hosts, and metrics have"
            " neither TLS nor tokens; listen on 127.0.0.1, or set process.metrics_remote = true where only yours can"
            " reach it"
        )


# --- tokens file -----------------------------------------------------------------------------------


class TokenEntry(Section, frozen=True):
    tenant: Slug
    sha256: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-fA-F]{64})?\Z")] = ""
    value_file: str = ""
    role: Role = "tenant"
    lanes: tuple[Literal["priority", "deferrable", "batch"], ...] = ()

    def __post_init__(self) -> None:
        if bool(self.sha256) == bool(self.value_file):
            raise ValueError("give either sha256 or value_file")


class TokensFile(Section, frozen=True):
    token: tuple[TokenEntry, ...]


def load_tokens(path: str) -> dict[bytes, Caller]:
    try:
        parsed = msgspec.convert(tomllib.loads(Path(path).read_text(encoding="utf-8")), TokensFile)
    except OSError as error:
        raise ConfigError(f"admission.tokens_file = {path!r} cannot be read: {error.strerror}") from None
    except ValueError as error:  # TOML, UTF-8 and msgspec errors all are
        raise ConfigError(f"admission.tokens_file = {path!r}: {error}") from None
    callers: dict[bytes, Caller] = {}
    for index, entry in enumerate(parsed.token):
        digest = _digest(entry, f"token[{index}].value_file of {path}")
        if digest in callers:
            raise ConfigError(f"admission.tokens_file = {path!r}: token[{index}] is the same as an earlier one")
        callers[digest] = Caller(entry.tenant, entry.role, frozenset(map(Lane, entry.lanes)) or frozenset(LANES))
    return callers


def _digest(entry: TokenEntry, key: str) -> bytes:
    if entry.sha256:
        return bytes.fromhex(entry.sha256)
    return hashlib.sha256(read_secret(entry.value_file, key).encode()).digest()


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    values = [value for key, value in metadata if key == "authorization"]
    if not values:
        raise Unauthenticated("the call has no token: send `authorization: Bearer <token>`")
    if len(values) > 1 or not isinstance(values[0], str):
        raise Unauthenticated("the call has several authorization headers")
    scheme, _, token = values[0].partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("the authorization header is not `Bearer <token>`")
    return token.strip().encode()


# --- peers -----------------------------------------------------------------------------------------


def is_loopback(peer: str) -> bool:
    """Whether a gRPC peer such as ipv4:127.0.0.1:50123, ipv6:%5B::1%5D:50123 or unix:… is on this host."""
    scheme, _, rest = unquote(peer).partition(":")
    if scheme == "unix":
        return True
    return scheme in ("ipv4", "ipv6") and is_loopback_host(rest.rpartition(":")[0])


@lru_cache(1024)
def is_loopback_host(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
