"""Pieces of the lanes that may wait are joined; the first never waits, nor does priority at a quiet door."""

import asyncio
import itertools

import pytest
from msgspec.structs import replace

from laneway.admission.holding import Flusher, HoldLimits
from laneway.admission.streams import Stream, StreamLimits
from laneway.core.lanes import Lane
from laneway.runtime.wire.chunks import merge_pieces, piece_ids
from tests.unit.test_admission_streams import RECORD, piece


class LoopClock:
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


LIMITS = HoldLimits({Lane.PRIORITY: 0.02, Lane.BATCH: 0.25}, priority_streams=128)


async def wakes(lane: Lane, streams: int, gap_s: float, count: int = 50) -> list[tuple[float, int]]:
    """When a reader of this lane gets how many tokens, sent one each `gap_s`, from the first on."""
    loop = asyncio.get_running_loop()
    stream = Stream(replace(RECORD, contract=replace(RECORD.contract, lane=lane)), StreamLimits())
    flusher = Flusher(LIMITS, LoopClock(), lambda: streams)
    got: list[tuple[float, int]] = []

    async def read() -> None:
        while pieces := await stream.read():
            got.append((loop.time(), len(piece_ids(merge_pieces(pieces)))))

    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    start = loop.time()
    for index in range(count):
        stream.offer("w", 1, index, 1, piece(index, 1))
        flusher.flush(stream, loop.time())
        await asyncio.sleep(gap_s)
    stream.end(RECORD, b"")
    await reading
    flusher.close()
    assert sum(n for _, n in got) == count
    return [(round(at - start, 6), n) for at, n in got]


@pytest.mark.looptime
async def test_priority_is_not_held_at_a_quiet_door():
    assert await wakes(Lane.PRIORITY, 127, 0.01) == [(round(i * 0.01, 6), 1) for i in range(50)]


@pytest.mark.looptime
async def test_priority_is_joined_by_twos_at_a_busy_door():
    got = await wakes(Lane.PRIORITY, 128, 0.01)
    assert got[0] == (0.0, 1)
    assert 24 <= len(got) <= 30
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(got)]
    assert max(gaps) <= 0.03 + 1e-6


@pytest.mark.looptime
async def test_slow_steps_are_never_held():
    assert [n for _, n in await wakes(Lane.PRIORITY, 500, 0.02)] == [1] * 50


@pytest.mark.looptime
async def test_batch_pieces_leave_four_times_a_second():
    got = await wakes(Lane.BATCH, 1, 0.01, 100)
    assert got[0] == (0.0, 1)
    assert 4 <= len(got) <= 6
