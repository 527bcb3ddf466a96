"""A docker engine for these tests: the one that answers, or one that the script of LANEWAY_DOCKER_SETUP starts."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SETUP = "LANEWAY_DOCKER_SETUP"
SETUP_S_MAX = 900.0


@contextmanager
def docker_engine() -> Iterator[None]:
    """While open, `docker` works. Skips where there is none; an engine that this started is stopped again."""
    script = os.environ.get(SETUP, "")
    if answers():
        yield
        return
    if not script:
        pytest.skip(f"no docker engine answers, and {SETUP} names no script that starts one")
    done = subprocess.run(["bash", script, "up"], capture_output=True, text=True, timeout=SETUP_S_MAX, check=False)
    # A skip here would let CI pass without containers.
    assert done.returncode == 0, f"{SETUP}={script} up ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    assert answers(), f"{SETUP}={script} up ended well, and no docker engine answers"
    try:
        yield
    finally:
        subprocess.run(["bash", script, "stop"], check=True, timeout=SETUP_S_MAX)


def answers() -> bool:
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=30, check=False).returncode == 0
    except FileNotFoundError:
        return False
