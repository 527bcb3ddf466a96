"""The health check of a container: what it asks, and what it takes for serving."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from laneway.runtime.health_check import READY_FILE, main, trouble_of


@contextmanager
def answering(*, serving: bool) -> Iterator[str]:
    answer = health_pb2.HealthCheckResponse
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        servicer = health.HealthServicer()
        servicer.set("", answer.SERVING if serving else answer.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"0.0.0.0:{port}"
        finally:
            server.stop(None).wait()


def ready_file(folder: Path, *, address: str, pid: int | None = None) -> str:
    path = folder / "ready.json"
    path.write_text(json.dumps({"service": "x", "address": address, "metrics": "", "pid": pid or os.getpid()}))
    return str(path)


def test_a_service_is_asked_by_grpc(tmp_path: Path):
    with answering(serving=True) as address:
        assert trouble_of(ready_file(tmp_path, address=address)) == ""
    assert "does not answer" in trouble_of(ready_file(tmp_path, address=address))


def test_a_service_that_drains_is_not_healthy(tmp_path: Path):
    with answering(serving=False) as address:
        assert trouble_of(ready_file(tmp_path, address=address)) == "NOT_SERVING"


def test_a_service_with_tls_is_asked_by_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LANEWAY_GRPC__TLS_CERT_FILE", "/certs/x.pem")
    monkeypatch.setenv("LANEWAY_GRPC__TLS_KEY_FILE", "/certs/x.key")
    with socket.create_server(("127.0.0.1", 0)) as server:
        path = ready_file(tmp_path, address=f"0.0.0.0:{server.getsockname()[1]}")
        assert trouble_of(path) == ""
    assert "does not answer" in trouble_of(path)


def test_a_worker_is_healthy_while_its_process_lives(tmp_path: Path):
    assert trouble_of(ready_file(tmp_path, address="host-7-1a2b3c4d")) == ""
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert "is gone" in trouble_of(ready_file(tmp_path, address="host-7-1a2b3c4d", pid=gone.pid))


def test_what_has_not_said_that_it_is_ready_is_not_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "ready.json"
    monkeypatch.setenv(READY_FILE, str(path))
    assert main() == 1
    assert "not ready" in capsys.readouterr().out
    path.write_text("{")
    assert main() == 1
    ready_file(tmp_path, address="host-7-1a2b3c4d")
    assert main() == 0
    monkeypatch.delenv(READY_FILE)
    assert main() == 1
    assert READY_FILE in capsys.readouterr().out
