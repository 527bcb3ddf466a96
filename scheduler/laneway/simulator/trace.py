"""A workload: requests in columns, in the order in which they arrive, each with its contract.

Columns are numpy arrays of one length, so that ten million requests take little memory and are read without a parse.
Where a request came from (a recorded trace, a made-up process) is forgotten; what its caller was promised, would wait
for and shares with others is here. Times in seconds, from the trace's begin unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from laneway.core.lanes import LANES, Lane

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_SESSION = -1


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What prompts have in common: of each request the ids of its prompt's whole blocks, one after the other.

    Two prompts share their first n blocks if their first n ids are equal. `ids[starts[i]:starts[i + 1]]` are those of
    request i; `starts` has one entry more than there are requests.
    """

    block_tokens: int
    ids: Ints
    starts: Ints

    def of(self, request: int) -> Ints:
        return self.ids[self.starts[request] : self.starts[request + 1]]


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    arrival_s: Floats  # never decreasing; of a later turn of a session 0: it comes `think_s` after the turn before
    lane: Ints  # index into LANES
    tenant: Ints  # index into `tenants`
    prompt_tokens: Ints  # at least 1
    output_tokens: Ints  # at least 1: what the model will say, known to nobody before
    max_tokens: Ints  # what the caller allows
    ttft_s: Floats  # promised; inf: no such promise
    tpot_s: Floats  # promised mean time between tokens of the answer; inf: no such promise
    deadline_s: Floats  # whole answer, after arrival; inf: none
    patience_s: Floats  # the caller leaves when its first token has not come by then; inf: never
    leaves_after: Ints  # the caller leaves after so many tokens; 0: stays to the end
    session: Ints  # NO_SESSION: stands alone; turns of a session follow each other
    think_s: Floats  # of a later turn of a session: from the end of the turn before to its arrival; else 0
    tenants: tuple[str, ...] = ("default",)
    prefixes: Prefixes | None = None
    notes: tuple[str, ...] = field(default=())  # source, licence, what was done to it: for the report

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Until the last arrival that is known before a run: later turns of sessions come when they come."""
        return float(self.arrival_s.max()) if len(self) else 0.0

    def of_lane(self, lane: Lane) -> NDArray[np.bool_]:
        return np.equal(self.lane, LANES.index(lane))

    def check(self) -> Trace:
        """Itself. Raises ValueError that names the column at fault."""
        size = len(self)
        for each in fields(self):
            column = getattr(self, each.name)
            if isinstance(column, np.ndarray) and len(column) != size:
                raise ValueError(f"{self.name}: {each.name} has {len(column)} rows, arrival_s has {size}")
        alone = self.arrival_s[(self.session == NO_SESSION) | (self.think_s == 0.0)]
        if np.any(np.diff(alone) < 0.0):
            raise ValueError(f"{self.name}: arrival_s decreases")
        for name in ("prompt_tokens", "output_tokens", "max_tokens"):
            if size and getattr(self, name).min() < 1:
                raise ValueError(f"{self.name}: {name} must be at least 1")
        if np.any(self.max_tokens < self.output_tokens):
            raise ValueError(f"{self.name}: max_tokens must be at least output_tokens")
        return self
