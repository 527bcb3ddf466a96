"""Checkpoints on JetStream: deltas of token ids, a subject for each attempt and first index.

Owns how they are written, cut, read and removed. When to write one is a worker's business, which of them count is
core.checkpoints'. Their stream drops what is old or too much, so nothing here is ever waited for without a bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from laneway.core import subjects
from laneway.core.checkpoints import Delta, Prefix, Span, longest_prefix, spans
from laneway.core.job import JobRecord, TokenLogprob
from laneway.runtime.bus import Bus, Stored
from laneway.runtime.reading import last_message, subject_list
from laneway.runtime.wire.checkpoints import decode_checkpoint, encode_checkpoint

IDS_MAX = 512  # of one message: with 20 log probabilities for each id, a fifth of NATS' usual limit
READERS = 16  # requests of one reading that are on their way at once


def writer_of(record: JobRecord, owner: str) -> str:
    """Whose tokens those of an owner of this job are. With the job's birth: where records are kept for less than
    checkpoints, a key may bring the same id to the same worker for another job."""
    return f"{owner} {round(record.timings.created_s * 1000)}"


class CheckpointStore:
    """Safe to share."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    @property
    def connected(self) -> bool:
        return self._bus.connected

    def begin(
        self, record: JobRecord, from_index: int, ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> tuple[Coroutine[Any, Any, Stored], int, int]:
        """Sends a delta of the record's present attempt, of as many of the ids as one message takes.

        Returns what is to be awaited for the acknowledgement (it raises BusError), how many ids it holds, and its size
        in bytes.
        """
        assert ids, "a delta holds ids"
        count = min(len(ids), IDS_MAX)
        writer = writer_of(record, record.owner)
        data = encode_checkpoint(writer, ids[:count], logprobs[:count])
        while len(data) > self._bus.payload_bytes_max and count > 1:
            count //= 2
            data = encode_checkpoint(writer, ids[:count], logprobs[:count])
        subject = subjects.checkpoint(record.region, record.job_id, record.attempt, from_index)
        return self._bus.begin_store(subject, data), count, len(data)

    async def read(self, record: JobRecord) -> Prefix:
        """The longest prefix that the job's checkpoints hold by the record's lineage. Raises BusError.

        A replica that is behind gives less of it, never something else.
        """
        stream = subjects.checkpoint_stream(record.region)
        present = await subject_list(self._bus, stream, subjects.checkpoints_of(record.region, record.job_id))
        by_attempt = {span.attempt: span for span in spans(record.lineage)}
        places = asyncio.Semaphore(READERS)

        async def delta_at(subject: str) -> Delta | None:
            attempt, from_index = subjects.checkpoint_parts(subject)
            span: Span | None = by_attempt.get(attempt)
            if span is None or from_index >= span.end:
                return None
            async with places:
                found = await last_message(self._bus, stream, subject)
            if found is None:
                return None
            return decode_checkpoint(found.data, writer_of(record, span.owner), attempt, from_index)

        deltas = await asyncio.gather(*(delta_at(subject) for subject in present))
        return longest_prefix(record.lineage, [delta for delta in deltas if delta is not None])

    async def purge(self, record: JobRecord) -> None:
        """Removes all that the job's attempts wrote. Raises BusError; then they go by their age."""
        stream = subjects.checkpoint_stream(record.region)
        wanted = {"filter": subjects.checkpoints_of(record.region, record.job_id)}
        await self._bus.api(f"STREAM.PURGE.{stream}", wanted)
