"""One reader's stream of one job: each token index once and in order, whatever workers send and however often.

Owns order, uniqueness, the bound on what a slow reader may pile up, and the token ids that a new worker needs to go on
where a dead one stopped. Knows nothing of NATS or gRPC: the door offers what arrived, a front reads.

    offered piece          what happens
    older attempt          dropped
    newer attempt          adopted: what was taken so far is the prefix that it must continue
    next index             taken, unless the reader is too far behind
    behind the next index  dropped as a repetition; if a newer attempt wrote it, its ids must equal what was delivered,
                           otherwise two different runs would be spliced and the stream is broken
    beyond the next index, dropped: the door asks the worker to send again from the next index, where it cuts its pieces
    or across it
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum

from msgspec import Struct

from laneway.core.errors import Aborted, InvalidRequest, LanewayError
from laneway.core.job import JobRecord, answer_tokens
from laneway.runtime.wire.chunks import piece_ids

COMPACT_PIECES = 256  # kept pieces are turned into ids at this many: 4 bytes a token instead of some 100


class Offer(IntEnum):
    TAKEN = 0
    DROPPED = 1  # a repetition, or of an older attempt
    GAP = 2  # something before it is missing, or its beginning was taken already
    BEHIND = 3  # the reader is too far behind: sent again, or read from the record, later
    BROKEN = 4  # going on would splice two different runs


class StreamLimits(Struct, frozen=True):
    unread_bytes: int = 256 * 1024  # of one reader
    delivered_ids: int = 65_536  # kept to hand over


class Stream:
    """The door writes (offer, flush, end, fail), one reader reads. All in one event loop."""

    __slots__ = (
        "_behind",
        "_compact",
        "_error",
        "_given",
        "_kept",
        "_kept_whole",
        "_known_from",
        "_limits",
        "_text_only_at",
        "_unread",
        "_unread_bytes",
        "_waiter",
        "attempt",
        "checked_at_s",
        "checks",
        "ended",
        "flushed_s",
        "from_index",
        "heard_at_s",
        "next_index",
        "on_caught_up",
        "outlet",
        "record",
        "replay_asked_s",
        "sound_index",
        "worker_id",
    )

    def __init__(
        self,
        record: JobRecord,
        limits: StreamLimits,
        *,
        from_index: int = 0,
        given: Sequence[int] = (),
        now_s: float = 0.0,
        outlet: str = "",
    ) -> None:
        """`given`: the tokens before `from_index` as the reader says that he got them elsewhere; empty: he does not."""
        self.outlet = outlet  # the name by which workers know where to send to
        self.record = record  # the latest seen; terminal once `ended`
        self.attempt = record.attempt
        self.worker_id = record.owner
        self.from_index = from_index
        self.next_index = from_index  # first token not taken yet
        self.sound_index = from_index  # tokens before it came from older attempts
        self.ended = False
        # Called when the reader has caught up after having been too far behind.
        self.on_caught_up: Callable[[Stream], None] | None = None
        # Kept by the door, monotonic: when the reader was last woken, the job last heard of, its record last read, a
        # replay last asked for.
        self.flushed_s = -1e9
        self.heard_at_s = now_s
        self.checked_at_s = now_s
        self.replay_asked_s = -1e9
        self.checks = 0
        self._limits = limits
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._kept: list[bytes] = []
        self._compact = array("I", given)
        self._kept_whole = len(given) == from_index
        self._known_from = 0 if self._kept_whole else from_index  # tokens from here on can be compared
        self._given = bool(given)
        self._behind = False
        self._text_only_at = -1
        self._error: LanewayError | None = None
        self._waiter: asyncio.Future[None] | None = None

    # --- the door's side -----------------------------------------------------------------------------

    def offer(self, worker_id: str, attempt: int, first_index: int, count: int, piece: bytes) -> Offer:
        if attempt < self.attempt or self.ended:
            return Offer.DROPPED
        if attempt > self.attempt:
            self.adopt(attempt, worker_id)
        self.worker_id = worker_id
        if first_index > self.next_index:
            return Offer.BEHIND if self._behind else Offer.GAP
        if first_index < self.next_index:
            return self._repetition(first_index, count, piece)
        if not count:
            if self._text_only_at == first_index:
                return Offer.DROPPED
            self._text_only_at = first_index
        too_much = self._unread and self._unread_bytes + len(piece) > self._limits.unread_bytes
        if self._behind or too_much:
            self._behind = True
            return Offer.BEHIND
        self._take(count, piece)
        return Offer.TAKEN

    def _take(self, count: int, piece: bytes) -> None:
        self.next_index += count
        self._unread.append(piece)
        self._unread_bytes += len(piece)
        if self._kept_whole:
            self._kept.append(piece)
            if len(self._kept) >= COMPACT_PIECES:
                self._compact_kept()

    def _repetition(self, first_index: int, count: int, piece: bytes) -> Offer:
        end = first_index + count
        inherited = min(end, self.sound_index) > max(first_index, self._known_from)
        if inherited and not self._repeats(first_index, piece):
            return Offer.BROKEN
        if end <= self.next_index:
            return Offer.DROPPED
        return Offer.BEHIND if self._behind else Offer.GAP

    def _repeats(self, first_index: int, piece: bytes) -> bool:
        """Whether the piece says of what was delivered the same as was delivered."""
        delivered = self.delivered_ids()
        if delivered is None:
            return False
        again = piece_ids(piece)
        old = delivered[first_index : first_index + len(again)]
        return list(old) == list(again)[: len(old)]

    def flush(self) -> None:
        """Wakes the reader: called once after all pieces of one message were offered, or later."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def adopt(self, attempt: int, worker_id: str) -> None:
        """A newer attempt goes on with the job."""
        self.attempt = attempt
        self.worker_id = worker_id
        self.sound_index = self.next_index
        self._text_only_at = -1

    def end(self, record: JobRecord, *rest: bytes) -> None:
        """The job ended. `rest` are the pieces with the tokens of its result from `next_index` on."""
        if self.ended:
            return
        self._unread.extend(filter(None, rest))
        self.next_index = max(self.next_index, answer_tokens(record))
        self._finish(record, None)

    def fail(self, error: LanewayError) -> None:
        """Ends the stream, whatever becomes of the job."""
        self._finish(self.record, error)

    def _finish(self, record: JobRecord, error: LanewayError | None) -> None:
        if self.ended:
            return
        self.record = record
        self.ended = True
        self._error = error
        self.flush()

    # --- handing over --------------------------------------------------------------------------------

    def offered_ids(self) -> array[int] | None:
        """What a worker may go on from: the ids that were delivered, unless it is a reader who says so."""
        return None if self._given else self.delivered_ids()

    def delivered_ids(self) -> array[int] | None:
        """The ids of tokens 0 .. next_index, or None where this stream does not know or has not kept them all."""
        self._compact_kept()
        return self._compact if self._kept_whole else None

    def _compact_kept(self) -> None:
        for piece in self._kept:
            self._compact.extend(piece_ids(piece))
        self._kept.clear()
        if len(self._compact) > self._limits.delivered_ids:
            self._kept_whole = False
            self._compact = array("I")

    def contradicts(self, record: JobRecord) -> bool:
        """Whether the result is another run's than the one whose tokens were delivered."""
        if record.result is None or record.attempt <= 1:
            return False
        if record.attempt > self.attempt:
            self.adopt(record.attempt, "")
        delivered = self.delivered_ids()
        if delivered is None:
            return self.sound_index > max(self.from_index, record.lineage[-1].start_index)
        return tuple(delivered[: len(record.result.token_ids)]) != record.result.token_ids[: len(delivered)]

    # --- the reader's side ---------------------------------------------------------------------------

    @property
    def unread_bytes(self) -> int:
        return self._unread_bytes

    async def read(self) -> list[bytes]:
        """All pieces that wait, at least one; empty once the job has ended and everything was read.

        Raises the error that ended the stream, after the pieces before it.
        """
        while not self._unread:
            if self.ended:
                if self._error is not None:
                    raise self._error
                return []
            await self._next_flush()
        return self.take()

    async def _next_flush(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> list[bytes]:
        """What waits now, without waiting."""
        pieces = list(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        if self._behind:
            self._behind = False
            if self.on_caught_up is not None:
                self.on_caught_up(self)
        return pieces


def spliced(job_id: str, next_index: int) -> Aborted:
    return Aborted(
        f"the job went on in another run after token {next_index - 1} had been delivered; what came before is sound",
        job_id=job_id,
        facts={"next_index": str(next_index)},
    )


def beyond_end(from_index: int, count: int) -> InvalidRequest:
    return InvalidRequest(
        f"from_index is {from_index}, and the answer has at most {count} tokens",
        field="from_index",
        reason="BEYOND_END",
        facts={"tokens": str(count)},
    )
