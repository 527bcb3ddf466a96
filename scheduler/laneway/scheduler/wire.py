"""The scheduler's values as messages of laneway.v1."""

from __future__ import annotations

from laneway.core.catalogue import Pool
from laneway.core.fleet import PoolPlan, WorkerLease
from laneway.core.lanes import Lane
from laneway.runtime.wire.enums import LANE_TO_WIRE
from laneway.runtime.wire.plans import step_times_to_proto
from laneway.runtime.wire.times import timestamp_of
from laneway.scheduler.explain import Explanation
from laneway.v1 import scheduler_pb2 as pb


def worker_to_proto(lease: WorkerLease) -> pb.Worker:
    return pb.Worker(
        worker_id=lease.worker_id,
        name=lease.name,
        pool=lease.pool,
        engine=lease.engine,
        state=lease.state.value,
        detail=lease.detail,
        slots=lease.slots,
        running=lease.running,
        kv_tokens=lease.kv_tokens,
        kv_tokens_used=lease.kv_tokens_used,
        prefill_tokens_per_s=lease.prefill_tokens_per_s,
        decode_tokens_per_s=lease.decode_tokens_per_s,
        started_at=timestamp_of(lease.started_s),
        seen_at=timestamp_of(lease.renewed_s),
        jobs_done=lease.jobs_done,
        tokens_done=lease.tokens_done,
        capabilities=lease.capabilities,
        busy_s=lease.busy_s,
        process_id=lease.process_id,
        home=lease.home,
        lower_tokens_per_s=lease.lower_tokens_per_s,
        priority_tpot_p95_s=lease.priority_tpot_p95_s,
        theta=lease.theta,
        step_times=step_times_to_proto(lease.step_times),
        load_progress=lease.load_progress,
        engine_deaths=lease.engine_deaths,
    )


def lane_status_to_proto(
    lane: Lane, pool: PoolPlan, *, paused: bool, next_due_ms: int | None, released: int
) -> pb.LaneStatus:
    plan = pool.lane(lane)
    return pb.LaneStatus(
        lane=LANE_TO_WIRE[lane],
        pool=pool.pool,
        paused=paused,
        ready=plan.ready,
        running=plan.running,
        parked=plan.parked,
        limit=plan.limit,
        next_due=timestamp_of(next_due_ms / 1000.0) if next_due_ms is not None else None,
        released=released,
    )


def model_to_proto(pool: Pool, workers: int) -> pb.Model:
    return pb.Model(
        name=pool.model,
        tier=pool.tier,
        pool=pool.name,
        engine=pool.engine,
        context_length=pool.context_length,
        vocabulary_size=pool.vocabulary_size,
        capabilities=pool.capabilities.names(),
        workers=workers,
        price_per_million_prompt_tokens=pool.price_per_million_prompt_tokens,
        price_per_million_completion_tokens=pool.price_per_million_completion_tokens,
        price_per_device_s=pool.price_per_device_s,
        weights=pool.weights,
        precision=pool.precision,
        lanes=[LANE_TO_WIRE[lane] for lane in pool.selector.lanes],
        prompt_tokens_min=pool.selector.prompt_tokens_min,
        prompt_tokens_max=pool.selector.prompt_tokens_max,
        features=pool.selector.features,
        planned_workers=pool.workers,
    )


def explanation_to_proto(step: Explanation) -> pb.Explanation:
    return pb.Explanation(
        at=timestamp_of(step.at_s), actor=step.actor, action=step.action, reason=step.reason, facts=step.facts
    )
