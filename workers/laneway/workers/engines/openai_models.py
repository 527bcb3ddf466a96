"""What an OpenAI-compatible server lists of its models, against what the pool says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laneway.workers.engines.protocol import EngineCapacity, EngineStartError

_SHOWN_MODELS = 5


def model_of(listed: Mapping[str, Any], wanted: str) -> Mapping[str, Any]:
    """The entry of the model to ask for, of what the server lists. EngineStartError if that is none."""
    data = listed.get("data")
    entries = [each for each in data if isinstance(each, Mapping)] if isinstance(data, list) else []
    models = {str(each.get("id")): each for each in entries if each.get("id")}
    if not models:
        raise EngineStartError("it lists no model: is it an OpenAI-compatible server, and base_url right?")
    if not wanted and len(models) == 1:
        return next(iter(models.values()))
    if wanted in models:
        return models[wanted]
    names = ", ".join(list(models)[:_SHOWN_MODELS]) + (", ..." if len(models) > _SHOWN_MODELS else "")
    if wanted:
        raise EngineStartError(f"it has no model {wanted!r}: set served_model to one of {names}")
    raise EngineStartError(f"it has several models: set served_model to one of {names}")


def check_model(pool: EngineCapacity, model: Mapping[str, Any]) -> None:
    """EngineStartError where the server tells what cannot be true with the pool's figures. Most tell nothing."""
    meta = model.get("meta")
    more: Mapping[str, Any] = meta if isinstance(meta, Mapping) else {}
    limit = model.get("max_model_len") or more.get("n_ctx")  # of vLLM; of llama.cpp, for one sequence
    if isinstance(limit, int) and 0 < limit < pool.context_length:
        raise EngineStartError(
            f"it takes {limit} tokens of prompt and answer, the pool's context_length is {pool.context_length}: "
            f"set context_length = {limit}, or start it with a longer context"
        )
    vocabulary = more.get("n_vocab")
    if isinstance(vocabulary, int) and vocabulary > pool.vocabulary_size:
        raise EngineStartError(
            f"its model has {vocabulary} tokens, the pool's vocabulary_size is {pool.vocabulary_size}: set the "
            "tokenizer and the vocabulary_size of that model"
        )
