"""Parts of a job, core value to protobuf message and back: contracts, verdicts, results, errors, timings, tasks.

Used for what Laneway itself wrote: values are taken to be valid. What callers send is parsed in requests.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from laneway.core.errors import Code
from laneway.core.job import (
    Contract,
    Estimate,
    GenerateTask,
    JobError,
    Result,
    Sampling,
    Timings,
    TokenLogprob,
    Usage,
    Verdict,
)
from laneway.core.lanes import Isolation, Lane, OnDisconnect
from laneway.runtime.wire import enums
from laneway.runtime.wire.times import duration_of, span_s, timestamp_of, unix_s
from laneway.v1 import common_pb2, task_pb2

_last_contract: tuple[Contract | None, common_pb2.Contract] = (None, common_pb2.Contract())


def contract_to_proto(contract: Contract) -> common_pb2.Contract:
    """To be put into another message, which copies it: the same contract gives the same message again."""
    global _last_contract  # noqa: PLW0603 - jobs that come together share one
    last, message = _last_contract
    if last is not contract:
        message = _contract_to_proto(contract)
        _last_contract = contract, message
    return message


def _contract_to_proto(contract: Contract) -> common_pb2.Contract:
    return common_pb2.Contract(
        lane=enums.LANE_TO_WIRE[contract.lane],
        ttft_target=duration_of(contract.ttft_target_s),
        tpot_target=duration_of(contract.tpot_target_s),
        deadline=timestamp_of(contract.deadline_s),
        not_before=timestamp_of(contract.not_before_s),
        isolation=enums.ISOLATION_TO_WIRE[contract.isolation],
        least_tier=contract.least_tier,
        cost_max=contract.cost_max,
        regions=contract.regions,
        on_disconnect=enums.ON_DISCONNECT_TO_WIRE[contract.on_disconnect],
        labels=contract.labels or None,
    )


def contract_from_proto(message: common_pb2.Contract) -> Contract:
    return Contract(
        lane=enums.LANE_FROM_WIRE.get(message.lane, Lane.PRIORITY),
        ttft_target_s=span_s(message.ttft_target),
        tpot_target_s=span_s(message.tpot_target),
        deadline_s=unix_s(message.deadline),
        not_before_s=unix_s(message.not_before),
        isolation=enums.ISOLATION_FROM_WIRE.get(message.isolation, Isolation.SLO),
        least_tier=message.least_tier,
        cost_max=message.cost_max if message.HasField("cost_max") else None,
        regions=tuple(message.regions),
        on_disconnect=enums.ON_DISCONNECT_FROM_WIRE.get(message.on_disconnect, OnDisconnect.CANCEL),
        labels=dict(message.labels),
    )


@lru_cache(1024)  # a job's verdict is stored, queued and answered
def verdict_to_proto(verdict: Verdict) -> common_pb2.Verdict:
    """To be put into another message, which copies it."""
    return common_pb2.Verdict(
        kind=enums.VERDICT_KIND_TO_WIRE[verdict.kind],
        reason=verdict.reason,
        message=verdict.message,
        ttft_eta=duration_of(verdict.ttft_eta_s),
        completion_eta=duration_of(verdict.completion_eta_s),
        hold_until=timestamp_of(verdict.hold_until_s or 0.0),
        retry_after=duration_of(verdict.retry_after_s),
        lane=enums.LANE_TO_WIRE[verdict.lane],
        tier=verdict.tier,
        region=verdict.region,
        pool=verdict.pool,
        cost=verdict.cost,
        ttft_bound=duration_of(verdict.ttft_bound_s),
        completion_bound=duration_of(verdict.completion_bound_s),
        facts=dict(verdict.facts),
        estimate=_estimate_to_proto(verdict.estimate),
    )


def verdict_from_proto(message: common_pb2.Verdict) -> Verdict:
    return Verdict(
        kind=enums.VERDICT_KIND_FROM_WIRE[message.kind],
        reason=message.reason,
        message=message.message,
        lane=enums.LANE_FROM_WIRE[message.lane],
        tier=message.tier,
        region=message.region,
        pool=message.pool,
        ttft_eta_s=span_s(message.ttft_eta) if message.HasField("ttft_eta") else None,
        completion_eta_s=span_s(message.completion_eta) if message.HasField("completion_eta") else None,
        hold_until_s=unix_s(message.hold_until) if message.HasField("hold_until") else None,
        retry_after_s=span_s(message.retry_after) if message.HasField("retry_after") else None,
        cost=message.cost,
        ttft_bound_s=span_s(message.ttft_bound) if message.HasField("ttft_bound") else None,
        completion_bound_s=span_s(message.completion_bound) if message.HasField("completion_bound") else None,
        facts=tuple(sorted(message.facts.items())),
        estimate=_estimate_from_proto(message.estimate) if message.HasField("estimate") else None,
    )


def _estimate_to_proto(estimate: Estimate | None) -> common_pb2.Estimate | None:
    if estimate is None:
        return None
    return common_pb2.Estimate(
        ttft_s=estimate.ttft_s,
        ttft_bound_s=estimate.ttft_bound_s,
        completion_s=estimate.completion_s,
        completion_bound_s=estimate.completion_bound_s,
    )


def _estimate_from_proto(message: common_pb2.Estimate) -> Estimate:
    return Estimate(message.ttft_s, message.ttft_bound_s, message.completion_s, message.completion_bound_s)


def usage_to_proto(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        cost=usage.cost,
    )


def usage_from_proto(message: common_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.cached_tokens, message.completion_tokens, message.cost)


def job_error_to_proto(error: JobError) -> common_pb2.JobError:
    return common_pb2.JobError(
        code=int(error.code),
        reason=error.reason,
        message=error.message,
        phase=enums.PHASE_TO_WIRE[error.phase] if error.phase else None,
        field=error.field,
    )


def job_error_from_proto(message: common_pb2.JobError) -> JobError:
    return JobError(
        code=Code(message.code),
        reason=message.reason,
        message=message.message,
        phase=enums.PHASE_FROM_WIRE.get(message.phase),
        field=message.field,
    )


def timings_to_proto(timings: Timings) -> common_pb2.Timings:
    created = timestamp_of(timings.created_s)
    if timings == Timings(timings.created_s):  # as each job is stored first
        return common_pb2.Timings(created_at=created)
    return common_pb2.Timings(
        created_at=created,
        claimed_at=timestamp_of(timings.claimed_s),
        first_token_at=timestamp_of(timings.first_token_s),
        ended_at=timestamp_of(timings.ended_s),
        prefill=duration_of(timings.prefill_span_s or None),
        decode=duration_of(timings.decode_span_s or None),
    )


def timings_from_proto(message: common_pb2.Timings) -> Timings:
    return Timings(
        created_s=unix_s(message.created_at),
        claimed_s=unix_s(message.claimed_at),
        first_token_s=unix_s(message.first_token_at),
        ended_s=unix_s(message.ended_at),
        prefill_span_s=span_s(message.prefill),
        decode_span_s=span_s(message.decode),
    )


def token_logprobs_to_proto(logprobs: Iterable[TokenLogprob]) -> list[task_pb2.TokenLogprob]:
    return [
        task_pb2.TokenLogprob(
            logprob=each.logprob,
            top=[task_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in each.top],
        )
        for each in logprobs
    ]


def token_logprobs_from_proto(messages: Iterable[task_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(m.logprob, tuple((top.token_id, top.logprob) for top in m.top)) for m in messages)


def result_to_proto(result: Result) -> task_pb2.Result:
    return task_pb2.Result(
        text=result.text,
        token_ids=result.token_ids,
        text_lengths=result.text_lengths,
        logprobs=token_logprobs_to_proto(result.logprobs),
        finish_reason=enums.FINISH_REASON_TO_WIRE[result.finish_reason],
        usage=usage_to_proto(result.usage),
    )


def result_from_proto(message: task_pb2.Result) -> Result:
    return Result(
        text=message.text,
        token_ids=tuple(message.token_ids),
        text_lengths=tuple(message.text_lengths),
        finish_reason=enums.FINISH_REASON_FROM_WIRE[message.finish_reason],
        usage=usage_from_proto(message.usage),
        logprobs=token_logprobs_from_proto(message.logprobs),
    )


# --- tasks -----------------------------------------------------------------------------------------


def sampling_to_proto(sampling: Sampling) -> task_pb2.Sampling:
    return task_pb2.Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias or None,  # an empty one takes as long as the rest
        n=sampling.n,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
    )


def sampling_from_proto(message: task_pb2.Sampling) -> Sampling:
    has = message.HasField
    return Sampling(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p if has("top_p") else None,
        top_k=message.top_k if has("top_k") else None,
        min_p=message.min_p if has("min_p") else None,
        seed=message.seed if has("seed") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs if has("top_logprobs") else None,
        repetition_penalty=message.repetition_penalty if has("repetition_penalty") else None,
        presence_penalty=message.presence_penalty if has("presence_penalty") else None,
        frequency_penalty=message.frequency_penalty if has("frequency_penalty") else None,
        logit_bias=dict(message.logit_bias),
        n=message.n,
        min_tokens=message.min_tokens if has("min_tokens") else None,
        ignore_eos=message.ignore_eos,
    )


def task_to_proto(task: GenerateTask) -> task_pb2.GenerateTask:
    return task_pb2.GenerateTask(
        tokens=task_pb2.TokenPrompt(ids=task.prompt_ids),
        sampling=sampling_to_proto(task.sampling),
        response_format=_format_to_proto(task),
        adapter=task.adapter,
        cache_salt=task.cache_salt,
        session_id=task.session_id,
    )


def task_from_proto(message: task_pb2.GenerateTask) -> GenerateTask:
    wanted = message.response_format
    return GenerateTask(
        prompt_ids=tuple(message.tokens.ids),
        sampling=sampling_from_proto(message.sampling),
        json_object=wanted.json_object,
        json_schema=wanted.json_schema,
        regex=wanted.regex,
        grammar=wanted.grammar,
        adapter=message.adapter,
        cache_salt=message.cache_salt,
        session_id=message.session_id,
    )


def _format_to_proto(task: GenerateTask) -> task_pb2.ResponseFormat | None:
    if task.json_object:
        return task_pb2.ResponseFormat(json_object=True)
    if task.json_schema:
        return task_pb2.ResponseFormat(json_schema=task.json_schema)
    if task.regex:
        return task_pb2.ResponseFormat(regex=task.regex)
    return task_pb2.ResponseFormat(grammar=task.grammar) if task.grammar else None
