"""A real OpenAI-compatible server: llama.cpp's, out of the package xllamacpp, with the small real model.

    async with openai_server() as base_url: ...

It runs in a process of its own, on a port that is free, and ends with the block. As a program it serves until its
input ends, that is also with whoever started it: python -m tests.support.openai_server <options as JSON>.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from laneway.runtime import model_files

ROOT = Path(__file__).resolve().parents[2]


class LlamaOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    slots: int = 4
    context_length: int = 2048  # of a sequence
    threads: int = 1
    port: int = 0  # 0: any
    api_key: str = ""  # asked of callers


class LlamaProcess:
    """The server in its process. `start` before `base_url`."""

    def __init__(self, options: LlamaOptions = LlamaOptions()) -> None:  # noqa: B008 - frozen
        command = [sys.executable, "-m", "tests.support.openai_server", msgspec.json.encode(options).decode()]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        )
        self._address = ""

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    @property
    def address(self) -> str:
        """Waits until it listens."""
        if not self._address:
            assert self._process.stdout is not None
            self._address = self._process.stdout.readline().strip()
            assert self._address, "the server did not start"
        return self._address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        """By SIGKILL, as the kernel does where memory runs out; returns when it is gone."""
        with self._process:
            os.kill(self._process.pid, signal.SIGKILL)


@asynccontextmanager
async def openai_server(options: LlamaOptions = LlamaOptions()) -> AsyncIterator[str]:  # noqa: B008 - frozen
    """Its base_url."""
    server = LlamaProcess(options)
    try:
        yield await asyncio.to_thread(lambda: server.base_url)
    finally:
        server.kill()


def main(arguments: list[str]) -> None:
    xllamacpp: Any = importlib.import_module("xllamacpp")  # compiled, without types
    options = msgspec.json.decode(arguments[0], type=LlamaOptions)
    params = xllamacpp.CommonParams()
    params.model.path = str(model_files.find(model_files.SMOLLM2))
    params.n_parallel, params.n_ctx = options.slots, options.slots * options.context_length
    params.kv_unified = False  # each slot has a context of its own
    params.port = options.port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_threads_http = 256  # one is taken by each open stream, of requests that wait as well
    if options.api_key:
        params.api_keys = [options.api_key]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
