"""A real Triton server for tests, on the CPU: builds it from `nvidia-pytriton`, and starts it.

    python tools/triton_test_server.py                   builds .triton/ if it is not there (`make triton-test-server`)
    python tools/triton_test_server.py smollm2_llmapi    and serves models of it until Ctrl-C

PyTriton's wheel has the server and its Python backend; it runs from a folder of its own, in an environment of its own,
because the backend's process crashes with numpy 2. The models are those of `tests/support/triton_models`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import string
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from laneway.runtime import model_files

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".triton"
MODELS = ROOT / "tests" / "support" / "triton_models"
REQUIREMENTS = ("nvidia-pytriton==0.7.0", "numpy==1.26.4", "openvino-genai==2026.4.1.0")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
CORES = ("echo", "smollm2")
DIALECTS = ("llmapi", "bls", "ids")
READY_S = 120.0
STOP_S = 20.0
# It dies with the thread that started it.
_TETHER = (sys.executable, "-I", "-S", str(ROOT / "services" / "laneway" / "cli" / "tether.py"))
PARAMETERS = {
    "slots": "8",
    "kv_tokens": "16384",
    "threads": "1",
    "exact": "false",
    "pace_s": "0.002",
    "decoupled": "true",
    "execute_s": "0",
    "accumulate_tokens": "true",
    "cancellation_check_period_ms": "100",
}


class ServerFailed(RuntimeError):
    """The server could not be built or started; the message says why."""


def build() -> Path:
    """The folder of the server, made if it is not there. Several processes may ask at once."""
    HOME.mkdir(exist_ok=True)
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = HOME / "built"
        wanted = "\n".join((PYTHON, *REQUIREMENTS))
        if not stamp.exists() or stamp.read_text() != wanted:
            stamp.unlink(missing_ok=True)
            _install()
            _lay_out()
            stamp.write_text(wanted)
    return HOME / "server"


def _install() -> None:
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        raise ServerFailed(f"{sys.executable} has no libpython of its own, which Triton's Python backend loads")
    print(f"building the Triton test server in {HOME.name}/: 120 MB to download, 600 MB on disk", file=sys.stderr)
    # The interpreter that this environment was made from: an environment of an environment has no pip.
    subprocess.run([sys._base_executable, "-m", "venv", "--clear", str(HOME / "venv")], check=True)  # type: ignore[attr-defined] # not in typeshed
    pip = [str(HOME / "venv/bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, *REQUIREMENTS], check=True)


def _packages() -> Path:
    return HOME / "venv" / "lib" / f"python{PYTHON}" / "site-packages"


def _lay_out() -> None:
    source, server = _packages() / "pytriton" / "tritonserver", HOME / "server"
    shutil.rmtree(server, ignore_errors=True)
    for name in ("bin", "backends", "caches"):
        shutil.copytree(source / name, server / name)
    stub = server / "backends" / "python" / "triton_python_backend_stub"
    shutil.copy(source / "python_backend_stubs" / PYTHON / "triton_python_backend_stub", stub)
    for program in (stub, server / "bin" / "tritonserver"):
        program.chmod(0o755)


class TritonServer:
    """A server that runs, from its start to `stop` or `kill`. Its log is the file `log`."""

    def __init__(self, models: Sequence[str], parameters: Mapping[str, str] | None = None, *, port: int = 0) -> None:
        self._server = build()
        self._folder = tempfile.TemporaryDirectory(prefix="triton-")
        folder = Path(self._folder.name)
        self._memory = f"laneway-{folder.name}"  # its models' shared memory, by the beginning of its names
        for model in models:
            _write_model(folder / "models" / model, model, {**PARAMETERS, **(parameters or {})})
        with _free_ports(3) as (free_port, http_port, metrics_port):
            grpc_port = port or free_port
        self.address = f"127.0.0.1:{grpc_port}"
        self.metrics_address = f"127.0.0.1:{metrics_port}"
        self._http_address = f"127.0.0.1:{http_port}"
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*_TETHER, str(os.getpid()), *self._command(folder / "models", grpc_port, http_port, metrics_port)],
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its model processes end with it
            )

    def wait_ready(self) -> None:
        """Blocks until all its models serve. Raises ServerFailed."""
        end_s = time.monotonic() + READY_S
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > end_s:
                said = self.log.read_text(errors="replace")[-2000:]
                self.kill()
                raise ServerFailed(f"tritonserver did not become ready:\n{said}")
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        """By SIGKILL, with the processes of its models. Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._folder.cleanup()
        for left in Path("/dev/shm").glob(f"{self._memory}*"):
            left.unlink(missing_ok=True)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._http_address}/v2/health/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _command(self, models: Path, grpc_port: int, http_port: int, metrics_port: int) -> list[str]:
        return [
            str(self._server / "bin" / "tritonserver"),
            f"--model-repository={models}",
            f"--backend-directory={self._server / 'backends'}",
            f"--cache-directory={self._server / 'caches'}",
            *(f"--{name}-address=127.0.0.1" for name in ("grpc", "http", "metrics")),
            f"--grpc-port={grpc_port}",
            f"--http-port={http_port}",
            f"--metrics-port={metrics_port}",
            "--pinned-memory-pool-byte-size=0",
            "--exit-timeout-secs=3",
            f"--backend-config=python,shm-region-prefix-name={self._memory}",
        ]

    def _environment(self) -> dict[str, str]:
        libraries = [_packages() / "nvidia_pytriton.libs", Path(str(sysconfig.get_config_var("LIBDIR")))]
        return {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "PATH": f"{HOME / 'venv/bin'}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(HOME / "venv"),
        }


def _write_model(folder: Path, name: str, parameters: Mapping[str, str]) -> None:
    core, _, dialect = name.partition("_")
    if core not in CORES or dialect not in DIALECTS:
        raise ServerFailed(f"there is no model {name}: {' or '.join(CORES)}, then _, then one of {', '.join(DIALECTS)}")
    given = {**parameters, "core": core, "dialect": dialect}
    if core == "smollm2":
        given["model_file"] = str(model_files.find(model_files.SMOLLM2))
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in given.items()]
    if "priority_levels" in given:
        levels = int(given["priority_levels"])
        lines.append(f"dynamic_batching {{ priority_levels: {levels} default_priority_level: {levels} }}")
    template = string.Template((MODELS / f"{dialect}.pbtxt").read_text())
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(template.substitute(decoupled=given["decoupled"], more="\n".join(lines)))
    (folder / "1" / "model.py").write_text(
        f"import sys\n\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.support.triton_models.model import TritonPythonModel\n\n__all__ = ['TritonPythonModel']\n"
    )


@contextmanager
def _free_ports(count: int) -> Iterator[list[int]]:
    """Ports that are free now; held until the end, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def main() -> int:
    build()
    if not sys.argv[1:]:
        return 0
    server = TritonServer(sys.argv[1:])
    try:
        server.wait_ready()
        print(f"grpc {server.address}, metrics {server.metrics_address}", flush=True)
        return server.process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
