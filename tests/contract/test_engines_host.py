"""The process of an engine: how it starts, fails, ends, and that it never outlives its worker."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
import time
from pathlib import Path

import psutil
import pytest
import structlog
import uvloop
from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.errors import ConfigError
from laneway.core.lanes import FinishReason
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.workers.engines.frames import FRAME_BYTES_MAX, Frames
from laneway.workers.engines.host import ProcessEngine
from laneway.workers.engines.protocol import EngineStartError
from laneway.workers.engines.registry import make_engine
from tests.support.engines import RecordingSink
from tests.support.nats import eventually

FAST = EngineOptions(pace_s=0.002)
PROMPT = b"a prompt"


def pool(engine: str = "simulated", tokenizer: str = "bytes") -> Pool:
    return Pool(
        name="under-test",
        model="chat",
        tier="small",
        engine=engine,
        context_length=2048,
        vocabulary_size=260 if tokenizer == "bytes" else 49_152,
        slots=4,
        workers=1,
        kv_tokens=8192,
        tokenizer=tokenizer,
        capabilities=capabilities_of(engine),
    )


def engine_of(options: EngineOptions = FAST) -> ProcessEngine:
    engine = make_engine(pool(), options)
    assert isinstance(engine, ProcessEngine)
    return engine


def gone(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_closing_ends_the_process_and_says_nothing():
    engine, sink = engine_of(), RecordingSink()
    await engine.start(sink)
    process_id = engine.process_id
    assert process_id is not None
    sink.submit(engine, PROMPT, 1000)
    await asyncio.gather(engine.close(), engine.close())
    assert gone(process_id)
    assert sink.closed == []
    with pytest.raises(RuntimeError, match="once"):
        await engine.start(sink)


async def test_closing_an_engine_that_was_never_started_is_nothing():
    await engine_of().close()


async def test_what_is_submitted_together_shares_its_first_step():
    engine, sink = engine_of(), RecordingSink()
    await engine.start(sink)
    try:
        with engine.together():
            sink.submit(engine, PROMPT, 1)
            time.sleep(0.05)  # noqa: ASYNC251 - many steps, if the engine had the first already
            sink.submit(engine, PROMPT, 1)
        await sink.until(lambda: not sink.live())
        assert (sink.calls, sink.stats.steps) == (1, 1)
    finally:
        await engine.close()


@pytest.mark.parametrize(
    "options",
    [EngineOptions(pace_s=0.002, fault_crash_step=7), EngineOptions(pace_s=0.002, fault_crash_token_id=7)],
    ids=["at a step", "at a prompt"],
)
async def test_a_crash_is_told_of_once_with_its_last_words(options):
    engine, sink = engine_of(options), RecordingSink()
    await engine.start(sink)
    try:
        sink.submit(engine, [1, 7], 100)
        await sink.until(lambda: sink.closed)
    finally:
        await engine.close()
    assert len(sink.closed) == 1
    assert "killed by SIGKILL; its last words: crashing" in sink.closed[0]


async def test_a_hung_engine_can_be_closed():
    engine, sink = engine_of(EngineOptions(pace_s=0.002, fault_hang_step=3)), RecordingSink()
    await engine.start(sink)
    process_id = engine.process_id
    assert process_id is not None
    with structlog.testing.capture_logs() as logs:
        live = sink.submit(engine, PROMPT, 100)
        await eventually(lambda: any(entry.get("line", "").startswith("hanging") for entry in logs))
        assert len(sink.heard[live].ids) == engine.stats().steps == 2
        await engine.close()
    assert gone(process_id)


async def test_an_engine_error_reaches_its_request_with_words():
    engine, sink = engine_of(EngineOptions(pace_s=0.002, fault_error_token_id=7)), RecordingSink()
    await engine.start(sink)
    try:
        good, bad = sink.submit(engine, PROMPT, 5), sink.submit(engine, [7], 5)
        heard = await sink.ended([good, bad])
        assert [h.finish for h in heard] == [FinishReason.LENGTH, FinishReason.ERROR]
        assert "failed on this prompt" in heard[1].message
    finally:
        await engine.close()


async def test_a_start_that_takes_too_long_is_given_up():
    engine = engine_of(EngineOptions(start_timeout_s=0.01))
    with pytest.raises(EngineStartError, match="start_timeout_s"):
        await engine.start(RecordingSink())
    assert engine.process_id is None or gone(engine.process_id)


async def test_a_cancelled_start_leaves_no_process():
    engine = engine_of()
    start = asyncio.ensure_future(engine.start(RecordingSink()))
    await eventually(lambda: engine.process_id is not None)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert engine.process_id is not None
    assert gone(engine.process_id)


async def test_a_wrong_option_is_told_as_it_is():
    with pytest.raises(EngineStartError, match='profile = "nowhere": no such profile'):
        await engine_of(EngineOptions(profile="nowhere")).start(RecordingSink())


async def test_a_process_that_dies_while_starting_says_its_last_words(monkeypatch, tmp_path):
    (tmp_path / "msgspec.py").write_text("raise SystemExit('no msgspec here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(EngineStartError, match="exit code 1; its last words: no msgspec here"):
        await engine_of().start(RecordingSink())


def test_an_unknown_engine_is_a_wrong_setting():
    with pytest.raises(ConfigError, match="known engines are"):
        make_engine(replace(pool(), engine="steam"), FAST)


def test_it_runs_under_uvloop():
    async def run() -> None:
        engine, sink = engine_of(), RecordingSink()
        await engine.start(sink)
        heard = await sink.ended([sink.submit(engine, PROMPT, 20) for _ in range(8)])
        assert {len(h.ids) for h in heard} == {20}
        assert engine.process_id is not None
        os.kill(engine.process_id, signal.SIGKILL)
        await sink.until(lambda: sink.closed)
        await engine.close()
        assert len(sink.closed) == 1

    uvloop.run(run())


WORKER = """
import asyncio, sys
from tests.contract.test_engines_host import engine_of, RecordingSink, PROMPT
async def main():
    engine, sink = engine_of(), RecordingSink()
    await engine.start(sink)
    sink.submit(engine, PROMPT, 2000)
    print(engine.process_id, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_killed_worker_takes_its_engine_with_it():
    root = Path(__file__).parents[2]
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, cwd=root, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        assert worker.stdout is not None
        process_id = int(await worker.stdout.readline())
        assert not gone(process_id)
        worker.kill()
        await worker.wait()
        await eventually(lambda: gone(process_id))
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()


async def test_a_step_of_sixty_four_sequences_costs_the_worker_little():
    """A count of calls, and processor time as a ratio: a tenth of a core at 100 steps a second is the bound."""
    engine = make_engine(replace(pool(), slots=64, kv_tokens=10**6), EngineOptions(pace_s=0.01))
    sink = RecordingSink()
    await engine.start(sink)
    try:
        ids = [sink.submit(engine, PROMPT, 60) for _ in range(64)]
        await sink.until(lambda: all(sink.heard[i].ids for i in ids))
        calls, used_s = sink.calls, time.process_time()
        await sink.ended(ids)
        used_s = time.process_time() - used_s
        steps = sink.calls - calls
        assert steps >= 30
        assert used_s / steps < 0.002
    finally:
        await engine.close()


class TestFrames:
    def test_frames_come_out_whole_however_they_arrive(self):
        payloads = [b"", b"a", b"bc" * 1000]
        stream = b"".join(struct.pack(">I", len(p)) + p for p in payloads)
        for size in (1, 3, 1000, len(stream)):
            frames = Frames()
            out = [f for at in range(0, len(stream), size) for f in frames.feed(stream[at : at + size])]
            assert out == payloads

    def test_a_frame_over_the_limit_breaks_the_stream(self):
        assert Frames().feed(struct.pack(">I", FRAME_BYTES_MAX)) == []
        with pytest.raises(ValueError, match="at most"):
            Frames().feed(struct.pack(">I", FRAME_BYTES_MAX + 1))


@pytest.mark.model
@pytest.mark.timeout(120)
class TestOpenVinoStart:
    """The words an operator reads when the model cannot be loaded."""

    async def start(self, options: EngineOptions, **changes) -> str:
        engine = make_engine(replace(pool("openvino", "smollm2"), **changes), options)
        with pytest.raises(EngineStartError) as failed:
            await engine.start(RecordingSink())
        assert "/home" not in str(failed.value)
        return str(failed.value)

    async def test_a_missing_file(self):
        assert "set model_file" in await self.start(EngineOptions(model_file="/nowhere/model.gguf"))

    async def test_a_file_that_is_no_model(self, tmp_path):
        path = tmp_path / "model.gguf"
        path.write_bytes(b"GGUF but nothing else")
        assert "not a sound GGUF file" in await self.start(EngineOptions(model_file=str(path)))

    async def test_tensors_it_cannot_read_are_named(self, tmp_path):
        from tests.unit.test_tokenizer import gguf

        path = tmp_path / "model.gguf"
        path.write_bytes(gguf({"general.architecture": "llama", "llama.context_length": 8192}, (6, 0)))
        assert "Q5_0 tensors" in await self.start(EngineOptions(model_file=str(path)))

    async def test_a_context_that_the_model_does_not_have(self):
        assert "8192" in await self.start(EngineOptions(), context_length=8193, kv_tokens=9000)


class Following(RecordingSink):
    """Has another request for one token ready whenever one has ended, as slices of a prompt follow each other."""

    def __init__(self, engine: ProcessEngine, count: int) -> None:
        super().__init__()
        self.engine = engine
        self.left = count

    def on_step(self, steps, stats):
        super().on_step(steps, stats)
        for step in steps:
            if step.finish is FinishReason.LENGTH and self.left:
                self.left -= 1
                self.submit(self.engine, PROMPT, 1)


async def test_a_request_that_follows_one_for_one_token_is_in_the_very_next_step():
    engine = engine_of(EngineOptions(pace_s=0.02))
    sink = Following(engine, 20)
    await engine.start(sink)
    try:
        sink.submit(engine, PROMPT, 2000)  # the engine steps on, whoever follows
        sink.submit(engine, PROMPT, 1)
        await sink.until(lambda: not sink.left and len(sink.live()) == 1)
        assert sink.stats.steps <= 24, "of 21 at best; without a moment for what follows about 30"
    finally:
        await engine.close()
