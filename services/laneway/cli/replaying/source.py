"""Where a trace comes from: a file with a request on each line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from laneway.core.errors import ConfigError
from laneway.core.lanes import LANES, Lane
from laneway.simulator.trace import NO_SESSION, Prefixes, Trace

INF = float("inf")
Tokens = Annotated[int, msgspec.Meta(ge=1)]


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request, with the names and units of Trace; what is left out is not promised, or does not happen."""

    arrival_s: float
    prompt_tokens: Tokens
    output_tokens: Tokens
    lane: Lane = Lane.PRIORITY
    tenant: str = "default"
    ttft_s: float = INF
    tpot_s: float = INF
    deadline_s: float = INF
    patience_s: float = INF
    leaves_after: int = 0
    session: int = NO_SESSION
    think_s: float = 0.0
    blocks: tuple[int, ...] = ()


def trace_of_lines(name: str, lines: list[Line], block_tokens: int = 16) -> Trace:
    """In the order of the lines. ValueError where they are no trace."""
    tenants = tuple(sorted({line.tenant for line in lines})) or ("default",)

    def floats(values: list[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array(values, dtype=np.float64)

    def ints(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(values, dtype=np.int64)

    prefixes = None
    if any(line.blocks for line in lines):
        starts = np.concatenate(([0], np.cumsum([len(line.blocks) for line in lines]))).astype(np.int64)
        prefixes = Prefixes(block_tokens, ints([block for line in lines for block in line.blocks]), starts)
    output_tokens = ints([line.output_tokens for line in lines])
    return Trace(
        name=name,
        arrival_s=floats([line.arrival_s for line in lines]),
        lane=ints([LANES.index(line.lane) for line in lines]),
        tenant=ints([tenants.index(line.tenant) for line in lines]),
        prompt_tokens=ints([line.prompt_tokens for line in lines]),
        output_tokens=output_tokens,
        max_tokens=output_tokens,
        ttft_s=floats([line.ttft_s for line in lines]),
        tpot_s=floats([line.tpot_s for line in lines]),
        deadline_s=floats([line.deadline_s for line in lines]),
        patience_s=floats([line.patience_s for line in lines]),
        leaves_after=ints([line.leaves_after for line in lines]),
        session=ints([line.session for line in lines]),
        think_s=floats([line.think_s for line in lines]),
        tenants=tenants,
        prefixes=prefixes,
    ).check()


def read_lines(path: Path) -> Trace:
    """Raises ConfigError that names the file and the line at fault."""
    decoder = msgspec.json.Decoder(Line)
    lines: list[Line] = []
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    try:
                        lines.append(decoder.decode(raw))
                    except msgspec.MsgspecError as error:
                        raise ConfigError(f"{path}, line {number}: {error}") from None
        return trace_of_lines(path.stem, lines)
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"the trace {path} cannot be played: {error}") from None
