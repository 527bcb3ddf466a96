"""One request as its caller makes it: asked, asked again when refused, listened to, given up when patience ends.

Priority requests are streamed. The others are submitted, and followed in a step of its own, so that a caller who waits
for hours holds a call meanwhile only where the player has one to spare.

A caller's patience and its deadline count from the time at which it was to ask, also where it asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Unpack

from laneway.cli.replaying.notes import Notes
from laneway.client.values import Cancelled, Chunk, Finished, Job, Submitted
from laneway.core.errors import (
    Code,
    DeadlineExceeded,
    LaneSaturated,
    LanewayError,
    OutcomeUnknown,
    Unavailable,
)
from laneway.core.lanes import LANES, JobState
from laneway.simulator.outcomes import End
from laneway.simulator.trace import NO_SESSION, Trace

if TYPE_CHECKING:
    from laneway.client import RequestFields

RETRIES = 2  # of one request that is refused
SUBMISSIONS = 32  # under way at a time: thousands of batch jobs at one moment are no reason to let a chat wait
BACKOFF_S = 1.0  # of a refusal that names no time; doubled each time, and spread from half to one and a half
LABEL = "laneway-replay"
# What "no such promise" is on the wire, where leaving a target out means the lane's default.
NO_TTFT_S, NO_TPOT_S, NO_DEADLINE_S = 3600.0, 60.0, 7 * 86_400.0
ENDS = {JobState.SUCCEEDED: End.DONE, JobState.EXPIRED: End.EXPIRED, JobState.REFUSED: End.REFUSED}  # else FAILED


class Answer(AsyncIterable[Chunk], Protocol):
    @property
    def finished(self) -> Finished: ...


class Door(Protocol):
    """What of laneway.client.Client is used here."""

    def generate(
        self,
        *,
        idempotency_key: str | None = None,
        timeout_s: float | None = None,
        retry_s_max: float | None = None,
        **request: Unpack[RequestFields],
    ) -> AbstractAsyncContextManager[Answer]: ...

    def watch(self, job_id: str) -> AbstractAsyncContextManager[Answer]: ...

    async def submit(
        self,
        *,
        idempotency_key: str | None = None,
        timeout_s: float | None = None,
        retry_s_max: float | None = None,
        **request: Unpack[RequestFields],
    ) -> Submitted: ...

    async def get_job(self, job_id: str) -> Job: ...

    async def cancel(self, job_id: str) -> Cancelled: ...


@dataclass(frozen=True, slots=True)
class Manner:
    """What all requests of a replay have in common."""

    model: str
    run: str  # label of the jobs, and part of the sessions' names
    ignore_eos: bool  # where the pool can
    draw: Callable[[], float]  # uniform in [0, 1), for back-offs


@dataclass(frozen=True, slots=True)
class Pending:
    """A submitted job to be followed."""

    request: int
    job_id: str
    door: Door
    accepted_s: float


class _Gone(Exception):
    """The caller has heard enough."""


class Asking:
    """Makes the requests of one pass. `began_s`: the pass's begin on the loop's clock."""

    def __init__(self, trace: Trace, manner: Manner, notes: Notes, began_s: float) -> None:
        self._trace, self._manner, self._notes, self._began_s = trace, manner, notes, began_s
        self._submissions = asyncio.Semaphore(SUBMISSIONS)

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    async def stream(self, door: Door, request: int, text: str) -> None:
        """Asks and listens to the end, whatever that is."""
        self._notes.asks(request, self.now_s())
        while True:
            accepted = False
            try:
                async with (
                    self._patience(request) as patience,
                    door.generate(retry_s_max=0.0, **self._fields(request, text)) as answer,
                ):
                    accepted = True
                    last_s = await self._listen(request, answer, patience)
            except (TimeoutError, _Gone):
                return self._notes.ends(request, End.LEFT, self.now_s())
            except LanewayError as error:
                if not await self._asks_again(request, error, accepted=accepted):
                    return None
            else:
                usage = answer.finished.usage
                self._notes.usage(request, usage.prompt_tokens, usage.cached_tokens)
                self._notes.counts["resumed"] += answer.finished.attempt > 1
                return self._notes.ends(request, End.DONE, last_s)

    async def submit(self, door: Door, request: int, text: str) -> Pending | None:
        """The job to be followed; None where the request ended instead."""
        asked = False
        while True:
            try:
                async with self._patience(request), self._submissions:
                    if not asked:
                        self._notes.asks(request, self.now_s())
                        asked = True
                    submitted = await door.submit(retry_s_max=0.0, **self._fields(request, text))
                return Pending(request, submitted.job_id, door, self.now_s())
            except TimeoutError:
                self._notes.ends(request, End.LEFT, self.now_s())
                return None
            except LanewayError as error:
                if not await self._asks_again(request, error, accepted=False):
                    return None

    async def follow(self, pending: Pending) -> None:
        """A submitted job to its end. Its times are the services' own: nobody may have listened when it began."""
        failure: LanewayError | None = None
        try:
            async with self._patience(pending.request) as patience, pending.door.watch(pending.job_id) as answer:
                await self._listen(pending.request, answer, patience)
        except (TimeoutError, _Gone):
            with contextlib.suppress(LanewayError):
                await pending.door.cancel(pending.job_id)
            return self._notes.ends(pending.request, End.LEFT, self.now_s())
        except LanewayError as error:
            failure = error
        try:
            job = await pending.door.get_job(pending.job_id)
        except LanewayError as error:
            return self._ends_by(pending.request, failure or error, accepted=True)
        return self._collected(pending, job)

    def _collected(self, pending: Pending, job: Job) -> None:
        notes, timings = self._notes, job.timings
        ended_s = (
            pending.accepted_s + max(0.0, timings.ended_s - timings.created_s) if timings.ended_s else self.now_s()
        )
        if timings.first_token_s:
            notes.timed(pending.request, pending.accepted_s + max(0.0, timings.first_token_s - timings.created_s))
        notes.counts["preemptions"] += job.preemptions
        end = ENDS.get(job.state, End.FAILED)
        if end is End.DONE:
            notes.usage(pending.request, job.usage.prompt_tokens, job.usage.cached_tokens)
        notes.ends(pending.request, end, ended_s, job.error.reason if job.error else "")

    async def _listen(self, request: int, answer: Answer, patience: asyncio.Timeout) -> float:
        """When the last token came. Raises _Gone once the caller has heard enough."""
        heard, enough = 0, int(self._trace.leaves_after[request])
        last_s = self.now_s()
        async for chunk in answer:
            if not chunk.token_ids:
                continue
            last_s = self.now_s()
            if not heard and not patience.expired():
                patience.reschedule(None)
            heard += len(chunk.token_ids)
            self._notes.heard(request, len(chunk.token_ids), last_s)
            if 0 < enough <= heard and heard < self._trace.output_tokens[request]:
                raise _Gone
        return last_s

    async def _asks_again(self, request: int, error: LanewayError, *, accepted: bool) -> bool:
        """Waits as the refusal says. False: the caller does not ask again, and the request has ended."""
        outcomes = self._notes.outcomes
        retries = int(outcomes.retries[request])
        may = isinstance(error, LaneSaturated | Unavailable) and not isinstance(error, OutcomeUnknown)
        if not may or retries >= RETRIES or outcomes.tokens[request]:
            self._ends_by(request, error, accepted=accepted)
            return False
        wait_s = error.retry_after_s
        if wait_s is None:
            wait_s = BACKOFF_S * 2.0**retries * (0.5 + self._manner.draw())
        stays_s = float(outcomes.asked_s[request] + self._trace.patience_s[request]) - self.now_s()
        if wait_s >= stays_s:
            await asyncio.sleep(max(0.0, stays_s))
            self._notes.ends(request, End.LEFT, self.now_s(), error.reason)
            return False
        await asyncio.sleep(wait_s)
        self._notes.asks_again(request, self.now_s(), error.reason)
        return True

    def _patience(self, request: int) -> asyncio.Timeout:
        patience_s = float(self._trace.patience_s[request])
        if math.isinf(patience_s):
            return asyncio.timeout(None)
        return asyncio.timeout_at(self._began_s + float(self._notes.outcomes.asked_s[request]) + patience_s)

    def _ends_by(self, request: int, error: LanewayError, *, accepted: bool) -> None:
        """A request ends with the last error that its caller got."""
        unserved = error.row.code in (Code.UNAVAILABLE, Code.INTERNAL, Code.UNKNOWN)
        if isinstance(error, DeadlineExceeded):
            end = End.EXPIRED
        elif accepted or unserved:
            end = End.FAILED
        else:
            end = End.REFUSED
        self._notes.ends(request, end, self.now_s(), error.reason)

    def _fields(self, request: int, text: str) -> RequestFields:
        """DeadlineExceeded where it is over already, as the door would say."""
        trace, manner = self._trace, self._manner
        deadline_s = float(trace.deadline_s[request])
        left_s = float(self._notes.outcomes.asked_s[request]) + deadline_s - self.now_s()
        if left_s <= 0.0:
            raise DeadlineExceeded("its deadline passed before it was asked again")
        made: RequestFields = {
            "model": manner.model,
            "prompt": text,
            "lane": LANES[int(trace.lane[request])],
            "max_tokens": int(trace.max_tokens[request]),
            "temperature": 1.0,  # a greedy answer may be shared by equal prompts, which are equal by the trace alone
            "ignore_eos": manner.ignore_eos,
            "ttft_target_s": min(float(trace.ttft_s[request]), NO_TTFT_S),
            "tpot_target_s": min(float(trace.tpot_s[request]), NO_TPOT_S),
            "deadline_s": min(left_s, NO_DEADLINE_S),
            "labels": {LABEL: manner.run},
        }
        session = int(trace.session[request])
        if session != NO_SESSION:
            made["session_id"] = f"{manner.run}-{session}"
        return made
