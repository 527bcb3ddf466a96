"""A producer that speaks NATS alone, as examples/producer.py does; it also counts what the region says of jobs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nats
import nats.aio.client
from google.protobuf import json_format
from nats.aio.msg import Msg

from laneway.core import subjects
from laneway.core.lanes import JobState, Lane
from laneway.runtime.wire import enums
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import bus_pb2, task_pb2
from tests.support.nats import REGION, eventually

TENANT = "default"  # of callers on this host where no tokens are configured


@dataclass
class Producer:
    """One connection to a region's NATS, and what it heard there."""

    nc: nats.aio.client.Client
    tenant: str = TENANT
    verdicts: dict[str, bus_pb2.IngestVerdict] = field(default_factory=dict)  # by key
    ends: Counter[str] = field(default_factory=Counter)  # terminal events heard, by job
    terminal_writes: Counter[str] = field(default_factory=Counter)  # tries to store a terminal record, by job
    claims: Counter[str] = field(default_factory=Counter)  # tries to store a RUNNING record, by job

    async def publish(self, key: str, spec: task_pb2.JobSpec, lane: Lane, *, json: bool = False) -> None:
        """Returns once the message is received. The verdict comes later."""
        request = pb.SubmitRequest(spec=spec)
        body = json_format.MessageToJson(request).encode() if json else request.SerializeToString()
        await self.send(f"ingest.{REGION}.{lane.value}.{self.tenant}", body, key)

    async def send(self, subject: str, body: bytes, key: str = "") -> None:
        headers = {subjects.H_KEY: key} if key else None
        await self.nc.jetstream().publish(subject, body, headers=headers, timeout=10)

    async def verdict(self, key: str) -> bus_pb2.IngestVerdict:
        return await eventually(lambda: self.verdicts.get(key), timeout_s=60)

    async def _on_verdict(self, msg: Msg) -> None:
        verdict = bus_pb2.IngestVerdict.FromString(msg.data)
        self.verdicts[verdict.key or verdict.job_id] = verdict

    async def _on_event(self, msg: Msg) -> None:
        event = bus_pb2.JobEvent.FromString(msg.data)
        state = enums.JOB_STATE_FROM_WIRE.get(event.state)
        self.ends[event.job_id] += state is not None and state.terminal

    async def _on_record(self, msg: Msg) -> None:
        job_id = subjects.record_parts(msg.subject)[2]
        state = JobState((msg.headers or {})[subjects.H_RECORD_STATE])
        self.terminal_writes[job_id] += state.terminal
        self.claims[job_id] += state is JobState.RUNNING


@asynccontextmanager
async def producer(url: str, tenant: str = TENANT, *, nkeys: Path | None = None) -> AsyncIterator[Producer]:
    """`nkeys`: the folder of seeds, where NATS has users: it publishes without a credential and watches as operator."""
    async with AsyncExitStack() as stack:
        nc = watching = await stack.enter_async_context(_connected(url))
        if nkeys is not None:
            key = {"nkeys_seed": str(nkeys / "operator.seed"), "inbox_prefix": "_INBOX_operator"}
            watching = await stack.enter_async_context(_connected(url, **key))
        made = Producer(nc, tenant)
        await nc.subscribe(f"verdict.{REGION}.{tenant}.*", cb=made._on_verdict)
        await watching.subscribe(subjects.events(REGION), cb=made._on_event)
        await watching.subscribe(subjects.records_of(REGION), cb=made._on_record)
        for each in (nc, watching):
            await each.flush()
        yield made


@asynccontextmanager
async def _connected(url: str, **key: str) -> AsyncIterator[nats.aio.client.Client]:
    nc = await nats.connect(url, **key)
    try:
        yield nc
    finally:
        async with asyncio.timeout(10):
            await nc.close()
