"""What TensorRT-LLM's answers mean, in whatever form they reach us. Pure; docs/engines.md says where it was read."""

from __future__ import annotations

import re

import structlog

from laneway.core.lanes import FinishReason
from laneway.workers.engines.protocol import EngineRequest

# The oldest release in whose documentation we found penalties of its default sampler: before, they are ignored.
PENALTIES_SINCE = (1, 3, 0, 24)
RELEASE = 10**6  # after every candidate of it

log = structlog.get_logger(__name__)


def end_ids_of(request: EngineRequest, eos_ids: frozenset[int]) -> frozenset[int]:
    """The ids that end an answer and are not among those given out."""
    return frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else eos_ids)


def finish_of(reason: str, received: int, max_tokens: int) -> tuple[FinishReason, str]:
    """What ended an answer of so many tokens, and our words for it where that is an error."""
    if reason == "stop":
        return FinishReason.STOP, ""
    if reason == "length":
        if received >= max_tokens:
            return FinishReason.LENGTH, ""
        # It cuts max_tokens to what its own context leaves, and says so in its log only.
        return FinishReason.ERROR, (
            f"TensorRT-LLM gave {received} of {max_tokens} tokens and stopped: its context is shorter than the pool's "
            "context_length"
        )
    if reason == "cancelled":
        return FinishReason.ERROR, "the request was aborted there by somebody else"
    if reason == "timeout":
        return FinishReason.ERROR, "a time limit of TensorRT-LLM ended the answer"
    log.warning("trtllm_finish_unknown", finish_reason=reason)
    return FinishReason.ERROR, "TensorRT-LLM ended the answer for a reason that is not known here"


def has_penalties(version: str) -> bool:
    """Whether this TensorRT-LLM version does what repetition, presence and frequency penalties ask for."""
    parts = re.match(r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?", version)
    if parts is None:
        return False
    major, minor, patch, candidate = parts.groups()
    return (int(major), int(minor), int(patch), int(candidate or RELEASE)) >= PENALTIES_SINCE
