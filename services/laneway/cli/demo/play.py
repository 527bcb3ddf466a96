"""The demo itself: starts the stack, plays the arrivals, kills a worker, asks for one refusal, compares with FIFO."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import nats
import uvloop
from rich.console import Console

from laneway.cli.demo.outcome import RunResult, broken_promises
from laneway.cli.demo.report import TRY_NEXT, print_report
from laneway.cli.demo.script import (
    BURST,
    DOCUMENTS_AT_S,
    KILL_AT_S,
    REFUSAL_AT_S,
    TRIAL_TOKENS,
    Arrival,
    arrivals,
    document_tokens,
    find_samples,
    trial_prompts,
)
from laneway.cli.demo.show import Board, Screen
from laneway.cli.demo.traffic import MODEL, Mode, Traffic
from laneway.cli.stack import LocalStack, Progress, StackError, StackOptions
from laneway.client import Client, SchedulerClient
from laneway.client.values import Message, Worker
from laneway.core.errors import LanewayError
from laneway.core.lanes import Lane

DRAIN_S_MAX = 30.0
WATCH_S = 0.25
ACK_WAIT_S = 3.0  # on all lanes: a killed worker's jobs come back soon
SLOTS = 8
QUEUE_LENGTH = 8  # priority jobs that may wait beyond the slots
FIFO_QUEUE_LENGTH = 1000
LANEWAY_MODE = Mode("Laneway", single_lane=False)
FIFO_MODE = Mode("FIFO", single_lane=True)


def demo(*, fifo: bool = True, keep: bool = False) -> int:
    """Runs the demo and returns its exit status: 0 when every promise was kept, 1 otherwise."""
    console = Console()
    try:
        return uvloop.run(_demo(console, fifo=fifo, keep=keep))
    except (StackError, FileNotFoundError) as error:
        console.print(f"the demo cannot run: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
        return 130


async def _demo(console: Console, *, fifo: bool, keep: bool) -> int:
    data = find_samples(Path(__file__))
    console.print("Starting NATS, the services and two workers with a real model (about 15 s) ...")
    runs = []
    async with _stack(console, QUEUE_LENGTH) as stack:
        script = arrivals(data, await _measure(console, stack, trial_prompts(data)))
        runs.append(await _play(console, stack, LANEWAY_MODE, script))
        if keep:
            print_report(console, runs)
            return await _stay(console, stack)
    if fifo:
        console.print("The same arrivals through a single FIFO lane, for comparison (about 90 s; FIFO=0 skips) ...")
        async with _stack(console, FIFO_QUEUE_LENGTH) as stack:
            runs.append(await _play(console, stack, FIFO_MODE, script))
    print_report(console, runs)
    broken = broken_promises(runs[0])
    for sentence in broken:
        console.print(f"[red]broken promise:[/red] {sentence}")
    if not broken:
        console.print("[green]Every promise was kept.[/green]")
    console.print("\nTry next:")
    for line in TRY_NEXT:
        console.print(f"  {line}", highlight=False)
    return 1 if broken else 0


def _stack(console: Console, queue_length: int) -> LocalStack:
    model: Mapping[str, object] = {
        "name": MODEL, "tier": "small", "engine": "openvino", "slots": SLOTS, "workers": 2,
        "queue_length": queue_length, "max_tokens_default": 64,
    }  # fmt: skip
    settings: Mapping[str, object] = {
        "models": [model],
        "process": {"drain_s": 5.0},
        "policy": {"priority_reserved_slots": 2},
    }
    waits = {lane.value: ACK_WAIT_S for lane in Lane}

    def progress(step: Progress) -> None:
        if step.state == "ready":
            console.print(f"  {step.part} {step.detail}", highlight=False, markup=False)

    return LocalStack(StackOptions(settings=settings, ack_wait_s=waits), on_progress=progress)


async def _measure(console: Console, stack: LocalStack, prompts: Sequence[str]) -> int:
    """Runs a few documents to see how fast this machine is; returns how long the demo's answers may be."""
    started_s = time.monotonic()
    async with Client(stack.addresses.admission) as client, asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(_trial(client, prompt))
    took_s = time.monotonic() - started_s
    tokens = document_tokens(took_s)
    console.print(f"{len(prompts)} trial documents took {took_s:.1f} s: the demo's get answers of {tokens} tokens")
    return tokens


async def _trial(client: Client, prompt: str) -> None:
    submitted = await client.submit(
        model=MODEL, messages=[Message("user", prompt)], lane=Lane.BATCH, max_tokens=TRIAL_TOKENS, ignore_eos=True
    )
    await client.wait(submitted.job_id)


