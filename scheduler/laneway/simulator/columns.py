"""Traces from columns: built, chosen from, joined, and given a contract. Nothing here reads a file or draws a number.

A column in which every request has the same value is a view of one number and takes no memory, so that ten million
requests cost little more than what differs between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laneway.core.lanes import LANES, Lane
from laneway.simulator.trace import NO_SESSION, Floats, Ints, Prefixes, Trace


@dataclass(frozen=True, slots=True)
class Contract:
    """What every caller of a stream is promised, and the answer it allows. Seconds, tokens; inf: no such promise."""

    lane: Lane = Lane.PRIORITY
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    deadline_s: float = math.inf
    max_tokens: int = 0  # allowed at least; a longer recorded answer is allowed as it is


def same(value: float, size: int) -> Floats:
    return np.broadcast_to(np.float64(value), size)


def same_int(value: int, size: int) -> Ints:
    return np.broadcast_to(np.int64(value), size)


def trace_of(
    name: str,
    arrival_s: Floats,
    prompt_tokens: Ints,
    output_tokens: Ints,
    *,
    tenant: Ints | None = None,
    tenants: tuple[str, ...] = ("default",),
    session: Ints | None = None,
    think_s: Floats | None = None,
    prefixes: Prefixes | None = None,
    notes: Sequence[str] = (),
) -> Trace:
    """Requests without a promise, whose callers stay to the end and allow as many tokens as will come.

    Rows may come in any order of arrival; the trace is in order, equal times as they came. ValueError: a bad column.
    """
    size = len(arrival_s)
    whole = Trace(
        name,
        arrival_s,
        same_int(0, size),
        same_int(0, size) if tenant is None else tenant,
        prompt_tokens,
        output_tokens,
        output_tokens,
        same(math.inf, size),
        same(math.inf, size),
        same(math.inf, size),
        same(math.inf, size),
        same_int(0, size),
        same_int(NO_SESSION, size) if session is None else session,
        same(0.0, size) if think_s is None else think_s,
        tenants,
        prefixes,
        tuple(notes),
    )
    begins_s = begin_s(whole)
    if np.any(np.diff(begins_s) < 0.0):
        whole = select(whole, np.argsort(begins_s, kind="stable"))
    return whole.check()


def begin_s(trace: Trace) -> Floats:
    """When each request arrives; of a later turn of a session, when its session begins."""
    later = later_turns(trace)
    if not np.any(later):
        return trace.arrival_s
    sessions, row = np.unique(trace.session, return_index=True)
    first = trace.arrival_s[row]
    return np.where(later, first[np.searchsorted(sessions, trace.session)], trace.arrival_s)


def later_turns(trace: Trace) -> NDArray[np.bool_]:
    later: NDArray[np.bool_] = (trace.session != NO_SESSION) & (trace.think_s > 0.0)
    return later


def with_contract(trace: Trace, contract: Contract) -> Trace:
    """All requests under one contract."""
    size = len(trace)
    return replace(
        trace,
        lane=same_int(LANES.index(contract.lane), size),
        ttft_s=same(contract.ttft_s, size),
        tpot_s=same(contract.tpot_s, size),
        deadline_s=same(contract.deadline_s, size),
        max_tokens=np.maximum(trace.output_tokens, contract.max_tokens),
    )


def select(trace: Trace, chosen: Ints | NDArray[np.bool_]) -> Trace:
    """These requests in this order. Whoever takes one turn of a session takes all of them, in order."""
    rows: Ints = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen.astype(np.int64, copy=False)
    columns: dict[str, Any] = {}
    for each in fields(trace):
        column = getattr(trace, each.name)
        if isinstance(column, np.ndarray):
            columns[each.name] = _picked(column, rows)
    return replace(trace, prefixes=trace.prefixes and select_prefixes(trace.prefixes, rows), **columns)


def _picked(column: NDArray[Any], rows: Ints) -> NDArray[Any]:
    """One number for all stays one number: stride 0 is what `same` makes."""
    return np.broadcast_to(column[:1], len(rows)) if column.strides == (0,) and len(column) else column[rows]


def select_prefixes(prefixes: Prefixes, rows: Ints) -> Prefixes:
    counts = prefixes.starts[rows + 1] - prefixes.starts[rows]
    starts = starts_of(counts)
    place = np.repeat(prefixes.starts[rows] - starts[:-1], counts) + np.arange(starts[-1])
    return Prefixes(prefixes.block_tokens, prefixes.ids[place], starts)


def starts_of(counts: Ints) -> Ints:
    """Where each request's ids begin, and where the last ones end."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)))


