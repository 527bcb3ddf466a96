"""Children of the local stack: ready, stopped within a bound, and gone with their parent."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

import laneway.cli.child
from laneway.cli.child import Child, StackError
from tests.support.nats import eventually

TETHER = Path(laneway.cli.child.__file__).with_name("tether.py")
READY = "import json, os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(json.dumps({'address': 'a:1'})); "


@asynccontextmanager
async def started(tmp_path: Path, code: str) -> AsyncIterator[Child]:
    ready = tmp_path / "ready.json"
    child = Child(
        "part",
        [sys.executable, "-c", textwrap.dedent(code), str(ready)],
        environment=os.environ,
        log=tmp_path / "part.log",
        ready_file=ready,
    )
    await child.start()
    try:
        yield child
    finally:
        await child.stop(0.0)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_child_is_ready_when_it_says_so_and_ends_cleanly(tmp_path: Path):
    async with started(tmp_path, READY + "time.sleep(60)") as child:
        note = await child.ready(10)
        assert note.address == "a:1"
        assert child.alive
        assert await child.stop(10) == -signal.SIGTERM
        assert not child.alive


async def test_a_child_that_ends_early_shows_the_end_of_its_log(tmp_path: Path):
    async with started(tmp_path, "print('no such file'); raise SystemExit(3)") as child:
        with pytest.raises(StackError, match=r"(?s)part ended with status 3.*no such file"):
            await child.ready(10)


async def test_a_child_that_never_gets_ready_is_reported(tmp_path: Path):
    async with started(tmp_path, "import time; time.sleep(60)") as child:
        with pytest.raises(StackError, match="not ready within"):
            await child.ready(0.2)


@pytest.mark.parametrize("paused", [False, True])
async def test_a_child_that_ignores_the_signal_is_killed_with_its_helpers(tmp_path: Path, paused: bool):
    helper = tmp_path / "helper"
    code = f"""
        import pathlib, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        pathlib.Path({str(helper)!r}).write_text(str(helper.pid))
        pathlib.Path(sys.argv[1]).write_text("{{}}")
        time.sleep(60)
    """
    async with started(tmp_path, code) as child:
        await child.ready(10)
        helper_id = int(helper.read_text())
        if paused:
            child.signal(signal.SIGSTOP)
        assert await child.stop(0.2) == -signal.SIGKILL
        await eventually(lambda: gone(helper_id))


async def test_a_stopped_child_may_be_started_again_and_must_say_ready_again(tmp_path: Path):
    async with started(tmp_path, READY + "time.sleep(60)") as child:
        await child.ready(10)
        first = child.pid
        child.kill()
        assert await child.wait() == -signal.SIGKILL
        await child.start()
        await child.ready(10)
        assert child.pid != first
        with pytest.raises(StackError, match="already runs"):
            await child.start()


async def test_children_die_with_a_parent_that_is_killed(tmp_path: Path):
    note = tmp_path / "pid"
    code = f"""
        import os, pathlib, subprocess, sys, time
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", {str(TETHER)!r}, str(os.getpid()), "sleep", "60"], start_new_session=True
        )
        pathlib.Path({str(note)!r}).write_text(str(child.pid))
        time.sleep(60)
    """
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(code))
    try:
        await eventually(lambda: note.exists() and note.read_text() != "")
        pid = int(note.read_text())
        await eventually(lambda: psutil.Process(pid).name() == "sleep")
    finally:
        parent.kill()
        await parent.wait()
    await eventually(lambda: gone(pid))


def test_a_child_whose_parent_is_already_gone_does_not_start():
    end = subprocess.run([sys.executable, "-I", "-S", TETHER, "1", "sleep", "60"], check=False)
    assert end.returncode == 1
