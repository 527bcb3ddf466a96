"""Tokens a second of a real engine behind Laneway (worker, lanes, door), against the bare engine in the same run.

Eight streams at once, each of 96 tokens after a prompt of 32, the next as soon as one ends; rounds of the bare engine
and of Laneway alternate, with the same prompts. Callers speak HTTP/2 by hand (lean_caller.py), as in token_path.py: a
Python client would take what the engine computes on.

- `openvino`: against OpenVINO GenAI's own loop (bare_openvino.py), in which the next prompt is in the very next step.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bare_openvino import prompts
from lean_caller import LeanCaller
from report import Bar, Report, main

from laneway.cli.stack import LocalStack, StackOptions
from laneway.v1 import admission_pb2, common_pb2, task_pb2

STREAMS_AT_ONCE, STREAMS, PROMPT_TOKENS, TOKENS = 8, 48, 32, 96
ROUNDS = 5
KV_TOKENS = 8_192
SHARE_MIN = {"openvino": 0.95}
MODEL: dict[str, object] = {
    "name": "chat", "engine": "openvino", "slots": STREAMS_AT_ONCE, "workers": 1, "queue_length": 256,
    "context_length": 1024, "kv_tokens": KV_TOKENS,
}  # fmt: skip
GENERATE = "/laneway.v1.AdmissionService/Generate"

Answers = Callable[[int, int, int], Awaitable[tuple[int, float]]]  # seed, streams, tokens: tokens made, seconds


@dataclass
class Arm:
    answers: Answers
    rates: list[float] = field(default_factory=list)  # tokens/s of each round
    made: int = 0

    async def round(self, seed: int, streams: int, tokens: int) -> None:
        made, took_s = await self.answers(seed, streams, tokens)
        self.made += made
        self.rates.append(made / took_s)


async def measure(smoke: bool) -> Report:
    rounds, streams, tokens = (1, STREAMS_AT_ONCE, 8) if smoke else (ROUNDS, STREAMS, TOKENS)
    figures: dict[str, float] = {}
    counts: dict[str, tuple[int, int]] = {}
    rows, bars = [], []
    for engine, pair in (("openvino", _openvino),):
        async with pair() as (bare, ours):
            for seed in range(1, rounds + 1):
                for arm in (bare, ours) if seed % 2 else (ours, bare):
                    await arm.round(seed, streams, tokens)
        shares = [mine / limit for mine, limit in zip(ours.rates, bare.rates, strict=True)]
        figures[f"{engine}_bare_tokens_per_s"] = statistics.median(bare.rates)
        figures[f"{engine}_laneway_tokens_per_s"] = statistics.median(ours.rates)
        figures[f"{engine}_share"] = statistics.median(shares)
        for name, arm in (("bare", bare), ("laneway", ours)):
            counts[f"{engine} {name} tokens"] = (arm.made, rounds * streams * tokens)
        shown = " ".join(f"{share:.3f}" for share in shares)
        rates = [figures[f"{engine}_{arm}_tokens_per_s"] for arm in ("bare", "laneway")]
        rows.append([engine, *(f"{rate:.0f}" for rate in rates), f"{figures[f'{engine}_share']:.3f}", shown])
        bars.append(
            Bar(
                f"{engine}: share of the bare engine", figures[f"{engine}_share"], SHARE_MIN[engine], "x", at_least=True
            )
        )
    columns = ["engine", "bare tokens/s", "through Laneway", "share", "each round"]
    return Report(f"Engine overhead: {STREAMS_AT_ONCE} streams", columns, rows, figures, bars, counts)


@asynccontextmanager
async def _openvino() -> AsyncIterator[tuple[Arm, Arm]]:
    command = [sys.executable, "bare_openvino.py", str(STREAMS_AT_ONCE), str(KV_TOKENS)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parent
    )
    assert process.stdin is not None
    assert process.stdout is not None
    to, of = process.stdin, process.stdout

    async def bare(seed: int, streams: int, tokens: int) -> tuple[int, float]:
        to.write(f"{seed} {streams} {PROMPT_TOKENS} {tokens}\n".encode())
        made, took_s = (await of.readline()).split()
        return int(made), float(took_s)

    try:
        assert await of.readline() == b"ready\n"
        async with _laneway(MODEL) as ours:
            yield Arm(bare), ours
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def _laneway(model: dict[str, object]) -> AsyncIterator[Arm]:
    options = StackOptions(settings={"models": [model], "process": {"log_level": "warning"}})
    async with LocalStack(options) as stack:
        caller = await LeanCaller.connect(stack.addresses.admission)

        async def ours(seed: int, streams: int, tokens: int) -> tuple[int, float]:
            asked = [_request(prompt, tokens) for prompt in prompts(seed, streams, PROMPT_TOKENS)]
            began_s = time.perf_counter()
            pieces = await _answers(caller, asked)
            took_s = time.perf_counter() - began_s
            events = (admission_pb2.GenerateResponse.FromString(piece) for piece in pieces)
            return sum(len(event.chunk.token_ids) for event in events), took_s

        await ours(0, STREAMS_AT_ONCE, 2)
        try:
            yield Arm(ours)
        finally:
            caller.close()


async def _answers(caller: LeanCaller, asked: Sequence[bytes]) -> list[bytes]:
    """All messages of all answers; STREAMS_AT_ONCE are asked for at any time."""
    waiting = list(asked)[::-1]
    pieces: list[bytes] = []

    async def one_after_another() -> None:
        while waiting:
            await caller.call(GENERATE, waiting.pop(), pieces.append)

    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS_AT_ONCE):
            group.create_task(one_after_another())
    return pieces


def _request(prompt: Sequence[int], tokens: int) -> bytes:
    sampling = task_pb2.Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    task = task_pb2.GenerateTask(tokens=task_pb2.TokenPrompt(ids=prompt), sampling=sampling)
    contract = common_pb2.Contract(lane=common_pb2.LANE_PRIORITY)
    spec = task_pb2.JobSpec(model="chat", generate=task, contract=contract)
    return admission_pb2.GenerateRequest(spec=spec).SerializeToString()


if __name__ == "__main__":
    main(measure, __doc__ or "")
