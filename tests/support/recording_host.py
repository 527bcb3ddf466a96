"""The engine's process with a witness in it: writes down what reaches the engine, and what each step gave, in order.

Runs in place of laneway.workers.engines.host_main (see tests/support/region.py). The worker and everything else are as
they always are; only here can be seen at which step an abort arrived, and what the engine saw of a prompt.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import IO

import msgspec

from laneway.workers.engines import host_main, registry
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStats, SequenceStep, StepEngine

RECORD_FILE = "LANEWAY_TEST_ENGINE_RECORD"


class Added(msgspec.Struct, frozen=True, tag="added"):
    """A sequence reached the engine after so many steps."""

    id: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    after_step: int


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """An abort reached the engine after so many steps."""

    id: int
    after_step: int


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One step, counted from 1."""

    number: int
    tokens: dict[int, int]  # made, by sequence
    finished: dict[int, str]  # why, by sequence
    running: int
    queued: int
    prefilling_tokens: int


Entry = Added | Aborted | Step


class Witness:
    """A StepEngine around another."""

    def __init__(self, engine: StepEngine, record: IO[bytes]) -> None:
        self._engine = engine
        self._record = record
        self._steps = 0

    def _write(self, entry: Entry) -> None:
        self._record.write(msgspec.json.encode(entry) + b"\n")

    def load(self) -> EngineCapacity:
        return self._engine.load()

    def add(self, request: EngineRequest) -> None:
        self._write(Added(request.id, request.prompt_ids, request.max_tokens, self._steps))
        self._engine.add(request)

    def abort(self, request_id: int) -> None:
        self._write(Aborted(request_id, self._steps))
        self._engine.abort(request_id)

    def busy(self) -> bool:
        return self._engine.busy()

    def step(self) -> tuple[list[SequenceStep], EngineStats]:
        steps, stats = self._engine.step()
        self._steps += 1
        self._write(
            Step(
                self._steps,
                {step.id: len(step.token_ids) for step in steps if step.token_ids},
                {step.id: step.finish.value for step in steps if step.finish is not None},
                stats.running,
                stats.queued,
                stats.prefilling_tokens,
            )
        )
        return steps, stats

    def close(self) -> None:
        self._engine.close()


def main() -> None:
    made = registry.make_step_engine
    with Path(os.environ[RECORD_FILE]).open("ab", buffering=0) as record:
        setattr(host_main, "make_step_engine", lambda spec: Witness(made(spec), record))  # noqa: B010 - not exported
        host_main.main()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the host does
    main()
