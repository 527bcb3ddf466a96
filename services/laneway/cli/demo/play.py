"""The demo itself: starts the stack, plays the arrivals, kills a worker, asks for one refusal, compares with FIFO."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import nats
import nats.errors
import uvloop
from rich.console import Console

from laneway.cli.console import EXIT_FAILED, EXIT_INTERRUPTED, say
from laneway.cli.demo.outcome import RunResult, broken_promises
from laneway.cli.demo.report import TRY_NEXT, TRY_NEXT_HERE, print_report
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
from laneway.cli.endpoint import endpoint_file, remove_endpoint
from laneway.cli.stack import LocalStack, Progress, StackError, StackOptions
from laneway.cli.staying import announce, end_at_once, stay
from laneway.client import Client, SchedulerClient
from laneway.client.values import Message, Worker
from laneway.core.errors import ConfigError, LanewayError
from laneway.core.lanes import Lane
from laneway.runtime.exception_groups import leaf_errors

DRAIN_S_MAX = 30.0
WATCH_S = 0.25
ACK_WAIT_S = 3.0  # on all lanes: a killed worker's jobs come back soon
REPLACED_AFTER_S = 6.0  # a new worker comes for the killed one
SLOTS = 8
QUEUE_LENGTH = 8  # priority jobs that may wait beyond the slots
FIFO_QUEUE_LENGTH = 1000
LANEWAY_MODE = Mode("Laneway", single_lane=False)
FIFO_MODE = Mode("FIFO", single_lane=True)
STOPPED = "stopped; nothing is left running"
FORESEEN = (StackError, LanewayError, ConfigError, nats.errors.Error, OSError)  # failures that a sentence explains


def demo(*, fifo: bool = True, keep: bool = False) -> int:
    """Runs the demo and returns its exit status: 0 when every promise was kept, 1 otherwise, 130 after Ctrl-C."""
    console = Console()
    try:
        return uvloop.run(Demo(console, fifo=fifo, keep=keep).run())
    except KeyboardInterrupt:  # before the first step
        console.print(STOPPED)
        return EXIT_INTERRUPTED


class Demo:
    """One showing. Ctrl-C ends it in order whatever it is at, and a second one ends it at once."""

    def __init__(self, console: Console, *, fifo: bool, keep: bool) -> None:
        self._console, self._fifo, self._keep = console, fifo, keep
        self._doing = ""  # once a stack runs: what may fail
        self._stack: LocalStack | None = None
        self._showing: asyncio.Task[int]
        self._asked_to_end = False
        self._leave: asyncio.Event | None = None  # while the stack stays up

    async def run(self) -> int:
        self._showing = asyncio.create_task(self._show())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        try:
            return await self._showing
        except asyncio.CancelledError:
            self._console.print(STOPPED)
            return EXIT_INTERRUPTED
        except Exception as error:
            why = next(leaf_errors(error))
            if not isinstance(why, FORESEEN):
                raise
            what = f"the demo failed while {self._doing}" if self._doing else "the demo cannot run"
            self._console.print(f"{what}: {why}", markup=False, highlight=False, soft_wrap=True)
            return EXIT_FAILED

    def _on_signal(self) -> None:
        if self._asked_to_end:
            end_at_once(self._stack, temporary=True)
        self._asked_to_end = True
        if self._leave is not None:
            self._leave.set()
        else:
            self._showing.cancel()

    async def _show(self) -> int:
        console, runs = self._console, []
        data = find_samples(Path(__file__))
        console.print("Starting NATS, the services and two workers with a real model (about 15 s) ...")
        async with self._running(QUEUE_LENGTH) as stack:
            self._doing = "measuring this machine with trial documents"
            script = arrivals(data, await _measure(console, stack, trial_prompts(data)))
            self._doing = "playing the arrivals through Laneway"
            runs.append(await _play(console, stack, LANEWAY_MODE, script))
            if self._keep:
                status = _judge(console, runs, TRY_NEXT_HERE)
                self._doing = "keeping the stack up"
                return status if await self._stay(stack) else EXIT_FAILED
        if self._fifo:
            console.print("The same arrivals through a single FIFO lane, for comparison (about 90 s; FIFO=0 skips) ...")
            self._doing = "starting the stack for the comparison"
            async with self._running(FIFO_QUEUE_LENGTH) as stack:
                self._doing = "playing the arrivals through a single FIFO lane"
                runs.append(await _play(console, stack, FIFO_MODE, script))
        return _judge(console, runs, TRY_NEXT)

    @contextlib.asynccontextmanager
    async def _running(self, queue_length: int) -> AsyncIterator[LocalStack]:
        self._stack = _stack(self._console, queue_length)
        async with self._stack as stack:
            try:
                yield stack
            except asyncio.CancelledError:
                for worker in stack.workers:  # nobody waits for what they run
                    worker.kill_group()
                raise

    async def _stay(self, stack: LocalStack) -> bool:
        """Until Ctrl-C; False if the stack ended by itself."""
        self._leave = asyncio.Event()
        path = endpoint_file()
        try:
            announce(stack, path)
            addresses = stack.addresses
            say(f"  admission {addresses.admission}, scheduler {addresses.scheduler}, routing {addresses.routing}")
            say(f"  NATS {addresses.nats}; logs are in {stack.logs}")
            say("the stack stays up; Ctrl-C stops everything")
            return await stay(stack, self._leave)
        finally:
            remove_endpoint(path, os.getpid())
            say("stopping; press Ctrl-C again to stop at once")


def _judge(console: Console, runs: Sequence[RunResult], try_next: Sequence[str]) -> int:
    """Shows what was promised and got; the exit status."""
    print_report(console, runs)
    broken = broken_promises(runs[0])
    for sentence in broken:
        console.print(f"[red]broken promise:[/red] {sentence}")
    if not broken:
        console.print("[green]Every promise was kept.[/green]")
    console.print("\nTry next:")
    for line in try_next:
        console.print(f"  {line}", highlight=False)
    return EXIT_FAILED if broken else 0


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
    victim = max((w for w in workers if w.state == "READY"), key=lambda w: w.running, default=None)
    if victim is None:
        raise StackError("no worker was ready when one was to be killed")
    process = stack.child(victim.name)
    process.stopping = True  # on purpose: the stack has not lost a part
    process.kill()
    board.dead.add(victim.name)
    board.tell(f"kill -9 of {victim.name} with {victim.running} jobs running; the other takes over")
    await asyncio.sleep(REPLACED_AFTER_S)
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
