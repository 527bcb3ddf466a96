"""What a Triton server tells of a TensorRT-LLM model's room: from its metrics, where they have it, and its statistics.

The classic model exports `nv_trt_llm_…` gauges; the one on the LLM API none, and then the pool's figures hold.
"""

from __future__ import annotations

import structlog
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from laneway.workers.engines.protocol import EngineCapacity

log = structlog.get_logger(__name__)


class Told(Struct, frozen=True):
    """Of one model; 0: not told."""

    slots: int = 0
    kv_tokens: int = 0
    block_tokens: int = 0


def told_by(metrics: str, model: str) -> Told:
    """From the text of a metrics page. The gauges carry the name of the classic inner model, whichever is asked for:
    those of `model` are taken if there are any, else those of the only model that has them."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            for label in ("kv_cache_block_type", "request_type"):
                if sample.name.startswith("nv_trt_llm_") and label in sample.labels:
                    gauges = found.setdefault(sample.labels.get("model", ""), {})
                    gauges[label, sample.labels[label]] = sample.value
    gauges = found.get(model) or (next(iter(found.values())) if len(found) == 1 else {})
    block_tokens = round(gauges.get(("kv_cache_block_type", "tokens_per"), 0.0))
    return Told(
        slots=round(gauges.get(("request_type", "max"), 0.0)),
        kv_tokens=round(gauges.get(("kv_cache_block_type", "max"), 0.0)) * block_tokens,
        block_tokens=block_tokens,
    )


def capacity_of(pool: EngineCapacity, told: Told) -> EngineCapacity:
    """The pool's figures, and the server's where it has less room."""
    slots = min(pool.slots, told.slots or pool.slots)
    kv_tokens = min(pool.kv_tokens, told.kv_tokens or pool.kv_tokens)
    if (slots, kv_tokens) != (pool.slots, pool.kv_tokens):
        log.warning("triton_has_less_room", slots=slots, kv_tokens=kv_tokens, pool_slots=pool.slots)
    return EngineCapacity(
        slots, kv_tokens, pool.context_length, pool.vocabulary_size, block_tokens=told.block_tokens or 1
    )


class Waits:
    """How long requests wait in the server before its model takes them, from counts that only grow."""

    def __init__(self) -> None:
        self._count = self._ns = 0

    def mean_s(self, count: int, ns: int) -> float:
        """Of the requests since the last call; 0 if there were none."""
        new, waited_ns = count - self._count, ns - self._ns
        self._count, self._ns = count, ns
        return waited_ns / new / 1e9 if new > 0 else 0.0
