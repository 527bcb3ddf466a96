"""What callers of the stack saw while a part of it was killed: streams, submitted jobs and a NATS producer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from laneway.client import Client, JobState, Lane, LanewayError, RequestFields, RetryParams
from tests.stack.composed import ROOT, Composed

STREAM_TOKENS, BATCH_TOKENS = 64, 24
STREAMS, SUBMITS, PUBLISHED, GAP_S = 6, 12, 18, 0.25
HOLD_S = 20.0  # a job that may not start before is parked until then
TIMES = {0: "unheard", 1: "once"}
# By default a priority call is tried twice; an outage lasts longer than that.
PATIENCE = RetryParams(attempts_max=dict.fromkeys(Lane, 100), floor_per_s=10.0)


@dataclass
class Kill:
    """One kill, and everything that was under way meanwhile."""

    victim: str
    at_s: float = 0.0  # Unix
    back_s: float = 0.0  # until its container was healthy again
    under_way: Counter[str] = field(default_factory=Counter)  # jobs at the time, by state
    note: str = ""
    streams: list[Stream] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)  # submitted over gRPC
    retried: Counter[str] = field(default_factory=Counter)  # reasons that the client heard and tried again after
    states: Counter[str] = field(default_factory=Counter)  # of all jobs but the streams', in the end
    produced: dict[str, Any] = field(default_factory=dict)  # what became of the producer's jobs
    ends: dict[str, int] = field(default_factory=dict)  # how often the region told each job's end

    def accepted(self) -> list[str]:
        return [*self.jobs, *self.produced["accepted"], *(stream.job_id for stream in self.streams if stream.job_id)]


@dataclass
class Stream:
    """One attached caller, who sees each token index once and in order, or an error."""

    job_id: str = ""
    indices: list[int] = field(default_factory=list)
    attempt: int = 0
    stall_s: float = 0.0
    error: str = ""

    async def run(self, client: Client, number: int) -> None:
        request = _request(f"Tell me a story about the number {number}.", Lane.PRIORITY, STREAM_TOKENS)
        try:
            async with client.generate(**request) as stream:
                self.job_id = stream.job_id
                async for chunk in stream:
                    self.indices += range(chunk.first_index, chunk.first_index + len(chunk.token_ids))
            self.attempt, self.stall_s = stream.finished.attempt, stream.finished.stall_s
        except LanewayError as error:
            self.error = error.reason


class Producer:
    """tests/stack/producer.py in a container of the stack's network."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: list[dict[str, Any]] = []

    async def until(self, key: str, value: object = None) -> dict[str, Any]:
        """The first of its lines that has the key, with the value if one is given."""
        read = 0
        while True:
            for line in self._lines[read:]:
                if key in line and value in (None, line[key]):
                    return line
            read = len(self._lines)
            await self._read()

    async def worker_of(self, job: str) -> str:
        """The worker that started a job."""
        worker: str = (await self.until("started", job))["worker"]
        return worker

    async def ends_of(self, jobs: list[str]) -> dict[str, int]:
        """How often the region told the end of each of these jobs, now that all have ended. It is the last question."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(jobs).encode() + b"\n")
        ends: dict[str, int] = (await self.until("ends"))["ends"]
        return ends

    async def _read(self) -> None:
        assert self._process.stdout is not None
        text = await self._process.stdout.readline()
        assert text, f"the producer ended with status {await self._process.wait()}"
        self._lines.append(json.loads(text))


@asynccontextmanager
async def producer(stack: Composed) -> AsyncIterator[Producer]:
    process = await asyncio.create_subprocess_exec(
        *("docker", "compose", "run", "--rm", "--no-TTY", "--no-deps", "producer", str(PUBLISHED), str(GAP_S)),
        cwd=ROOT,
        env=stack.environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Producer(process)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def submit(client: Client, number: int, *, hold_s: float = 0.0) -> str:
    request = _request(f"Describe the number {number}.", Lane.BATCH, BATCH_TOKENS)
    if hold_s:
        request["not_before_s"] = hold_s
    return (await client.submit(**request)).job_id


async def end_of(client: Client, job_id: str) -> str:
    """The state in which a job ended, with its number of tokens if that is not as asked for."""
    job = await client.wait(job_id, timeout_s=600.0)
    whole = job.state is not JobState.SUCCEEDED or job.usage.completion_tokens == BATCH_TOKENS
    return job.state.value if whole else f"{job.state.value} with {job.usage.completion_tokens} tokens"


def _request(text: str, lane: Lane, max_tokens: int) -> RequestFields:
    """With the times that a slow machine needs."""
    return {
        "model": "chat",
        "messages": [{"role": "user", "content": text}],
        "lane": lane,
        "max_tokens": max_tokens,
        "ttft_target_s": 600.0,
        "deadline_s": 1200.0,
        "temperature": 0.0,
        "ignore_eos": True,
    }


def table(kills: Sequence[Kill]) -> list[str]:
    """What each kill cost those who called."""
    rows = [("killed -9", "under way", "back", "streams", "longest pause", "submits", "producer", "ended", "end told")]
    for kill in kills:
        broken = Counter(stream.error for stream in kill.streams if stream.error)
        whole = [stream for stream in kill.streams if not stream.error]
        moved = sum(stream.attempt > 1 for stream in whole)
        retried, produced, told = sum(kill.retried.values()), kill.produced, Counter(kill.ends.values())
        rows.append(
            (
                kill.victim,
                ", ".join(f"{count} {state}" for state, count in sorted(kill.under_way.items())),
                f"{kill.back_s:.1f} s",
                f"{len(whole)} of {len(kill.streams)} whole, {moved} moved{_counts(broken)}",
                f"{max((stream.stall_s for stream in whole), default=0.0):.1f} s",
                f"{len(kill.jobs)} accepted, {retried} retries{_counts(kill.retried)}",
                f"{len(produced['accepted'])} accepted, {sum(produced['retries'].values())} retries",
                f"{kill.states['succeeded'] + len(whole)} of {len(kill.ends)}",
                ", ".join(f"{jobs} {TIMES.get(times, f'{times} times')}" for times, jobs in sorted(told.items())),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, *(f"{kill.victim}: {kill.note}" for kill in kills if kill.note)]


def _counts(reasons: Counter[str]) -> str:
    return f" ({', '.join(f'{count} {reason}' for reason, count in sorted(reasons.items()))})" if reasons else ""