async def _play(console: Console, stack: LocalStack, mode: Mode, script: Sequence[Arrival]) -> RunResult:
    """One pass over the arrivals on a running stack."""
    board = Board(title=mode.name)
    async with contextlib.AsyncExitStack() as parts:
        client = await parts.enter_async_context(Client(stack.addresses.admission))
        scheduler = await parts.enter_async_context(SchedulerClient(stack.addresses.scheduler))
        bus = await nats.connect(stack.addresses.nats)
        parts.push_async_callback(bus.close)
        screen = parts.enter_context(Screen(console, board))
        busy_before = _busy(await _workers(scheduler))
        traffic = Traffic(client, bus, mode, board)
        started_s = time.monotonic()
        background = [
            asyncio.create_task(_watch(scheduler, board, screen, started_s)),
            asyncio.create_task(_kill(stack, scheduler, board, started_s)),
        ]
        if not mode.single_lane:
            background.append(asyncio.create_task(_ask_for_refusal(client, board, started_s)))
        try:
            board.tell("real chats stream in the priority lane")
            await traffic.run(script, started_s)
            length_s = time.monotonic() - started_s
            for task in background[1:]:
                await task
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        workers = await _workers(scheduler)
    # A killed worker's figures end with it: utilisation is that of the workers that lived through.
    lived = [name for name in busy_before if name in {w.name for w in workers}]
    busy = _busy(workers)
    used = [(busy[name] - busy_before[name]) / length_s for name in lived]
    return RunResult(
        mode.name,
        traffic.outcomes,
        length_s,
        utilisation=sum(used) / len(used) if used else None,
        resumed=sum(o.attempts > 1 for o in traffic.outcomes),
    )


async def _watch(scheduler: SchedulerClient, board: Board, screen: Screen, started_s: float) -> None:
    while True:
        board.elapsed_s = time.monotonic() - started_s
        with contextlib.suppress(LanewayError):
            board.lanes = [status async for status in scheduler.list_lanes()]
            board.workers = await _workers(scheduler)
        screen.refresh()
        await asyncio.sleep(WATCH_S)


async def _kill(stack: LocalStack, scheduler: SchedulerClient, board: Board, started_s: float) -> None:
    """kill -9 of the worker that runs most, once documents are under way; a new one takes its place later."""
    await asyncio.sleep(max(0.0, started_s + DOCUMENTS_AT_S - time.monotonic()))
    board.tell("a producer publishes forty documents to NATS for the batch lane")
    await asyncio.sleep(max(0.0, started_s + KILL_AT_S - time.monotonic()))
    workers = await _workers(scheduler)
    victim = max((w for w in workers if w.state == "READY"), key=lambda w: w.running)
    stack.child(victim.name).kill()
    board.dead.add(victim.name)
    board.tell(f"kill -9 of {victim.name} with {victim.running} jobs running; the other takes over")
    await asyncio.sleep(6.0)
    worker = await stack.add_worker()
    board.tell(f"{worker.name} has joined")


async def _ask_for_refusal(client: Client, board: Board, started_s: float) -> None:
    """More short priority requests at once than the lane holds: the last ones are refused, with a reason and a time."""
    await asyncio.sleep(max(0.0, started_s + REFUSAL_AT_S - time.monotonic()))
    refusals: list[LanewayError] = []
    accepted: list[str] = []

    async def one(number: int) -> None:
        try:
            submitted = await client.submit(
                model=MODEL, prompt=f"{number}", lane=Lane.PRIORITY, max_tokens=1, retry_s_max=0.0
            )
            accepted.append(submitted.job_id)
        except LanewayError as error:
            refusals.append(error)

    async with asyncio.TaskGroup() as group:
        for number in range(BURST):
            group.create_task(one(number))
    if refusals:
        error = refusals[0]
        again = f"again in {error.retry_after_s:.1f} s" if error.retry_after_s is not None else "no retry helps"
        board.tell(f"{BURST} requests at once: {len(refusals)} refused, {error.reason}: {error.message}; {again}")
    else:
        board.tell(f"{BURST} requests at once: all found room")
    for job_id in accepted:
        await client.wait(job_id)


async def _workers(scheduler: SchedulerClient) -> list[Worker]:
    return [worker async for worker in scheduler.list_workers()]


def _busy(workers: Sequence[Worker]) -> dict[str, float]:
    return {worker.name: worker.busy_s for worker in workers}


async def _stay(console: Console, stack: LocalStack) -> int:
    console.print(f"The stack stays up at {stack.addresses.admission}; Ctrl-C ends it.")
    with contextlib.suppress(asyncio.CancelledError):
        await stack.ended()
    return 0
