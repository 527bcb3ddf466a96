"""The region that a replay runs against, its callers, and what is counted."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import structlog

from laneway.core.errors import LanewayError
from laneway.core.job import JobRecord
from laneway.core.lanes import JobState, Lane
from laneway.policy.calibration import Outcome, outcome_of
from laneway.runtime.auth import Caller
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.settings import ModelSettings, SchedulerSettings, Settings
from laneway.runtime.wire.times import timestamp_of
from laneway.v1 import admission_pb2, common_pb2, task_pb2
from laneway.workers.engines.registry import EngineSpec
from laneway.workers.engines.simulated import SimulatedCore, make_core
from laneway.workers.engines.simulated_inline import InlineEngine
from tests.sim.replay.traffic import TOKENS_OUT_MAX, Wish
from tests.sim.system.asks import WIRE_LANE
from tests.sim.system.calls import Call, Dropped
from tests.sim.system.engines import PROMPT_END
from tests.sim.system.hosts import Incarnation
from tests.sim.system.loop import SimLoop, run, until
from tests.sim.system.region import Gate, Region, Shape

BASE_S, SEQUENCE_S, TOKEN_S = 0.03, 0.001, 0.0004  # of a step; a small accelerator, so that a replay is cheap
LENGTH_BASE, FIRST_ID = 100, 0x20
TRIES_MAX = 4  # of a request that is refused and told when to come again
SETTLE_S = 120.0


class StepPrice:
    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        return BASE_S + SEQUENCE_S * len(decode) + TOKEN_S * sum(tokens for _, tokens in prefill)


class TraceCore(SimulatedCore):
    """Ends an answer at the length that its prompt begins with; nobody else reads it."""

    __slots__ = ()

    def _ends_itself(self, sequence, draw):
        high, low = (token_id - FIRST_ID for token_id in sequence.request.prompt_ids[:2])
        return min(self.eos_ids) if sequence.made >= high * LENGTH_BASE + low else None


def prompt_of(wish: Wish, random: Random) -> tuple[int, ...]:
    """Nothing in common with another, but the length of its answer."""
    high, low = divmod(wish.tokens_out, LENGTH_BASE)
    if low + FIRST_ID >= PROMPT_END:  # not the mark of a prompt's end
        low = PROMPT_END - FIRST_ID - 1
    rest = (random.randrange(0x61, 0x7B) for _ in range(wish.tokens_in - 3))
    return (FIRST_ID + high, FIRST_ID + low, *rest, PROMPT_END)


def settings_of(workers: int, slots: int) -> Settings:
    """The product's defaults, but for the pool."""
    return Settings(
        scheduler=SchedulerSettings(plan_interval_s=0.5),
        models=(
            ModelSettings(
                name="chat",
                engine="simulated",
                tokenizer="bytes",
                context_length=1024,
                slots=slots,
                workers=workers,
                kv_tokens=slots * 1024,
                queue_length=400,
                max_tokens_default=TOKENS_OUT_MAX,
                load_s=1.0,
                prefill_tokens_per_s=1500.0,
                decode_tokens_per_s=25.0,
                engine_options=EngineOptions(pace_s=BASE_S, prefill_chunk_tokens=128),
            ),
        ),
    )


class ReplayRegion(Region):
    def engine_of(self, spec: EngineSpec, worker_id: str, life: Incarnation) -> InlineEngine:
        made = make_core(spec.capacity, frozenset(spec.eos_ids), spec.options)
        core = TraceCore(made.capacity, StepPrice(), made.options, made.eos_ids, made.chunk_tokens)
        return InlineEngine(core, spec.capabilities, load_s=0.5)


@dataclass
class Told:
    """One answer of a door."""

    at_s: float
    lane: Lane
    accepted: bool
    reason: str
    retry: int  # how often it was refused before
    retry_after_s: float | None = None
    in_time: bool = False  # it came exactly when it had been told to


