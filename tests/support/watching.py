"""What a region says of its jobs and its leaders, heard from outside by an operator."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from nats.aio.msg import Msg

from laneway.cli.stack import Child, LocalStack
from laneway.core import subjects
from laneway.core.fleet import Plan
from laneway.core.lanes import JobState
from laneway.runtime.bus import Bus
from laneway.runtime.reading import last_from_leader
from laneway.runtime.wire.plans import decode_plan
from laneway.scheduler.leader import KEY, Term
from tests.support.nats import REGION, eventually


@dataclass
class Watcher:
    """Counts tries to write, the refused ones too. Times are the event loop's."""

    bus: Bus
    claims: Counter[str] = field(default_factory=Counter)  # by job
    terminal_writes: Counter[str] = field(default_factory=Counter)  # by job
    ends: Counter[JobState] = field(default_factory=Counter)
    terms: list[tuple[float, Term]] = field(default_factory=list)
    plans: list[tuple[float, Plan]] = field(default_factory=list)

    async def led(self, *, after: int = 0) -> tuple[float, Term]:
        """When a term of a later epoch began."""
        return await eventually(lambda: next((t for t in self.terms if t[1].holder and t[1].epoch > after), None), 30.0)

    async def planned(self, *, after: int = 0) -> tuple[float, Plan]:
        """When the first plan of a later epoch was published."""
        return await eventually(lambda: next((p for p in self.plans if p[1].epoch > after), None), 30.0)

    async def stored_plan(self) -> Plan:
        stream = f"KV_{subjects.plan_bucket(REGION)}"
        found = await last_from_leader(self.bus, stream, subjects.plan_changes(REGION))
        assert found is not None
        return decode_plan(found.data)

    def _record(self, msg: Msg) -> None:
        job_id = subjects.record_parts(msg.subject)[2]
        state = JobState((msg.headers or {})[subjects.H_RECORD_STATE])
        if state is JobState.RUNNING:
            self.claims[job_id] += 1
        if state.terminal:
            self.terminal_writes[job_id] += 1
            self.ends[state] += 1

    def _term(self, msg: Msg) -> None:
        self.terms.append((asyncio.get_running_loop().time(), msgspec.json.decode(msg.data, type=Term)))

    def _plan(self, msg: Msg) -> None:
        self.plans.append((asyncio.get_running_loop().time(), decode_plan(msg.data)))


@asynccontextmanager
async def watching(stack: LocalStack) -> AsyncIterator[Watcher]:
    bus = await Bus.connect(stack.nats_settings("operator"), name="operator")
    try:
        watcher = Watcher(bus)
        await bus.listen(subjects.records_of(REGION), watcher._record)
        await bus.listen(subjects.kv_subject(subjects.leader_bucket(REGION), KEY), watcher._term)
        await bus.listen(subjects.plan_changes(REGION), watcher._plan)
        await bus.nc.flush()
        yield watcher
    finally:
        await bus.close()


@asynccontextmanager
async def one_more(stack: LocalStack, service: str) -> AsyncIterator[tuple[Child, str]]:
    """A second process of a service, of the present build and as the stack configures it, and its address."""
    name = f"{service}-2"
    ready_file = stack.directory / "ready" / f"{name}.json"
    own = {
        "LANEWAY_NATS__URL": stack.addresses.nats,
        "LANEWAY_PROCESS__READY_FILE": str(ready_file),
        f"LANEWAY_{service.upper()}__LISTEN": "127.0.0.1:0",
    }
    first = stack.child(service)
    child = Child(
        name,
        [sys.executable, *first.arguments[1:]],
        environment={**first.environment, **own},
        log=stack.logs / f"{name}.log",
        ready_file=ready_file,
    )
    try:
        await child.start()
        yield child, (await child.ready(60.0)).address
    finally:
        await child.stop(10.0)
