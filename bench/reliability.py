"""What a fault costs the callers of a running stack: the longest silence of a stream, the longest time without a
successful new request, what was lost and what came twice. docs/reliability.md shows its table.

For each fault, repeated: eight streams run, and small requests follow each other, none of them repeated by its caller;
the fault happens in the middle. A stream's gap is its longest silence as its caller measures it; "lost" are streams
that were accepted and did not end as their contract says, "doubled" are ends that came twice and answers that differ
from the undisturbed one, which they do where a token comes twice. The engine is simulated, 20 ms a token, so that the
gaps are Laneway's and NATS'. A part that was killed is started again at once, as a supervisor does.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from contextlib import AsyncExitStack

import psutil
from fault_bench import (
    STEP_TIMEOUT_S,
    STREAMS,
    TOKENS,
    WORKERS,
    Bench,
    Case,
    Sample,
    Stream,
    benched,
    ready,
)
from report import Report, main, percentile

from laneway.client import (
    Client,
    Lane,
    OnDisconnect,
)
from laneway.core import subjects
from tests.support.drill_faults import kill_engine, slow_down
from tests.support.drill_load import PATIENCE
from tests.support.drill_stack import CLUSTER_SIZE
from tests.support.nats import REGION

REPEATS = 3
LIMIT_S = 1200.0  # of the whole
FREEZE_S = 6.0
OUTAGE_S = 5.0  # a partition, or no scheduler


# --- faults ----------------------------------------------------------------------------------------


async def nothing(_: Bench) -> None:
    await asyncio.sleep(1.0)


async def kill_worker(bench: Bench) -> None:
    bench.worker().kill()
    await bench.worker().wait()
    await bench.back(bench.worker())


async def freeze_worker(bench: Bench) -> None:
    bench.worker().signal(signal.SIGSTOP)
    await asyncio.sleep(FREEZE_S)
    bench.worker().signal(signal.SIGCONT)


async def drain_worker(bench: Bench) -> None:
    bench.worker().stopping = True
    bench.worker().signal(signal.SIGTERM)
    await bench.worker().wait()
    await bench.back(bench.worker())


async def cut_worker_off(bench: Bench) -> None:
    line = bench.lines[bench.victim]
    line.cut()
    await asyncio.sleep(OUTAGE_S + 3.0)
    line.heal()


async def crash_engine(bench: Bench) -> None:
    await kill_engine(bench.worker())


async def hang_engine(bench: Bench) -> None:
    for process in psutil.Process(bench.worker().pid).children(recursive=True):
        process.suspend()
    await asyncio.sleep(STEP_TIMEOUT_S + 3.0)


async def kill_leader(bench: Bench) -> None:
    scheduler = bench.stack.child("scheduler")
    scheduler.kill()
    await scheduler.wait()
    await asyncio.sleep(OUTAGE_S)
    await bench.back(scheduler)


async def kill_schedulers(bench: Bench) -> None:
    schedulers = bench.stack.of("scheduler")
    for each in schedulers:
        each.kill()
        await each.wait()
    await asyncio.sleep(OUTAGE_S)
    for each in schedulers:
        await bench.back(each)


async def kill_door(bench: Bench) -> None:
    door = bench.stack.child("admission")
    door.kill()
    await door.wait()
    await bench.back(door)


async def restart_nats(bench: Bench) -> None:
    server = bench.stack.servers[0]
    server.kill()
    await server.wait()
    await bench.stack.restart(server.name)


async def slow_nats(bench: Bench) -> None:
    await slow_down(bench.stack.servers[0], OUTAGE_S)


async def slow_reader(bench: Bench) -> None:
    """Callers that ask for much and read nothing; only the others are measured."""
    async with Client(bench.stack.doors[0]) as client, AsyncExitStack() as held:
        for number in range(4):
            idle = Stream(900_000 + number, OnDisconnect.CANCEL, tokens=2000)
            await held.enter_async_context(client.generate(**idle.request))
        await asyncio.sleep(3.0)


async def preempt(bench: Bench) -> None:
    """More priority work than there is room for beside the batch streams that are measured."""
    async with Client(bench.stack.doors[-1], retry_budget=PATIENCE) as client, asyncio.TaskGroup() as group:
        for number in range(8 * WORKERS):
            more = Stream(800_000 + number, OnDisconnect.CANCEL)
            group.create_task(more.run(client))


async def kill_records_leader(bench: Bench) -> None:
    leader = await bench.stack.leader_of(bench.bus, subjects.jobs_stream(REGION))
    leader.kill()
    await leader.wait()
    await asyncio.sleep(8.0)
    await bench.stack.restart(leader.name)


async def kill_lane_leader(bench: Bench) -> None:
    """Whoever leads the lane hands its messages out: a new one delivers again what healthy workers run."""
    leader = await bench.stack.leader_of(bench.bus, subjects.lane_stream(REGION, Lane.PRIORITY))
    leader.kill()
    await leader.wait()
    await asyncio.sleep(8.0)
    await bench.stack.restart(leader.name)


CASES = (
    Case("nothing", nothing),
    Case("worker: kill -9", kill_worker),
    Case(f"worker: frozen for {FREEZE_S:g} s", freeze_worker),
    Case("worker: SIGTERM", drain_worker),
    Case(f"worker: cut off for {OUTAGE_S + 3:g} s", cut_worker_off),
    Case("engine: kill -9", crash_engine),
    Case(f"engine: hangs (step_timeout_s {STEP_TIMEOUT_S:g})", hang_engine),
    Case("leading scheduler: kill -9", kill_leader),
    Case(f"all schedulers: dead for {OUTAGE_S:g} s", kill_schedulers),
    Case("door: kill -9, KEEP", kill_door, OnDisconnect.KEEP),
    Case("door: kill -9, CANCEL", kill_door),
    Case("NATS, one server: kill -9", restart_nats),
    Case(f"NATS: slow for {OUTAGE_S:g} s", slow_nats),
    Case("slow readers", slow_reader),
    Case("batch work yields to priority", preempt, lane=Lane.BATCH),
)
CLUSTER_CASES = (
    Case("NATS, three servers: records' leader kill -9", kill_records_leader),
    Case("NATS, three servers: lane's leader kill -9", kill_lane_leader),
)


# --- the run ---------------------------------------------------------------------------------------


async def measure(smoke: bool) -> Report:
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    counts: dict[str, tuple[int, int]] = {}
    quiet_s = 0.0
    for servers, cases in ((1, CASES), (CLUSTER_SIZE, CLUSTER_CASES)):
        if smoke and servers > 1:
            continue
        async with benched(servers) as bench:
            for case in cases[:2] if smoke else cases:
                samples = []
                for _ in range(1 if smoke else REPEATS):
                    samples.append(await bench.sample(case))
                    await ready(bench)
                if case.fault is nothing:
                    quiet_s = max(sample.silence_s for sample in samples)
                row, key = _row(case, samples, quiet_s)
                rows.append(row)
                print("  ".join(row), file=sys.stderr, flush=True)
                figures[f"{key}_gap_median_s"] = percentile([s.silence_s for s in samples], 50)
                figures[f"{key}_gap_max_s"] = max(s.silence_s for s in samples)
                figures[f"{key}_refused_max_s"] = max(s.refused_s for s in samples)
                counts[f"lost: {case.name}"] = (sum(s.lost for s in samples), 0)
                counts[f"doubled: {case.name}"] = (sum(s.doubled for s in samples), 0)
    columns = ["fault", "gap s, median", "gap s, longest", "new requests s", "lost", "doubled", "told meanwhile"]
    notes = [(f"{REPEATS} repeats of {STREAMS} streams of {TOKENS} tokens; without a fault the longest silence is"
             f" {quiet_s:.2f} s")]  # fmt: skip
    return Report("What a fault costs", columns, rows, figures, counts=counts, notes=notes)


def _row(case: Case, samples: list[Sample], quiet_s: float) -> tuple[list[str], str]:
    gaps = [sample.silence_s for sample in samples]
    told: Counter[str] = Counter()
    for sample in samples:
        told.update({word: count for word, count in sample.told.items() if word != "ok"})
    words = ", ".join(f"{count} {word}" for word, count in told.most_common(4))
    key = "".join(c if c.isalnum() else "_" for c in case.name.lower()).strip("_")
    row = [
        case.name,
        f"{percentile(gaps, 50):.2f}",
        f"{max(gaps):.2f}",
        f"{max(sample.refused_s for sample in samples):.2f}",
        str(sum(sample.lost for sample in samples)),
        str(sum(sample.doubled for sample in samples)),
        words or "-",
    ]
    return row, key


if __name__ == "__main__":
    main(measure, __doc__ or "", limit_s=LIMIT_S)