@dataclass
class Replayed:
    told: list[Told] = field(default_factory=list)
    records: list[JobRecord] = field(default_factory=list)  # of accepted jobs, as they ended

    def outcomes(self) -> list[Outcome]:
        return [found for record in self.records if (found := outcome_of(record)) is not None]

    def coverage(self, of: str = "completion", after_s: float = 0.0) -> dict[Lane, tuple[int, int]]:
        """By lane: (covered, all)."""
        counts: dict[Lane, list[int]] = defaultdict(lambda: [0, 0])
        for outcome in self.outcomes():
            span = getattr(outcome, of)
            if span is not None:
                counts[outcome.lane][0] += not span.missed
                counts[outcome.lane][1] += 1
        return {lane: (covered, every) for lane, (covered, every) in counts.items()}

    def retries(self, lane: Lane | None = None) -> tuple[int, int]:
        """(accepted, all) of those made exactly at the stated time."""
        made = [told for told in self.told if told.in_time and lane in (None, told.lane)]
        return sum(told.accepted for told in made), len(made)


def replay(wishes: Sequence[Wish], *, seed: int, workers: int, slots: int) -> Replayed:
    """Runs them all to their ends."""
    before = structlog.get_config()
    structlog.configure(processors=[_drop], wrapper_class=structlog.BoundLogger, cache_logger_on_first_use=False)
    try:
        return run(lambda: _replay(wishes, seed, Shape(doors=1, schedulers=1, workers=workers, slots=slots)))
    finally:
        structlog.configure(**before)


def _drop(logger: object, method: str, event: object) -> str:
    raise structlog.DropEvent


async def _replay(wishes: Sequence[Wish], seed: int, shape: Shape) -> Replayed:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    region = ReplayRegion(seed, loop, shape, settings_of(shape.workers, shape.slots))
    replayed = Replayed()
    try:
        await region.start()
        async with asyncio.TaskGroup() as group:
            for number, wish in enumerate(wishes):
                group.create_task(_ask(region, replayed, wish, Random(f"{seed} {number}")))
        until_s = loop.time() + max((wish.due_s for wish in wishes), default=0.0) + SETTLE_S
        await until(lambda: not any(region.history.open()) or loop.time() > until_s, 2.0)
        finals = (region.history.final(job_id) for job_id in region.history.jobs)
        replayed.records = [record for record in finals if record is not None and record.state is not JobState.REFUSED]
        return replayed
    finally:
        await region.close()


async def _ask(region: Region, replayed: Replayed, wish: Wish, random: Random) -> None:
    await asyncio.sleep(wish.at_s)
    gate: Gate = region.doors[0].part
    prompt, in_time = prompt_of(wish, random), False
    for refusals in range(TRIES_MAX):
        spec = _spec(wish, prompt, region.clock.now())
        request = admission_pb2.SubmitRequest(spec=spec)
        now_s = region.loop.time()
        try:
            answer = await Call(gate, Caller(wish.tenant)).begin(gate.service.Submit, request).answer()
        except LanewayError as error:
            told = Told(now_s, wish.lane, False, error.reason, refusals, error.retry_after_s, in_time)
            replayed.told.append(told)
        except Dropped:
            return
        else:
            replayed.told.append(Told(now_s, wish.lane, True, answer.verdict.reason, refusals, in_time=in_time))
            return
        if told.retry_after_s is None:
            return
        in_time = True
        await asyncio.sleep(told.retry_after_s)


def _spec(wish: Wish, prompt: tuple[int, ...], now_s: float) -> task_pb2.JobSpec:
    contract = common_pb2.Contract(lane=WIRE_LANE[wish.lane], deadline=timestamp_of(now_s + wish.due_s))
    sampling = task_pb2.Sampling(max_tokens=TOKENS_OUT_MAX, temperature=0.0)
    task = task_pb2.GenerateTask(tokens=task_pb2.TokenPrompt(ids=prompt), sampling=sampling)
    return task_pb2.JobSpec(model="chat", generate=task, contract=contract)
