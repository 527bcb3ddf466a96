"""The conformance kit on the adapter `triton` in front of a real Triton server with the small real model.

As a program it prints the report that `tools/engine_table.py` makes a column of:

    python -m tests.support.triton_kit llmapi > triton-llmapi.json
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
import structlog

from laneway.core.catalogue import Pool
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.conformance.kit import Report, run_kit
from laneway.workers.conformance.subject import Subject
from laneway.workers.engines.protocol import Engine
from laneway.workers.engines.registry import make_engine
from tests.support.triton_server import TritonServer

SLOTS = 8
ABORT_CALLS = 8  # steps go on while a stop request is on its way


def triton_pool(model: str, options: EngineOptions, *, exact: bool = False) -> Pool:
    """What `model` of a test server can serve."""
    tokenizer = "bytes" if model.startswith("echo") else "smollm2"
    return Pool(
        name="under-test",
        model="chat",
        tier="small",
        engine="triton",
        context_length=2048,
        vocabulary_size=load_tokenizer(tokenizer).vocabulary_size,
        slots=SLOTS,
        workers=1,
        kv_tokens=16_384,
        tokenizer=tokenizer,
        capabilities=capabilities_of("triton", options, exact=exact),
    )


class Servers:
    """A server for each engine that the kit asks for, and the end of all."""

    def __init__(self, dialect: str) -> None:
        self._model = f"smollm2_{dialect}"
        self._dialect = dialect
        self._exact = dialect == "ids"  # in text, what is resumed may be cut into other tokens
        self._running: dict[int, TritonServer] = {}

    def subject(self) -> Subject:
        pool = triton_pool(self._model, EngineOptions(dialect=self._dialect), exact=self._exact)  # type: ignore[arg-type] # one of its words
        return Subject(self.make, load_tokenizer(pool.tokenizer), pool.capabilities, self.kill, abort_calls=ABORT_CALLS)

    def make(self) -> Engine:
        """Blocks until the server is ready; nothing else runs meanwhile."""
        server = TritonServer([self._model], {"slots": str(SLOTS), "exact": str(self._exact).lower()})
        server.wait_ready()
        options = EngineOptions(address=server.address, served_model=self._model, dialect=self._dialect)  # type: ignore[arg-type] # one of its words
        engine = make_engine(triton_pool(self._model, options, exact=self._exact), options)
        self._running[id(engine)] = server
        return engine

    def kill(self, engine: Engine) -> None:
        self._running[id(engine)].kill()

    def close(self) -> None:
        for server in self._running.values():
            server.stop()


async def kit_report(dialect: str) -> Report:
    servers = Servers(dialect)
    try:
        return await run_kit(servers.subject(), tell=lambda case: print(case, file=sys.stderr))
    finally:
        servers.close()


def main() -> int:
    dialect = sys.argv[1]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    report = asyncio.run(kit_report(dialect))
    print(msgspec.json.encode({"engine": f"triton ({dialect})", "results": report.results}).decode())
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
