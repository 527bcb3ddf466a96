"""Rewrites constraints.txt: one exact version of everything that laneway and its extras may install.

The versions are what pip resolves today for the Python that runs this, so run it with the oldest supported one.
TensorRT-LLM is left out: what the public index holds under its name cannot be resolved there.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("local", "triton", "trtllm-grpc", "openai", "simulate", "gateway", "dev")
HEADER = """\
# What `make venv` and the container images install, for Python 3.11 and 3.12. Made by `make constraints`.
"""


def main() -> int:
    pins = resolve()
    (ROOT / "constraints.txt").write_text(HEADER + "".join(f"{name}=={pins[name]}\n" for name in sorted(pins)))
    print(f"constraints.txt: {len(pins)} pins")
    return 0


def resolve() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", str(report), f"{ROOT}[{','.join(EXTRAS)}]"], check=True)
        installs = json.loads(report.read_text())["install"]
    pins = {normalise(item["metadata"]["name"]): item["metadata"]["version"] for item in installs}
    del pins["laneway"]
    return pins


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
