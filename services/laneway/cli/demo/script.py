"""What the demo sends and when: one fixed list of arrivals, the same for Laneway and for the FIFO comparison. Pure."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from laneway.core.lanes import Lane

LENGTH_S = 55.0  # last arrival; the rest of the minute drains
DOCUMENTS_AT_S = 10.0
KILL_AT_S = 31.0
REFUSAL_AT_S = 46.0
CHAT_EVERY_S = 1.0
PRIORITY_TTFT_S = 1.0
PRIORITY_TPOT_S = 0.25
DEFERRABLE_WITHIN_S = 45.0
BATCH_WITHIN_S = 120.0
BURST = 64  # more short priority requests at once than the lane can hold


class Way(StrEnum):
    """How a request comes in."""

    STREAM = "gRPC stream"
    SUBMIT = "gRPC submit"
    PRODUCER = "NATS producer"


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    name: str
    lane: Lane
    way: Way
    text: str
    max_tokens: int
    within_s: float | None = None  # deadline after arrival; None: the lane's default


def find_samples(start: Path) -> Path:
    """The folder of sample texts: examples/data of the clone that holds `start`."""
    for folder in start.resolve().parents:
        data = folder / "examples" / "data"
        if (data / "chats.jsonl").is_file():
            return data
    raise FileNotFoundError("the sample texts are in examples/data of a clone; run the demo from there (make demo)")


def _texts(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def arrivals(data: Path, seed: int = 7) -> list[Arrival]:
    """Chats all the way, forty documents at once at 10 s, deferrable work among them; sorted by time."""
    rng = random.Random(seed)
    chats, documents = _texts(data / "chats.jsonl"), _texts(data / "documents.jsonl")
    out: list[Arrival] = []
    at_s, number = 0.3, 0
    while at_s < LENGTH_S:
        out.append(Arrival(at_s, f"chat-{number}", Lane.PRIORITY, Way.STREAM, chats[number % len(chats)], 40))
        at_s += rng.uniform(0.5, 1.5) * CHAT_EVERY_S
        number += 1
    for i, document in enumerate(documents):
        text = f"Summarize in two sentences:\n\n{document}"
        at_s = DOCUMENTS_AT_S + 0.05 * i
        out.append(Arrival(at_s, f"document-{i}", Lane.BATCH, Way.PRODUCER, text, 64, BATCH_WITHIN_S))
    for i in range(10):
        text = f"Give this text a title:\n\n{documents[-1 - i]}"
        at_s = DOCUMENTS_AT_S + 3.0 + 1.2 * i
        out.append(Arrival(at_s, f"title-{i}", Lane.DEFERRABLE, Way.SUBMIT, text, 24, DEFERRABLE_WITHIN_S))
    return sorted(out, key=lambda a: a.at_s)
