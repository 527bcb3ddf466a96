"""Azure LLM inference traces: CSV of 2023 and 2024 (TIMESTAMP, ContextTokens, GeneratedTokens), 2025 with NumImages.

Source: Azure/AzurePublicDataset, CC BY 4.0. Met: the 2023 files, code and conversation, whole. Never met: the week of
2024 (same columns; times with an offset from UTC are read, one that is not 0 is refused) and the multimodal file of
2025, of which rows by hand were read. Images are counted into the notes only: how many tokens one is, is not said.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from laneway.simulator.columns import trace_of
from laneway.simulator.readers.rows import count, moment_s, read_csv
from laneway.simulator.readers.tokens import at_least_one
from laneway.simulator.trace import Trace

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SOURCE = "Azure/AzurePublicDataset, CC BY 4.0"


def read(path: Path, *, images: bool = False) -> Trace:
    """`images`: with the column NumImages. Raises ConfigError that names file, line and field."""
    columns = dict(zip(COLUMNS, (moment_s, count, count), strict=True)) | ({"NumImages": count} if images else {})
    rows = read_csv(path, columns)
    moments_s = rows["TIMESTAMP"]
    notes = [f"{path.name}: {SOURCE}"]
    if images:
        notes.append(f"{int(rows['NumImages'].sum())} images are not counted as tokens")
    return trace_of(
        path.name.partition(".")[0],
        moments_s - moments_s.min(initial=np.inf) if len(moments_s) else moments_s,
        at_least_one(rows["ContextTokens"], "prompts", notes),
        at_least_one(rows["GeneratedTokens"], "answers", notes),
        notes=notes,
    )


def read_multimodal(path: Path) -> Trace:
    return read(path, images=True)
