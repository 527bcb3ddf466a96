"""What all runs of a worker work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from laneway.core.catalogue import Pool
from laneway.core.clock import Clock
from laneway.core.lanes import Lane
from laneway.policy.lengths import LengthBook
from laneway.workers.budget import Budget
from laneway.workers.checkpointing import Checkpointing
from laneway.workers.claims import Claims
from laneway.workers.dead_letters import DeadLetters
from laneway.workers.emitter import Emitter
from laneway.workers.endings import Endings
from laneway.workers.hot_prefixes import HotPrefixes
from laneway.workers.rates import Rates
from laneway.workers.reparking import Reparking
from laneway.workers.retries import Retries
from laneway.workers.sequences import Sequences


class Bench(Struct, frozen=True):
    """Shared by the runs, owned by the worker."""

    worker_id: str
    pool: Pool
    exact: bool  # the engine gives the same greedy answer alone, batched and again
    clock: Clock
    ack_wait_s: Mapping[Lane, float]
    token_bytes: Callable[[int], bytes]
    claims: Claims
    endings: Endings
    checkpointing: Checkpointing
    dead_letters: DeadLetters
    emitter: Emitter
    sequences: Sequences
    rates: Rates
    retries: Retries
    lengths: LengthBook
    hot_prefixes: HotPrefixes
    reparking: Reparking
    single_flight: Callable[[], bool]  # whether identical deterministic jobs share a sequence now
    budget: Budget
