"""What a stream holds at one moment: the headers of the last message of each matching subject, once, in stream order.

For lists. An ephemeral push consumer that is deleted at the end; nothing is acknowledged and no body leaves the server.
"""

from __future__ import annotations

import asyncio
import contextlib

from nats.aio.msg import Msg

from laneway.core.errors import Unavailable
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.headers import STATUS, AckSubject

_NS = 1_000_000_000
SNAPSHOT_MESSAGES_MAX = 100_000  # some 30 MB of headers on their way
SNAPSHOT_TIMEOUT_S = 10.0


async def snapshot(bus: Bus, stream: str, subject_filter: str) -> list[Msg]:
    """Headers only. Raises Unavailable where it takes longer than SNAPSHOT_TIMEOUT_S, or is too much."""
    inbox = bus.nc.new_inbox()
    found: list[Msg] = []
    complete = asyncio.Event()

    def receive(msg: Msg) -> None:
        if msg.headers is not None and msg.headers.get(STATUS):
            return
        found.append(msg)
        if not AckSubject.parse(msg.reply).pending:
            complete.set()

    subscription = await bus.listen(inbox, receive)
    consumer = ""
    try:
        config: dict[str, object] = {
            "deliver_policy": "last_per_subject",
            "ack_policy": "none",
            "max_deliver": 1,
            "deliver_subject": inbox,
            "filter_subject": subject_filter,
            "headers_only": True,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": 5 * _NS,
        }
        answer = await bus.api(f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config})
        consumer = answer["name"]
        waiting = answer.get("num_pending", 0) + answer["delivered"]["consumer_seq"]
        if not waiting:
            return []
        if waiting > SNAPSHOT_MESSAGES_MAX:
            raise Unavailable(f"the list has {waiting} entries, more than {SNAPSHOT_MESSAGES_MAX} cannot be listed")
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                await complete.wait()
        except TimeoutError:
            raise Unavailable("the list could not be read in time", retry_after_s=1.0) from None
        return found
    finally:
        await bus.unsubscribe(subscription)
        if consumer and bus.connected:
            with contextlib.suppress(BusError):
                await bus.api(f"CONSUMER.DELETE.{stream}.{consumer}", {}, timeout_s=1.0)
