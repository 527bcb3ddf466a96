"""What a scenario is: streams of requests, each with its source, contract and callers, and the trace of a seed.

A stream's trace is made in one order: drawn (resampled in recorded time), brought to the rate that is asked for by
compressing time, and put under its contract. Load raises the rate of what people and programs ask for; batch job lists
stay as they are, since what is harvested is measured by a fixed list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from laneway.core.lanes import Lane
from laneway.simulator.bootstrap import BLOCK_S, STAYS, Patience, bootstrapped, streams, with_patience
from laneway.simulator.columns import Contract, joined, later_turns, select, with_blocks_of, with_contract
from laneway.simulator.processes import drawn_tenants
from laneway.simulator.scaling import circle_s, compressed
from laneway.simulator.setup import BLOCK_TOKENS
from laneway.simulator.trace import NO_SESSION, Trace


@dataclass(frozen=True, slots=True)
class Draw:
    """What is asked of a stream that is drawn anew for each seed: `load` times its rate, `span_s` seconds long."""

    seed: int
    load: float
    span_s: float


@dataclass(frozen=True, slots=True)
class Stream:
    """`source`: a trace to resample, or a function that draws one (then in the run's own time).

    `speed`: how much faster than recorded at load 1. `tenants`: names and shares, redrawn for each request; none: the
    source's own. `fixed`: a job list, which comes as it is whatever seed and load.
    """

    source: Trace | Callable[[Draw], Trace]
    contract: Contract
    speed: float = 1.0
    tenants: tuple[tuple[str, float], ...] = ()
    patience: Patience = STAYS
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    what: str  # and when it passes
    streams: tuple[Stream, ...]
    span_s: float  # of a run at load 1
    notes: tuple[str, ...] = ()

    def trace(
        self,
        seed: int,
        *,
        load: float = 1.0,
        span_s: float | None = None,
        block_tokens: int | None = BLOCK_TOKENS,
        poisson: bool = False,
    ) -> Trace:
        """`load` times the scenario's rate, by compressing time; `span_s`: of the run, else its own by the load.

        `block_tokens`: of the prefixes, the engine's by default; None: as recorded. `poisson`: the same requests at
        arrivals of a Poisson process, to see what burstiness does. ValueError: no positive load or span.
        """
        run_s = self.span_s / load if span_s is None and load > 0.0 else span_s
        if run_s is None or not (load > 0.0 and run_s > 0.0):
            raise ValueError(f"{self.name}: load {load} and span {span_s} must be above 0")
        seeds = np.random.SeedSequence(seed).generate_state(len(self.streams), np.uint64)
        parts = [
            _made(stream, Draw(int(own), load, run_s), poisson=poisson)
            for stream, own in zip(self.streams, seeds.tolist(), strict=True)
        ]
        if block_tokens is not None:
            parts = [with_blocks_of(part, block_tokens) for part in parts]
        notes = [*self.notes, f"load {load:g}, {run_s:g} s, seed {seed}"]
        notes += [note for part in parts for note in part.notes]
        return replace(joined(self.name, parts), notes=tuple(dict.fromkeys(notes)))


def _made(stream: Stream, draw: Draw, *, poisson: bool) -> Trace:
    shares = [share for _, share in stream.tenants] or None
    if stream.fixed:
        assert isinstance(stream.source, Trace)
        trace = stream.source
    elif isinstance(stream.source, Trace):
        speed = stream.speed * draw.load
        span_s = draw.span_s * speed
        trace = bootstrapped(
            _named(stream.source, stream), draw.seed, block_s=BLOCK_S, span_s=span_s, tenants=shares,
            patience=stream.patience,
        )  # fmt: skip
        trace = compressed(trace, speed)
    else:
        _, tenants, waits, leaves = streams(draw.seed, 4)
        trace = _named(stream.source(draw), stream)
        if shares is not None:
            trace = replace(trace, tenant=drawn_tenants(tenants, len(trace), shares))
        trace = with_patience(trace, stream.patience, waits, leaves)
    if poisson and not stream.fixed:
        trace = _poisson(trace, draw)
    return with_contract(trace, stream.contract)


def _named(trace: Trace, stream: Stream) -> Trace:
    return replace(trace, tenants=tuple(name for name, _ in stream.tenants)) if stream.tenants else trace


def _poisson(trace: Trace, draw: Draw) -> Trace:
    """The same requests, in the same order, at uniform times: a Poisson process given how many there are."""
    if np.any(later_turns(trace)):
        return trace
    arrival_s = np.sort(streams(draw.seed, 5)[4].random(len(trace))) * draw.span_s
    return replace(trace, arrival_s=arrival_s, notes=(*trace.notes, "arrivals of a Poisson process instead"))


def job_list(
    lengths: Trace,
    jobs: int,
    *,
    at_s: float = 0.0,
    deadline_s: float = 3600.0,
    max_tokens: int = 1024,
    tenant: str = "batch",
) -> Stream:
    """The first jobs of a list, over again where it is shorter, published at once. The same for all seeds and loads."""
    listed = select(lengths, np.arange(jobs) % len(lengths))
    listed = replace(listed, arrival_s=np.full(jobs, at_s), tenants=(tenant,), tenant=np.zeros(jobs, dtype=np.int64))
    note = f"{jobs} batch jobs of {tenant!r} at {at_s:g} s, due {deadline_s:g} s later"
    contract = Contract(Lane.BATCH, deadline_s=deadline_s, max_tokens=max_tokens)
    return Stream(replace(listed, notes=(*lengths.notes, note)), contract, fixed=True)


def rate_of(trace: Trace) -> float:
    """Requests per second, in the trace's own time."""
    return len(trace) / circle_s(trace)


def some_sessions(trace: Trace, number: int, draw: Draw, *, start_s: float, turns: int) -> Trace:
    """So many sessions, drawn with replacement, that start within `start_s`; of each the first turns.

    A session that is drawn again shares no prefixes with its double.
    """
    random = streams(draw.seed, 6)[5]
    names, sizes = np.unique(trace.session[trace.session != NO_SESSION], return_counts=True)
    drawn = random.integers(0, len(names), number)
    starts = np.sort(random.random(number)) * start_s
    counts = np.minimum(sizes[drawn], turns)
    inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    by_session = np.argsort(trace.session, kind="stable")
    begins = np.cumsum(sizes) - sizes
    taken = select(trace, by_session[np.repeat(begins[drawn], counts) + inside])
    again = np.array([np.count_nonzero(drawn[:at] == session) for at, session in enumerate(drawn.tolist())])
    prefixes = taken.prefixes
    if prefixes is not None and len(prefixes.ids):
        level = np.repeat(np.repeat(again, counts), np.diff(prefixes.starts))
        prefixes = replace(prefixes, ids=prefixes.ids + level * (int(prefixes.ids.max()) + 1))
    return replace(
        taken,
        arrival_s=np.where(inside == 0, np.repeat(starts, counts), 0.0),
        session=np.repeat(np.arange(number), counts),
        prefixes=prefixes,
        notes=(*trace.notes, f"{number} sessions that start within {start_s:g} s, at most {turns} turns of each"),
    ).check()


def tenants_of(names: Sequence[str], top: float) -> tuple[tuple[str, float], ...]:
    """Tenants whose shares fall by a constant factor, the first one's being `top` of all (nearly)."""
    return tuple((name, top * (1.0 - top) ** rank) for rank, name in enumerate(names))
