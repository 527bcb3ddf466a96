"""From a job's task to what an engine is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from laneway.core.job import GenerateTask
from laneway.core.lanes import Lane
from laneway.workers.engines.protocol import EngineRequest

# For engines that order inside; ours never queue lower lanes there, so this only breaks ties.
_PRIORITY = {Lane.PRIORITY: 1.0, Lane.DEFERRABLE: 0.5, Lane.BATCH: 0.0}


def request_of(request_id: int, task: GenerateTask, lane: Lane, done: Sequence[int] = ()) -> EngineRequest:
    """The sequence that goes on after `done`, ids already generated; fewer than max_tokens."""
    s = task.sampling
    return EngineRequest(
        id=request_id,
        prompt_ids=(*task.prompt_ids, *done),
        max_tokens=s.max_tokens - len(done),
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        seed=s.seed,
        stop_token_ids=s.stop_token_ids,
        logprobs=s.logprobs,
        top_logprobs=s.top_logprobs or 0,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=dict(s.logit_bias),
        min_tokens=max(0, (s.min_tokens or 0) - len(done)),
        ignore_eos=s.ignore_eos,
        json_schema=task.json_schema,
        adapter=task.adapter,
        cache_salt=task.cache_salt,
        priority=_PRIORITY[lane],
    )
