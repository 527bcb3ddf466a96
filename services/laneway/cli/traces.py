"""Traces for commands: a file of any known format, and the promises of those whose callers were promised nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from laneway.cli.replaying.source import read_lines
from laneway.core.errors import ConfigError
from laneway.core.lanes import Lane
from laneway.simulator.columns import Contract, joined, trace_of, with_contract
from laneway.simulator.readers import read_trace
from laneway.simulator.readers.rows import head
from laneway.simulator.trace import Trace
from laneway.simulator.workloads import workload

OWN_MARK = '"arrival_s"'
# Lengths of scientific papers and their summaries (arXiv), median: what batch work is by default.
BATCH_PROMPT_TOKENS, BATCH_OUTPUT_TOKENS = 2730, 167
BATCH_DEADLINE_S = 86_400.0


def trace_from(path: Path, *, ttft_s: float, tpot_s: float, deadline_s: float) -> Trace:
    """A trace of Laneway's own format as it is; of a recorded one, whose callers were promised nothing, as priority
    with these promises. Raises ConfigError that names file, line and field."""
    if path.is_file() and OWN_MARK in head(path):
        return read_lines(path)
    return with_contract(read_trace(path), Contract(Lane.PRIORITY, ttft_s, tpot_s, deadline_s))


def scenario(name: str, data: Path | None, *, seed: int, load: float, span_s: float | None) -> Trace:
    """A named workload, from the recorded traces in `data` where they are there. Raises ConfigError."""
    try:
        return workload(name, data).trace(seed, load=load, span_s=span_s)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def with_batch(trace: Trace, jobs: int) -> Trace:
    """The trace, and so many batch jobs beside it that are all there at its begin and due within a day."""
    if not jobs:
        return trace
    lengths = np.full(jobs, BATCH_PROMPT_TOKENS), np.full(jobs, BATCH_OUTPUT_TOKENS)
    note = f"{jobs} batch jobs of {BATCH_PROMPT_TOKENS} and {BATCH_OUTPUT_TOKENS} tokens at the begin, made up"
    batch = trace_of("batch", np.zeros(jobs), *lengths, notes=(note,))
    batch = with_contract(batch, Contract(Lane.BATCH, deadline_s=BATCH_DEADLINE_S))
    return joined(f"{trace.name} and {jobs} batch jobs", [trace, batch])
