"""How long an answer is expected to get at most, for what rests on it here: KV that it will take, and who may yield."""

from __future__ import annotations

from laneway.core.job import LaneJob, QueuedJob
from laneway.policy.lengths import LengthBook

PREDICTED_QUANTILE = 0.9  # of output lengths; who outlives it is expected to go on to its limit


def predicted_tokens(job: QueuedJob, lengths: LengthBook) -> int:
    """Tokens of the whole answer, at least 1 and at most its limit."""
    record = job.record
    if not isinstance(job, LaneJob):  # its task is not here yet
        return lengths.predict(record.tenant, record.model, PREDICTED_QUANTILE, record.max_tokens, route=record.route)
    sampling = job.task.sampling
    if sampling.ignore_eos:
        return sampling.max_tokens
    return lengths.predict(
        record.tenant,
        record.model,
        PREDICTED_QUANTILE,
        sampling.max_tokens,
        min_tokens=sampling.min_tokens or 0,
        route=record.route,
    )
