"""The scheduler's plan as bytes, and its parts that leases have as well."""

from __future__ import annotations

from laneway.core.fleet import (
    Demand,
    EtaFit,
    HomePlan,
    LanePlan,
    Plan,
    PolicyVersion,
    PoolPlan,
    StepTimes,
    TenantDepth,
)
from laneway.runtime.wire import enums
from laneway.runtime.wire.reading import UnreadableMessage, parse_message
from laneway.runtime.wire.times import duration_of, span_s, timestamp_of, unix_s
from laneway.v1 import scheduler_pb2


def encode_plan(plan: Plan) -> bytes:
    return plan_to_proto(plan).SerializeToString()


def decode_plan(data: bytes) -> Plan:
    message = scheduler_pb2.Plan()
    parse_message(message, data, "plan")
    try:
        return plan_from_proto(message)
    except (KeyError, ValueError) as error:
        raise UnreadableMessage(f"the plan holds an unknown value: {error}") from None


def plan_to_proto(plan: Plan) -> scheduler_pb2.Plan:
    return scheduler_pb2.Plan(
        region=plan.region,
        epoch=plan.epoch,
        version=plan.version,
        made_at=timestamp_of(plan.made_s),
        valid_until=timestamp_of(plan.valid_until_s),
        pools=[_pool_to_proto(pool) for pool in plan.pools],
        paused=sorted(enums.LANE_TO_WIRE[lane] for lane in plan.paused),
        tenants=[
            scheduler_pb2.TenantDepth(tenant=each.tenant, lane=enums.LANE_TO_WIRE[each.lane], open=each.open)
            for each in plan.tenants
        ],
        counted_before=plan.counted_before,
        policy=_policy_to_proto(plan.policy) if plan.policy.version else None,
    )


def plan_from_proto(message: scheduler_pb2.Plan) -> Plan:
    return Plan(
        region=message.region,
        epoch=message.epoch,
        version=message.version,
        made_s=unix_s(message.made_at),
        valid_until_s=unix_s(message.valid_until),
        pools=tuple(_pool_from_proto(pool) for pool in message.pools),
        paused=frozenset(enums.LANE_FROM_WIRE[lane] for lane in message.paused),
        tenants=tuple(TenantDepth(t.tenant, enums.LANE_FROM_WIRE[t.lane], t.open) for t in message.tenants),
        counted_before=message.counted_before,
        policy=_policy_from_proto(message.policy),
    )


def _pool_to_proto(pool: PoolPlan) -> scheduler_pb2.PoolPlan:
    return scheduler_pb2.PoolPlan(
        pool=pool.pool,
        workers=pool.workers,
        slots=pool.slots,
        free_slots=pool.free_slots,
        kv_tokens=pool.kv_tokens,
        free_kv_tokens=pool.free_kv_tokens,
        prefill_tokens_per_s=pool.prefill_tokens_per_s,
        decode_tokens_per_s=pool.decode_tokens_per_s,
        service_s=pool.service_s,
        desired_workers=pool.desired_workers,
        lanes=[
            scheduler_pb2.LanePlan(
                lane=enums.LANE_TO_WIRE[lane.lane],
                ready=lane.ready,
                running=lane.running,
                parked=lane.parked,
                parked_device_s=lane.parked_device_s,
                limit=lane.limit,
                oldest_wait=duration_of(lane.oldest_wait_s or None),
                demand=[
                    scheduler_pb2.Demand(by=timestamp_of(each.by_s), device_s=each.device_s) for each in lane.demand
                ],
                ttft_fit=_fit_to_proto(lane.ttft_fit),
                completion_fit=_fit_to_proto(lane.completion_fit),
            )
            for lane in pool.lanes
        ],
        homes=[
            scheduler_pb2.HomePlan(
                home=each.home,
                worker_id=each.worker_id,
                ready=each.ready,
                running=each.running,
                oldest_wait=duration_of(each.oldest_wait_s or None),
            )
            for each in pool.homes
        ],
        lower_tokens_per_s=pool.lower_tokens_per_s,
        priority_per_s=pool.priority_per_s,
        burstiness=pool.burstiness,
        reserved_slots=pool.reserved_slots,
        step_times=step_times_to_proto(pool.step_times),
        hot_prefixes=pool.hot_prefixes,
        desired_reason=pool.desired_reason,
    )


def _pool_from_proto(message: scheduler_pb2.PoolPlan) -> PoolPlan:
    return PoolPlan(
        pool=message.pool,
        workers=message.workers,
        slots=message.slots,
        free_slots=message.free_slots,
        kv_tokens=message.kv_tokens,
        free_kv_tokens=message.free_kv_tokens,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        decode_tokens_per_s=message.decode_tokens_per_s,
        service_s=message.service_s,
        desired_workers=message.desired_workers,
        lanes=tuple(
            LanePlan(
                lane=enums.LANE_FROM_WIRE[lane.lane],
                ready=lane.ready,
                running=lane.running,
                parked=lane.parked,
                parked_device_s=lane.parked_device_s,
                limit=lane.limit,
                oldest_wait_s=span_s(lane.oldest_wait),
                demand=tuple(Demand(unix_s(each.by), each.device_s) for each in lane.demand),
                ttft_fit=_fit_from_proto(lane.ttft_fit),
                completion_fit=_fit_from_proto(lane.completion_fit),
            )
            for lane in message.lanes
        ),
        homes=tuple(
            HomePlan(each.home, each.worker_id, each.ready, each.running, span_s(each.oldest_wait))
            for each in message.homes
        ),
        lower_tokens_per_s=message.lower_tokens_per_s,
        priority_per_s=message.priority_per_s,
        burstiness=message.burstiness or 1.0,
        reserved_slots=message.reserved_slots,
        step_times=step_times_from_proto(message.step_times),
        hot_prefixes=tuple(message.hot_prefixes),
        desired_reason=message.desired_reason,
    )


def step_times_to_proto(times: StepTimes) -> scheduler_pb2.StepTimes | None:
    if not times.base_s:
        return None
    return scheduler_pb2.StepTimes(
        base_s=times.base_s,
        sequence_s=times.sequence_s,
        context_token_s=times.context_token_s,
        prefill_token_s=times.prefill_token_s,
        chunk_tokens=times.chunk_tokens,
    )


def step_times_from_proto(message: scheduler_pb2.StepTimes) -> StepTimes:
    return StepTimes(
        base_s=message.base_s,
        sequence_s=message.sequence_s,
        context_token_s=message.context_token_s,
        prefill_token_s=message.prefill_token_s,
        chunk_tokens=message.chunk_tokens,
    )


def _policy_to_proto(policy: PolicyVersion) -> scheduler_pb2.PolicyVersion:
    return scheduler_pb2.PolicyVersion(
        version=policy.version,
        json=policy.json,
        loaded_at=timestamp_of(policy.loaded_s),
        refused=policy.refused,
        restart=policy.restart,
    )


def _policy_from_proto(message: scheduler_pb2.PolicyVersion) -> PolicyVersion:
    return PolicyVersion(
        message.version, message.json, unix_s(message.loaded_at), message.refused, tuple(message.restart)
    )


def _fit_to_proto(fit: EtaFit) -> scheduler_pb2.EtaFit | None:
    return scheduler_pb2.EtaFit(p50=fit.p50, p90=fit.p90, samples=fit.samples) if fit.samples else None


def _fit_from_proto(message: scheduler_pb2.EtaFit) -> EtaFit:
    return EtaFit(message.p50, message.p90, message.samples) if message.samples else EtaFit()
