"""When a run's tokens are written to its checkpoints, so that another worker can go on from there.

Owns how often: after TOKENS tokens, or sooner once AGE_S have passed and there are enough for their message to be no
larger than twice its ids; never more than MESSAGES_PER_S_MAX messages of a worker a second, and then those that have
waited longest first, with more tokens each. Nothing waits for a periodic delta; one whose acknowledgement does not come
is sent again with what followed it. The last delta before a job is handed back is waited for, within KEEP_S_MAX.

Jobs are written while they run only where nobody else holds their tokens. The token path pays one comparison of two
integers.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from msgspec import Struct

from laneway.core.catalogue import Capabilities
from laneway.core.clock import Clock
from laneway.core.job import GenerateTask, JobRecord, resumable
from laneway.core.lanes import OnDisconnect
from laneway.runtime.bus import BusError, Stored
from laneway.runtime.checkpoints import CheckpointStore
from laneway.workers import metrics
from laneway.workers.transcript import Transcript

TOKENS = 32  # new ones after which a delta is due
AGE_S = 2.0  # since the last delta, after which fewer will do
TOKENS_MIN = 10  # as many ids of one byte weigh as much as the rest of their message
MESSAGES_PER_S_MAX = 100  # of one worker: a second's worth may leave at once
KEEP_S_MAX = 2.0  # for the last delta before a job is handed back
PURGES_WAITING_MAX = 1_000  # jobs that ended and whose checkpoints are still to be removed; the oldest are left to age
NEVER = sys.maxsize

_log = structlog.get_logger(__name__)


def worth_keeping(task: GenerateTask, can: Capabilities) -> bool:
    """Whether any worker of the pool could go on from the tokens of this task; those that made it may be unable to."""
    return resumable(task, sampling=can.resumable_sampling)


def kept_while_running(record: JobRecord, task: GenerateTask, can: Capabilities) -> bool:
    """Whether to write checkpoints while the job runs, and not only when it is handed back.

    Of an attached job that ends with its caller, the caller's door holds what was delivered, and nobody else wants it.
    """
    detached = not record.attached or record.contract.on_disconnect is OnDisconnect.KEEP
    return detached and worth_keeping(task, can)


class Tail:
    """How much of one run's output its checkpoints hold. Owned by the run; what was written is Checkpointing's."""

    __slots__ = ("due_at", "may_write", "record", "sent", "since_s", "stored", "transcript", "tried")

    def __init__(
        self, record: JobRecord, transcript: Transcript, may_write: Callable[[], bool], *, known: int = 0
    ) -> None:
        """`record`: as we own it. `known`: of the tokens it goes on from, those that are in checkpoints already.
        `may_write`: whether the job is ours for certain."""
        self.record = record
        self.transcript = transcript
        self.may_write = may_write
        self.sent = self.stored = known  # tokens; of the stored ones this is certain
        self.tried = False  # whether any was sent, whatever became of it
        self.since_s = 0.0  # of the last delta
        self.due_at = NEVER  # number of tokens

    @property
    def new(self) -> int:
        return len(self.transcript) - self.sent

    @property
    def touched(self) -> bool:
        """Whether there may be something to remove when the job has ended: what was not acknowledged may be there."""
        return self.tried or self.sent > 0 or self.record.checkpoint_index > 0


class _Sent(Struct, frozen=True):
    """A delta on its way."""

    tail: Tail
    acknowledged: Coroutine[Any, Any, Stored]
    start: int
    end: int

    async def stored(self) -> None:
        """Raises BusError."""
        await self.acknowledged
        if self.start <= self.tail.stored:
            self.tail.stored = max(self.tail.stored, self.end)


class Checkpointing:
    """Of one worker."""

    def __init__(self, store: CheckpointStore, clock: Clock, pool: str) -> None:
        self.store = store
        self._clock = clock
        self._pool = pool
        self._tails: dict[Tail, None] = {}
        self._due: OrderedDict[Tail, None] = OrderedDict()
        self._allowed = float(MESSAGES_PER_S_MAX)
        self._allowed_s = clock.monotonic()
        self._sent: deque[_Sent] = deque()  # no more than the rate gives while an acknowledgement may take
        self._sent_wake = asyncio.Event()
        self._purges: OrderedDict[str, JobRecord] = OrderedDict()
        self._purge_wake = asyncio.Event()

    # --- while jobs run ------------------------------------------------------------------------------

    def follow(self, tail: Tail) -> None:
        """From now on its tokens are written."""
        tail.since_s = self._clock.monotonic()
        tail.due_at = tail.sent + TOKENS
        self._tails[tail] = None

    def leave(self, tail: Tail) -> None:
        """The run has an outcome, whatever it is."""
        tail.due_at = NEVER
        self._tails.pop(tail, None)
        self._due.pop(tail, None)

    def due(self, tail: Tail) -> None:
        """It has `due_at` tokens. They leave with `write_due`, behind what callers wait for."""
        tail.due_at = NEVER
        self._due[tail] = None

    def write_due(self) -> None:
        """Writes what is due, as far as the rate allows."""
        if not self._due:
            return
        if not self.store.connected:
            return  # the tokens are still there when it is again
        for tail in tuple(self._due):
            if tail.may_write() and tail.new > 0:
                if not self._take_one():
                    return
                self._sent.append(self._send(tail, tail.sent))
                self._sent_wake.set()
                tail.due_at = tail.sent + TOKENS
            else:
                tail.due_at = len(tail.transcript) + TOKENS
            tail.since_s = self._clock.monotonic()
            del self._due[tail]

    def look(self, now_s: float) -> None:
        """A few times a second: finds the slow ones."""
        for tail in self._tails:
            if now_s - tail.since_s >= AGE_S and tail.new >= TOKENS_MIN:
                self.due(tail)
        self.write_due()

    def _send(self, tail: Tail, start: int) -> _Sent:
        tail.tried = True
        ids, logprobs = tail.transcript.since(start)
        acknowledged, count, size_bytes = self.store.begin(tail.record, start, ids, logprobs)
        tail.sent = max(tail.sent, start + count)
        metrics.CHECKPOINT_BYTES.labels(self._pool).inc(size_bytes)
        return _Sent(tail, acknowledged, start, start + count)

    def _take_one(self) -> bool:
        now_s = self._clock.monotonic()
        self._allowed += (now_s - self._allowed_s) * MESSAGES_PER_S_MAX
        self._allowed = min(self._allowed, float(MESSAGES_PER_S_MAX))
        self._allowed_s = now_s
        if self._allowed < 1.0:
            return False
        self._allowed -= 1.0
        return True

    # --- when jobs leave -----------------------------------------------------------------------------

    async def keep(self, tail: Tail) -> int:
        """Writes the rest of what the run computed, before its job is handed back. Returns how many tokens are known to
        be stored, which may be fewer where NATS does not answer in time."""
        try:
            async with asyncio.timeout(KEEP_S_MAX):
                while tail.stored < len(tail.transcript):
                    await self._send(tail, tail.stored).stored()
        except (TimeoutError, BusError) as error:
            _log.warning("checkpoint_not_stored", job_id=tail.record.job_id, error=repr(error), stored=tail.stored)
        return tail.stored

    def forget(self, record: JobRecord) -> None:
        """The job has ended: its checkpoints are removed when there is time."""
        self._purges[record.job_id] = record
        if len(self._purges) > PURGES_WAITING_MAX:
            self._purges.popitem(last=False)
        self._purge_wake.set()

    async def run(self) -> None:
        """Takes acknowledgements and removes the checkpoints of jobs that ended, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._take_acknowledgements())
                group.create_task(self._remove())
        finally:
            for sent in self._sent:
                sent.acknowledged.close()

    async def _take_acknowledgements(self) -> None:
        failing = False
        while True:
            while self._sent:
                sent = self._sent.popleft()  # in the order in which the answers come
                try:
                    await sent.stored()
                    failing = False
                except BusError as error:
                    if not failing:
                        _log.warning("checkpoint_not_stored", job_id=sent.tail.record.job_id, reason=error.reason)
                    failing = True
                    sent.tail.sent = sent.tail.stored  # what follows a gap is of no use: the next begins before it
            self._sent_wake.clear()
            await self._sent_wake.wait()

    async def _remove(self) -> None:
        while True:
            while self._purges:
                _, record = self._purges.popitem(last=False)
                try:
                    await self.store.purge(record)
                except BusError as error:
                    _log.info("checkpoints_left", job_id=record.job_id, reason=error.reason)
            self._purge_wake.clear()
            await self._purge_wake.wait()
