"""An answer on its way to one caller: what every front reads, whatever its protocol.

Pieces that wait are joined: a front that writes slowly, or whose lane may wait a moment, gets several steps' tokens as
one piece, since the number of writes is what a token costs at the door.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from laneway.admission.streams import Stream
from laneway.core.clock import Clock
from laneway.core.errors import LanewayError
from laneway.core.job import JobRecord, Verdict, never_accepted
from laneway.core.lanes import JobState, Lane
from laneway.runtime import metrics
from laneway.runtime.grpc_errors import error_of
from laneway.runtime.wire.chunks import merged

NEVER_RAN_RETRY_S = 1.0

_ttft = metrics.histogram("laneway_ttft_seconds", "From receipt to the first piece of the answer.", ("lane",))
_ttft_of = {lane: _ttft.labels(lane=lane.value) for lane in Lane}


class Answer:
    """First `job_id` and `verdict`, then the pieces, then `finished`."""

    def __init__(self, stream: Stream, clock: Clock, received_s: float | None) -> None:
        self._stream = stream
        self._clock = clock
        self._received_s = received_s  # monotonic; None: a watcher's, which is no first token

    @property
    def job_id(self) -> str:
        return self._stream.record.job_id

    @property
    def verdict(self) -> Verdict:
        return self._stream.record.verdict

    async def pieces(self) -> AsyncIterator[bytes]:
        """Serialised GenerateResponses with a chunk each, in order, until the job has ended.

        Raises what ended the stream without the job's end: ABORTED, UNAVAILABLE while draining.
        """
        first = True
        while waiting := await self._stream.read():
            if first:
                self._first()
                first = False
            for piece in merged(waiting):
                yield piece

    def _first(self) -> None:
        if self._received_s is not None:
            _ttft_of[self._stream.record.contract.lane].observe(self._clock.monotonic() - self._received_s)

    def finished(self) -> JobRecord:
        """The terminal record of a job that succeeded; raises the error of any other end. After all pieces."""
        record = self._stream.record
        assert record.state.terminal, "the answer has not ended"
        if record.state is JobState.SUCCEEDED:
            return record
        raise end_error(record)


def end_error(record: JobRecord) -> LanewayError:
    """What a caller of a job that ended without a result is told."""
    if record.error is None:
        return LanewayError(f"the job ended as {record.state} without saying why", job_id=record.job_id)
    error = error_of(record.error, record.job_id)
    if error.row.retryable and never_accepted(record):  # nothing ran, and the key is free again
        error.retry_after_s = NEVER_RAN_RETRY_S
    return error
