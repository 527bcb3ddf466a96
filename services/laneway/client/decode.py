"""From the services' messages to the client's values. A word that this release does not know gets a neutral reading:
an older client must not fail on a newer service."""

from __future__ import annotations

from laneway.client.values import (
    Cancelled,
    Chunk,
    DeadAttempt,
    DeadLetter,
    ExplainedStep,
    Explanation,
    Job,
    LaneStatus,
    Model,
    Quote,
    Region,
    RegionModel,
    RegionScore,
    Route,
    Submitted,
    Worker,
)
from laneway.core.job import Verdict
from laneway.core.lanes import FinishReason, JobState, Lane
from laneway.core.selectors import Selector
from laneway.runtime.wire import enums, jobs
from laneway.runtime.wire.times import span_s, unix_s
from laneway.v1 import admission_pb2, common_pb2, routing_pb2, scheduler_pb2, task_pb2


def state_of(number: int) -> JobState:
    return enums.JOB_STATE_FROM_WIRE.get(number, JobState.WAITING)


def finish_reason_of(number: int) -> FinishReason:
    return enums.FINISH_REASON_FROM_WIRE.get(number, FinishReason.STOP)


def verdict_of(message: common_pb2.Verdict) -> Verdict | None:
    known = message.kind in enums.VERDICT_KIND_FROM_WIRE and message.lane in enums.LANE_FROM_WIRE
    return jobs.verdict_from_proto(message) if known else None


def chunk_of(message: task_pb2.Chunk) -> Chunk:
    return Chunk(
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=jobs.token_logprobs_from_proto(message.logprobs),
        output=message.output,
    )


def submitted_of(message: admission_pb2.SubmitResponse | admission_pb2.RequeueDeadLetterResponse) -> Submitted:
    return Submitted(message.job_id, jobs.verdict_from_proto(message.verdict))


def quote_of(message: admission_pb2.QuoteResponse) -> Quote:
    return Quote(jobs.verdict_from_proto(message.verdict), message.prompt_tokens, message.max_tokens)


def cancelled_of(job_id: str, message: admission_pb2.CancelJobResponse) -> Cancelled:
    return Cancelled(job_id, state_of(message.state), unix_s(message.ended_at))


def job_of(message: admission_pb2.Job) -> Job:
    return Job(
        job_id=message.job_id,
        tenant=message.tenant,
        model=message.model,
        state=state_of(message.state),
        contract=jobs.contract_from_proto(message.contract),
        verdict=verdict_of(message.verdict),
        attempt=message.attempt,
        timings=jobs.timings_from_proto(message.timings),
        usage=jobs.usage_from_proto(message.usage),
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        result=jobs.result_from_proto(message.result) if message.HasField("result") else None,
        error=jobs.job_error_from_proto(message.error) if message.HasField("error") else None,
        preemptions=message.preemptions,
        requeued_from=message.requeued_from,
    )


def dead_letter_of(message: admission_pb2.DeadLetter) -> DeadLetter:
    return DeadLetter(
        job_id=message.job_id,
        tenant=message.tenant,
        model=message.model,
        lane=enums.LANE_FROM_WIRE.get(message.lane, Lane.PRIORITY),
        reason=message.reason,
        message=message.message,
        died_s=unix_s(message.died_at),
        attempts=tuple(DeadAttempt(a.attempt, a.worker_id, unix_s(a.claimed_at)) for a in message.attempts),
        requeueable=message.requeueable,
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        labels=dict(message.labels),
        requeued_from=message.requeued_from,
    )


# --- operators -------------------------------------------------------------------------------------


def worker_of(message: scheduler_pb2.Worker) -> Worker:
    return Worker(
        worker_id=message.worker_id,
        name=message.name,
        pool=message.pool,
        engine=message.engine,
        state=message.state,
        detail=message.detail,
        slots=message.slots,
        running=message.running,
        kv_tokens=message.kv_tokens,
        kv_tokens_used=message.kv_tokens_used,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        decode_tokens_per_s=message.decode_tokens_per_s,
        started_s=unix_s(message.started_at),
        seen_s=unix_s(message.seen_at),
        jobs_done=message.jobs_done,
        tokens_done=message.tokens_done,
        capabilities=tuple(message.capabilities),
        busy_s=message.busy_s,
        process_id=message.process_id,
        home=message.home,
        lower_tokens_per_s=message.lower_tokens_per_s,
        priority_tpot_p95_s=message.priority_tpot_p95_s,
        theta=message.theta,
        load_progress=message.load_progress,
        engine_deaths=message.engine_deaths,
    )


def lane_status_of(message: scheduler_pb2.LaneStatus) -> LaneStatus:
    return LaneStatus(
        lane=enums.LANE_FROM_WIRE.get(message.lane, Lane.PRIORITY),
        pool=message.pool,
        paused=message.paused,
        ready=message.ready,
        running=message.running,
        parked=message.parked,
        limit=message.limit,
        next_due_s=unix_s(message.next_due),
        released=message.released,
    )


def model_of(message: scheduler_pb2.Model) -> Model:
    return Model(
        name=message.name,
        tier=message.tier,
        pool=message.pool,
        engine=message.engine,
        context_length=message.context_length,
        vocabulary_size=message.vocabulary_size,
        capabilities=tuple(message.capabilities),
        workers=message.workers,
        price_per_million_prompt_tokens=message.price_per_million_prompt_tokens,
        price_per_million_completion_tokens=message.price_per_million_completion_tokens,
        price_per_device_s=message.price_per_device_s,
        weights=message.weights,
        precision=message.precision,
        selector=Selector(
            tuple(enums.LANE_FROM_WIRE[lane] for lane in message.lanes if lane in enums.LANE_FROM_WIRE),
            message.prompt_tokens_min,
            message.prompt_tokens_max,
            tuple(message.features),
        ),
        planned_workers=message.planned_workers,
    )


def explanation_of(message: scheduler_pb2.ExplainJobResponse) -> Explanation:
    steps = (ExplainedStep(unix_s(s.at), s.actor, s.action, s.reason, dict(s.facts)) for s in message.steps)
    return Explanation(message.job_id, state_of(message.state), tuple(steps))


def region_of(message: routing_pb2.RegionDigest) -> Region:
    return Region(
        region=message.region,
        made_s=unix_s(message.made_at),
        draining=message.draining,
        healthy=message.healthy,
        zones=tuple(message.zones),
        models=tuple(_region_model_of(model) for model in message.models),
        price_factor=message.price_factor,
        round_trip_s=span_s(message.round_trip) if message.HasField("round_trip") else None,
    )


def _region_model_of(message: routing_pb2.ModelDigest) -> RegionModel:
    return RegionModel(
        model=message.model,
        tier=message.tier,
        workers=message.workers,
        free_slots=message.free_slots,
        ttft_eta_s=span_s(message.ttft_eta) if message.HasField("ttft_eta") else None,
        batch_eta_s=span_s(message.batch_eta) if message.HasField("batch_eta") else None,
    )


def route_of(message: routing_pb2.RouteResponse) -> Route:
    scores = tuple(RegionScore(s.region, s.score_s, s.excluded) for s in message.scores)
    return Route(message.region, message.reason, scores)
