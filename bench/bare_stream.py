"""The bare limit of the token path's door: a grpc.aio server that only writes, driven by one step loop as an engine is.

token_path.py runs `serve` in a process of its own; it prints its port.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio

PIECE = bytes(60)  # about what a chunk with one token takes
PACE_S = 0.010

_waiting: list[asyncio.Future[None]] = []


async def _steps() -> None:
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while True:
        due_s += PACE_S
        await asyncio.sleep(due_s - loop.time())
        woken = _waiting[:]
        _waiting.clear()
        for future in woken:
            if not future.done():
                future.set_result(None)


async def generate(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
    for _ in range(int(request)):
        step: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        _waiting.append(step)
        await step
        yield PIECE


async def serve() -> None:
    server = grpc.aio.server()
    methods = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await _steps()