def with_blocks_of(trace: Trace, block_tokens: int) -> Trace:
    """The same prefixes in smaller blocks, as an engine has them. ValueError: the trace's are no multiple of it.

    A request gets no more blocks than fill its prompt. Memory: 8 bytes for each block of each prompt.
    """
    prefixes = trace.prefixes
    if prefixes is None or prefixes.block_tokens == block_tokens:
        return trace
    if prefixes.block_tokens < block_tokens and block_tokens % prefixes.block_tokens == 0:
        return replace(trace, prefixes=_joined_blocks(prefixes, block_tokens // prefixes.block_tokens))
    parts, rest = divmod(prefixes.block_tokens, block_tokens)
    if rest or not parts:
        raise ValueError(f"{trace.name}: blocks of {prefixes.block_tokens} tokens do not split into {block_tokens}")
    ids = (prefixes.ids[:, None] * parts + np.arange(parts)).ravel()
    split = Prefixes(block_tokens, ids, prefixes.starts * parts)
    counts = np.minimum(np.diff(split.starts), trace.prompt_tokens // block_tokens)
    return replace(trace, prefixes=_first_blocks(split, counts))


def _joined_blocks(prefixes: Prefixes, parts: int) -> Prefixes:
    """The id of a larger block is that of its last part, which stands for all that is before it."""
    counts = np.diff(prefixes.starts) // parts
    starts = starts_of(counts)
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    place = np.repeat(prefixes.starts[:-1], counts) + inside * parts + parts - 1
    return Prefixes(prefixes.block_tokens * parts, prefixes.ids[place], starts)


def _first_blocks(prefixes: Prefixes, counts: Ints) -> Prefixes:
    starts = starts_of(counts)
    place = np.repeat(prefixes.starts[:-1] - starts[:-1], counts) + np.arange(starts[-1])
    return Prefixes(prefixes.block_tokens, prefixes.ids[place], starts)


def joined(name: str, traces: Sequence[Trace], notes: Sequence[str] = ()) -> Trace:
    """All of them at once, in order of arrival. Tenants of one name are one; sessions and prefixes stay apart.

    ValueError: their blocks differ in size.
    """
    parts = [trace for trace in traces if len(trace)]
    if not parts:
        raise ValueError(f"{name}: nothing to join")
    if len(parts) == 1:
        return replace(parts[0], name=name, notes=tuple(notes) or parts[0].notes)
    tenants = tuple(dict.fromkeys(tenant for trace in parts for tenant in trace.tenants))
    begins_s = np.concatenate([begin_s(trace) for trace in parts])
    order = np.argsort(begins_s, kind="stable")
    columns: dict[str, Any] = {}
    for each in fields(Trace):
        if isinstance(getattr(parts[0], each.name), np.ndarray):
            columns[each.name] = _picked(_together([getattr(trace, each.name) for trace in parts]), order)
    number = [np.array([tenants.index(tenant) for tenant in trace.tenants]) for trace in parts]
    columns["tenant"] = np.concatenate([of[trace.tenant] for of, trace in zip(number, parts, strict=True)])[order]
    if np.any(columns["session"] != NO_SESSION):
        columns["session"] = _apart([trace.session for trace in parts])[order]
    prefixes = _joined_prefixes(name, parts)
    columns["prefixes"] = prefixes and select_prefixes(prefixes, order)
    return Trace(name=name, tenants=tenants, notes=tuple(notes) or _all_notes(parts), **columns).check()


def _together(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """One after the other; one number for all where it is the same in all."""
    first = columns[0][:1]
    if all(column.strides == (0,) and np.array_equal(column[:1], first) for column in columns):
        return np.broadcast_to(first, sum(len(column) for column in columns))
    return np.concatenate(columns)


def _all_notes(parts: Sequence[Trace]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for trace in parts for note in trace.notes))


def _apart(columns: Sequence[Ints]) -> Ints:
    """Ids of each column beyond those before; negative ones, that stand for none, as they are."""
    base, apart = 0, []
    for column in columns:
        apart.append(np.where(column >= 0, column + base, column))
        base += int(column.max(initial=-1)) + 1
    return np.concatenate(apart)


def _joined_prefixes(name: str, parts: Sequence[Trace]) -> Prefixes | None:
    sizes = {trace.prefixes.block_tokens for trace in parts if trace.prefixes is not None}
    if not sizes:
        return None
    if len(sizes) > 1:
        raise ValueError(f"{name}: prefixes in blocks of {sorted(sizes)} tokens cannot be joined")
    size = sizes.pop()
    none = np.zeros(0, dtype=np.int64)
    each = [trace.prefixes or Prefixes(size, none, np.zeros(len(trace) + 1, dtype=np.int64)) for trace in parts]
    counts = np.concatenate([np.diff(prefixes.starts) for prefixes in each])
    return Prefixes(size, _apart([prefixes.ids for prefixes in each]), starts_of(counts))
