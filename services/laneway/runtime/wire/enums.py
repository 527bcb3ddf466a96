"""Core words and their protobuf numbers, both ways. An unspecified or unknown number has no entry: callers decide."""

from __future__ import annotations

from laneway.core.lanes import FinishReason, Isolation, JobState, Lane, OnDisconnect, Phase, VerdictKind
from laneway.v1 import common_pb2 as pb

LANE_TO_WIRE: dict[Lane, pb.Lane] = {
    Lane.PRIORITY: pb.LANE_PRIORITY,
    Lane.DEFERRABLE: pb.LANE_DEFERRABLE,
    Lane.BATCH: pb.LANE_BATCH,
}
LANE_FROM_WIRE: dict[int, Lane] = {number: word for word, number in LANE_TO_WIRE.items()}

ISOLATION_TO_WIRE: dict[Isolation, pb.Isolation] = {
    Isolation.SLO: pb.ISOLATION_SLO,
    Isolation.STRICT: pb.ISOLATION_STRICT,
}
ISOLATION_FROM_WIRE: dict[int, Isolation] = {number: word for word, number in ISOLATION_TO_WIRE.items()}

ON_DISCONNECT_TO_WIRE: dict[OnDisconnect, pb.OnDisconnect] = {
    OnDisconnect.CANCEL: pb.ON_DISCONNECT_CANCEL,
    OnDisconnect.KEEP: pb.ON_DISCONNECT_KEEP,
}
ON_DISCONNECT_FROM_WIRE: dict[int, OnDisconnect] = {number: word for word, number in ON_DISCONNECT_TO_WIRE.items()}

JOB_STATE_TO_WIRE: dict[JobState, pb.JobState] = {
    JobState.WAITING: pb.JOB_STATE_WAITING,
    JobState.PARKED: pb.JOB_STATE_PARKED,
    JobState.READY: pb.JOB_STATE_READY,
    JobState.RUNNING: pb.JOB_STATE_RUNNING,
    JobState.SUCCEEDED: pb.JOB_STATE_SUCCEEDED,
    JobState.FAILED: pb.JOB_STATE_FAILED,
    JobState.CANCELLED: pb.JOB_STATE_CANCELLED,
    JobState.EXPIRED: pb.JOB_STATE_EXPIRED,
    JobState.REFUSED: pb.JOB_STATE_REFUSED,
}
JOB_STATE_FROM_WIRE: dict[int, JobState] = {number: word for word, number in JOB_STATE_TO_WIRE.items()}

PHASE_TO_WIRE: dict[Phase, pb.Phase] = {
    Phase.QUEUE: pb.PHASE_QUEUE,
    Phase.PREFILL: pb.PHASE_PREFILL,
    Phase.DECODE: pb.PHASE_DECODE,
}
PHASE_FROM_WIRE: dict[int, Phase] = {number: word for word, number in PHASE_TO_WIRE.items()}

FINISH_REASON_TO_WIRE: dict[FinishReason, pb.FinishReason] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.EXPIRED: pb.FINISH_REASON_EXPIRED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
FINISH_REASON_FROM_WIRE: dict[int, FinishReason] = {number: word for word, number in FINISH_REASON_TO_WIRE.items()}

VERDICT_KIND_TO_WIRE: dict[VerdictKind, pb.VerdictKind] = {
    VerdictKind.ACCEPTED: pb.VERDICT_KIND_ACCEPTED,
    VerdictKind.HELD: pb.VERDICT_KIND_HELD,
    VerdictKind.MOVED: pb.VERDICT_KIND_MOVED,
    VerdictKind.REFUSED: pb.VERDICT_KIND_REFUSED,
}
VERDICT_KIND_FROM_WIRE: dict[int, VerdictKind] = {number: word for word, number in VERDICT_KIND_TO_WIRE.items()}
