"""What the way through Laneway adds to a stream, against a direct call to the same engine in the same run.

A simulated engine at 10 ms a token; 1, 16 and 64 callers at once, each asking for 64 tokens again and again; rounds of
the direct call and of Laneway alternate. Between two streams a caller waits for up to two steps: one that asks at the
very end of a step, as a closed loop does, gets into the next step when it calls directly and misses it through anything
else, and the difference would be the engine's step and not Laneway. It waits in a
thread: timers of the event loop have whole milliseconds, so that direct calls would come at ten fixed phases of a step,
and their median would be that of ten values. Added TTFT and added total time are differences of
the same percentile. CPU for each stream is what every process used over the Laneway rounds, divided by their streams.

The callers speak HTTP/2 by hand (lean_caller.py): a Python gRPC client takes 2 ms CPU a stream of the same two cores,
and its hand-offs would count as Laneway's. What such a client sees is measured as well, in rounds of its own.

The bare limits, in the same run: the same hops with nothing decided on the way (bare_path.py), and a grpc.aio server
that does nothing but write 64 messages, one every 10 ms (bare_stream.py). They say what the libraries and NATS cost on
this machine.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import psutil
from lean_caller import LeanCaller
from report import Bar, Report, main, percentile

from laneway.cli.stack import LocalStack, StackOptions
from laneway.runtime.catalogue import catalogue_of
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.settings import load_settings
from laneway.v1 import admission_pb2, common_pb2, task_pb2
from laneway.workers.engines.protocol import EngineRequest, EngineStats, SequenceStep
from laneway.workers.engines.registry import make_engine

PACE_S = 0.010
TOKENS = 64
SLOTS = 72
PROMPT = list(range(97, 97 + 24))
LEVELS = (1, 16, 64)
ROUNDS = 3
CHUNK_TAG = admission_pb2.GenerateResponse.CHUNK_FIELD_NUMBER << 3 | 2  # first byte of a response with a chunk
MODEL = {
    "name": "chat", "engine": "simulated", "slots": SLOTS, "workers": 1, "queue_length": 256,
    "context_length": 4096, "kv_tokens": 4096 * SLOTS, "engine_options": {"pace_s": PACE_S},
    "prefill_tokens_per_s": 50_000.0, "decode_tokens_per_s": 1 / PACE_S,
}  # fmt: skip


@dataclass
class Samples:
    ttft_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    tokens: int = 0


Call = Callable[[Samples], Awaitable[None]]


class DirectSink:
    """The worker's side of the engine, reduced to what a caller would see."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[asyncio.Future[None], list[float], list[int]]] = {}

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        now = time.perf_counter()
        for step in steps:
            done, first, count = self.waiting[step.id]
            if step.token_ids and not first:
                first.append(now)
            count[0] += len(step.token_ids)
            if step.finish is not None and not done.done():
                done.set_result(None)

    def on_closed(self, reason: str) -> None:
        for done, _, _ in self.waiting.values():
            if not done.done():
                done.set_exception(RuntimeError(reason))


async def _callers(count: int, streams: int, call: Call, samples: Samples) -> None:
    """`count` callers in a closed loop, starting apart, `streams` streams in all."""
    rng = random.Random(1)
    left = streams

    async def caller(delay_s: float) -> None:
        nonlocal left
        await asyncio.sleep(delay_s)
        while left > 0:
            left -= 1
            await call(samples)
            await asyncio.get_running_loop().run_in_executor(threads, time.sleep, rng.uniform(0.0, 2 * PACE_S))

    with ThreadPoolExecutor(count) as threads:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(caller(rng.uniform(0.0, PACE_S * TOKENS)))


class Processes:
    """CPU seconds of the stack's processes by name; an engine counts apart from its worker."""

    def __init__(self, stack: LocalStack) -> None:
        self._known: dict[str, psutil.Process] = {}
        for child in stack.children:
            if child.alive:
                process = psutil.Process(child.pid)
                name = "worker" if child in stack.workers else child.name
                self._known[name] = process
                for inner in process.children(recursive=True):
                    self._known[f"{name} engine"] = inner
        self._known["client"] = psutil.Process()

    def cpu_s(self) -> dict[str, float]:
        return {name: sum(p.cpu_times()[:2]) for name, p in self._known.items()}


