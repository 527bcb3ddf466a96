"""TLS of both ends, from the files that settings name: contexts for NATS, credentials for gRPC.

Where a file cannot be used, and where a handshake failed, says which setting to check. Nothing here turns checks off.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from laneway.core.errors import ConfigError
from laneway.runtime.settings import GrpcSettings, NatsSettings

# In messages of OpenSSL and of the gRPC library's own copy of it.
_UNTRUSTED = ("certificate_verify_failed", "certificate verify failed")
_WRONG_NAME = ("hostname mismatch", "ip address mismatch", "hostname verification", "hostname_verification")
_NOT_TAKEN = (  # what the other end says of ours
    "certificate required",
    "certificate_required",
    "bad certificate",
    "bad_certificate",
    "unknown ca",
    "unknown_ca",
)
_RUN_OUT = ("certificate has expired", "certificate_has_expired", "not yet valid", "not_yet_valid")
# Not merely that a handshake failed: so it does as well when a server ends in the middle of one.
_ANY = ("ssl_error_ssl", "[ssl", "wrong_version_number", "wrong version number")


# --- NATS ------------------------------------------------------------------------------------------


def nats_context(settings: NatsSettings) -> ssl.SSLContext | None:
    """What to connect to NATS with; None where the settings ask for no TLS. ConfigError names the setting at fault."""
    if not _wants_nats_tls(settings):
        return None
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise _unusable("nats.tls_ca_file", settings.tls_ca_file, error) from None
    if settings.tls_cert_file:
        try:
            context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
        except (OSError, ssl.SSLError) as error:
            files = f"{settings.tls_cert_file} and {settings.tls_key_file}"
            raise _unusable("nats.tls_cert_file and nats.tls_key_file", files, error) from None
    return context


def _wants_nats_tls(settings: NatsSettings) -> bool:
    return bool(settings.tls_ca_file or settings.tls_cert_file) or any(
        url.strip().startswith("tls://") for url in settings.url.split(",")
    )


# --- gRPC ------------------------------------------------------------------------------------------


def server_credentials(settings: GrpcSettings) -> grpc.ServerCredentials | None:
    """With what a server shows who it is, and whether its callers must. None: no TLS. Raises ConfigError."""
    if not settings.tls_cert_file:
        return None
    pair = _pair(settings.tls_cert_file, settings.tls_key_file)
    callers = _authority(settings.tls_client_ca_file, "grpc.tls_client_ca_file")
    return grpc.ssl_server_credentials([pair], root_certificates=callers, require_client_auth=callers is not None)


def channel_credentials(ca_file: str = "", cert_file: str = "", key_file: str = "") -> grpc.ChannelCredentials:
    """With what a client knows a server, and shows who it is where it has a certificate. Raises ConfigError."""
    key, certificate = _pair(cert_file, key_file) if cert_file or key_file else (None, None)
    return grpc.ssl_channel_credentials(_authority(ca_file, "grpc.tls_ca_file"), key, certificate)


def client_credentials(settings: GrpcSettings) -> grpc.ChannelCredentials | None:
    """What to call services with; None where the settings ask for no TLS. Raises ConfigError."""
    if not settings.tls_ca_file:
        return None
    return channel_credentials(settings.tls_ca_file, settings.tls_cert_file, settings.tls_key_file)


def _pair(cert_file: str, key_file: str) -> tuple[bytes, bytes]:
    """(key, certificate). gRPC takes any bytes and fails at the first call: so OpenSSL looks at them first."""
    settings = "grpc.tls_cert_file and grpc.tls_key_file"
    if not (cert_file and key_file):
        raise ConfigError(f"{settings} go together: one of them is not given")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file)
        return Path(key_file).read_bytes(), Path(cert_file).read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise _unusable(settings, f"{cert_file} and {key_file}", error) from None


def _authority(path: str, setting: str) -> bytes | None:
    if not path:
        return None
    try:
        ssl.create_default_context(cafile=path)
        return Path(path).read_bytes()
    except (OSError, ssl.SSLError) as error:
        raise _unusable(setting, path, error) from None


def _unusable(setting: str, path: str, error: OSError) -> ConfigError:
    return ConfigError(f"{setting}: {path} cannot be used: {error.strerror or error}; it must be PEM")


# --- what a failed handshake means -----------------------------------------------------------------


def handshake_failure(section: str, where: str, text: str) -> str:
    """What to check, in words, where `text` tells of a handshake that failed; empty where it does not.

    `section`: of the settings, "nats" or "grpc". `where`: who was called.
    """
    lower = text.lower()
    if any(words in lower for words in _WRONG_NAME):
        return f"the certificate of {where} is for another name; call it by a name in it, or make it anew for this one"
    if any(words in lower for words in _RUN_OUT):
        return f"the certificate of {where} has run out, or is not valid yet: renew it, and compare the clocks"
    if any(words in lower for words in _UNTRUSTED):
        return f"the certificate of {where} is not signed by whom we trust: check {section}.tls_ca_file"
    if any(words in lower for words in _NOT_TAKEN):
        return certificate_wanted(section, where)
    if any(words in lower for words in _ANY):
        return f"no TLS connection to {where}: check {section}.tls_ca_file, and whether it serves with TLS at all"
    return ""


def certificate_wanted(section: str, where: str) -> str:
    return (
        f"{where} asks for a client certificate, or does not take ours: check {section}.tls_cert_file and"
        f" {section}.tls_key_file"
    )
