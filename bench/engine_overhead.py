"""What a real engine gives through Laneway (door, lanes, worker), as a share of what it gives bare, in the same run.

Eight streams at once, each of 96 tokens after a prompt of about 40, the next as soon as one ends; rounds of the bare
engine and of Laneway alternate, with the same prompts. Callers speak HTTP/2 by hand (lean_caller.py), as in
token_path.py: a Python client would take what the engine computes on.

- `openvino`: against OpenVINO GenAI's own loop (bare_openvino), in which the next prompt is in the very next step.
- `triton`: SmolLM2 behind a real Triton server on the CPU, against `tritonclient.grpc.aio` alone (bare_triton). Both
  ask the same server: with token ids, where tokens are counted, and with texts, where characters are (an answer may end
  by itself there).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lean_caller import LeanCaller
from overhead_prompts import prompts
from report import Bar, Report, main

from laneway.cli.stack import LocalStack, StackOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.v1 import admission_pb2, common_pb2, task_pb2

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the tests' own server

from tests.support.triton_server import triton_server

AT_ONCE, STREAMS, TOKENS = 8, 48, 96
ROUNDS = 5
KV_TOKENS = 8_192
SHARE_MIN = {"openvino": 0.95, "triton ids": 0.92, "triton llmapi": 0.92}
GENERATE = "/laneway.v1.AdmissionService/Generate"
LIMIT_S = 1200.0


@dataclass
class Arm:
    """Who answers: `ask` with seed, streams and tokens gives how much came, and in how many seconds."""

    ask: Callable[[int, int, int], Awaitable[tuple[int, float]]]
    rates: list[float] = field(default_factory=list)  # of each round, a second
    came: int = 0

    async def round(self, seed: int, streams: int, tokens: int) -> None:
        came, took_s = await self.ask(seed, streams, tokens)
        self.came += came
        self.rates.append(came / took_s)


async def measure(smoke: bool) -> Report:
    rounds, streams, tokens = (1, AT_ONCE, 8) if smoke else (ROUNDS, STREAMS, TOKENS)
    figures: dict[str, float] = {}
    counts: dict[str, tuple[int, int]] = {}
    rows, bars = [], []
    for engine, pair in PAIRS.items():
        async with pair() as (bare, ours):
            for seed in range(1, rounds + 1):
                for arm in (bare, ours) if seed % 2 else (ours, bare):
                    await arm.round(seed, streams, tokens)
        shares = [mine / limit for mine, limit in zip(ours.rates, bare.rates, strict=True)]
        share = statistics.median(shares)
        figures |= {f"{engine} share": share}
        figures |= {f"{engine} {name} a second": statistics.median(arm.rates) for name, arm in _named(bare, ours)}
        for name, arm in _named(bare, ours):
            if engine != "triton llmapi":
                counts[f"{engine} {name} tokens"] = (arm.came, rounds * streams * tokens)
        rates = [f"{figures[f'{engine} {name} a second']:.0f}" for name in ("bare", "laneway")]
        rows.append([engine, *rates, f"{share:.3f}", " ".join(f"{each:.3f}" for each in shares)])
        bars.append(Bar(f"{engine}: share of the bare engine", share, SHARE_MIN[engine], "x", at_least=True))
    columns = ["engine", "bare, a second", "through Laneway", "share", "each round"]
    notes = ["Tokens a second; characters for triton llmapi."]
    return Report(f"Engine overhead: {AT_ONCE} streams", columns, rows, figures, bars, counts, notes)


def _named(bare: Arm, ours: Arm) -> list[tuple[str, Arm]]:
    return [("bare", bare), ("laneway", ours)]


@asynccontextmanager
async def _openvino() -> AsyncIterator[tuple[Arm, Arm]]:
    async with (
        _bare("bare_openvino", AT_ONCE, KV_TOKENS) as bare,
        _laneway({"engine": "openvino"}, ids=True) as ours,
    ):
        yield bare, ours


@asynccontextmanager
async def _triton(dialect: str) -> AsyncIterator[tuple[Arm, Arm]]:
    model = f"smollm2_{dialect}"
    async with triton_server(model, slots=str(AT_ONCE), kv_tokens=str(KV_TOKENS)) as server:
        options = {"address": server.address, "served_model": model, "dialect": dialect}
        pool = {"engine": "triton", "tokenizer": "smollm2", "engine_options": options}
        async with (
            _bare("bare_triton", server.address, model, AT_ONCE) as bare,
            _laneway(pool, ids=dialect == "ids") as ours,
        ):
            yield bare, ours


PAIRS = {
    "openvino": _openvino,
    "triton ids": lambda: _triton("ids"),
    "triton llmapi": lambda: _triton("llmapi"),
}


@asynccontextmanager
async def _bare(module: str, *arguments: object) -> AsyncIterator[Arm]:
    """The bare engine in a process of its own, which is told what to do line by line."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-c", f"import {module}; {module}.serve(*{arguments!r})"]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=Path(__file__).parent)
    to, of = process.stdin, process.stdout
    assert to is not None
    assert of is not None

    async def ask(seed: int, streams: int, tokens: int) -> tuple[int, float]:
        to.write(f"{seed} {streams} {tokens}\n".encode())
        came, took_s = (await of.readline()).split()
        return int(came), float(took_s)

    try:
        assert await of.readline() == b"ready\n", f"{module} did not start"
        yield Arm(ask)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def _laneway(pool: Mapping[str, object], *, ids: bool) -> AsyncIterator[Arm]:
    """`ids`: tokens are counted, and end tokens ignored; else characters."""
    model = {
        "name": "chat", "slots": AT_ONCE, "workers": 1, "queue_length": 256, "context_length": 1024,
        "kv_tokens": KV_TOKENS, **pool,
    }  # fmt: skip
    options = StackOptions(settings={"models": [model], "process": {"log_level": "warning"}})
    tokenizer = load_tokenizer("smollm2")
    async with LocalStack(options) as stack:
        caller = await LeanCaller.connect(stack.addresses.admission)

        async def ask(seed: int, streams: int, tokens: int) -> tuple[int, float]:
            asked = [_request(tokenizer.encode(text), tokens, ignore_eos=ids) for text in prompts(seed, streams)]
            began_s = time.perf_counter()
            pieces = await _answers(caller, asked)
            took_s = time.perf_counter() - began_s
            chunks = [admission_pb2.GenerateResponse.FromString(piece).chunk for piece in pieces]
            return sum(len(chunk.token_ids) if ids else len(chunk.text) for chunk in chunks), took_s

        try:
            await ask(0, AT_ONCE, 2)
            yield Arm(ask)
        finally:
            caller.close()


async def _answers(caller: LeanCaller, asked: Sequence[bytes]) -> list[bytes]:
    """All messages of all answers; AT_ONCE are asked for at any time."""
    waiting = list(asked)[::-1]
    pieces: list[bytes] = []

    async def one_after_another() -> None:
        while waiting:
            await caller.call(GENERATE, waiting.pop(), pieces.append)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one_after_another())
    return pieces


def _request(prompt: Sequence[int], tokens: int, *, ignore_eos: bool) -> bytes:
    sampling = task_pb2.Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=ignore_eos)
    task = task_pb2.GenerateTask(tokens=task_pb2.TokenPrompt(ids=prompt), sampling=sampling)
    contract = common_pb2.Contract(lane=common_pb2.LANE_PRIORITY)
    spec = task_pb2.JobSpec(model="chat", generate=task, contract=contract)
    return admission_pb2.GenerateRequest(spec=spec).SerializeToString()


if __name__ == "__main__":
    main(measure, __doc__ or "", limit_s=LIMIT_S)
