"""Tokens on their way to the doors: one core NATS message for each engine step and door.

Owns what was said in this step and is not sent yet, and nothing older: whatever cannot be sent is dropped and counted,
because the door that misses it asks for a replay, which runs make from their transcripts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import structlog

from laneway.core import subjects
from laneway.runtime.bus import BusError
from laneway.v1 import bus_pb2

BATCH_BYTES_MAX = 256 * 1024  # a message is closed when it is larger; NATS' usual limit is 1 MiB
OUTGOING_BYTES_MAX = 8 * 1024 * 1024  # of messages made and not yet handed to the connection
_DELTA_BYTES = 96  # of a delta beside its chunk: job id, numbers, tags; an estimate for BATCH_BYTES_MAX

_log = structlog.get_logger(__name__)


class _Batch:
    """What one step gave to one door."""

    __slots__ = ("add", "message", "size_bytes")

    def __init__(self, worker_id: str) -> None:
        self.message = bus_pb2.TokenBatch(worker_id=worker_id)
        self.add = self.message.deltas.add
        self.size_bytes = 0


class Emitter:
    """`add` what a step gave to whom, `flush` once after it; `run` sends."""

    def __init__(
        self,
        publish: Callable[[str, bytes], Awaitable[None]],
        worker_id: str,
        *,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        outgoing_bytes_max: int = OUTGOING_BYTES_MAX,
    ) -> None:
        self._publish = publish
        self._worker_id = worker_id
        self._batch_bytes_max = batch_bytes_max
        self._outgoing_bytes_max = outgoing_bytes_max
        self._open: dict[str, _Batch] = {}
        self._outgoing: deque[tuple[str, bytes]] = deque()
        self._outgoing_bytes = 0
        self._wake = asyncio.Event()
        self.may_emit = False  # False while our lease may have expired; looked at before each step
        self.dropped = 0  # messages since start

    def add(self, door: str, job_id: str, attempt: int, first_index: int, count: int, response: bytes) -> None:
        """A chunk for one stream of a door."""
        batch = self._open.get(door)
        if batch is None or batch.size_bytes > self._batch_bytes_max:
            batch = self._open_batch(door)
        batch.size_bytes += len(response) + _DELTA_BYTES
        batch.add(job_id=job_id, attempt=attempt, first_index=first_index, count=count, response=response)

    def flush(self) -> None:
        """Hands over what was added since the last flush."""
        if not self._open:
            return
        for door, batch in self._open.items():
            self._put_out(door, batch)
        self._open.clear()
        while self._outgoing_bytes > self._outgoing_bytes_max:
            _, payload = self._outgoing.popleft()
            self._outgoing_bytes -= len(payload)
            self.dropped += 1
        self._wake.set()

    def _open_batch(self, door: str) -> _Batch:
        full = self._open.get(door)
        if full is not None:
            self._put_out(door, full)
        batch = self._open[door] = _Batch(self._worker_id)
        return batch

    def _put_out(self, door: str, batch: _Batch) -> None:
        payload = batch.message.SerializeToString()
        self._outgoing.append((subjects.tokens(door), payload))
        self._outgoing_bytes += len(payload)

    async def run(self) -> None:
        """Sends until cancelled."""
        while True:
            while self._outgoing:
                subject, payload = self._outgoing.popleft()
                self._outgoing_bytes -= len(payload)
                try:
                    await self._publish(subject, payload)
                except BusError:
                    self.dropped += 1
            self._wake.clear()
            await self._wake.wait()
