"""An engine is ready once it has given a token: what loads and then cannot compute must not be sent work.

The sink of an engine while it is tried out, and from then on a pass-through to the worker's own. Knows nothing of jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from laneway.core.catalogue import Capabilities
from laneway.core.errors import InvalidRequest
from laneway.core.lanes import FinishReason
from laneway.core.prompt import ChatTurn
from laneway.runtime.tokenizer import Tokenizer
from laneway.workers.engines.protocol import (
    Engine,
    EngineGone,
    EngineRequest,
    EngineStartError,
    EngineStats,
    SequenceStep,
    StepSink,
)

REQUEST_ID = 2**48  # of the first try, and one more for each next; those of jobs are below
AGAIN_S = 1.0  # until a request that a server lost alone is tried again


class FirstToken:
    """The StepSink that an engine is started with."""

    def __init__(self, sink: StepSink) -> None:
        self._sink = sink
        self._trying = REQUEST_ID - 1
        self._end: asyncio.Future[SequenceStep] | None = None  # while the trial runs
        self._tokens = 0
        self.passed = False

    async def of(self, engine: Engine, request: EngineRequest, timeout_s: float) -> None:
        """Returns when the engine has answered, however long a server is too busy for it; an answer may take
        `timeout_s`. Raises EngineStartError, with what came instead."""
        try:
            end = await self._try(engine, request, timeout_s)
            while end.finish is FinishReason.CANCELLED:  # by a server that was busy, and goes on
                await asyncio.sleep(AGAIN_S)
                end = await self._try(engine, request, timeout_s)
        except TimeoutError:
            raise EngineStartError(f"the engine loaded, and gave no token within {timeout_s:g} s") from None
        except EngineGone:
            raise EngineStartError("the engine loaded, and was gone before its first token") from None
        if end.finish not in (FinishReason.LENGTH, FinishReason.STOP):
            said = end.message or f"it ended as {end.finish}"
            raise EngineStartError(f"the engine loaded, and failed on its first request: {said}")
        if not self._tokens and request.ignore_eos:
            raise EngineStartError("the engine loaded, and ended its first answer without a token")
        self.passed = True

    async def _try(self, engine: Engine, request: EngineRequest, timeout_s: float) -> SequenceStep:
        """The last step of an answer. Raises EngineStartError, EngineGone or TimeoutError."""
        self._trying, self._tokens = self._trying + 1, 0
        self._end = asyncio.get_running_loop().create_future()
        engine.submit(replace(request, id=self._trying))
        async with asyncio.timeout(timeout_s):
            return await self._end

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        if self.passed:
            self._sink.on_step(steps, stats)
            return
        for step in steps:
            if step.id == self._trying and self._end is not None and not self._end.done():
                self._tokens += len(step.token_ids)
                if step.finish is not None:
                    self._end.set_result(step)

    def on_closed(self, reason: str) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_exception(EngineStartError(f"the engine loaded, and died on its first request: {reason}"))
        else:
            self._sink.on_closed(reason)


def trial_request(can: Capabilities, prompt_ids: tuple[int, ...]) -> EngineRequest:
    """One token after a short prompt."""
    return EngineRequest(REQUEST_ID, prompt_ids, 1, temperature=0.0, ignore_eos=can.ignore_eos)


def trial_prompt(tokenizer: Tokenizer) -> tuple[int, ...]:
    """A chat, since there are engines that are given nothing else; plain text of a model that has no template."""
    try:
        return tuple(tokenizer.encode_chat([ChatTurn("user", "Hi")]))
    except InvalidRequest:
        return tuple(tokenizer.encode("Hi"))
