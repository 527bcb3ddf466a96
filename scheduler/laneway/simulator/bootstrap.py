"""Seeds of a trace: the same traffic as it could have come on another day.

A circular block bootstrap (Politis and Romano, 1992): blocks of five minutes that begin anywhere in the trace, taken
around its end, one after the other until its span is full. Inside a block everything stays as it was: bursts, lengths,
who shares prefixes. Who asks, how long callers wait and who leaves half-way is drawn anew.

Common random numbers: all draws are made here, before any policy runs, each kind from a generator of its own, so that
one seed gives every policy, and every load by compressed time, the same requests with the same callers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from laneway.core.lanes import LANES
from laneway.simulator.columns import Contract, begin_s, later_turns, same, same_int, select
from laneway.simulator.processes import drawn_tenants
from laneway.simulator.scaling import circle_s
from laneway.simulator.trace import NO_SESSION, Floats, Ints, Prefixes, Trace

BLOCK_S = 300.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How callers leave: log-normal patience until the first token, and a share that goes during the answer.

    No public trace records cancellations. Median and share are the project's assumption, and so is the spread: with 0.7
    one caller in twenty waits 3.2 s at most, and one in twenty 32 s.
    """

    median_s: float = 10.0  # inf: nobody leaves before the first token
    sigma: float = 0.7  # of its logarithm
    leaving: float = 0.03  # share that leaves at a uniform point of the answer, 0 to 1


STAYS = Patience(math.inf, leaving=0.0)


def streams(seed: int, number: int) -> list[np.random.Generator]:
    """Independent generators, the first ones the same however many are asked for."""
    return [np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(number)]


def bootstrapped(
    trace: Trace,
    seed: int,
    *,
    block_s: float = BLOCK_S,
    span_s: float | None = None,
    tenants: Sequence[float] | Floats | None = None,
    patience: Patience = STAYS,
) -> Trace:
    """The trace of this seed, `span_s` long; as long as the trace is by default.

    `tenants`: their shares, in the trace's order, redrawn for each request; None: kept. Rates are kept on average: how
    many requests there are differs from seed to seed. ValueError: a block of no length.
    """
    blocks, tenant_draws, patience_draws, leaving_draws = streams(seed, 4)
    resampled = resample(trace, blocks, block_s, span_s)
    if tenants is not None:
        resampled = replace(resampled, tenant=drawn_tenants(tenant_draws, len(resampled), tenants))
    note = f"circular block bootstrap, blocks of {block_s:g} s"
    resampled = replace(resampled, notes=(*resampled.notes, note))
    return with_patience(resampled, patience, patience_draws, leaving_draws)


def resample(trace: Trace, random: np.random.Generator, block_s: float, span_s: float | None = None) -> Trace:
    """Blocks of the trace, drawn with replacement; sessions go where their first turn goes, with all their turns."""
    if not block_s > 0.0:
        raise ValueError(f"{trace.name}: blocks of {block_s} s")
    if not len(trace):
        return trace
    round_s = circle_s(trace)
    block_s = min(block_s, round_s)
    whole_s = round_s if span_s is None else span_s
    number = max(1, math.ceil(whole_s / block_s))
    begins_s = random.random(number) * round_s
    keys_s = begin_s(trace)  # rises, also where a session's turns lie apart
    levels = _levels(begins_s, block_s, round_s)
    rows, places_s = [], []
    for block, begin in enumerate(begins_s.tolist()):
        length_s = min(block_s, whole_s - block * block_s)
        taken, moved_s = _block(keys_s, begin, length_s, round_s)
        rows.append(taken)
        places_s.append(moved_s + block * block_s)
    block_of = np.repeat(np.arange(number), [len(taken) for taken in rows])
    return _taken(trace, np.concatenate(rows), np.concatenate(places_s), block_of, levels[block_of])


