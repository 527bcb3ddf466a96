"""TLS and mutual TLS with NATS and over gRPC: who is let in, who is not, and which setting the refusal names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from laneway.cli.certs import make_certs
from laneway.client import RetryParams, SchedulerClient, Unavailable, channel_credentials
from laneway.core.errors import ConfigError
from laneway.runtime.bus import Bus
from laneway.runtime.grpc_server import GrpcServer
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.settings import AdmissionSettings, GrpcSettings, NatsSettings, Settings
from laneway.runtime.tls import handshake_failure
from laneway.v1 import scheduler_pb2 as pb
from laneway.v1.scheduler_pb2_grpc import SchedulerServiceServicer, add_SchedulerServiceServicer_to_server
from tests.support.nats import eventually, nats_settings

pytestmark = pytest.mark.wire

NAME = "laneway.v1.SchedulerService"
ONCE = RetryParams.never()
QUICK: dict[str, Any] = {"connect_timeout_s": 1.0}  # how long a server that refuses us is tried


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this machine and of one caller, `worker`; beside it those of strangers."""
    folder = tmp_path_factory.mktemp("certs")
    make_certs(folder / "ours", hosts=["localhost"], clients=["worker"])
    make_certs(folder / "theirs", hosts=["localhost"], clients=["worker"])
    make_certs(folder / "elsewhere", hosts=["localhost"])
    return folder


# --- NATS ------------------------------------------------------------------------------------------


@asynccontextmanager
async def nats_with_tls(folder: Path, certs: Path, *, mutual: bool) -> AsyncIterator[LocalNats]:
    ours = certs / "ours"
    block = f'cert_file: "{ours}/localhost.pem", key_file: "{ours}/localhost.key", ca_file: "{ours}/ca.pem"'
    async with LocalNats(folder / "nats", extra_config=f"tls {{ {block}, verify: {str(mutual).lower()} }}\n") as server:
        yield server


def knowing(server: LocalNats, certs: Path, whom: str = "ours", own: str = "") -> NatsSettings:
    key: dict[str, str] = {"tls_cert_file": f"{certs}/{own}.pem", "tls_key_file": f"{certs}/{own}.key"} if own else {}
    return nats_settings(server, tls_ca_file=str(certs / whom / "ca.pem"), **QUICK, **key)


async def works(settings: NatsSettings) -> Bus:
    bus = await Bus.connect(settings, name="test")
    await bus.api("INFO", {})
    await bus.close()
    return bus


async def test_nats_over_tls_with_the_right_authority(tmp_path: Path, certs: Path):
    async with nats_with_tls(tmp_path, certs, mutual=False) as server:
        await works(knowing(server, certs))
        with pytest.raises(ConfigError, match=r"nats\.tls_ca_file"):
            await Bus.connect(knowing(server, certs, "theirs"), name="test")
        with pytest.raises(ConfigError, match=r"nats\.tls_ca_file"):  # nobody whom this machine trusts has signed it
            await Bus.connect(nats_settings(server, url=server.url.replace("nats://", "tls://"), **QUICK), name="test")
        with pytest.raises(ConfigError, match=r"nats\.tls_ca_file"):  # nothing was said of TLS; the server asks for it
            await Bus.connect(nats_settings(server, **QUICK), name="test")


async def test_nats_that_asks_for_a_certificate_takes_only_those_that_its_authority_signed(tmp_path: Path, certs: Path):
    async with nats_with_tls(tmp_path, certs, mutual=True) as server:
        await works(knowing(server, certs, own="ours/clients/worker"))
        for own in ("", "theirs/clients/worker"):
            with pytest.raises(ConfigError, match=r"nats\.tls_cert_file and nats\.tls_key_file"):
                await Bus.connect(knowing(server, certs, own=own), name="test")


async def test_who_asks_for_tls_does_not_talk_to_nats_in_the_clear(nats_server: LocalNats, certs: Path):
    with pytest.raises(ConfigError, match=r"speaks no TLS.*nats\.tls_ca_file"):
        await Bus.connect(knowing(nats_server, certs), name="test")


async def test_a_tls_connection_is_made_again_after_a_restart(tmp_path: Path, certs: Path):
    async with nats_with_tls(tmp_path, certs, mutual=True) as server:
        bus = await Bus.connect(knowing(server, certs, own="ours/clients/worker"), name="test")
        try:
            heard: list[bytes] = []
            await bus.listen("a", lambda msg: heard.append(msg.data))
            await server.kill()
            await server.restart()
            await eventually(lambda: bus.reconnects and bus.connected)
            await bus.emit("a", b"x" * 200_000)  # more than one record of TLS
            await eventually(lambda: [len(data) for data in heard] == [200_000])
        finally:
            await bus.close()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tls_ca_file": "absent.pem"}, r"nats\.tls_ca_file.*absent\.pem"),
        ({"tls_ca_file": "text"}, r"nats\.tls_ca_file.*text"),
        ({"tls_ca_file": "ca.pem", "tls_cert_file": "text", "tls_key_file": "text"}, r"nats\.tls_cert_file.*text"),
        (
            {"tls_ca_file": "ca.pem", "tls_cert_file": "ca.pem", "tls_key_file": "clients/worker.key"},
            r"nats\.tls_cert_file and nats\.tls_key_file.*ca\.pem",
        ),
    ],
)
async def test_a_file_that_cannot_be_used_is_named(certs: Path, settings: dict[str, str], named: str):
    (certs / "ours" / "text").write_text("no PEM")
    files: dict[str, Any] = {key: str(certs / "ours" / name) for key, name in settings.items()}
    with pytest.raises(ConfigError, match=named):
        await Bus.connect(NatsSettings(url="nats://127.0.0.1:1", **files), name="test")


