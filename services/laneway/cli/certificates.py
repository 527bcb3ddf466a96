"""Certificates for development: an authority and what it signs, as PEM files. Needs the package cryptography."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from laneway.cli import private_files
from laneway.core.errors import ConfigError
from laneway.core.ids import is_token

AUTHORITY_DAYS = 3650
LEAF_DAYS = 365
BACKDATED = timedelta(minutes=5)  # for clocks that are behind
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")  # in every server's certificate: health checks and tunnels
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?\Z")
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make(folder: Path, *, hosts: Sequence[str], clients: Sequence[str], force: bool) -> list[Path]:
    """As certs.make_certs says."""
    for name in clients:
        if not is_token(name):
            raise ConfigError(f"a client's name is 1 to 64 of A-Z a-z 0-9 _ -, not {name!r}")
    names = {host: [_name_of(name) for name in _names(host)] for host in hosts}
    private_files.make_folder(folder)
    authority = _authority(folder, force=force)
    files = [folder / "ca.pem", folder / "ca.key"]
    for host, alternatives in names.items():
        first = _names(host)[0]
        files += _leaf(folder / first.replace(":", "_").replace("*", "_"), authority, first, alternatives, force=force)
    if clients:
        private_files.make_folder(folder / "clients")
    for client in clients:
        files += _leaf(folder / "clients" / client, authority, client, [], force=force)
    return files


def _authority(folder: Path, *, force: bool) -> _Authority:
    certificate_file, key_file = folder / "ca.pem", folder / "ca.key"
    if certificate_file.exists() and not force:
        try:
            kept = serialization.load_pem_private_key(key_file.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{certificate_file} and its key cannot be used ({error}); --force makes new") from None
        if not isinstance(kept, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{key_file} was not made by this command; use another folder, or --force")
        return _Authority(certificate, kept)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _subject("Laneway development")
    builder = (
        _builder(name, name, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
    )
    made = _Authority(builder.sign(key, hashes.SHA256()), key)
    _store(folder / "ca", made.certificate, key)
    return made


def _leaf(
    stem: Path, authority: _Authority, name: str, alternatives: Sequence[x509.GeneralName], *, force: bool
) -> list[Path]:
    """A certificate and its key: of a server where there are alternative names, which may also show it as a client."""
    certificate_file, key_file = stem.with_name(f"{stem.name}.pem"), stem.with_name(f"{stem.name}.key")
    if certificate_file.exists() and key_file.exists() and not force:
        _check_kept(certificate_file, authority)
        return [certificate_file, key_file]
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if alternatives else [])]
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = (
        _builder(_subject(name), authority.certificate.subject, key, LEAF_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(signer, critical=False)
    )
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    _store(stem, builder.sign(authority.key, hashes.SHA256()), key)
    return [certificate_file, key_file]


def _check_kept(path: Path, authority: _Authority) -> None:
    """What is kept must still be good: signed by the authority beside it, and not about to end."""
    mend = "remove it, or make all anew with --force"
    try:
        kept = x509.load_pem_x509_certificate(path.read_bytes())
        kept.verify_directly_issued_by(authority.certificate)
    except (OSError, ValueError, TypeError, InvalidSignature):
        raise ConfigError(f"{path} is not signed by ca.pem of the folder; {mend}") from None
    if kept.not_valid_after_utc <= datetime.now(UTC):
        raise ConfigError(f"{path} ended at {kept.not_valid_after_utc:%Y-%m-%d}; {mend}")


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _names(host: str) -> list[str]:
    """What one server is called: as given, separated by commas, and as this machine calls itself."""
    return list(dict.fromkeys([*(name.strip() for name in host.split(",")), *LOCAL_NAMES]))


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _HOST.match(host):
        raise ConfigError(f"a host is a name or an address, without a port, not {host!r}")
    return x509.DNSName(host)


def _store(stem: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    secret = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    private_files.write(stem.with_name(f"{stem.name}.key"), secret)
    private_files.write(stem.with_name(f"{stem.name}.pem"), certificate.public_bytes(_PEM))
