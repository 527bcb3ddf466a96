"""Regenerates the checked-in protobuf stubs from protos/**/*.proto.

The stubs are made by the pinned grpcio-tools (messages, their .pyi, services) and mypy-protobuf (the services'
.pyi), and never edited. `--check` writes nothing and fails when what is checked in differs from what the .proto
files give.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent.parent / "protos"
GOOGLEAPIS = Path(__file__).resolve().parent / "googleapis"  # for imports; its stubs are a dependency's
STUB_PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a checked-in stub differs")
    check: bool = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh_root = Path(folder)
        generate(fresh_root)
        fresh = read_stubs(fresh_root)
    present = read_stubs(PROTO_ROOT)
    changed = sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))
    if check:
        return report_drift(changed, fresh, present)
    for name in changed:
        if name in fresh:
            (PROTO_ROOT / name).write_bytes(fresh[name])
        else:
            (PROTO_ROOT / name).unlink()
        print(f"{'wrote' if name in fresh else 'removed'} protos/{name}")
    print(f"{len(fresh)} stubs, {len(changed)} changed")
    return 0


def generate(target: Path) -> None:
    """Writes the stubs of every .proto file under `target`; files without a service get no service stubs."""
    protos = sorted(PROTO_ROOT.rglob("*.proto"))
    messages = [str(path.relative_to(PROTO_ROOT)) for path in protos]
    services = [str(path.relative_to(PROTO_ROOT)) for path in protos if declares_service(path)]
    run_protoc(messages, f"--python_out={target}", f"--pyi_out={target}")
    if services:
        plugin = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
        run_protoc(
            services,
            f"--grpc_python_out={target}",
            f"--plugin=protoc-gen-mypy_grpc={plugin}",
            f"--mypy_grpc_out=quiet:{target}",
        )


def declares_service(proto: Path) -> bool:
    return any(line.startswith("service ") for line in proto.read_text().splitlines())


def run_protoc(names: list[str], *options: str) -> None:
    well_known = resources.files("grpc_tools") / "_proto"
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{PROTO_ROOT}",
        f"-I{GOOGLEAPIS}",
        f"-I{well_known}",
        *options,
        *names,
    ]
    subprocess.run(command, check=True)


def read_stubs(root: Path) -> dict[str, bytes]:
    paths = (path for pattern in STUB_PATTERNS for path in root.rglob(pattern))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def report_drift(changed: list[str], fresh: dict[str, bytes], present: dict[str, bytes]) -> int:
    for name in changed:
        what = "is missing" if name not in present else "has no .proto" if name not in fresh else "differs"
        print(f"protos/{name} {what}", file=sys.stderr)
    if changed:
        print("stubs drifted from the .proto files: run `make protos` and commit the result", file=sys.stderr)
        return 1
    print(f"{len(fresh)} stubs match the .proto files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
