"""From a job's task to what an engine is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from laneway.core.job import GenerateTask
from laneway.core.lanes import Lane
from laneway.workers.engines.protocol import EngineRequest

# For engines that order inside; ours never queue lower lanes there, so this only breaks ties. The lane decides, then
# slack, coarsely: among those that are about equally urgent, who came first is first.
_LEAST = {Lane.PRIORITY: 0.75, Lane.DEFERRABLE: 0.375, Lane.BATCH: 0.0}
_BAND, _URGENCIES = 0.25, 16
HALF_URGENT_S = 30.0  # of slack


def priority_of(lane: Lane, slack_s: float) -> float:
    """0 to 1: the lane's least for who may begin whenever it likes, a band more for who should have begun."""
    urgency = 1.0 / (1.0 + max(0.0, slack_s) / HALF_URGENT_S)
    return _LEAST[lane] + _BAND * round(_URGENCIES * urgency) / _URGENCIES


def request_of(
    request_id: int, task: GenerateTask, lane: Lane, done: Sequence[int] = (), *, slack_s: float = math.inf
) -> EngineRequest:
    """The sequence that goes on after `done`, ids already generated; fewer than max_tokens. `slack_s`: until its
    latest start."""
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
        priority=priority_of(lane, slack_s),
    )
