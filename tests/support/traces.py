"""Traces by hand, for tests of what plays and reads them."""

from __future__ import annotations

from laneway.cli.replaying.source import Line, trace_of_lines
from laneway.core.lanes import Lane
from laneway.simulator.trace import Trace


def asked(
    arrival_s: float = 0.0, prompt_tokens: int = 40, output_tokens: int = 5, lane: Lane = Lane.PRIORITY, **more: object
) -> Line:
    return Line(arrival_s, prompt_tokens, output_tokens, lane, **more)  # type: ignore[arg-type]


def trace(*lines: Line, block_tokens: int = 16) -> Trace:
    return trace_of_lines("by hand", list(lines), block_tokens)
