"""What a case works with: one started engine at a time, and what was heard of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from laneway.core.catalogue import Capabilities
from laneway.core.lanes import FinishReason
from laneway.core.prompt import ChatTurn
from laneway.workers.conformance.case import Broken, expect
from laneway.workers.conformance.listener import Breach, Heard, Listener
from laneway.workers.conformance.subject import Subject
from laneway.workers.engines.protocol import Engine, EngineCapacity, EngineRequest, EngineStats

QUESTIONS = (
    "Why is the sky blue?",
    "Name three primes.",
    "Write one line of Python that prints 7.",
    "What is the capital of France?",
    "Tell me a very short story about a road.",
    "List the colours of a traffic light.",
    "What is 12 times 12?",
    "Say good morning in Spanish.",
)
SETTLE_S = 0.5
LASTING_TOKENS = 1500  # of a run that is to be stopped long before its end


@dataclass(slots=True)
class _Running:
    """A started engine and its listener."""

    engine: Engine
    listener: Listener
    capacity: EngineCapacity


class Rig:
    """Numbers the requests, so that one engine can serve many cases. Owns the engine between `restart` and `close`."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.breaches: list[Breach] = []
        self._running: _Running | None = None
        self._next_id = count(1)
        self._next_prompt = count(1)
        self._plain_ids = sorted(set(subject.tokenizer.encode(" ".join(QUESTIONS))))

    async def restart(self) -> None:
        """Another engine in place of the present one. Raises EngineStartError."""
        await self.close()
        engine, listener = self.subject.make(), Listener(self.breaches, own_ids=self.can.token_ids_out)
        try:
            capacity = await engine.start(listener)
        except BaseException:
            await engine.close()
            raise
        self._running = _Running(engine, listener, capacity)

    async def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await running.engine.close()

    @property
    def engine(self) -> Engine:
        return self._started.engine

    @property
    def listener(self) -> Listener:
        return self._started.listener

    @property
    def capacity(self) -> EngineCapacity:
        return self._started.capacity

    @property
    def can(self) -> Capabilities:
        return self.subject.can

    @property
    def started(self) -> bool:
        """Whether there is an engine that has not said its end."""
        return self._running is not None and self._running.listener.closed is None

    @property
    def _started(self) -> _Running:
        assert self._running is not None
        return self._running

    # --- prompts -------------------------------------------------------------------------------------

    def prompt(self, question: str) -> list[int]:
        return self.subject.tokenizer.encode_chat([ChatTurn("user", question)])

    def fresh_prompt(self, tokens: int) -> list[int]:
        """Plain ids that no earlier prompt began with."""
        ids, number = self._plain_ids, next(self._next_prompt)
        head = [ids[number % len(ids)], ids[number // len(ids) % len(ids)]]
        return [*head, *(ids[(n * n + number) % len(ids)] for n in range(tokens - 2))][:tokens]

    def lasting(self, prompt_ids: Sequence[int], sequences: int = 1, tokens: int = LASTING_TOKENS) -> int:
        """`tokens`, or what fits where so many sequences run at once."""
        room = min(self.capacity.context_length, self.capacity.kv_tokens // sequences) - len(prompt_ids)
        return max(1, min(tokens, room))

    # --- requests ------------------------------------------------------------------------------------

    def submit(self, prompt_ids: Sequence[int], max_tokens: int, **changes: Any) -> int:
        """Greedy, and to its full length where the engine can be asked for that."""
        fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": self.can.ignore_eos, **changes}
        request = EngineRequest(next(self._next_id), tuple(prompt_ids), max_tokens, **fields)
        self.listener.expect(request)
        self.engine.submit(request)
        return request.id

    async def run(self, prompt_ids: Sequence[int], max_tokens: int, **changes: Any) -> Heard:
        (heard,) = await self.ended([self.submit(prompt_ids, max_tokens, **changes)])
        return heard

    async def ended(self, request_ids: Iterable[int]) -> list[Heard]:
        """What was heard of sequences once all of them have ended."""
        wanted = [self.listener.heard[i] for i in request_ids]
        await self.until(lambda: all(heard.finish is not None for heard in wanted), "for sequences to end")
        return wanted

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for something of what is heard. Broken where the engine ends, or says nothing more."""
        listener = self.listener
        while not condition():
            if listener.closed is not None:
                raise Broken(f"the engine ended ({listener.closed}); the case waited {what}")
            listener.changed.clear()
            try:
                async with asyncio.timeout(self.subject.silence_s):
                    await listener.changed.wait()
            except TimeoutError:
                raise Broken(f"nothing was heard for {self.subject.silence_s:g} s; the case waited {what}") from None

    async def settle(self, condition: Callable[[], bool]) -> None:
        """Waits for what an engine may tell of a moment after the ids it belongs to. It is for the case to judge."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while not condition():
                    self.listener.changed.clear()
                    await self.listener.changed.wait()

    async def stop(self, request_ids: Iterable[int]) -> list[Heard]:
        """Aborts sequences; what was heard of them once they have ended."""
        wanted = list(request_ids)
        for request_id in wanted:
            self.engine.abort(request_id)
        return await self.ended(wanted)

    def ids(self, request_id: int) -> list[int]:
        """The ids heard so far."""
        return self.listener.heard[request_id].ids

    # --- what is said of them ------------------------------------------------------------------------

    def same(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Whether two greedy answers to one prompt are the same, as far as this engine's can be."""
        return list(one) == list(other) if self.can.exact else bool(one) == bool(other)

    def expect_cancelled(self, heard: Heard) -> None:
        by_itself = heard.finish is FinishReason.STOP and not self.can.ignore_eos
        expect(heard.finish is FinishReason.CANCELLED or by_itself, f"an aborted run ended with {heard.finish}")

    async def expect_rest(self) -> None:
        """Nothing is live and nothing is held."""
        expect(await self.engine.drain(self.subject.silence_s), "drain found a live sequence after all had ended")
        held = held_of(self.engine.stats())
        expect(not held, f"with no live sequence the statistics say {held}")


def held_of(stats: EngineStats) -> str:
    """What an engine says that it still holds; empty if nothing."""
    counts = {
        name: getattr(stats, name) for name in ("running", "queued", "prefilling_tokens", "kv_tokens_used", "decoding")
    }
    return ", ".join(f"{name} {number}" for name, number in counts.items() if number)
