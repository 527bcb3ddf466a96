"""One drill as a value: what it will do, what it found; and what every drill plays with.

A drill calls RPCs like any caller. It uses labels of its own, so that its jobs are told from others, and puts back what
it changed before it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laneway.core.lanes import Lane, OnDisconnect

if TYPE_CHECKING:
    from laneway.client import Client, Job, RequestFields, SchedulerClient, TokenStream, Worker

LABEL = "laneway-drill"
POLL_S = 0.1
TOKENS = 24
END_S_MAX = 120.0  # of one job; the deadline that it gets
CLEAN_UP_S_MAX = 20.0


class Skipped(Exception):
    """The stack cannot show this; the message says why."""


@dataclass
class Outcome:
    """What a drill found."""

    name: str
    held: bool = True
    skipped: str = ""  # why
    took_s: float = 0.0
    found: list[str] = field(default_factory=list)  # what was counted
    broken: list[str] = field(default_factory=list)  # promises that were not kept


@dataclass
class Play:
    """What a drill has at hand. `expect` notes a broken promise and goes on."""

    client: Client
    scheduler: SchedulerClient
    model: str
    run: str  # label of this run
    jobs: int
    outcome: Outcome
    say: Callable[[str], None]

    def expect(self, kept: bool, promise: str) -> None:
        if not kept:
            self.outcome.held = False
            self.outcome.broken.append(promise)

    def found(self, text: str) -> None:
        self.outcome.found.append(text)

    def request(
        self, number: int, lane: Lane = Lane.PRIORITY, *, tokens: int = TOKENS, keep: bool = False
    ) -> RequestFields:
        """Greedy and of a known length. The drill's name goes along as a label."""
        made: RequestFields = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"Tell me something about the number {number}."}],
            "lane": lane,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "ttft_target_s": END_S_MAX,
            "deadline_s": END_S_MAX,
            "labels": self.labels,
        }
        if keep:
            made["on_disconnect"] = OnDisconnect.KEEP
        return made

    @property
    def labels(self) -> dict[str, str]:
        return {LABEL: self.run, "name": self.outcome.name}

    async def listed(self) -> list[Job]:
        """This drill's jobs, as the door lists them."""
        return [job async for job in self.client.list_jobs(labels=self.labels)]

    async def until(self, what: Callable[[], Awaitable[bool]], within_s: float) -> bool:
        """Whether it came true within the time."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + within_s
        while not await what():
            if loop.time() >= give_up_s:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def put_back(self, act: Awaitable[object], otherwise: str) -> None:
        """Takes back what the drill changed, or says at once what is left for a person to do."""
        try:
            await act
        except BaseException:
            self.say(f"  {otherwise}")
            raise

    async def workers(self) -> list[Worker]:
        """Those that serve the model and are ready."""
        models = [m async for m in self.scheduler.list_models()]
        name, _, tier = self.model.partition("/")
        pools = {m.pool for m in models if m.name == name and tier in ("", m.tier)}
        return [w async for w in self.scheduler.list_workers() if w.pool in pools and w.state == "READY"]


@dataclass(frozen=True)
class Drill:
    name: str
    intent: str  # said before it begins
    play: Callable[[Play], Awaitable[None]]


@dataclass
class Heard:
    """A stream as it was heard, possibly over several calls."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    job_id: str = ""
    contiguous: bool = True

    async def listen(self, stream: TokenStream, *, tokens_max: int = 2**31) -> None:
        """Until the end, or until so many tokens were heard."""
        async for chunk in stream:
            self.job_id = stream.job_id
            self.contiguous = self.contiguous and chunk.first_index == len(self.ids)
            self.ids += chunk.token_ids
            self.text += chunk.text
            if len(self.ids) >= tokens_max:
                return


async def clean_up(client: Client, run: str) -> int:
    """Cancels whatever of a run has not ended; how many there were."""
    left = [job async for job in client.list_jobs(labels={LABEL: run}) if not job.state.terminal]
    await asyncio.gather(*(client.cancel(job.job_id) for job in left))
    return len(left)