async def measure(smoke: bool) -> Report:
    levels, rounds = ((1, 8), 1) if smoke else (LEVELS, ROUNDS)
    policy = {"single_flight": False}  # all callers ask the same, and each is to cost what a caller costs
    options = StackOptions(settings={"models": [MODEL], "process": {"log_level": "warning"}, "policy": policy})
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    bars: list[Bar] = []
    notes: list[str] = []
    counts: dict[str, tuple[int, int]] = {}
    async with LocalStack(options) as stack:
        direct_call, close = await _direct()
        caller = await LeanCaller.connect(stack.addresses.admission)
        channel = grpc.aio.insecure_channel(stack.addresses.admission)
        processes = Processes(stack)
        for level in levels:
            direct, ours, through_client, bare_path = Samples(), Samples(), Samples(), Samples()
            cpu: dict[str, float] = {}
            streams = 0
            each = 2 * level if smoke else max(12, 4 * level)
            for _ in range(rounds):
                await _callers(level, each, direct_call, direct)
                before = processes.cpu_s()
                await _callers(level, each, _lean(caller, "/laneway.v1.AdmissionService/Generate", _REQUEST), ours)
                after = processes.cpu_s()
                for name in before:
                    cpu[name] = cpu.get(name, 0.0) + after[name] - before[name]
                streams += each
                await _callers(level, each, _through(channel), through_client)
            async with _bare_path() as address:
                bare = await LeanCaller.connect(address)
                await _callers(level, each, _lean(bare, "/bare.Bare/Generate", _REQUEST), bare_path)
                bare.close()
            bare_cpu = await _bare(level, each)
            cpu["bare gRPC server"] = bare_cpu * streams / each
            row, found = _figures(level, direct, ours, cpu, streams)
            others = (("grpc_aio_client", through_client), ("bare_path", bare_path))
            for name, samples in others:
                for q in (50, 99):
                    added = percentile(samples.ttft_s, q) - percentile(direct.ttft_s, q)
                    found[f"{name}_added_ttft_p{q}_ms_{level}"] = 1000 * added
                row.insert(-1, " / ".join(f"{found[f'{name}_added_ttft_p{q}_ms_{level}']:.2f}" for q in (50, 99)))
            rows.append(row)
            shown = ", ".join(f"{name} {1000 * used / streams:.2f}" for name, used in cpu.items())
            notes.append(f"CPU a stream at {level}, ms: {shown}")
            figures |= found
            counts[f"tokens at {level}"] = (ours.tokens, streams * TOKENS)
            counts[f"tokens through a client at {level}"] = (through_client.tokens, streams * TOKENS)
            counts[f"direct tokens at {level}"] = (direct.tokens, streams * TOKENS)
        await channel.close()
        caller.close()
        await close()
    if not smoke:
        bars = [
            Bar("added TTFT p50 at 64 streams", figures["added_ttft_p50_ms_64"], 3.0, "ms"),
            Bar("added TTFT p99 at 64 streams", figures["added_ttft_p99_ms_64"], 10.0, "ms"),
            Bar("door CPU a stream at 64 streams", figures["cpu_admission_ms_64"], 3.0, "ms"),
        ]
    columns = [
        "streams", "direct TTFT p50/p99", "added TTFT p50/p99", "added total p50/p99",
        "added TTFT, grpc.aio client", "added TTFT, bare path", "door CPU a stream",
    ]  # fmt: skip
    return Report("Token path: 64 tokens at 10 ms each (ms)", columns, rows, figures, bars, counts, notes)


def _figures(
    level: int, direct: Samples, ours: Samples, cpu: dict[str, float], streams: int
) -> tuple[list[str], dict[str, float]]:
    found: dict[str, float] = {}
    for q in (50, 99):
        base = percentile(direct.ttft_s, q)
        found[f"direct_ttft_p{q}_ms_{level}"] = 1000 * base
        found[f"added_ttft_p{q}_ms_{level}"] = 1000 * (percentile(ours.ttft_s, q) - base)
        found[f"added_total_p{q}_ms_{level}"] = 1000 * (percentile(ours.total_s, q) - percentile(direct.total_s, q))
    for name, used in cpu.items():
        found[f"cpu_{name.replace(' ', '_')}_ms_{level}"] = 1000 * used / streams
    kinds = ("direct_ttft", "added_ttft", "added_total")
    row = [f"{found[f'{kind}_p50_ms_{level}']:.2f} / {found[f'{kind}_p99_ms_{level}']:.2f}" for kind in kinds]
    return [str(level), *row, f"{found[f'cpu_admission_ms_{level}']:.2f}"], found


