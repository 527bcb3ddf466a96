"""Tokens on their way to the doors: one core NATS message for each flush and door, a flush or two for each engine step.

Owns what was said in this step and is not sent yet, and nothing older: whatever cannot be sent now is dropped and
counted, because the door that misses it asks for a replay, which runs make from their transcripts.
"""

from __future__ import annotations

from collections.abc import Callable

from laneway.core import subjects
from laneway.runtime.bus import BusError
from laneway.v1 import bus_pb2

BATCH_BYTES_MAX = 256 * 1024  # a message is closed when it is larger; NATS' usual limit is 1 MiB
_DELTA_BYTES = 96  # of a delta beside its chunk: job id, numbers, tags; an estimate for BATCH_BYTES_MAX


class _Batch:
    """What one step gave to one door."""

    __slots__ = ("add", "message", "size_bytes")

    def __init__(self, worker_id: str) -> None:
        self.message = bus_pb2.TokenBatch(worker_id=worker_id)
        self.add = self.message.deltas.add
        self.size_bytes = 0


class Emitter:
    """`add` what a step gave to whom, `flush` once after it."""

    def __init__(
        self, post: Callable[[str, bytes], None], worker_id: str, *, batch_bytes_max: int = BATCH_BYTES_MAX
    ) -> None:
        """`post` sends at once or raises BusError."""
        self._post = post
        self._worker_id = worker_id
        self._batch_bytes_max = batch_bytes_max
        self._open: dict[str, _Batch] = {}
        self.may_emit = False  # False while our lease may have expired; looked at before each step
        self.dropped = 0  # messages since start

    def add(self, door: str, job_id: str, attempt: int, first_index: int, count: int, response: bytes) -> None:
        """A chunk for one stream of a door."""
        batch = self._open.get(door)
        if batch is not None and batch.size_bytes > self._batch_bytes_max:
            self._send(door, batch)
            batch = None
        if batch is None:
            batch = self._open[door] = _Batch(self._worker_id)
        batch.size_bytes += len(response) + _DELTA_BYTES
        batch.add(job_id=job_id, attempt=attempt, first_index=first_index, count=count, response=response)

    def flush(self) -> None:
        """Sends what was added since the last flush."""
        for door, batch in self._open.items():
            self._send(door, batch)
        self._open.clear()

    def _send(self, door: str, batch: _Batch) -> None:
        try:
            self._post(subjects.tokens(door), batch.message.SerializeToString())
        except BusError:
            self.dropped += 1
