"""Whether the service of this container serves: `python -m laneway.runtime.health_check` ends with 0 or 1.

Asks the process that the ready file names: a gRPC service by its health call, or, where that would need a certificate,
by a connection; a worker, which serves nobody, by being alive.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

READY_FILE = "LANEWAY_PROCESS__READY_FILE"
CALL_S_MAX = 3.0


def main() -> int:
    trouble = trouble_of(os.environ.get(READY_FILE, ""))
    print(trouble or "serving")
    return 1 if trouble else 0


def trouble_of(ready_file: str) -> str:
    """What is wrong, in words; empty when the service serves."""
    if not ready_file:
        return f"{READY_FILE} is not set: it names the file by which the service says that it is ready"
    try:
        note = json.loads(Path(ready_file).read_text(encoding="utf-8"))
        address, pid = str(note["address"]), int(note["pid"])
    except OSError as error:
        return f"not ready: {ready_file}: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return f"{ready_file} is not a ready file"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return f"process {pid} is gone"
    except PermissionError:
        pass  # alive, of another user
    host, colon, port = address.rpartition(":")
    return _call_trouble(host, port) if colon else ""


def _call_trouble(host: str, port: str) -> str:
    from laneway.runtime.settings import load_settings

    # A service that listens on every address is asked on this host's own.
    own = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    if load_settings().grpc.tls_cert_file:
        return _connection_trouble(own, int(port))
    import grpc
    from grpc_health.v1 import health_pb2

    with grpc.insecure_channel(f"{own}:{port}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(health_pb2.HealthCheckRequest(), timeout=CALL_S_MAX)
        except grpc.RpcError as error:
            return f"{own}:{port} does not answer: {error}"
    serving = health_pb2.HealthCheckResponse.SERVING
    return "" if answer.status == serving else health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def _connection_trouble(host: str, port: int) -> str:
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=CALL_S_MAX):
            return ""
    except OSError as error:
        return f"{host}:{port} does not answer: {error}"


if __name__ == "__main__":
    sys.exit(main())
