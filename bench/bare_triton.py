"""The bare limit of an engine behind Triton: `tritonclient.grpc.aio` and nothing else, in a process of its own.

engine_overhead.py runs `serve` in a process of its own. It prints `ready`, and for each line `SEED STREAMS TOKENS` on
stdin asks so many prompts, `at_once` at any time; then it prints how much came, ids or characters by the model's
dialect, and in how many seconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from overhead_prompts import prompts
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import np_to_triton_dtype

from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.protocol import EngineRequest
from laneway.workers.engines.triton_wire import IDS, Served, Tensors, request_tensors, served_of


async def _one(client: InferenceServerClient, model: str, served: Served, tensors: Tensors) -> int:
    inputs = []
    for name, value in tensors.items():
        tensor = InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": inputs}

    made = 0
    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        if served.dialect == IDS:
            made += int(result.as_numpy("sequence_length").sum())
        else:  # the whole answer so far
            made = len(result.as_numpy("text_output").ravel()[0].decode())
    return made


async def _all(client: InferenceServerClient, model: str, served: Served, asked: list[Tensors], at_once: int) -> int:
    waiting = asked[::-1]
    came: list[int] = []

    async def one_after_another() -> None:
        while waiting:
            came.append(await _one(client, model, served, waiting.pop()))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(one_after_another())
    return sum(came)


def serve(address: str, model: str, at_once: int) -> None:
    uvloop.run(_serve(address, model, at_once))


async def _serve(address: str, model: str, at_once: int) -> None:
    client, tokenizer = InferenceServerClient(address), load_tokenizer("smollm2")
    config = (await client.get_model_config(model)).config
    served = served_of(
        [each.name for each in config.input], [each.name for each in config.output], {},
        max_batch_size=config.max_batch_size,
    )  # fmt: skip

    def asked(seed: int, streams: int, tokens: int) -> list[Tensors]:
        requests = (
            EngineRequest(1, tuple(tokenizer.encode(text)), tokens, temperature=0.0, ignore_eos=served.dialect == IDS)
            for text in prompts(seed, streams)
        )
        return [request_tensors(request, served, tokenizer) for request in requests]

    await _all(client, model, served, asked(0, at_once, 2), at_once)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        seed, streams, tokens = (int(text) for text in line.split())
        tensors = asked(seed, streams, tokens)
        began_s = time.perf_counter()
        made = await _all(client, model, served, tensors, at_once)
        print(made, time.perf_counter() - began_s, flush=True)