# --- gRPC ------------------------------------------------------------------------------------------


class Models(SchedulerServiceServicer):
    """All that is called here."""

    async def ListModels(self, request: pb.ListModelsRequest, context: object) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="chat")])


def _models(server: grpc.aio.Server) -> None:
    models = Models()  # type: ignore[abstract]  # pyright: ignore[reportAbstractUsage]
    add_SchedulerServiceServicer_to_server(models, server)


@asynccontextmanager
async def grpc_with_tls(certs: Path, *, mutual: bool, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    ours = certs / "ours"
    tls = GrpcSettings(
        tls_cert_file=f"{ours}/localhost.pem",
        tls_key_file=f"{ours}/localhost.key",
        tls_client_ca_file=f"{ours}/ca.pem" if mutual else "",
    )
    server = GrpcServer(Settings(grpc=tls))
    server.add(NAME, _models)
    address = await server.start(listen)
    try:
        yield address
    finally:
        await server.drain(0.0)


def caller(address: str, credentials: grpc.ChannelCredentials | None) -> SchedulerClient:
    return SchedulerClient(address, credentials=credentials, retry_budget=ONCE)


async def names(address: str, credentials: grpc.ChannelCredentials | None) -> list[str]:
    async with caller(address, credentials) as client:
        return [model.name async for model in client.list_models(timeout_s=10.0)]


async def test_grpc_over_tls_with_the_right_authority(certs: Path):
    async with grpc_with_tls(certs, mutual=False) as address:
        assert await names(address, channel_credentials(str(certs / "ours" / "ca.pem"))) == ["chat"]
        with pytest.raises(Unavailable, match=r"grpc\.tls_ca_file") as caught:
            await names(address, channel_credentials(str(certs / "theirs" / "ca.pem")))
        assert (caught.value.reason, caught.value.row.retryable) == ("TLS_FAILED", False)
        with pytest.raises(Unavailable, match=r"grpc\.tls_ca_file"):  # in the clear, to a server that speaks TLS
            await names(address, None)


async def test_grpc_that_asks_for_a_certificate_takes_only_those_that_its_authority_signed(certs: Path):
    def own(whose: str) -> grpc.ChannelCredentials:
        stem = certs / whose / "clients" / "worker"
        return channel_credentials(str(certs / "ours" / "ca.pem"), f"{stem}.pem", f"{stem}.key")

    async with grpc_with_tls(certs, mutual=True) as address:
        assert await names(address, own("ours")) == ["chat"]
        for credentials in (channel_credentials(str(certs / "ours" / "ca.pem")), own("theirs")):
            with pytest.raises(
                Unavailable, match=r"asks callers for certificates, grpc\.tls_cert_file and grpc\.tls_key_file"
            ):
                await names(address, credentials)


async def test_a_caller_with_tls_is_told_that_the_server_has_none(certs: Path):
    server = GrpcServer(Settings())
    server.add(NAME, _models)
    address = await server.start("127.0.0.1:0")
    try:
        with pytest.raises(Unavailable, match=r"grpc\.tls_ca_file.*serves with TLS at all"):
            await names(address, channel_credentials(str(certs / "ours" / "ca.pem")))
    finally:
        await server.drain(0.0)


async def test_other_hosts_are_served_with_tls_and_tokens_alone(certs: Path, tmp_path: Path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[[token]]\ntenant = "acme"\nsha256 = "{"0" * 64}"\n')
    ours = certs / "ours"
    tls = GrpcSettings(tls_cert_file=f"{ours}/localhost.pem", tls_key_file=f"{ours}/localhost.key")
    known = AdmissionSettings(tokens_file=str(tokens))
    for settings in (Settings(grpc=tls), Settings(admission=known), Settings()):
        with pytest.raises(ConfigError, match=r"grpc\.tls_cert_file|admission\.tokens_file"):
            await GrpcServer(settings).start("0.0.0.0:0")
    server = GrpcServer(Settings(grpc=tls, admission=known))
    await server.start("0.0.0.0:0")
    await server.drain(0.0)
    await asyncio.sleep(0)


def test_halves_of_a_pair_are_refused():
    for section in (NatsSettings, GrpcSettings):
        with pytest.raises(ValueError, match="tls_cert_file and tls_key_file go together"):
            section(tls_cert_file="a.pem")
    with pytest.raises(ValueError, match="tls_client_ca_file"):
        GrpcSettings(tls_client_ca_file="ca.pem")
    with pytest.raises(ConfigError, match=r"grpc\.tls_cert_file and grpc\.tls_key_file"):
        channel_credentials(cert_file="a.pem")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006)",
            "run out",
        ),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: IP address mismatch, not valid for 'x'", "name"),
        ("Tls handshake failed: SSL_ERROR_SSL: error:1000007d:…:CERTIFICATE_VERIFY_FAILED: Hostname mismatch", "name"),
        (
            "SSL_ERROR_SSL: error:10000416:SSL routines:OPENSSL_internal:SSLV3_ALERT_CERTIFICATE_UNKNOWN",
            "grpc.tls_ca_file",
        ),
        (
            "[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca (_ssl.c:2580)",
            "grpc.tls_cert_file and grpc.tls_key_file",
        ),
    ],
)
def test_what_a_failed_handshake_means(text: str, why: str):
    assert why in handshake_failure("grpc", "the service", text)


@pytest.mark.parametrize(
    "text", ["Connection refused", "Tls handshake failed: Socket closed", "tls-host: no such host"]
)
def test_a_server_that_is_away_is_no_matter_of_certificates(text: str):
    assert handshake_failure("grpc", "the service", text) == ""
