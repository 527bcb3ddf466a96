"""BurstGPT: CSV with Timestamp (s), Request tokens, Response tokens, Model, and more that is not needed.

Source: HPMLL/BurstGPT, CC BY 4.0. Never met a real file: read from rows by hand with the published columns. A failed
request has 0 response tokens; it counts as an answer of one token, since it was offered. Models are tenants.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from laneway.simulator.columns import trace_of
from laneway.simulator.readers.rows import count, positive, read_csv, text
from laneway.simulator.readers.tokens import at_least_one
from laneway.simulator.trace import Trace

SOURCE = "HPMLL/BurstGPT, CC BY 4.0"
COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


def read(path: Path) -> Trace:
    """Raises ConfigError that names file, line and field."""
    rows = read_csv(path, dict(zip(COLUMNS, (positive, text, count, count), strict=True)))
    arrival_s = rows["Timestamp"]
    notes = [f"{path.name}: {SOURCE}"]
    tenants, tenant = np.unique(rows["Model"].astype(str), return_inverse=True)
    return trace_of(
        path.name.partition(".")[0],
        arrival_s - arrival_s.min() if len(arrival_s) else arrival_s,
        at_least_one(rows["Request tokens"], "prompts", notes),
        at_least_one(rows["Response tokens"], "answers", notes),
        tenant=tenant.astype(np.int64),
        tenants=tuple(tenants.tolist()) or ("default",),
        notes=notes,
    )
