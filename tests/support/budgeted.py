"""One worker's engine side under virtual time: the real budget, sequences and generations on the simulated engine.

In place of the pull loop: priority jobs start when they come, lower ones when the gate lets them. In place of runs: an
owner that takes what its generation says.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.job import GenerateTask, LaneJob, Sampling
from laneway.core.lanes import Lane
from laneway.policy import interference
from laneway.policy.lengths import LengthBook
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.live_policy import LivePolicy
from laneway.runtime.settings import PolicySettings
from laneway.workers.bench import Bench
from laneway.workers.budget import Budget
from laneway.workers.engines.host import ProcessEngine
from laneway.workers.engines.protocol import EngineStats, SequenceStep
from laneway.workers.engines.registry import spec_of
from laneway.workers.engines.simulated import make_core
from laneway.workers.engines.simulated_inline import InlineEngine
from laneway.workers.generation import Generation
from laneway.workers.ledger import Seat, Seats
from laneway.workers.outcomes import Kind, Outcome
from laneway.workers.rates import Rates
from laneway.workers.resume import Continue
from laneway.workers.sequences import Sequences
from tests.support.nats import make_record
from tests.support.yielding_region import CLOCK

H100 = EngineOptions(profile="h100-8b-fp8", prefill_chunk_tokens=512)
_numbers = itertools.count(1)


def pool_of(slots: int = 64, **changes: Any) -> Pool:
    values: dict[str, Any] = {
        "name": "chat-small", "model": "chat", "tier": "small", "engine": "simulated", "context_length": 32_768,
        "vocabulary_size": 260, "slots": slots, "workers": 1, "kv_tokens": 900_000, "tokenizer": "bytes",
        "capabilities": capabilities_of("simulated"),
    }  # fmt: skip
    return Pool(**(values | changes))


@dataclass(eq=False)
class Call:
    """A job in the engine: what a run is to its generation."""

    yard: EngineYard
    job: LaneJob
    seat: Seat
    asked_s: float
    tokens_s: list[float] = field(default_factory=list)
    outcome: Outcome | None = None
    outcomes: int = 0

    def __post_init__(self) -> None:
        self.generation = Generation(self.yard.bench, self.job, self)

    def begin(self) -> Call:
        outcome = self.generation.submit(Continue())
        if outcome is not None:
            self.end(outcome)
        return self

    def on_step(self, step: SequenceStep, now_s: float) -> None:
        if self.outcome is None:
            self.tokens_s += [now_s] * len(step.token_ids)
            outcome = self.generation.take(step, now_s)
            if outcome is not None:
                self.end(outcome)

    def on_engine_lost(self, reason: str) -> None:
        self.end(Outcome(Kind.ENGINE_LOST, message=reason))

    def on_fault(self, error: Exception) -> None:
        raise error

    def end(self, outcome: Outcome) -> None:
        self.outcomes += 1
        if self.outcome is None:
            self.outcome = outcome
            self.generation.abort()
            if outcome.kind is Kind.FINISHED:
                self.generation.measure(self.asked_s)
            self.yard.left(self)

    @property
    def lane(self) -> Lane:
        return self.job.record.contract.lane

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.asked_s

    @property
    def tpot_s(self) -> float:
        return (self.tokens_s[-1] - self.tokens_s[0]) / (len(self.tokens_s) - 1)


class EngineYard:
    """See the module."""

    def __init__(self, pool: Pool, options: EngineOptions = H100, **policy: Any) -> None:
        self.pool = pool
        self.options = options
        self.policy = LivePolicy(PolicySettings(**policy))
        self.sequences = Sequences(CLOCK, lambda: None, self._after_step)
        self.budget = Budget(pool, self.policy, CLOCK, self.sequences, prefix_cache=options.prefix_cache)
        self.sequences.watcher = self
        given: dict[str, Any] = {
            "worker_id": "w", "pool": pool, "exact": True, "clock": CLOCK, "ack_wait_s": {},
            "token_bytes": lambda token_id: bytes([token_id % 256]), "sequences": self.sequences, "rates": Rates(),
            "lengths": LengthBook(), "single_flight": lambda: False, "budget": self.budget,
        }  # fmt: skip
        # What a generation does not touch is not there.
        absent: dict[str, Any] = dict.fromkeys(Bench.__struct_fields__)
        self.bench = Bench(**(absent | given))
        self.calls: list[Call] = []
        self.lower: deque[tuple[Lane, Sequence[int], int, dict[str, Any]]] = deque()
        self.queued_max = 0  # sequences of lower lanes that the engine had and did not compute
        self.debt_max = 0.0  # of the budget, as a share of what is allowed
        self.in_flight_max = 0
        self.engine: Any
        self.seats: Seats
        self._idle = asyncio.Event()

    async def start(self) -> EngineYard:
        spec = spec_of(self.pool, self.options)
        if self.pool.engine == "simulated":
            self.engine = InlineEngine(make_core(spec.capacity, frozenset(), self.options), spec.capabilities)
        else:
            self.engine = ProcessEngine(spec)  # in real time
        capacity = await self.engine.start(self.sequences)
        self.seats = Seats(capacity)
        self.sequences.attach(self.engine)
        self.budget.started(capacity, self.seats, self._lower_prefills)
        return self

    def submit(self, lane: Lane, prompt: Sequence[int], max_tokens: int, **contract: Any) -> Call:
        """Starts a job now."""
        record = make_record(lane=lane, prompt_tokens=len(prompt), max_tokens=max_tokens)
        values = {"deadline_s": CLOCK.now() + 86_400.0} | contract
        record = replace(
            record,
            job_id=f"job-{next(_numbers)}",
            contract=replace(record.contract, **values),
            timings=replace(record.timings, created_s=CLOCK.now()),
        )
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        job = LaneJob(record, GenerateTask(tuple(prompt), sampling))
        seat = self.seats.take(lane, self.seats.ask(job))
        call = Call(self, job, seat, CLOCK.monotonic())
        self.calls.append(call)
        self._look()
        return call.begin()

    def put(self, lane: Lane, prompt: Sequence[int], max_tokens: int, **contract: Any) -> None:
        """A lower-lane job that starts when the gate lets it."""
        self.lower.append((lane, prompt, max_tokens, contract))
        self.pull()

    def pull(self) -> None:
        while self.lower and self.seats.slots_free > self.budget.reserved_slots() and self.budget.lower_places() > 0:
            lane, prompt, max_tokens, contract = self.lower.popleft()
            self.submit(lane, prompt, max_tokens, **contract)

    def left(self, call: Call) -> None:
        self.seats.give_back(call.seat)
        self._idle.set()

    async def until(self, *calls: Call) -> None:
        while any(call.outcome is None for call in calls):
            self._idle.clear()
            await self._idle.wait()

    def of(self, lane: Lane) -> list[Call]:
        return [call for call in self.calls if call.lane is lane]

    # --- the sequences' watcher: looks, and passes it on ---------------------------------------------

    def stepped(self, stats: EngineStats, now_s: float) -> None:
        self.budget.stepped(stats, now_s)
        self._look()

    def closed(self, reason: str) -> None:
        self.budget.closed(reason)

    def _after_step(self) -> None:
        self.budget.pump()
        self._look()
        self.pull()

    def _look(self) -> None:
        self.budget._refill(CLOCK.monotonic())  # what is allowed falls with the load, and debt with it
        load = self.budget.load()
        guard = interference.guard_tokens(load, self.budget._params())
        self.debt_max = max(self.debt_max, -self.budget.credit / guard)
        self.in_flight_max = max(self.in_flight_max, load.lower_prompt_tokens)
        self.queued_max = max(self.queued_max, self.sequences.stats().queued)

    def _lower_prefills(self) -> int:
        return sum(c.lane is not Lane.PRIORITY and c.outcome is None and not c.tokens_s for c in self.calls)


def p99(values: list[float]) -> float:
    return sorted(values)[max(0, -(-99 * len(values) // 100) - 1)]
