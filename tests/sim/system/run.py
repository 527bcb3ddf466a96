"""One run: a region, its callers, its faults; then peace, and a look at what is left.

python -m tests.sim.system.run 17        runs seed 17 and says what it found; -v shows what the services logged,
                                         --wire all that was sent to the server
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import structlog

from laneway.runtime.references import References
from tests.sim.system.asks import draw_asks
from tests.sim.system.callers import Callers
from tests.sim.system.checks import check_all
from tests.sim.system.faults import Faults, draw_faults
from tests.sim.system.loop import SimLoop, here, run, until
from tests.sim.system.region import CRASH_ID, Region, Shape, draw_shape

# What a service logs when its own code failed.
OWN_FAULTS = (
    " run_failed ",
    " step_not_taken ",
    " chore_failed ",
    " bus_handler_failed ",
    " bus_callback_failed ",
    " ingest_failed ",
    " ingest_not_put_aside ",
    "_unreadable ",
)
ASKS_S = 24.0
FAULTS_S = 30.0
SETTLE_S = 75.0  # after the faults: then everything must have ended
REST_S = 12.0  # after the last end: leases, sweeps and beats that follow


@dataclass
class Report:
    seed: int
    complaints: list[str]
    faults: list[str]
    log: list[str]
    wire: list[str]  # all that was sent to the server: when, by which client, where to, and how long it was
    virtual_s: float
    ended: dict[str, int] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)  # attempts by why they ran

    @property
    def digest(self) -> str:
        """Of the wire: equal for equal runs."""
        return hashlib.blake2b("\n".join(self.wire).encode(), digest_size=16).hexdigest()

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {len(self.complaints)} complaints", *self.complaints, "faults:", *self.faults]
        lines.append(f"run it again: LANEWAY_SIM_SEED={self.seed} pytest tests/sim/system -k under_faults")
        return "\n".join(lines)


def simulate(seed: int, shape: Shape | None = None, *, asks: int = 0, faults: int | None = None) -> Report:
    """What is not given is drawn from the seed."""
    random = Random(f"{seed} sizes")
    drawn_asks, drawn_faults = random.choice((30, 50, 80)), random.choice((0, 6, 14, 14, 30))
    shape, asks = shape or draw_shape(seed), asks or drawn_asks
    faults = drawn_faults if faults is None else faults
    with _logged() as log, small_messages(shape):
        return run(lambda: _simulate(seed, shape, asks, faults, log))


async def _simulate(seed: int, shape: Shape, asks: int, faults: int, log: list[str]) -> Report:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    region = Region(seed, loop, shape)
    wire = _watch_wire(region, loop)
    try:
        await region.start()
        callers = Callers(region, draw_asks(seed, asks, ASKS_S))
        plan = Faults(region, draw_faults(seed, [host.name for host in region.hosts], faults, FAULTS_S))
        region.nats_died = any(fault.kind == "nats_kill" for fault in plan.faults)
        region.undisturbed = not plan.faults and not any(CRASH_ID in ask.prompt for ask in callers.asks)
        complaints = await _trouble_and_peace(region, callers, plan, log)
        complaints += check_all(region, callers.asks)
        return Report(seed, complaints, plan.applied, log, wire, loop.time(), _ends(region), _starts(region))
    finally:
        await region.close()


async def _trouble_and_peace(region: Region, callers: Callers, plan: Faults, log: list[str]) -> list[str]:
    complaints: list[str] = []
    calling = asyncio.ensure_future(callers.run())
    await plan.run()
    plan.over()
    try:
        async with asyncio.timeout(SETTLE_S):
            await calling
            await until(lambda: not (any(region.history.open()) or region.ingested()), 0.5)
        await asyncio.sleep(REST_S)
    except TimeoutError:
        waiting = [ask.label for ask in callers.asks if not ask.done]
        complaints.append(f"not all has ended: callers of {waiting}, jobs {list(region.history.open())}")
    complaints += callers.complaints
    complaints += [line for line in log if any(event in line for event in OWN_FAULTS)]
    complaints += [failure for host in region.hosts for failure in host.failures]
    return complaints


def _ends(region: Region) -> dict[str, int]:
    """How many jobs ended how."""
    finals = (region.history.final(job_id) for job_id in region.history.jobs)
    return dict(Counter(final.state.value if final is not None else "none" for final in finals))


def _starts(region: Region) -> dict[str, int]:
    finals = (region.history.final(job_id) for job_id in region.history.jobs)
    return dict(Counter(attempt.reason for final in finals if final is not None for attempt in final.lineage))


def _watch_wire(region: Region, loop: SimLoop) -> list[str]:
    """A line for every message that reaches the server."""
    wire: list[str] = []
    publish = region.server.publish

    def watched(client: Any, subject: str, data: bytes, headers: Any, reply: str) -> None:
        wire.append(f"{loop.time():.6f} {client._number} {subject} {len(data)}")
        publish(client, subject, data, headers, reply)

    region.server.publish = watched  # type: ignore[method-assign]
    return wire


@contextmanager
def small_messages(shape: Shape) -> Iterator[None]:
    """Tasks above the shape's size go to the object store, as very large ones always do."""
    defaults = References.__init__.__kwdefaults__
    assert defaults is not None
    before = defaults["inline_bytes_max"]
    defaults["inline_bytes_max"] = shape.inline_bytes_max
    try:
        yield
    finally:
        defaults["inline_bytes_max"] = before


@contextmanager
def _logged() -> Iterator[list[str]]:
    """What the services log goes into a list, with virtual times."""
    lines: list[str] = []

    def collect(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        process = here()
        error = event.pop("exc_info", None)
        facts = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
        lines.append(
            f"{asyncio.get_running_loop().time():9.3f} {process.name if process else '-':14} {method:7} "
            f"{event.get('event')} {facts}{f' {error!r}' if error else ''}"
        )
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[collect], wrapper_class=structlog.BoundLogger, cache_logger_on_first_use=False)
    try:
        yield lines
    finally:
        structlog.configure(**before)


def main() -> int:
    seeds = [int(text) for text in sys.argv[1:] if not text.startswith("-")]
    failed = 0
    for seed in seeds:
        report = simulate(seed)
        failed += bool(report.complaints)
        print(report, report.ended, f"{report.virtual_s:.0f} s", report.digest)
        if "-v" in sys.argv:
            print("\n".join(report.log))
        if "--wire" in sys.argv:
            print("\n".join(report.wire))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
