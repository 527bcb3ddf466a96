"""When a worker removes the checkpoints of a job that ended."""

import asyncio
from typing import Any, cast

from laneway.core.clock import ManualClock
from laneway.runtime.bus import PublishUnknown
from laneway.workers.checkpointing import Checkpointing, Tail
from tests.support.nats import make_record


class DeafStore:
    """Stores everything, perhaps; no acknowledgement ever comes."""

    connected = True

    def begin(self, record: object, start: int, ids: list[int], logprobs: object) -> tuple[Any, int, int]:
        async def acknowledged() -> None:
            raise PublishUnknown("no answer")

        return acknowledged(), len(ids), 10


class Written:
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def since(self, start: int) -> tuple[list[int], list[object]]:
        return list(range(start, self._count)), []


async def test_what_was_not_acknowledged_may_be_there_and_is_removed_with_its_job():
    checkpointing = Checkpointing(cast(Any, DeafStore()), ManualClock(), "pool")
    tail = Tail(make_record(), cast(Any, Written(40)), lambda: True)
    assert not tail.touched
    checkpointing.due(tail)
    checkpointing.write_due()
    running = asyncio.ensure_future(checkpointing.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (tail.stored, tail.touched) == (0, True)
