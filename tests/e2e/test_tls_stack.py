"""A stack whose services speak mutual TLS and ask for tokens, used by the commands; and no service without either."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laneway.cli.certs import make_certs
from laneway.cli.main import app
from laneway.cli.secrets import SecretsOptions, make_secrets
from laneway.cli.stack import LocalStack, StackOptions
from laneway.cli.toml_text import toml_text

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

MODEL = {"name": "chat", "engine": "simulated", "workers": 1, "engine_options": {"pace_s": 0.001}}


async def laneway(*arguments: str, **settings: str) -> tuple[int, str]:
    """A command's exit code, and all that it said."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LANEWAY_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "laneway.cli", *arguments, env=kept | settings, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode or 0, (out + err).decode()


@pytest.mark.slow
async def test_the_commands_reach_a_stack_that_asks_for_certificates_and_tokens(tmp_path: Path):
    make_secrets(tmp_path / "s", SecretsOptions(tls=True))
    certs = tmp_path / "s" / "certs"
    server = {"tls_cert_file": f"{certs}/admission.pem", "tls_key_file": f"{certs}/admission.key"}
    trust = {"tls_ca_file": f"{certs}/ca.pem"}
    options = StackOptions(
        settings={
            "models": [MODEL],
            "grpc": {**server, **trust, "tls_client_ca_file": f"{certs}/ca.pem"},
            "admission": {"tokens_file": str(tmp_path / "s" / "tokens.toml")},
        },
        token=(tmp_path / "s" / "tokens" / "default.token").read_text().strip(),
    )
    async with LocalStack(options) as stack:
        common = {
            "LANEWAY_ADDRESS": stack.addresses.admission,
            "LANEWAY_SCHEDULER_ADDRESS": stack.addresses.scheduler,
            "LANEWAY_TOKEN_FILE": str(tmp_path / "s" / "tokens" / "operator.token"),
        }
        own = {
            "LANEWAY_GRPC__TLS_CA_FILE": f"{certs}/ca.pem",
            "LANEWAY_GRPC__TLS_CERT_FILE": f"{certs}/clients/operator.pem",
            "LANEWAY_GRPC__TLS_KEY_FILE": f"{certs}/clients/operator.key",
        }
        make_certs(tmp_path / "theirs", hosts=["localhost"])
        answered, listed, uncertified, strange, plain = await asyncio.gather(
            laneway("generate", "Hi", "--max-tokens", "4", **common, **own),
            laneway("workers", **common, **own),
            laneway(
                "quote", "Hi", "--timeout", "3", **common, LANEWAY_GRPC__TLS_CA_FILE=own["LANEWAY_GRPC__TLS_CA_FILE"]
            ),
            laneway("jobs", **common, LANEWAY_GRPC__TLS_CA_FILE=str(tmp_path / "theirs" / "ca.pem")),
            laneway("quote", "Hi", "--timeout", "3", **common),
        )
    assert answered[0] == 0, answered
    assert listed[0] == 0, listed
    assert "chat-small-1" in listed[1]
    for (code, said), setting in (
        (uncertified, "grpc.tls_cert_file"),
        (strange, "grpc.tls_ca_file"),
        (plain, "tls_ca_file"),
    ):
        assert code == 1, said
        assert setting in said.replace("\n", " "), said


@pytest.mark.parametrize("service", ["admission", "scheduler", "routing"])
def test_no_service_serves_other_hosts_without_tokens_and_tls(tmp_path: Path, service: str):
    """Nothing else is up: it is refused before anything is connected to."""
    file = tmp_path / "laneway.toml"
    file.write_text(toml_text({service: {"listen": "0.0.0.0:0"}, "nats": {"url": "nats://127.0.0.1:1"}}))
    result = CliRunner().invoke(app, [service, "--config", str(file)])
    assert result.exit_code == 2, result.output
    for words in ("0.0.0.0:0 can be reached from other hosts", "admission.tokens_file", "grpc.tls_cert_file"):
        assert words in result.output


async def test_no_process_shows_its_metrics_to_other_hosts_unless_told_to():
    """Not even a worker, which serves nothing else."""
    code, said = await laneway("worker", "--set", "process.metrics_listen=0.0.0.0:0")
    assert code == 2, said
    assert "process.metrics_remote" in said
