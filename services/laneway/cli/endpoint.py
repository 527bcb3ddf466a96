"""Where the services are: a flag, the environment, the stack that `laneway up` runs here, or the settings.

`laneway up` writes a small file in the user's own runtime folder, so that commands in another terminal find it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

SERVICES = ("admission", "scheduler", "routing")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A running local stack."""

    pid: int
    admission: str
    scheduler: str
    routing: str
    nats: str
    logs: str


def endpoint_file() -> Path:
    """LANEWAY_ENDPOINT_FILE, or endpoint.json in the user's runtime folder, else in the cache folder."""
    named = os.environ.get("LANEWAY_ENDPOINT_FILE")
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "laneway" / "endpoint.json"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "laneway" / "endpoint.json"


def write_endpoint(endpoint: Endpoint, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(asdict(endpoint)), encoding="utf-8")
    partial.replace(path)


def read_endpoint(path: Path) -> Endpoint | None:
    """The stack that the file names, if its process still runs."""
    try:
        endpoint = Endpoint(**json.loads(path.read_text(encoding="utf-8")))
        os.kill(endpoint.pid, 0)
    except PermissionError:
        return None  # the id now belongs to somebody else's process
    except (OSError, ValueError, TypeError):
        return None
    return endpoint


def remove_endpoint(path: Path, pid: int) -> None:
    """Removes the file if it names this process."""
    endpoint = read_endpoint(path)
    if endpoint is not None and endpoint.pid == pid:
        path.unlink(missing_ok=True)


def address_of(service: str, given: str | None) -> str:
    """host:port of a service. `given` is the flag or its environment variable."""
    if given:
        return given
    running = read_endpoint(endpoint_file())
    if running is not None:
        return str(getattr(running, service))
    from laneway.runtime.settings import load_settings

    settings = load_settings()
    match service:
        case "admission":
            return settings.admission.listen
        case "scheduler":
            return settings.scheduler.listen
        case "routing":
            return settings.routing.listen
        case _:
            raise ValueError(f"there is no service {service}")
