"""The last look at a request before an engine takes it, the same for every engine.

The door has refused all of this already with the field's name. What arrives here wrong all the same must harm only
itself, and its caller reads the words below and never those of an engine.
"""

from __future__ import annotations

from laneway.core.catalogue import Capabilities
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest


def check_request(request: EngineRequest, capacity: EngineCapacity) -> None:
    """Raises ValueError when the engine could not run the request."""
    prompt, vocabulary = len(request.prompt_ids), capacity.vocabulary_size
    if not prompt:
        raise ValueError("the prompt is empty")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens is {request.max_tokens}; it must be at least 1")
    if prompt + request.max_tokens > capacity.context_length:
        raise ValueError(
            f"prompt and max_tokens are {prompt} + {request.max_tokens} tokens; "
            f"the context length is {capacity.context_length}"
        )
    if prompt + request.max_tokens > capacity.kv_tokens:
        raise ValueError(
            f"prompt and max_tokens are {prompt} + {request.max_tokens} tokens; "
            f"the engine's KV cache holds {capacity.kv_tokens}"
        )
    for what, ids in (
        ("prompt", request.prompt_ids),
        ("stop", request.stop_token_ids),
        ("biased", tuple(request.logit_bias)),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
            raise ValueError(f"a {what} token id is outside the vocabulary of {vocabulary}")
    if not 0.0 <= request.temperature <= 2.0:
        raise ValueError("temperature must be 0 to 2")
    if request.top_p is not None and not 0.0 < request.top_p <= 1.0:
        raise ValueError("top_p must be above 0 and at most 1")
    if request.min_p is not None and not 0.0 <= request.min_p <= 1.0:
        raise ValueError("min_p must be 0 to 1")


def check_abilities(request: EngineRequest, can: Capabilities) -> None:
    """Raises ValueError when the request uses what its pool does not offer. Never ignored, here neither."""
    lacking = {
        "logprobs": request.logprobs and not can.logprobs,
        "top_logprobs": request.top_logprobs > can.top_logprobs,
        "min_p": request.min_p is not None and not can.min_p,
        "top_k": request.top_k is not None and not can.top_k,
        "seed": request.seed is not None and request.temperature > 0.0 and not can.seed,
        "repetition_penalty": request.repetition_penalty is not None and not can.penalties,
        "presence_penalty": request.presence_penalty is not None and not can.penalties,
        "frequency_penalty": request.frequency_penalty is not None and not can.penalties,
        "logit_bias": bool(request.logit_bias) and not can.logit_bias,
        "min_tokens": request.min_tokens > 0 and not can.min_tokens,
        "ignore_eos": request.ignore_eos and not can.ignore_eos,
        "json_schema": bool(request.json_schema) and not can.json_schema,
        "adapter": bool(request.adapter) and not can.adapters,
        "cache_salt": bool(request.cache_salt) and not can.cache_salt,
    }
    for name, lacks in lacking.items():
        if lacks:
            raise ValueError(f"the pool does not offer {name}")
