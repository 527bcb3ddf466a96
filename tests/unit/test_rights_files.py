"""`laneway secrets` and `laneway certs`: what they write, for whom to read, and what a second run changes."""

from __future__ import annotations

import hashlib
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laneway.cli.certs import make_certs
from laneway.cli.main import app
from laneway.cli.secrets import SecretsOptions, make_secrets
from laneway.core.errors import ConfigError
from laneway.runtime.auth import load_tokens
from laneway.runtime.local_nats import find_nats_server


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_secrets_are_for_their_owner_alone_and_name_no_secret_where_it_is_not_needed(tmp_path: Path):
    folder = tmp_path / "secrets"
    code, _ = run(
        "secrets", str(folder), *["--tenant", "acme"] * 2, "--region", "eu", "--mutual-tls", "--nats-host", "nats"
    )
    assert code == 0
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    found = contents(folder)
    assert {name for name in found if name.startswith("nkeys/")} == {
        f"nkeys/{name}.seed" for name in ("admission", "scheduler", "routing", "worker", "operator", "producer-acme")
    }
    shared = found["nats.conf"] + found["tokens.toml"]
    for name, data in found.items():
        if name.endswith((".seed", ".token")):
            assert data.strip() not in shared, name
    assert b"job.eu.*.*" in shared
    assert b"verify: true" in shared
    callers = load_tokens(str(folder / "tokens.toml"))
    roles = {}
    for name in ("acme", "operator"):
        caller = callers[hashlib.sha256(found[f"tokens/{name}.token"].strip()).digest()]
        roles[name] = (caller.tenant, caller.role)
    assert roles == {"acme": ("acme", "tenant"), "operator": ("operator", "operator")}


def test_the_server_takes_the_configuration(tmp_path: Path):
    make_secrets(tmp_path / "s", SecretsOptions(nats_store=str(tmp_path / "store"), tls=True, mutual_tls=True))
    subprocess.run(
        [find_nats_server(), "-t", "-c", tmp_path / "s" / "nats.conf"], check=True, capture_output=True, timeout=20
    )


def test_a_second_run_keeps_what_is_secret_and_adds_what_is_new(tmp_path: Path):
    make_secrets(tmp_path, SecretsOptions(tls=True))
    before = contents(tmp_path)
    make_secrets(tmp_path, SecretsOptions(tls=True))
    assert contents(tmp_path) == before
    make_secrets(tmp_path, SecretsOptions(tls=True, tenants=("default", "acme")))
    after = contents(tmp_path)
    new = {
        "nkeys/producer-acme.seed",
        "tokens/acme.token",
        "certs/clients/producer-acme.pem",
        "certs/clients/producer-acme.key",
    }
    assert after.keys() - before.keys() == new
    assert {name for name in before if before[name] != after[name]} == {"nats.conf", "tokens.toml"}
    make_secrets(tmp_path, SecretsOptions(tls=True, tenants=("default", "acme")), force=True)
    assert [name for name, data in contents(tmp_path).items() if data == after[name]] == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tenant", "a.b"], "--tenant 'a.b'"),
        (["--tenant", "*"], "--tenant"),
        (["--tenant", "operator"], "--tenant operator"),
        (["--region", ">"], "--region"),
        (["--tls", "--nats-host", "a b"], "'a b'"),
    ],
)
def test_a_name_that_is_none_stops_with_the_option(tmp_path: Path, arguments: list[str], named: str):
    code, output = run("secrets", str(tmp_path / "s"), *arguments)
    assert code == 2
    assert named in output


def test_a_kept_file_that_is_no_seed_is_named(tmp_path: Path):
    make_secrets(tmp_path, SecretsOptions())
    (tmp_path / "nkeys" / "worker.seed").write_text("lost")
    with pytest.raises(ConfigError, match=r"worker\.seed.*--force"):
        make_secrets(tmp_path, SecretsOptions())


def test_certificates_are_signed_and_kept(tmp_path: Path):
    code, output = run(
        "certs", str(tmp_path), "--host", "door.example,10.0.0.7", "--host", "nats", "--client", "worker"
    )
    assert code == 0
    assert output.split() == [
        str(tmp_path / name)
        for name in (
            "ca.pem", "ca.key", "door.example.pem", "door.example.key", "nats.pem", "nats.key",
            "clients/worker.pem", "clients/worker.key",
        )
    ]  # fmt: skip
    for stem in ("door.example", "nats", "clients/worker"):
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        context.load_cert_chain(tmp_path / f"{stem}.pem", tmp_path / f"{stem}.key")
    before = contents(tmp_path)
    assert run("certs", str(tmp_path), "--host", "nats", "--client", "worker")[0] == 0
    assert contents(tmp_path) == before


def test_a_certificate_of_another_authority_is_named(tmp_path: Path):
    make_certs(tmp_path / "a", hosts=["nats"])
    make_certs(tmp_path / "b", hosts=["nats"])
    (tmp_path / "a" / "nats.pem").write_bytes((tmp_path / "b" / "nats.pem").read_bytes())
    with pytest.raises(ConfigError, match=r"nats\.pem is not signed by ca\.pem"):
        make_certs(tmp_path / "a", hosts=["nats"])
    (tmp_path / "b" / "ca.key").write_text("")
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        make_certs(tmp_path / "b", hosts=["nats"])


def test_without_the_package_the_command_says_what_to_install(tmp_path: Path):
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        f"sys.argv[1:] = ['certs', {str(tmp_path / 'c')!r}]\n"
        "from laneway.cli.main import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert "pip install 'laneway[local]'" in ended.stderr
