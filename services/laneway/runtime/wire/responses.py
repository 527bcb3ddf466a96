"""What callers get: jobs, chunks and ends of answers, from records and results."""

from __future__ import annotations

from collections.abc import Iterator

from laneway.core.job import JobRecord, Result
from laneway.core.lanes import JobState
from laneway.runtime.wire import enums, jobs
from laneway.v1 import admission_pb2, common_pb2, task_pb2

_ID_BYTES = 5  # of a token id, at most
_LOGPROB_BYTES = 24  # of a token's probability with its id and tags, at most


def record_to_job(
    record: JobRecord, state: JobState | None = None, *, include_result: bool = False
) -> admission_pb2.Job:
    """`state`: what readers see instead of WAITING, where it is known."""
    result = record.result
    return admission_pb2.Job(
        job_id=record.job_id,
        tenant=record.tenant,
        model=record.model,
        state=enums.JOB_STATE_TO_WIRE[state or record.state],
        contract=jobs.contract_to_proto(record.contract),
        verdict=jobs.verdict_to_proto(record.verdict),
        attempt=record.attempt,
        timings=jobs.timings_to_proto(record.timings),
        result=jobs.result_to_proto(result) if result and include_result else None,
        error=jobs.job_error_to_proto(record.error) if record.error else None,
        usage=jobs.usage_to_proto(result.usage) if result else None,
        prompt_tokens=record.prompt_tokens,
        max_tokens=record.max_tokens,
        preemptions=record.preemptions,
        requeued_from=record.requeued_from,
    )


def finished_of(record: JobRecord) -> admission_pb2.Finished:
    """The end of a stream, from a terminal record."""
    result = record.result
    return admission_pb2.Finished(
        job_id=record.job_id,
        state=enums.JOB_STATE_TO_WIRE[record.state],
        finish_reason=(
            enums.FINISH_REASON_TO_WIRE[result.finish_reason] if result else common_pb2.FINISH_REASON_UNSPECIFIED
        ),
        usage=jobs.usage_to_proto(result.usage) if result else None,
        timings=jobs.timings_to_proto(record.timings),
        attempt=record.attempt,
    )


def result_chunks(result: Result, from_index: int, bytes_max: int) -> Iterator[task_pb2.Chunk]:
    """All tokens from `from_index` on, with the text that became final with them; cut before `bytes_max` is reached."""
    if from_index >= len(result.token_ids):
        return
    first, size, skipped = from_index, 0, sum(result.text_lengths[:from_index])
    count, lengths, logprobs = len(result.token_ids), result.text_lengths, result.logprobs
    written = skipped  # characters up to `index`
    for index in range(from_index, count):
        adds = _ID_BYTES + 4 * (lengths[index] if index < len(lengths) else 0)
        if index < len(logprobs):
            adds += _LOGPROB_BYTES * (1 + len(logprobs[index].top))
        if size and size + adds > bytes_max:
            yield _chunk(result, first, index, result.text[skipped:written])
            first, size, skipped = index, 0, written
        size += adds
        written += lengths[index] if index < len(lengths) else 0
    yield _chunk(result, first, count, result.text[skipped:])


def _chunk(result: Result, first: int, end: int, text: str) -> task_pb2.Chunk:
    return task_pb2.Chunk(
        first_index=first,
        token_ids=result.token_ids[first:end],
        text=text,
        logprobs=jobs.token_logprobs_to_proto(result.logprobs[first:end]),
    )