def _block(keys_s: Floats, begin: float, length_s: float, round_s: float) -> tuple[Ints, Floats]:
    """Rows that begin inside the block, and how long after its begin."""
    low, high = np.searchsorted(keys_s, (begin, min(begin + length_s, round_s)))
    rows, moved_s = np.arange(low, high), keys_s[low:high] - begin
    over_s = begin + length_s - round_s
    if over_s > 0.0:
        around = int(np.searchsorted(keys_s, over_s))
        rows = np.concatenate((rows, np.arange(around)))
        moved_s = np.concatenate((moved_s, keys_s[:around] + round_s - begin))
    return rows, moved_s


def _levels(begins_s: Floats, block_s: float, round_s: float) -> Ints:
    """Of each block the lowest number that no block before it has with which it overlaps."""
    levels = np.zeros(len(begins_s), dtype=np.int64)
    for block, begin in enumerate(begins_s.tolist()):
        apart_s = np.abs(begins_s[:block] - begin)
        overlapping = np.minimum(apart_s, round_s - apart_s) < block_s
        used = set(levels[:block][overlapping].tolist())
        levels[block] = next(level for level in range(block + 1) if level not in used)
    return levels


def _taken(trace: Trace, rows: Ints, begins_s: Floats, blocks: Ints, levels: Ints) -> Trace:
    """These rows with their new begins. Where a time comes twice, its second copy has prefixes of its own.

    Else a block that is drawn twice would find all of its prompts cached, which no traffic does.
    """
    taken = select(trace, rows)
    first = ~later_turns(taken)
    session = taken.session
    if np.any(session != NO_SESSION):
        session = np.where(session == NO_SESSION, NO_SESSION, blocks * (int(trace.session.max()) + 1) + session)
    prefixes = taken.prefixes
    if prefixes is not None and len(prefixes.ids):
        apart = np.repeat(levels, np.diff(prefixes.starts)) * (int(prefixes.ids.max()) + 1)
        prefixes = Prefixes(prefixes.block_tokens, prefixes.ids + apart, prefixes.starts)
    arrival_s = np.where(
        first, np.maximum.accumulate(begins_s), 0.0
    )  # a block's end may be rounded past the next begin
    return replace(taken, arrival_s=arrival_s, session=session, prefixes=prefixes).check()


def with_patience(trace: Trace, patience: Patience, waits: np.random.Generator, leaves: np.random.Generator) -> Trace:
    """Callers who leave. One draw of each kind for each request, whatever the patience, so that seeds stay common."""
    size = len(trace)
    patience_s = same(math.inf, size)
    if patience.median_s < math.inf:
        patience_s = patience.median_s * np.exp(patience.sigma * waits.standard_normal(size))
    leaves_after = same_int(0, size)
    if patience.leaving > 0.0:
        goes = leaves.random(size) < patience.leaving
        point = 1 + np.floor(leaves.random(size) * (trace.output_tokens - 1)).astype(np.int64)
        leaves_after = np.where(goes & (trace.output_tokens > 1), point, 0)
    return replace(trace, patience_s=patience_s, leaves_after=leaves_after)


def with_lanes(trace: Trace, shares: Sequence[tuple[Contract, float]], random: np.random.Generator) -> Trace:
    """Each request under one of the contracts, drawn by their shares; a session under the one of its first turn."""
    which = drawn_tenants(random, len(trace), [share for _, share in shares])
    in_session = trace.session != NO_SESSION
    if np.any(in_session):
        _, first, turn_of = np.unique(trace.session, return_index=True, return_inverse=True)
        which = np.where(in_session, which[first][turn_of], which)
    contracts = [contract for contract, _ in shares]

    def of(values: Sequence[float]) -> Floats:
        return np.array(values, dtype=np.float64)[which]

    lanes = np.array([LANES.index(contract.lane) for contract in contracts], dtype=np.int64)
    allowed = np.array([contract.max_tokens for contract in contracts], dtype=np.int64)
    return replace(
        trace,
        lane=lanes[which],
        ttft_s=of([contract.ttft_s for contract in contracts]),
        tpot_s=of([contract.tpot_s for contract in contracts]),
        deadline_s=of([contract.deadline_s for contract in contracts]),
        max_tokens=np.maximum(trace.output_tokens, allowed[which]),
    )
