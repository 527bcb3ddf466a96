"""An engine is ready once it has given a token: what loads and then cannot compute must not be sent work.

The sink of an engine while it is tried out, and from then on a pass-through to the worker's own. Knows nothing of jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from laneway.core.catalogue import Capabilities
from laneway.core.lanes import FinishReason
from laneway.workers.engines.protocol import (
    Engine,
    EngineGone,
    EngineRequest,
    EngineStartError,
    EngineStats,
    SequenceStep,
    StepSink,
)

REQUEST_ID = 0  # of the trial; those of jobs are above
PLAIN_TRIED_MAX = 4096  # ids that are looked at for one that is plain text


class FirstToken:
    """The StepSink that an engine is started with."""

    def __init__(self, sink: StepSink) -> None:
        self._sink = sink
        self._end: asyncio.Future[SequenceStep] | None = None  # while the trial runs
        self._tokens = 0
        self.passed = False

    async def of(self, engine: Engine, request: EngineRequest, timeout_s: float) -> None:
        """Returns when the engine has answered. Raises EngineStartError, with what came instead."""
        self._end = asyncio.get_running_loop().create_future()
        try:
            engine.submit(request)
            async with asyncio.timeout(timeout_s):
                end = await self._end
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

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        if self.passed:
            self._sink.on_step(steps, stats)
            return
        for step in steps:
            if step.id == REQUEST_ID and self._end is not None and not self._end.done():
                self._tokens += len(step.token_ids)
                if step.finish is not None:
                    self._end.set_result(step)

    def on_closed(self, reason: str) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_exception(EngineStartError(f"the engine loaded, and died on its first request: {reason}"))
        else:
            self._sink.on_closed(reason)


def trial_request(can: Capabilities, token_bytes: Callable[[int], bytes], vocabulary_size: int) -> EngineRequest:
    """One token after a short prompt of plain text, which an engine that is given text can be given as well."""
    ids = range(min(vocabulary_size, PLAIN_TRIED_MAX))
    plain = next((token_id for token_id in ids if token_bytes(token_id).isalpha()), 0)
    return EngineRequest(REQUEST_ID, (plain, plain), 1, temperature=0.0, ignore_eos=can.ignore_eos)
