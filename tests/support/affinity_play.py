"""Conversations over a stack of several workers, and the one cache that they are compared with.

Each turn's prompt is all that was said before and something new. The reference is a prefix cache of all workers' size
together, that every prompt passes in the order in which they were sent: what it would find is what homes can find at
most. Whole blocks, least recently used first out, as engines have it.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from laneway.cli.stack import StackOptions
from laneway.client import Client, Lane, RequestFields, SchedulerClient
from tests.support.drill_load import PATIENCE, workers_seen
from tests.support.drill_stack import DrillStack
from tests.support.nats import eventually

WORKERS, SLOTS, KV_TOKENS, BLOCK_TOKENS = 2, 8, 16_384, 32
TURNS, SESSIONS = 5, 16
ANSWER_TOKENS = 16
COLD_SHARE = 0.5  # a turn that finds less of what the one cache would find began anew


@dataclass(frozen=True)
class Engine:
    """Whose caches are met. `first` and `more`: prompt tokens of a first turn, and new ones of each later turn;
    `at_once`: turns under way together."""

    name: str
    vocabulary: tuple[int, int]  # token ids to draw from
    first: int
    more: int
    at_once: int


# OpenVINO tells a lower bound of what came from its cache, which is near where few prompts are computed in one step and
# what is new of a prompt fits one step of 128 tokens.
OPENVINO = Engine("openvino", (1_000, 40_000), first=512, more=64, at_once=4)
SIMULATED = Engine("simulated", (0, 256), first=256, more=96, at_once=16)


class OneCache:
    """A prefix cache of so many blocks."""

    def __init__(self, blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self._room = blocks
        self._block_tokens = block_tokens
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def found_tokens(self, prompt: Sequence[int]) -> int:
        """Of a prompt, in whole blocks; the last token is always computed."""
        found = 0
        for block in self._hashes(prompt[:-1]):
            if block not in self._blocks:
                break
            found += self._block_tokens
        return found

    def keep(self, ids: Sequence[int]) -> None:
        for block in reversed(list(self._hashes(ids))):  # the end of a prefix is forgotten first
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._room:
            self._blocks.popitem(last=False)

    def _hashes(self, ids: Sequence[int]) -> Iterator[int]:
        chain = 0
        for at in range(0, len(ids) - self._block_tokens + 1, self._block_tokens):
            chain = hash((chain, *ids[at : at + self._block_tokens]))
            yield chain


@dataclass
class Turn:
    session: int
    number: int
    prompt_tokens: int
    cached_tokens: int
    reference_tokens: int

    @property
    def cold(self) -> bool:
        return self.cached_tokens < COLD_SHARE * self.reference_tokens


@dataclass
class Play:
    """Sessions that go on turn by turn; every turn is noted."""

    engine: Engine
    seed: int = 1
    said: dict[int, list[int]] = field(default_factory=dict)  # session: all token ids so far
    turns: list[Turn] = field(default_factory=list)
    cache: OneCache = field(default_factory=lambda: OneCache(WORKERS * KV_TOKENS // BLOCK_TOKENS))

    async def talk(self, client: Client, sessions: int, turns: int) -> list[Turn]:
        """So many turns more of each session; of one session one after the other, of all `at_once` together."""
        free = asyncio.Semaphore(self.engine.at_once)
        begin = len(self.turns)

        async def one(session: int) -> None:
            for _ in range(turns):
                async with free:
                    await self._turn(client, session)

        async with asyncio.TaskGroup() as group:
            for session in range(sessions):
                group.create_task(one(session))
        return self.turns[begin:]

    async def _turn(self, client: Client, session: int) -> None:
        said = self.said.setdefault(session, [])
        number = sum(turn.session == session for turn in self.turns)
        said += self.new_ids(f"{session}:{number}", self.engine.more if said else self.engine.first)
        found = self.cache.found_tokens(said)
        self.cache.keep(said)  # as soon as it is computed, others may begin with it
        prompt_tokens = len(said)
        async with client.generate(**self.request(said, f"session {session}")) as stream:
            async for chunk in stream:
                said += chunk.token_ids
        usage = stream.finished.usage
        assert usage.prompt_tokens == prompt_tokens
        self.cache.keep(said[:-1])  # nobody computed the last token's part
        self.turns.append(Turn(session, number, prompt_tokens, usage.cached_tokens, found))

    def new_ids(self, name: str, count: int) -> list[int]:
        draw = random.Random(f"{self.seed}:{name}")
        return [draw.randrange(*self.engine.vocabulary) for _ in range(count)]

    def request(self, ids: Sequence[int], session: str) -> RequestFields:
        request: RequestFields = {
            "model": "chat", "token_ids": list(ids), "max_tokens": ANSWER_TOKENS, "ignore_eos": True,
            "temperature": 0.0, "lane": Lane.PRIORITY, "ttft_target_s": 60.0, "deadline_s": 600.0,
        }  # fmt: skip
        if session:
            request["session_id"] = session
        return request


async def hot(play: Play, client: Client, jobs: int, prefix_tokens: int, at_once: int) -> int:
    """So many jobs that begin alike and name no session; the prompt tokens that came from a cache."""
    shared = play.new_ids("shared", prefix_tokens)
    free = asyncio.Semaphore(at_once)
    cached = 0

    async def one(number: int) -> None:
        nonlocal cached
        async with free:
            prompt = [*shared, *play.new_ids(f"hot {number}", 8)]
            async with client.generate(**play.request(prompt, "")) as stream:
                async for _ in stream:
                    pass
            cached += stream.finished.usage.cached_tokens

    async with asyncio.TaskGroup() as group:
        for number in range(jobs):
            group.create_task(one(number))
    return cached


def reuse(turns: Sequence[Turn]) -> float:
    """Prompt tokens that came from a cache, over those that would come from the one cache."""
    return sum(turn.cached_tokens for turn in turns) / max(1, sum(turn.reference_tokens for turn in turns))


def cold_turns(turns: Sequence[Turn]) -> dict[int, int]:
    """By session: turns that had to compute again what the one cache would have had."""
    counts = dict.fromkeys((turn.session for turn in turns), 0)
    for turn in turns:
        counts[turn.session] += turn.cold
    return counts


@dataclass
class Place:
    """A running stack, and who asks it."""

    stack: DrillStack
    client: Client
    scheduler: SchedulerClient

    async def jobs_by_worker(self) -> dict[str, int]:
        """Runs that ended, by worker; leases are a second old at most."""
        await asyncio.sleep(1.5)
        return {worker.name: worker.jobs_done async for worker in self.scheduler.list_workers()}

    async def homes(self) -> dict[str, str]:
        """Who serves which home."""
        workers = {worker.worker_id: worker.name async for worker in self.scheduler.list_workers()}
        plan = await self.scheduler.get_plan()
        homes = plan.pools[0].homes
        return {home.home: workers.get(home.worker_id, "") for home in homes}

    async def all_served(self) -> bool:
        homes = await self.homes()
        return len(homes) == WORKERS and all(homes.values())


@asynccontextmanager
async def place(engine: Engine, *, homes: bool = True) -> AsyncIterator[Place]:
    model: dict[str, object] = {
        "name": "chat", "engine": engine.name, "slots": SLOTS, "workers": WORKERS, "kv_tokens": KV_TOKENS,
        "context_length": 8192, "queue_length": 64,
    }  # fmt: skip
    if engine.name == "simulated":
        model["engine_options"] = {"pace_s": 0.02, "prefill_chunk_tokens": 64}  # 3,200 prompt tokens a second
    if not homes:
        model["home_slots"] = 0
    options = StackOptions(settings={"models": [model], "process": {"drain_s": 0.3}})
    async with (
        DrillStack(options) as stack,
        Client(stack.addresses.admission, retry_budget=PATIENCE) as client,
        SchedulerClient(stack.addresses.scheduler) as scheduler,
    ):
        here = Place(stack, client, scheduler)
        await workers_seen(scheduler, WORKERS)
        if homes:
            await eventually(here.all_served, 60.0)
        yield here
