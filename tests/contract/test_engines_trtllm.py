"""What every engine promises, of the adapter `trtllm_grpc` in front of a fake of its server in a process of its own.

The real server was never run: see docs/engines.md. What it does not tell, or does not do, is stated by a test here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from laneway.core.catalogue import Pool
from laneway.core.lanes import FinishReason
from laneway.runtime.engine_options import EngineOptions
from laneway.workers.conformance.rig import QUESTIONS
from laneway.workers.engines.protocol import Engine
from laneway.workers.engines.registry import make_engine
from tests.contract.test_engines import EngineContract, UnderTest, judge, t
from tests.support.trtllm_server import FakeOptions

ROOT = Path(__file__).resolve().parents[2]
__all__ = ["judge", "t"]  # the fixtures


class FakeProcess:
    """The fake server, ended by SIGKILL."""

    def __init__(self, options: FakeOptions) -> None:
        command = [sys.executable, "-m", "tests.support.trtllm_server", msgspec.json.encode(options).decode()]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def kill(self) -> None:
        with self._process:
            os.kill(self._process.pid, signal.SIGKILL)


@pytest.mark.asyncio(loop_scope="class")
class TestTrtllmGrpc(EngineContract):
    engine = "trtllm_grpc"
    tokenizer = "bytes"
    options = EngineOptions()
    # Its sampler keeps no seed for each request, and it counts no tokens.
    not_offered = frozenset(
        {
            "seed-repeats-alone",
            "seed-repeats-in-company",
            "seeds-differ",
            "prompt-whole",
            "counts-true",
            "resume-sampled",
            "priority-first",
        }
    )
    servers: ClassVar[dict[int, FakeProcess]] = {}  # by engine

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def no_server_is_left(cls) -> Iterator[None]:
        yield
        for server in cls.servers.values():
            server.kill()
        cls.servers.clear()

    @classmethod
    def make(cls, pool: Pool) -> Engine:
        server = FakeProcess(FakeOptions(eos_mean_tokens=30.0))
        engine = make_engine(pool, EngineOptions(address=server.address))
        cls.servers[id(engine)] = server
        return engine

    def kill(self, engine: Any) -> str:
        self.servers.pop(id(engine)).kill()
        return "is gone (UNAVAILABLE)"

    def interrupt(self, engine: Any) -> None:
        """It is not of the worker's terminal."""

    async def test_tokens_come_step_by_step_and_end_once(self, t: UnderTest):
        """Two that came in one go are told together."""
        heard = await t.run(t.prompt(QUESTIONS[0]), 40, logprobs=True)
        assert len(heard.ids) == len(heard.logprobs) == 40
        assert 4 <= heard.calls <= 41
        assert heard.finish is FinishReason.LENGTH
        assert all(p <= 0.0 for p in heard.logprobs)

    async def test_higher_priority_leaves_the_queue_first(self, t: UnderTest):
        """There is no priority in the proto: who came first is first."""
        running = [t.submit(t.prompt(q), 400) for q in QUESTIONS * 2]
        await t.sink.until(lambda: all(t.sink.heard[i].ids for i in running))
        low = t.submit(t.prompt(QUESTIONS[0]), 400, priority=0.1)
        calls = t.sink.calls
        await t.sink.until(lambda: t.sink.calls > calls)
        high = t.submit(t.prompt(QUESTIONS[0]), 400, priority=0.9)
        t.engine.abort(running[0])
        await t.sink.until(lambda: t.sink.heard[low].ids)
        assert t.sink.heard[high].ids == []
        for i in (low, high, *running):
            t.engine.abort(i)
        await t.sink.ended([low, high, *running])

    async def test_statistics_say_what_the_steps_did(self, t: UnderTest):
        """They cannot: what is not known stays 0, and only that something came is counted."""
        before = t.engine.stats().steps
        ids = [t.submit([80 + (n * n + k) % 13 for n in range(300)], 40) for k in range(3)]
        await t.sink.until(lambda: all(len(t.sink.heard[i].ids) >= 2 for i in ids))
        assert (t.sink.stats.decoding, t.sink.stats.running) == (3, 3)
        assert t.sink.stats.kv_tokens_used == sum(300 + len(t.sink.heard[i].ids) for i in ids)
        await t.sink.ended(ids)
        after = t.engine.stats()
        assert after.steps >= before + 40
        assert (after.busy_s, after.prefilled_tokens, after.decoded_tokens, after.decoding) == (0.0, 0, 0, 0)

    async def test_the_capacity_says_how_much_of_a_prompt_a_step_takes(self, t: UnderTest):
        """It does not tell."""
        assert (t.capacity.chunk_tokens, t.capacity.paged) == (0, False)
