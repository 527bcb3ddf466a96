"""What a simulated fleet does over time, sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from laneway.core.fleet import StepTimes
from laneway.core.lanes import LANES
from laneway.simulator.outcomes import Usage
from laneway.simulator.trace import Floats

if TYPE_CHECKING:
    from laneway.simulator.engine import Engine
    from laneway.simulator.world import Worker

_Tokens = TypeVar("_Tokens", float, Floats)
REFERENCE_BATCH = 32  # sequences that share a decode step in what a token is worth


def device_s(prompt_tokens: _Tokens, output_tokens: _Tokens, times: StepTimes) -> _Tokens:
    """Of one accelerator, what a request is worth: its prompt in full chunks, and of each decode step its share.

    prefill = prompt x (gamma + base / chunk);  decode = output x (base + beta B + kappa B c) / B at a batch B of 32,
    with the context c halfway through its answer.
    """
    chunk = times.chunk_tokens or 1
    context = prompt_tokens + output_tokens / 2.0
    step_s = times.base_s + REFERENCE_BATCH * (times.sequence_s + times.context_token_s * context)
    return prompt_tokens * (times.prefill_token_s + times.base_s / chunk) + output_tokens * step_s / REFERENCE_BATCH


class Meter:
    """Collects rows of `every_s` seconds each."""

    def __init__(self, every_s: float, times: StepTimes) -> None:
        self.due_s = every_s
        self._every_s = every_s
        self._times = times
        self._rows: list[tuple[float, float, list[float], list[float], list[int], float]] = []
        self._tokens = [0.0] * len(LANES)
        self._device_s = [0.0] * len(LANES)
        self._busy_s: dict[int, float] = {}  # of each engine at the last row
        self._gone_s = 0.0
        self._paid_s = 0.0
        self._paid_workers = 0
        self._paid_from_s = 0.0
        self._row_from_s = 0.0

    def done(self, lane: int, prompt_tokens: int, output_tokens: int) -> None:
        self._tokens[lane] += output_tokens
        self._device_s[lane] += device_s(prompt_tokens, output_tokens, self._times)

    def paid(self, now_s: float, workers: int) -> None:
        """So many workers are paid for from now on."""
        self._paid_s += (now_s - self._paid_from_s) * self._paid_workers
        self._paid_from_s, self._paid_workers = now_s, workers

    def gone(self, engine: Engine) -> None:
        self._gone_s += engine.busy_s - self._busy_s.pop(id(engine), 0.0)

    def sample(self, now_s: float, workers: Sequence[Worker], booting: int, waiting: Sequence[int]) -> None:
        span_s = now_s - self._row_from_s
        self.due_s = now_s + self._every_s
        if span_s <= 0.0:
            return
        self.paid(now_s, len(workers) + booting)
        busy_s = self._gone_s
        used = held = 0
        for worker in workers:
            engine = worker.engine
            busy_s += engine.busy_s - self._busy_s.get(id(engine), 0.0)
            self._busy_s[id(engine)] = engine.busy_s
            used += engine.kv_tokens_used
            held += engine.kv_tokens
        paid = self._paid_s / span_s
        busy = min(1.0, busy_s / (span_s * len(workers))) if workers else 0.0
        self._rows.append((paid, busy, self._tokens, self._device_s, list(waiting), used / held if held else 0.0))
        self._tokens, self._device_s = [0.0] * len(LANES), [0.0] * len(LANES)
        self._gone_s = self._paid_s = 0.0
        self._row_from_s = now_s

    def usage(self) -> Usage:
        def column(at: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            return np.array([row[at] for row in self._rows], dtype=np.float64)

        def table(at: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
            return np.array([row[at] for row in self._rows], dtype=np.float64).reshape(-1, len(LANES))

        return Usage(self._every_s, column(0), column(1), table(2), table(3), table(4), column(5))
