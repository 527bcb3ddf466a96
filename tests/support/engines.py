"""A worker's side of an engine, that notes everything and checks what the engine contract says of every step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from laneway.core.lanes import FinishReason
from laneway.workers.engines.protocol import Engine, EngineRequest, EngineStats, SequenceStep

WAIT_S = 50.0  # a bound for a stuck engine, generous for a busy machine


@dataclass
class Heard:
    """What was heard of one sequence."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    calls: int = 0
    cached_tokens: int = 0
    finish: FinishReason | None = None
    message: str = ""


class RecordingSink:
    """Gives the ids of requests itself, so that one engine can serve many tests."""

    def __init__(self) -> None:
        self.heard: dict[int, Heard] = {}
        self.calls = 0
        self.closed: list[str] = []
        self.stats = EngineStats()
        self._next_id = 1
        self._changed = asyncio.Event()

    def submit(self, engine: Engine, prompt_ids: Sequence[int], max_tokens: int, **changes: Any) -> int:
        request_id = self._next_id
        self._next_id += 1
        self.heard[request_id] = Heard()
        changes = {"temperature": 0.0, "ignore_eos": True} | changes
        engine.submit(EngineRequest(request_id, tuple(prompt_ids), max_tokens, **changes))
        return request_id

    def live(self) -> set[int]:
        return {i for i, heard in self.heard.items() if heard.finish is None}

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        self.calls += 1
        self.stats = stats
        assert len({s.id for s in steps}) == len(steps), "one delta for a sequence and step"
        for step in steps:
            heard = self.heard[step.id]
            assert heard.finish is None, "nothing follows a finish"
            heard.calls += 1
            heard.ids += step.token_ids
            if step.logprobs is not None:
                assert len(step.logprobs) == len(step.token_ids)
                heard.logprobs += step.logprobs
            heard.cached_tokens += step.cached_tokens
            heard.finish = step.finish
            heard.message = step.message
        assert stats.running + stats.queued == len(self.live()), "counts equal a recount of the live sequences"
        self._changed.set()

    def on_closed(self, reason: str) -> None:
        self.closed.append(reason)
        self._changed.set()

    async def until(self, condition: Any) -> None:
        """Waits for a condition of what was heard; looked at after every call of the engine."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def ended(self, request_ids: int | Iterable[int]) -> list[Heard]:
        """What was heard of sequences once all of them have ended."""
        wanted = [request_ids] if isinstance(request_ids, int) else list(request_ids)
        await self.until(lambda: all(self.heard[i].finish is not None for i in wanted))
        return [self.heard[i] for i in wanted]

    async def run(self, engine: Engine, prompt_ids: Sequence[int], max_tokens: int, **changes: Any) -> Heard:
        return (await self.ended(self.submit(engine, prompt_ids, max_tokens, **changes)))[0]
