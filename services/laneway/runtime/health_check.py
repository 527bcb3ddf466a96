"""Whether the service of this container serves: `python -m laneway.runtime.health_check` ends with 0 or 1.

Asks the process that the ready file names: a gRPC service by its health call, a worker, which serves nobody, by being
alive. Until the ready file is there it costs an interpreter's start and nothing more. Reads no settings but one.
"""

from __future__ import annotations

import json
import os
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
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    # A service that listens on every address is asked on this host's own.
    own = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    with grpc.insecure_channel(f"{own}:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_S_MAX)
        except grpc.RpcError as error:
            return f"{own}:{port} does not answer: {error}"
    serving = health_pb2.HealthCheckResponse.SERVING
    return "" if answer.status == serving else health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


if __name__ == "__main__":
    sys.exit(main())