async def _direct() -> tuple[Call, Callable[[], Awaitable[None]]]:
    """A direct call to an engine of the same kind, in a process of its own as at the worker."""
    settings = load_settings(flags={"models": [MODEL]}, environ={})
    pool = catalogue_of(settings).pools[0]
    engine = make_engine(pool, settings.engine_options_of(pool.name))
    sink = DirectSink()
    await engine.start(sink)
    numbers = iter(range(1, 1 << 31))

    async def call(samples: Samples) -> None:
        number = next(numbers)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        first: list[float] = []
        count = [0]
        sink.waiting[number] = (done, first, count)
        started = time.perf_counter()
        engine.submit(EngineRequest(number, tuple(PROMPT), TOKENS, temperature=0.0, ignore_eos=True))
        await done
        samples.total_s.append(time.perf_counter() - started)
        samples.ttft_s.append(first[0] - started)
        samples.tokens += count[0]
        del sink.waiting[number]

    return call, engine.close


@asynccontextmanager
async def _bare_path() -> AsyncIterator[str]:
    """The bare path in processes of its own, with a NATS server of its own; gives the door's address."""
    worker = (
        "import token_path as t; s = t.load_settings(flags={'models': [t.MODEL]}, environ={});"
        "p = t.catalogue_of(s).pools[0];"
        "uvloop.run(bare_path.serve_worker(sys.argv[1], p, s.engine_options_of(p.name), t.PROMPT, t.TOKENS))"
    )
    door = f"uvloop.run(bare_path.serve_door(sys.argv[1], {TOKENS}))"
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        async with LocalNats(Path(folder)) as nats:
            try:
                said = []
                for run in (door, worker):
                    command = [sys.executable, "-c", "import sys, uvloop, bare_path; " + run, nats.url]
                    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent)  # noqa: ASYNC220
                    processes.append(process)
                    assert process.stdout is not None
                    said.append((await asyncio.to_thread(process.stdout.readline)).decode().strip())
                yield f"127.0.0.1:{said[0]}"
            finally:
                for process in processes:
                    process.kill()
                    await asyncio.to_thread(process.wait)


async def _bare(level: int, streams: int) -> float:
    """CPU seconds of a server in a process of its own that serves `streams` streams to `level` callers."""
    run = "import uvloop, bare_stream; uvloop.run(bare_stream.serve())"
    # Not through uvloop: it forks, which gRPC's handlers in this process do not bear.
    process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
        [sys.executable, "-c", run], stdout=subprocess.PIPE, cwd=Path(__file__).parent
    )
    assert process.stdout is not None
    port = int(await asyncio.to_thread(process.stdout.readline))
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    generate = channel.unary_stream("/bare.Bare/Generate")

    async def call(samples: Samples) -> None:
        async for _ in generate(b"%d" % TOKENS):
            samples.tokens += 1

    try:
        watched = psutil.Process(process.pid)
        before = sum(watched.cpu_times()[:2])
        await _callers(level, streams, call, Samples())
        return sum(watched.cpu_times()[:2]) - before
    finally:
        await channel.close()
        process.kill()
        await asyncio.to_thread(process.wait)


_REQUEST = admission_pb2.GenerateRequest(
    spec=task_pb2.JobSpec(
        model="chat",
        generate=task_pb2.GenerateTask(
            tokens=task_pb2.TokenPrompt(ids=PROMPT),
            sampling=task_pb2.Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        ),
        contract=common_pb2.Contract(lane=common_pb2.LANE_PRIORITY),
    )
).SerializeToString()


def _lean(caller: LeanCaller, path: str, request: bytes) -> Call:
    """Calls without a client library; messages are parsed after the stream has ended."""

    async def call(samples: Samples) -> None:
        first = 0.0
        pieces: list[bytes] = []

        def on_message(message: bytes) -> None:
            nonlocal first
            if not first and message[0] == CHUNK_TAG:
                first = time.perf_counter()
            pieces.append(message)

        started = time.perf_counter()
        await caller.call(path, request, on_message)
        assert first, f"{path} ended without a token"
        _note(samples, started, first, pieces)

    return call


def _note(samples: Samples, started: float, first: float, pieces: Sequence[bytes]) -> None:
    samples.total_s.append(time.perf_counter() - started)
    samples.ttft_s.append(first - started)
    answer = [admission_pb2.GenerateResponse.FromString(piece) for piece in pieces]
    samples.tokens += sum(len(event.chunk.token_ids) for event in answer)


def _through(channel: grpc.aio.Channel) -> Call:
    """Calls through the Python gRPC client; bytes are parsed after the stream has ended."""
    generate = channel.unary_stream("/laneway.v1.AdmissionService/Generate")

    async def call(samples: Samples) -> None:
        started = time.perf_counter()
        first = 0.0
        pieces: list[bytes] = []
        async for piece in generate(_REQUEST):
            if not first and piece[0] == CHUNK_TAG:
                first = time.perf_counter()
            pieces.append(piece)
        _note(samples, started, first, pieces)

    return call


if __name__ == "__main__":
    main(measure, __doc__ or "")
