"""What the demo sends and when: one fixed list of arrivals, the same for Laneway and for the FIFO comparison. Pure."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from laneway.core.lanes import Lane

DOCUMENTS = 40
LENGTH_S = 55.0  # last arrival; the rest of the minute drains
DOCUMENTS_AT_S = 10.0
KILL_AT_S = 31.0
REFUSAL_AT_S = 46.0
CHAT_EVERY_S = 1.2
CHAT_TOKENS = 32
PRIORITY_TTFT_S = 2.0
PRIORITY_TPOT_S = 0.25
DEFERRABLE_WITHIN_S = 45.0
BATCH_WITHIN_S = 120.0
BURST = 64  # more short priority requests at once than the lane can hold
# Documents are made so long that forty of them keep all workers of this machine busy for about as long as they have:
TRIAL_DOCUMENTS = 8
TRIAL_TOKENS = 24
DOCUMENTS_BUSY_S = 30.0
DOCUMENT_TOKENS_MIN, DOCUMENT_TOKENS_MAX = 12, 128


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


def document_prompt(text: str) -> str:
    return f"Summarize in two sentences:\n\n{text}"


def trial_prompts(data: Path) -> list[str]:
    """Documents to measure the machine with, unlike those of the demo, so that no prefix cache knows these."""
    documents = _texts(data / "documents.jsonl")[:TRIAL_DOCUMENTS]
    return [document_prompt(" ".join(reversed(document.split()))) for document in documents]


def document_tokens(trial_s: float) -> int:
    """How long the documents' answers may be, when the trial documents took `trial_s` at once on all workers."""
    whole_s = trial_s * DOCUMENTS / TRIAL_DOCUMENTS
    return max(DOCUMENT_TOKENS_MIN, min(DOCUMENT_TOKENS_MAX, round(TRIAL_TOKENS * DOCUMENTS_BUSY_S / whole_s)))


def arrivals(data: Path, tokens: int, seed: int = 7) -> list[Arrival]:
    """Chats all the way, forty documents at once at 10 s, deferrable work among them; sorted by time.

    `tokens` is the length of a document's answer.
    """
    rng = random.Random(seed)
    chats, documents = _texts(data / "chats.jsonl"), _texts(data / "documents.jsonl")
    out: list[Arrival] = []
    at_s, number = 0.3, 0
    while at_s < LENGTH_S:
        out.append(Arrival(at_s, f"chat-{number}", Lane.PRIORITY, Way.STREAM, chats[number % len(chats)], CHAT_TOKENS))
        at_s += rng.uniform(0.5, 1.5) * CHAT_EVERY_S
        number += 1
    for i, document in enumerate(documents[:DOCUMENTS]):
        text = document_prompt(document)
        at_s = DOCUMENTS_AT_S + 0.05 * i
        out.append(Arrival(at_s, f"document-{i}", Lane.BATCH, Way.PRODUCER, text, tokens, BATCH_WITHIN_S))
    for i in range(10):
        text = f"Give this text a title:\n\n{documents[-1 - i]}"
        at_s = DOCUMENTS_AT_S + 3.0 + 1.2 * i
        out.append(Arrival(at_s, f"title-{i}", Lane.DEFERRABLE, Way.SUBMIT, text, 24, DEFERRABLE_WITHIN_S))
    return sorted(out, key=lambda a: a.at_s)
