"""A real Triton server for a test: `tools/triton_test_server.py` builds it when it is not there, and starts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tools.triton_test_server import ServerFailed, TritonServer, build

__all__ = ["ServerFailed", "TritonServer", "triton_server"]

SMOLLM2 = "smollm2_llmapi"  # SmolLM2-135M, eight sequences at once, with the tensors of the LLM API's model


@asynccontextmanager
async def triton_server(*models: str, port: int = 0, **parameters: str) -> AsyncIterator[TritonServer]:
    """Serves models, `<echo or smollm2>_<llmapi, bls or ids>`, at `.address`; none named: SMOLLM2. It may be killed."""
    await asyncio.to_thread(build)  # minutes, where it was never built
    server = TritonServer(models or (SMOLLM2,), parameters, port=port)
    try:
        await asyncio.to_thread(server.wait_ready)
        yield server
    finally:
        await asyncio.to_thread(server.stop)
