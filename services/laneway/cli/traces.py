"""Traces for commands: a file of any known format, and the promises of those whose callers were promised nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from laneway.cli.replaying.source import read_lines
from laneway.core.lanes import Lane
from laneway.simulator.columns import Contract, trace_of, with_contract
from laneway.simulator.readers import read_trace
from laneway.simulator.readers.rows import head
from laneway.simulator.trace import Trace

OWN_MARK = '"arrival_s"'
# Lengths of scientific papers and their summaries (arXiv), median: what batch work is by default.
BATCH_PROMPT_TOKENS, BATCH_OUTPUT_TOKENS = 2730, 167


def trace_from(path: Path, *, ttft_s: float, tpot_s: float, deadline_s: float) -> Trace:
    """A trace of Laneway's own format as it is; of a recorded one, whose callers were promised nothing, as priority
    with these promises. Raises ConfigError that names file, line and field."""
    if path.is_file() and OWN_MARK in head(path):
        return read_lines(path)
    return with_contract(read_trace(path), Contract(Lane.PRIORITY, ttft_s, tpot_s, deadline_s))


def batch_jobs(jobs: int, prompt_tokens: int, output_tokens: int, deadline_s: float) -> Trace:
    """So many alike, all there at the begin."""
    size = (jobs,)
    same = trace_of(
        "batch", np.zeros(size), np.full(size, prompt_tokens), np.full(size, output_tokens),
        notes=(f"{jobs} batch jobs of {prompt_tokens} and {output_tokens} tokens at the begin, made up",),
    )  # fmt: skip
    return with_contract(same, Contract(Lane.BATCH, deadline_s=deadline_s))
