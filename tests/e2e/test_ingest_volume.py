"""100,000 messages published to NATS while workers drain them: one verdict and one answer each, in flat memory.

The ingest stream is made small: a producer that is faster than admission is refused and has to come again, as
docs/wire.md tells producers to.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil
import pytest
from nats.aio.msg import Msg

from laneway.cli.stack import LocalStack, StackOptions
from laneway.core import subjects
from laneway.core.lanes import JobState, Lane
from laneway.runtime.bus import Bus
from laneway.runtime.bus_errors import NoAnswer
from laneway.runtime.connecting import SafeClient
from laneway.runtime.records import RecordStore
from laneway.runtime.requests import Requests, listen
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import bus_pb2, common_pb2, task_pb2
from tests.support.nats import REGION, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

MESSAGES = 100_000
WARM = 30_000  # messages after which nothing may grow any more
PUBLISHERS = 512
BACKLOG = 10_000  # messages and jobs that may wait: what waits may take memory
TENANT = "default"
MIB = 1024 * 1024
MODEL = {
    "name": "chat", "engine": "simulated", "slots": 64, "workers": 2, "context_length": 1024, "kv_tokens": 1 << 20,
    "engine_options": {"pace_s": 0.001}, "prefill_tokens_per_s": 1e6, "decode_tokens_per_s": 1e3,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "models": [MODEL],
    "nats": {"ingest_bytes_max": 64 * 1024},  # some 240 messages
    "process": {"log_level": "warning"},
}
GROWTH_BYTES_MAX = 24 * MIB  # of a process from WARM to MESSAGES
# nats-server keeps an index of all records' subjects in memory, and each job leaves one record for a day.
INDEX_BYTES_MAX = 2048  # for each message


@dataclass
class Producer:
    """Publishes until each message is stored, and counts verdicts by key."""

    client: SafeClient
    requests: Requests
    refused: int = 0  # publishes that the full stream refused
    verdicts: Counter[str] = field(default_factory=Counter)
    others: list[bus_pb2.IngestVerdict] = field(default_factory=list)

    async def publish(self, key: str) -> None:
        spec = task_pb2.JobSpec(
            model="chat",
            generate=task_pb2.GenerateTask(text=f"Message {key}", sampling=task_pb2.Sampling(max_tokens=1)),
            contract=common_pb2.Contract(labels={"key": key}),
        )
        body = pb.SubmitRequest(spec=spec).SerializeToString()
        subject = subjects.ingest(REGION, Lane.BATCH, TENANT)
        while True:
            try:
                answer = await self.requests.send(subject, body, {subjects.H_KEY: key}, timeout_s=10.0)
                if "error" not in msgspec.json.decode(answer.data):
                    return
                self.refused += 1
            except NoAnswer:  # stored or not: the key makes it safe to send it again
                pass
            await asyncio.sleep(0.05)

    def heard(self, msg: Msg) -> None:
        verdict = bus_pb2.IngestVerdict.FromString(msg.data)
        self.verdicts[verdict.key] += 1
        if verdict.verdict.kind == common_pb2.VERDICT_KIND_REFUSED:
            self.others.append(verdict)


@asynccontextmanager
async def producing(stack: LocalStack) -> AsyncIterator[Producer]:
    client = SafeClient()
    await client.connect(stack.addresses.nats)
    requests = Requests(client, client.new_inbox())
    producer = Producer(client, requests)
    await requests.start()
    await listen(client, subjects.verdict(REGION, TENANT, "*"), producer.heard)
    try:
        yield producer
    finally:
        await client.close()


def memory(stack: LocalStack) -> dict[str, int]:
    found: dict[str, int] = {}
    for child in stack.children:
        process = psutil.Process(child.pid)
        found[child.name] = process.memory_info().rss
        for number, inner in enumerate(process.children(recursive=True)):
            found[f"{child.name} child {number}"] = inner.memory_info().rss
    return found


async def stored(bus: Bus, stream: str) -> int:
    return int((await bus.api(f"STREAM.INFO.{stream}", {}))["state"]["messages"])


async def states(stack: LocalStack) -> Counter[JobState]:
    """Of all records, by their headers, as a scheduler reads them."""
    counts: Counter[JobState] = Counter()
    bus = await Bus.connect(stack.nats_settings("scheduler"), name="scheduler")
    async with asyncio.timeout(300), RecordStore(bus).follow_heads(REGION) as heads:
        async for head in heads:
            counts[head.state] += 1
            if counts.total() == MESSAGES:
                break
    await bus.close()
    return counts


async def test_messages_by_the_hundred_thousand_have_one_verdict_and_one_answer_each():
    async with LocalStack(StackOptions(settings=SETTINGS, engine="simulated")) as stack, producing(stack) as producer:
        bus = await Bus.connect(stack.nats_settings("operator"), name="operator")
        keys = map(str, range(MESSAGES))
        warm: dict[str, int] = {}
        has_room = asyncio.Event()

        async def left() -> int:
            names = [subjects.ingest_stream(REGION), *(subjects.lane_stream(REGION, lane) for lane in Lane)]
            await asyncio.sleep(0.2)
            return sum([await stored(bus, name) for name in names])

        async def keep_pace() -> None:
            while True:
                (has_room.set if await left() < BACKLOG else has_room.clear)()

        async def publisher() -> None:
            for key in keys:
                await has_room.wait()
                await producer.publish(key)
                if key == str(WARM):
                    warm.update(memory(stack))

        async def drained() -> bool:
            return not await left()

        pacing = asyncio.ensure_future(keep_pace())
        async with asyncio.TaskGroup() as group:
            for _ in range(PUBLISHERS):
                group.create_task(publisher())
        pacing.cancel()
        await eventually(lambda: len(producer.verdicts) >= MESSAGES, timeout_s=1200)
        await eventually(drained, timeout_s=1200)
        after = memory(stack)
        growth = {name: after[name] - before for name, before in warm.items()}
        print("refused publishes:", producer.refused, "memory MiB:", {n: round(b / MIB) for n, b in after.items()})
        print("growth MiB since", WARM, "messages:", {name: round(grown / MIB, 1) for name, grown in growth.items()})

        assert producer.refused, "the stream was never full: this producer had no need to come again"
        assert producer.others == []
        assert producer.verdicts == Counter(dict.fromkeys(map(str, range(MESSAGES)), 1)), "one verdict for each"
        assert await stored(bus, subjects.jobs_stream(REGION)) == MESSAGES
        assert await stored(bus, subjects.verdict_stream(REGION)) == MESSAGES
        assert await states(stack) == {JobState.SUCCEEDED: MESSAGES}
        for name, grown in growth.items():
            index = (MESSAGES - WARM) * INDEX_BYTES_MAX if name == "nats" else 0
            assert grown <= GROWTH_BYTES_MAX + index, f"{name} grew by {grown / MIB:.0f} MiB"
        await bus.close()
