"""A plan of faults drawn from one seed, and who carries it out. The same seed gives the same plan."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from laneway.cli.child import Child, StackError
from tests.support.drill_stack import DrillStack

LEASE_S = 3.0  # of a worker: a longer pause lets others take what it ran
BACK_S_MAX = 60.0
WORKERS_DOWN_MAX = 0.3  # share of the workers that may be away at once


class FaultKind(StrEnum):
    KILL_WORKER = "kill a worker"
    FREEZE_WORKER = "freeze a worker beyond its lease"
    KILL_ENGINE = "kill an engine"
    KILL_DOOR = "kill a door"
    KILL_SCHEDULER = "kill a scheduler"
    FREEZE_SCHEDULER = "freeze a scheduler"
    KILL_NATS = "kill nats"
    FREEZE_NATS = "freeze nats"
    SLOW_NATS = "slow nats down"


@dataclass(frozen=True)
class Fault:
    at_s: float  # after the beginning
    kind: FaultKind
    choice: float  # which process, in [0, 1)
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:5.1f} s {self.kind} for {self.lasts_s:.1f} s"


# How often each happens in a minute, and how long the part is away.
OFTEN: Mapping[FaultKind, tuple[float, tuple[float, float]]] = {
    FaultKind.KILL_WORKER: (14, (0.2, 4.0)),
    FaultKind.FREEZE_WORKER: (6, (LEASE_S + 0.5, 2 * LEASE_S)),
    FaultKind.KILL_ENGINE: (4, (0.0, 0.0)),
    FaultKind.KILL_DOOR: (4, (0.1, 1.5)),
    FaultKind.KILL_SCHEDULER: (4, (0.1, 3.0)),
    FaultKind.FREEZE_SCHEDULER: (2, (2.0, 6.0)),
    FaultKind.KILL_NATS: (2, (0.1, 1.5)),
}


def plan(seed: int, span_s: float, often: Mapping[FaultKind, tuple[float, tuple[float, float]]] = OFTEN) -> list[Fault]:
    """Each kind as often as said, at least once, at random moments of the middle of the span."""
    rng = random.Random(f"faults {seed}")
    out = [
        Fault(rng.uniform(0.1, 0.95) * span_s, kind, rng.random(), rng.uniform(*lasts))
        for kind, (per_minute, lasts) in often.items()
        for _ in range(max(1, round(per_minute * span_s / 60.0)))
    ]
    return sorted(out, key=lambda fault: fault.at_s)


@dataclass
class Saboteur:
    """Carries a plan out on a stack, and puts back what it took away."""

    stack: DrillStack
    faults: Sequence[Fault]
    done: Counter[FaultKind] = field(default_factory=Counter)
    skipped: Counter[FaultKind] = field(default_factory=Counter)
    _away: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Returns once all parts are back."""
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for fault in self.faults:
                await asyncio.sleep(began_s + fault.at_s - time.monotonic())
                group.create_task(self._commit(fault))

    async def _commit(self, fault: Fault) -> None:
        victim = self._victim(fault)
        if victim is None:
            self.skipped[fault.kind] += 1
            return
        self._away.add(victim.name)
        self.done[fault.kind] += 1
        try:
            match fault.kind:
                case FaultKind.KILL_ENGINE:
                    await kill_engine(victim)
                case FaultKind.SLOW_NATS:
                    await slow_down(victim, fault.lasts_s)
                case FaultKind.FREEZE_WORKER | FaultKind.FREEZE_SCHEDULER | FaultKind.FREEZE_NATS:
                    victim.signal(signal.SIGSTOP)
                    await asyncio.sleep(fault.lasts_s)
                    victim.signal(signal.SIGCONT)
                case _:
                    victim.kill()
                    await victim.wait()
                    await asyncio.sleep(fault.lasts_s)
                    await self._bring_back(victim.name)
        finally:
            self._away.discard(victim.name)

    async def _bring_back(self, name: str) -> None:
        """As a supervisor does: a service that finds no NATS when it starts says so, exits and is started again."""
        give_up_s = time.monotonic() + BACK_S_MAX
        while True:
            try:
                await self.stack.restart(name)
                return
            except StackError:
                if time.monotonic() > give_up_s:
                    raise
                await asyncio.sleep(0.3)

    def _victim(self, fault: Fault) -> Child | None:
        """One that is there; None where too many of its kind are away."""
        service = fault.kind.rsplit(" ", 1)[-1]
        match fault.kind:
            case FaultKind.KILL_WORKER | FaultKind.FREEZE_WORKER | FaultKind.KILL_ENGINE:
                service, least = "worker", round(len(self.stack.workers) * (1.0 - WORKERS_DOWN_MAX))
            case FaultKind.KILL_NATS | FaultKind.FREEZE_NATS | FaultKind.SLOW_NATS:
                service, least = "nats", len(self.stack.servers) // 2
            case FaultKind.KILL_DOOR:
                service, least = "admission", 0
            case _:
                service, least = "scheduler", 0
        there = [child for child in self.stack.of(service) if child.name not in self._away and child.alive]
        if len(there) <= least:
            return None
        return there[int(fault.choice * len(there))]


async def kill_engine(worker: Child) -> None:
    """kill -9 of the process in which a worker's engine runs."""
    import psutil

    for process in await asyncio.to_thread(lambda: psutil.Process(worker.pid).children(recursive=True)):
        process.kill()


async def slow_down(server: Child, lasts_s: float, *, stopped: float = 0.8, pulse_s: float = 0.1) -> None:
    """As a disk that writes in bursts: the server stands still for most of each pulse."""
    until_s = time.monotonic() + lasts_s
    while time.monotonic() < until_s:
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(stopped * pulse_s)
        server.signal(signal.SIGCONT)
        await asyncio.sleep((1.0 - stopped) * pulse_s)
