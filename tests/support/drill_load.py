"""Callers of every kind for drills, drawn from one seed; each notes what it was told, once and for ever.

The simulated engine's answer follows from the prompt alone, so every caller knows the undisturbed answer beforehand.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg

from laneway.client import (
    Client,
    Job,
    Lane,
    LanewayError,
    OnDisconnect,
    RequestFields,
    RetryParams,
    SchedulerClient,
)
from laneway.core import subjects
from laneway.core.ids import keyed_job_id
from laneway.core.job import NOT_ACCEPTED
from laneway.runtime.bus import Bus
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.wire import enums
from laneway.v1 import admission_pb2, bus_pb2, common_pb2, task_pb2
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest
from laneway.workers.engines.simulated import make_core
from tests.support.nats import REGION, eventually

TENANT = "default"
# Greedy, for an exact engine: then even a caller whose door and worker died can be given the rest of its answer.
PATIENT: RequestFields = {"model": "chat", "ttft_target_s": 3600.0, "ignore_eos": True, "temperature": 0.0}
# A door that has just come through an outage expects the worst of the queue, many times over: nobody is to be refused
# for that here, since a refusal with a time to come again would leave the drill without the job.
DEADLINE_S = 6 * 3600.0
# A service needs seconds to start again, and a cluster to choose a leader; by default a client gives up before that.
PATIENCE = RetryParams(attempts_max=dict.fromkeys(Lane, 200), floor_per_s=100.0, outage_s_max=120.0)
CALL_S_MAX = 90.0  # of a call with one answer, its repeats included
END_S_MAX = 90.0  # from an arrival to what its caller is told


class Way(StrEnum):
    ATTACHED = "attached"  # a stream; the job is dropped if its door dies
    KEPT = "kept"  # a stream; the job goes on if its door dies
    DETACHED = "detached"
    PRODUCED = "produced"  # over NATS
    LEFT = "left"  # a stream whose caller goes away in the middle
    CANCELLED = "cancelled"  # detached, and cancelled at some moment


MIX = {Way.ATTACHED: 35, Way.KEPT: 15, Way.DETACHED: 20, Way.PRODUCED: 20, Way.LEFT: 5, Way.CANCELLED: 5}


def answer_of(prompt_ids: Sequence[int], tokens: int) -> list[int]:
    """What the simulated engine says to a prompt."""
    core = make_core(EngineCapacity(1, 4096, 4096, 256), frozenset(), EngineOptions(pace_s=0.0))
    core.add(EngineRequest(1, tuple(prompt_ids), max_tokens=tokens, ignore_eos=True))
    answer: list[int] = []
    while core.busy():
        for step in core.step(0.0).steps:
            answer += step.token_ids
    return answer


@dataclass
class Asked:
    """One request, and what its caller saw of it."""

    number: int
    way: Way
    lane: Lane
    at_s: float  # after the beginning
    tokens: int
    turn_s: float  # when it leaves or cancels, after it was accepted
    seed: int
    due: datetime  # a moment, so that the same request can be made twice
    job_id: str = ""
    told: list[str] = field(default_factory=list)  # ends: a state, or the reason of an error
    ids: list[int] = field(default_factory=list)
    text: str = ""
    attempts: int = 0
    stall_s: float = 0.0  # longest silence of its stream
    stalled_at_s: float = 0.0  # when that began, after the beginning
    verdicts: Counter[str] = field(default_factory=Counter)

    @property
    def key(self) -> str:
        return f"drill-{self.seed}-{self.number}"

    @property
    def prompt_ids(self) -> list[int]:
        return list(f"{self.seed} asks {self.number:05d}".encode())

    @property
    def expected(self) -> list[int]:
        return answer_of(self.prompt_ids, self.tokens)

    @property
    def fields(self) -> RequestFields:
        request: RequestFields = {**PATIENT, "token_ids": self.prompt_ids, "max_tokens": self.tokens, "lane": self.lane}
        request["deadline_at"] = self.due
        request["labels"] = {"drill": str(self.seed)}
        if self.way is Way.KEPT:
            request["on_disconnect"] = OnDisconnect.KEEP
        return request


def drawn(seed: int, count: int, span_s: float, mix: dict[Way, int] | None = None, tokens: int = 24) -> list[Asked]:
    """Arrivals at random moments of the span, sorted by time."""
    rng = random.Random(seed)
    mix = mix or MIX
    ways = rng.choices(list(mix), list(mix.values()), k=count)
    times = sorted(rng.uniform(0.0, span_s) for _ in range(count))
    due = datetime.now(UTC) + timedelta(seconds=DEADLINE_S)
    out: list[Asked] = []
    for number, (way, at_s) in enumerate(zip(ways, times, strict=True)):
        lanes = [Lane.DEFERRABLE, Lane.BATCH] if way in (Way.PRODUCED, Way.DETACHED) else list(Lane)
        weights = [1] * len(lanes) if len(lanes) == 2 else [4, 1, 1]
        lane = rng.choices(lanes, weights)[0]
        length = rng.randint(tokens // 2, tokens)
        out.append(Asked(number, way, lane, at_s, length, rng.uniform(0.0, 2.0), seed, due))
    return out


class Callers:
    """Sends what was drawn, and holds what was seen. `run` returns once every caller was told its end."""

    def __init__(self, doors: Sequence[str], bus: Callable[[], Bus], asked: Sequence[Asked]) -> None:
        self.asked = asked
        self._clients = [Client(address, retry_budget=PATIENCE) for address in doors]
        self._bus = bus
        self._began_s = 0.0
        self._by_key = {each.key: each for each in asked}

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def heard_verdict(self, msg: Msg) -> None:
        verdict = bus_pb2.IngestVerdict.FromString(msg.data)
        asked = self._by_key.get(verdict.key)
        if asked is not None:
            asked.job_id = verdict.job_id
            asked.verdicts[verdict.error.reason if verdict.HasField("error") else "OK"] += 1

    async def run(self) -> None:
        began_s = self._began_s = time.monotonic()
        ways = {
            Way.ATTACHED: self._attached,
            Way.KEPT: self._attached,
            Way.DETACHED: self._detached,
            Way.PRODUCED: self._produced,
            Way.LEFT: self._left,
            Way.CANCELLED: self._cancelled,
        }

        async def one(asked: Asked) -> None:
            try:
                async with asyncio.timeout(END_S_MAX):
                    await ways[asked.way](asked)
            except LanewayError as error:
                asked.job_id = asked.job_id or error.job_id
                asked.told.append(error.reason)
            except TimeoutError:
                asked.told.append("NO_END")

        async with asyncio.TaskGroup() as group:
            for asked in self.asked:
                await asyncio.sleep(began_s + asked.at_s - time.monotonic())
                group.create_task(one(asked))

    def _door(self, asked: Asked, further: int = 0) -> Client:
        return self._clients[(asked.number + further) % len(self._clients)]

    async def _attached(self, asked: Asked) -> None:
        async with self._door(asked).generate(idempotency_key=asked.key, **asked.fields) as stream:
            asked.job_id, last_s = stream.job_id, 0.0
            async for chunk in stream:
                assert chunk.first_index == len(asked.ids), f"{asked.key} hears {chunk.first_index}"
                asked.ids += chunk.token_ids
                asked.text += chunk.text
                now_s = time.monotonic()
                if last_s and now_s - last_s > asked.stall_s:
                    asked.stall_s, asked.stalled_at_s = now_s - last_s, last_s - self._began_s
                last_s = now_s
        asked.job_id = stream.job_id
        asked.told.append(stream.finished.state.value)
        asked.attempts = stream.finished.attempt

    async def _left(self, asked: Asked) -> None:
        async with self._door(asked).generate(idempotency_key=asked.key, **asked.fields) as stream:
            asked.job_id = stream.job_id
            async for chunk in stream:
                assert chunk.first_index == len(asked.ids), f"{asked.key} hears {chunk.first_index}"
                asked.ids += chunk.token_ids
                if len(asked.ids) >= asked.tokens / 3:
                    break
        await self._note_end(asked)

    async def _submitted(self, asked: Asked) -> None:
        submitted = await self._door(asked).submit(idempotency_key=asked.key, timeout_s=CALL_S_MAX, **asked.fields)
        asked.job_id = submitted.job_id
        if asked.number % 4 == 0:  # the same again, at another door, as after a lost answer
            again = self._door(asked, 1)
            twice = await again.submit(idempotency_key=asked.key, timeout_s=CALL_S_MAX, **asked.fields)
            assert twice.job_id == asked.job_id

    async def _detached(self, asked: Asked) -> None:
        await self._submitted(asked)
        await self._note_end(asked)

    async def _cancelled(self, asked: Asked) -> None:
        await self._submitted(asked)
        await asyncio.sleep(asked.turn_s)
        await self._door(asked, 1).cancel(asked.job_id, timeout_s=CALL_S_MAX)
        await self._note_end(asked)

    async def _produced(self, asked: Asked) -> None:
        spec = task_pb2.JobSpec(
            model="chat",
            generate=task_pb2.GenerateTask(
                tokens=task_pb2.TokenPrompt(ids=asked.prompt_ids),
                sampling=task_pb2.Sampling(max_tokens=asked.tokens, ignore_eos=True, temperature=0.0),
            ),
            contract=common_pb2.Contract(lane=enums.LANE_TO_WIRE[asked.lane], labels={"drill": str(asked.seed)}),
        )
        body = admission_pb2.SubmitRequest(spec=spec).SerializeToString()
        subject, headers = subjects.ingest(REGION, asked.lane, TENANT), {subjects.H_KEY: asked.key}
        while True:  # a producer repeats what was not acknowledged: its key makes that safe
            try:
                await self._bus().js.publish(subject, body, headers=headers, timeout=2.0)
                break
            except (nats.errors.Error, nats.js.errors.Error, TimeoutError, OSError):
                await asyncio.sleep(0.5)
        asked.job_id = keyed_job_id(REGION, TENANT, asked.key)
        # The verdict is stored: it is read from there at the end, whether or not we were connected when it came.
        await self._note_end(asked, patience=True)

    async def _note_end(self, asked: Asked, *, patience: bool = False) -> None:
        client = self._door(asked, 1)
        job: Job | None = None
        while job is None:
            try:
                job = await client.wait(asked.job_id)
            except LanewayError as error:
                if not (patience and error.reason == "JOB_NOT_FOUND"):
                    raise
            # A producer's message that did not get into its lane is tried again, under the same id.
            if job is not None and patience and job.error is not None and job.error.reason == NOT_ACCEPTED:
                job = None
            if job is None:
                await asyncio.sleep(0.2)
        asked.told.append(job.state.value)
        asked.attempts = job.attempt
        if job.result is not None and asked.way is not Way.LEFT:
            asked.ids, asked.text = list(job.result.token_ids), job.result.text


async def workers_seen(scheduler: SchedulerClient, count: int) -> None:
    async def all_ready() -> bool:
        return len([w async for w in scheduler.list_workers() if w.state == "READY"]) == count

    await eventually(all_ready, 60.0)
