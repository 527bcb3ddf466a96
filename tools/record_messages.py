"""Records what this release writes, so that later releases can show that they still read it.

Each kind of message that is stored on NATS, or travels between services that may be of two releases, becomes a file in
tests/compat/messages/<release>/: its bytes, and what they say in readable form. A sample has every field set. Folders
of earlier releases are never touched: they are what was running. tests/compat/test_messages.py reads them all.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from google.protobuf import json_format
from google.protobuf.message import Message
from msgspec.structs import replace

from laneway.admission import signals
from laneway.admission.ingest_messages import encode_verdict, parse_body
from laneway.core.checkpoints import Delta
from laneway.core.dead_letters import DeadLetter
from laneway.core.errors import Code
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
    WorkerLease,
    WorkerState,
)
from laneway.core.job import (
    SCHEMA,
    Attempt,
    Contract,
    Estimate,
    GenerateTask,
    JobError,
    JobRecord,
    LaneJob,
    QueuedJob,
    ReferredJob,
    Result,
    Sampling,
    Timings,
    TokenLogprob,
    Usage,
    Verdict,
)
from laneway.core.lanes import FinishReason, Isolation, JobState, Lane, OnDisconnect, Phase, VerdictKind
from laneway.core.objects import ObjectRef
from laneway.core.subjects import ParkSubject
from laneway.policy.breaker import Breaker
from laneway.policy.quota import Amount, Grant, QuotaRecord, Slice, Waiter, WindowUse
from laneway.policy.rate_headers import Told
from laneway.policy.route import ModelDigest, RegionDigest
from laneway.routing.wire import decode_digest, digest_to_proto
from laneway.runtime.wire import plans, records
from laneway.runtime.wire.answers import answered
from laneway.runtime.wire.checkpoints import decode_checkpoint, encode_checkpoint
from laneway.runtime.wire.dead_letters import decode_dead_letter, encode_dead_letter
from laneway.runtime.wire.quotas import decode_quota, encode_quota
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.scheduler.leader import Term
from laneway.v1 import admission_pb2, bus_pb2, common_pb2, routing_pb2, scheduler_pb2, task_pb2
from laneway.workers.messages import Attachment, CancelHint, Control, DoorBeat, DrainHint, parse_control

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "compat" / "messages"
SCHEMAS = "schemas.json"  # which schema number a release writes, and which ones it reads

T = TypeVar("T")
NOW_S = 1_800_000_000.25
JOB = "eu-01900000-0000-7000-8000-000000000001"


@dataclass(frozen=True)
class Kind:
    """One kind of message: how this release writes it, and how it reads it."""

    name: str
    message: type[Message] | None  # None: JSON or plain text
    sample: object
    encode: Callable[[], bytes]  # of the sample
    decode: Callable[[bytes], object]
    again: Callable[[bytes], bytes]  # read as a service reads it, and written anew

    def readable(self, data: bytes) -> object:
        """What the bytes say by the wire format alone."""
        if self.message is None:
            return data.decode()
        return json_format.MessageToDict(self.message.FromString(data), preserving_proto_field_name=True)


def kind(
    name: str, message: type[Message] | None, sample: T, encode: Callable[[T], bytes], decode: Callable[[bytes], T]
) -> Kind:
    return Kind(name, message, sample, lambda: encode(sample), decode, lambda data: encode(decode(data)))


# --- samples: every field is set, even where no job would have both -----------------------------------

CONTRACT = Contract(
    lane=Lane.DEFERRABLE,
    ttft_target_s=1.5,
    tpot_target_s=0.05,
    deadline_s=NOW_S + 600.0,
    not_before_s=NOW_S + 1.0,
    isolation=Isolation.STRICT,
    least_tier="small",
    cost_max=0.5,
    regions=("eu", "us"),
    on_disconnect=OnDisconnect.KEEP,
    labels={"team": "search"},
)
VERDICT = Verdict(
    kind=VerdictKind.HELD,
    reason="HELD_FOR_CAPACITY",
    message="the pool is busy",
    lane=Lane.DEFERRABLE,
    tier="small",
    region="eu",
    pool="chat-small",
    ttft_eta_s=2.5,
    completion_eta_s=4.0,
    hold_until_s=NOW_S + 300.0,
    retry_after_s=3.0,
    cost=0.25,
    ttft_bound_s=3.5,
    completion_bound_s=6.0,
    facts=(("wait_s", "2.25"),),
    estimate=Estimate(2.25, 3.25, 3.75, 5.5),
)
RECORD = JobRecord(
    job_id=JOB,
    tenant="acme",
    region="eu",
    model="chat",
    tier="small",
    pool="chat-small",
    contract=CONTRACT,
    verdict=VERDICT,
    prompt_tokens=3,
    max_tokens=16,
    state=JobState.SUCCEEDED,
    attempt=2,
    lineage=(
        Attempt(
            1,
            1,
            "w1-1a",
            NOW_S + 2.0,
            begun=True,
            yielded_s=NOW_S + 3.0,
            reason="IDLE_CAPACITY",
            yield_reason="NO_SLOT job-2",
        ),
        Attempt(
            2,
            1,
            "w2-1b",
            NOW_S + 5.0,
            begun=True,
            yielded_s=NOW_S + 5.5,
            reason="STEAL_WAITED",
            yield_reason="NO_KV job-3",
        ),
    ),
    starts=2,
    clean=1,
    preemptions=1,
    retries=1,
    owner="w2-1b",
    door="door-1",
    attached=True,
    publish_by_s=NOW_S + 5.0,
    body_digest=bytes(range(32)),
    checkpoint_index=1,
    latest_start_s=NOW_S + 500.0,
    device_ms=120,
    result=Result(
        text="Hé",
        token_ids=(72, 195, 169),
        text_lengths=(1, 0, 1),
        finish_reason=FinishReason.STOP,
        usage=Usage(3, 1, 3, 0.125),
        logprobs=(TokenLogprob(-0.5, ((72, -0.5), (73, -1.5))), TokenLogprob(-0.25), TokenLogprob(-0.125)),
    ),
    error=JobError(Code.ABORTED, "NOT_RESUMABLE", "interrupted", Phase.DECODE, "spec.generate"),
    timings=Timings(NOW_S, NOW_S + 5.0, NOW_S + 5.5, NOW_S + 6.0, 0.25, 0.5),
    idempotency_key="order-17",
    origin="NATS",
    requeued_from="eu-01900000-0000-7000-8000-000000000000",
    route="summary",
    affinity_key="0a1b2c3d4e",
    home="h1",
)
TASK = GenerateTask(
    prompt_ids=(72, 105, 33),
    sampling=Sampling(
        max_tokens=16,
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.125,
        seed=7,
        stop=("\n\n",),
        stop_token_ids=(0, 1),
        logprobs=True,
        top_logprobs=2,
        repetition_penalty=1.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={72: 1.5},
        n=2,
        min_tokens=1,
        ignore_eos=True,
    ),
    json_schema='{"type":"object"}',
    adapter="legal",
    cache_salt="acme-1",
    session_id="talk-7",
)
QUEUED: QueuedJob = LaneJob(RECORD, TASK)
OBJECT = ObjectRef(f"acme/{JOB}/task/6b49d200-6b4b2380-0a1b2c3d", 700_000, bytes(range(32)))
REFERRED: QueuedJob = ReferredJob(RECORD, OBJECT)
DEAD_LETTER = DeadLetter(RECORD, LaneJob(RECORD, TASK), NOW_S + 6.0)
CHECKPOINT = Delta(2, 1, (195, 169), (TokenLogprob(-0.5, ((195, -0.5), (73, -1.5))), TokenLogprob(-0.25)))
STEP_TIMES = StepTimes(0.008, 0.0005, 0.00000004, 0.0001, 512)
LEASE = WorkerLease(
    worker_id="w1-1a",
    name="w1",
    pool="chat-small",
    engine="simulated",
    state=WorkerState.DRAINING,
    detail="told to go",
    slots=8,
    running=3,
    kv_tokens=16384,
    kv_tokens_used=4096,
    prefill_tokens_per_s=900.0,
    decode_tokens_per_s=45.5,
    service_s=2.5,
    started_s=NOW_S,
    renewed_s=NOW_S + 60.0,
    jobs_done=1000,
    tokens_done=160_000,
    busy_s=55.5,
    capabilities=("logprobs", "stop"),
    running_by_lane={Lane.PRIORITY: 2, Lane.BATCH: 1},
    process_id=4711,
    home="h0",
    step_times=STEP_TIMES,
    lower_tokens_per_s=500.0,
    priority_tpot_p95_s=0.045,
    theta=0.8,
    hot_prefixes=(2**63 + 1, 7),
    block_tokens=32,
    lower_places=1,
    load_progress=0.5,
    engine_deaths=2,
)
PLAN = Plan(
    region="eu",
    epoch=1_800_000_000,
    version=42,
    made_s=NOW_S,
    valid_until_s=NOW_S + 3.0,
    pools=(
        PoolPlan(
            pool="chat-small",
            workers=2,
            slots=16,
            free_slots=5,
            kv_tokens=32768,
            free_kv_tokens=20000,
            prefill_tokens_per_s=900.0,
            decode_tokens_per_s=45.5,
            service_s=2.5,
            desired_workers=3,
            lanes=(
                LanePlan(
                    Lane.DEFERRABLE,
                    4,
                    2,
                    1000,
                    120.5,
                    64,
                    1.5,
                    demand=(Demand(NOW_S + 60.0, 20.5), Demand(NOW_S + 600.0, 120.5)),
                    ttft_fit=EtaFit(0.75, 1.5, 200),
                    completion_fit=EtaFit(0.875, 1.25, 100),
                ),
            ),
            homes=(HomePlan("h0", "w1-1a", 3, 2, 0.5), HomePlan("h1", "", 1)),
            lower_tokens_per_s=500.0,
            priority_per_s=2.5,
            burstiness=3.0,
            reserved_slots=2,
            step_times=STEP_TIMES,
            hot_prefixes=(2**63 + 1, 7),
            desired_reason="DUE",
        ),
    ),
    paused=frozenset({Lane.BATCH}),
    tenants=(TenantDepth("acme", Lane.BATCH, 4_100),),
    counted_before=98_765,
    policy=PolicyVersion(3, '{"batch_weight":1.0}', NOW_S - 5.0, "there is no setting policy.x", ("nats.url",)),
)
DIGEST = RegionDigest(
    region="eu",
    made_s=NOW_S,
    draining=True,
    healthy=False,
    zones=("eu-a", "eu-b"),
    models=(ModelDigest("chat", "small", 2, 5, 0.25, 60.5, (2**63 + 1, 7)),),
    price_factor=1.25,
    round_trip_s=0.0625,
)
EVENT = signals.Event(JOB, JobState.SUCCEEDED, 2, "w2-1b", RECORD, answered(RECORD))
TOKENS = bus_pb2.TokenBatch(
    worker_id="w1-1a",
    deltas=[
        bus_pb2.SequenceDelta(
            job_id=JOB,
            attempt=2,
            first_index=1,
            count=2,
            response=admission_pb2.GenerateResponse(
                chunk=task_pb2.Chunk(first_index=1, token_ids=[195, 169], text="é")
            ).SerializeToString(),
        )
    ],
)
BEAT = DoorBeat("door-1", (Attachment(JOB, 2, 3, (72, 195, 169), replay=True),))
SUBMIT = admission_pb2.SubmitRequest(
    spec=task_pb2.JobSpec(
        model="chat/small",
        route="summary",
        generate=task_pb2.GenerateTask(
            text="Hi!", session_id="talk-7", sampling=task_pb2.Sampling(max_tokens=16, temperature=0.5)
        ),
        contract=common_pb2.Contract(lane=common_pb2.LANE_BATCH, labels={"team": "search"}),
    ),
    idempotency_key="order-17",
)
PARK = ParkSubject(
    region="eu",
    lane=Lane.BATCH,
    pool="chat-small",
    tenant="acme",
    not_before_ms=1_800_000_001_250,
    due_ms=1_800_000_500_250,
    cost_ms=120,
    group="0123456789",
    job=JOB,
)
TERM = Term("scheduler-0a1b2c", 1_800_000_000)


def _event_bytes(event: signals.Event) -> bytes:
    assert event.record is not None
    return signals.encode_event(event.record, worker_id=event.worker_id, with_record=True)


def _dead_letter_bytes(letter: DeadLetter) -> bytes:
    assert letter.job is not None
    return encode_dead_letter(letter.record, records.encode_lane_job(letter.job), letter.died_s)


def _checkpoint(data: bytes) -> Delta:
    delta = decode_checkpoint(data, "w2-1b", 2, 1)
    assert delta is not None
    return delta


QUOTA = QuotaRecord(
    grants=(Grant("w1-1a", 7, NOW_S, NOW_S + 15.0, Amount(1, 300, 0.25), probe=True),),
    queue=(Waiter("w2-1b", NOW_S + 6.0, Amount(1, 200, 0.125)),),
    used=(WindowUse(60.0, (Slice(1_920_000_000, Amount(3, 640, 0.5)),)),),
    rest_until_s=NOW_S + 20.0,
    breaker=Breaker(failures=2, openings=1, open_until_s=NOW_S + 5.0, probing=True),
    told=(Told("tokens", 20_000.0, 150.0, NOW_S, NOW_S + 30.0),),
)


def _control_bytes(control: Control) -> bytes:
    match control:
        case DoorBeat():
            attachments = [
                signals.Attachment(a.job_id, a.attempt, a.next_index, a.delivered_ids, a.replay)
                for a in control.attachments
            ]
            (data,) = signals.encode_beats(control.door, attachments)
            return data
        case CancelHint():
            return signals.encode_cancel_hint(control.job_id)
        case DrainHint():
            return _written(bus_pb2.WorkerControl(drain=bus_pb2.DrainHint(draining=control.draining)))


def _control(data: bytes) -> Control:
    control = parse_control(data)
    assert control is not None
    return control


def _control_kind(name: str, sample: Control) -> Kind:
    return kind(name, bus_pb2.WorkerControl, sample, _control_bytes, _control)


def _written(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _submit_json(request: admission_pb2.SubmitRequest) -> bytes:
    return json_format.MessageToJson(request, indent=None).encode()


KINDS = (
    # Stored on NATS.
    kind("job_record", bus_pb2.JobRecord, RECORD, records.encode_record, records.decode_record),
    kind("lane_message", bus_pb2.LaneMessage, QUEUED, records.encode_lane_job, records.decode_lane_job),
    kind(
        "job_record_by_reference",
        bus_pb2.JobRecord,
        replace(RECORD, result_object=OBJECT),
        records.encode_record,
        records.decode_record,
    ),
    kind("lane_message_by_reference", bus_pb2.LaneMessage, REFERRED, records.encode_lane_job, records.decode_lane_job),
    kind("dead_letter", bus_pb2.StoredDeadLetter, DEAD_LETTER, _dead_letter_bytes, decode_dead_letter),
    kind(
        "checkpoint",
        bus_pb2.Checkpoint,
        CHECKPOINT,
        lambda delta: encode_checkpoint("w2-1b", delta.ids, delta.logprobs),
        _checkpoint,
    ),
    kind("park_subject", None, PARK, lambda park: str(park).encode(), lambda data: ParkSubject.parse(data.decode())),
    kind("worker_lease", bus_pb2.WorkerLease, LEASE, records.encode_lease, records.decode_lease),
    kind("plan", scheduler_pb2.Plan, PLAN, plans.encode_plan, plans.decode_plan),
    kind("provider_quota", bus_pb2.ProviderQuota, QUOTA, encode_quota, decode_quota),
    kind("leader_term", None, TERM, msgspec.json.encode, lambda data: msgspec.json.decode(data, type=Term)),
    kind("paused_lanes", None, [*Lane], msgspec.json.encode, lambda data: msgspec.json.decode(data, type=list[Lane])),
    kind("submit_request", admission_pb2.SubmitRequest, SUBMIT, _written, parse_body),
    kind("submit_request_json", None, SUBMIT, _submit_json, parse_body),
    kind(
        "ingest_verdict",
        bus_pb2.IngestVerdict,
        bus_pb2.IngestVerdict.FromString(encode_verdict(RECORD, "order-17")),
        _written,
        bus_pb2.IngestVerdict.FromString,
    ),
    # Between services, never stored.
    kind("job_event", bus_pb2.JobEvent, EVENT, _event_bytes, signals.decode_event),
    kind("token_batch", bus_pb2.TokenBatch, TOKENS, _written, signals.decode_tokens),
    _control_kind("control_beat", BEAT),
    _control_kind("control_cancel", CancelHint(JOB)),
    _control_kind("control_drain", DrainHint(True)),
    kind("region_digest", routing_pb2.RegionDigest, DIGEST, lambda d: _written(digest_to_proto(d)), decode_digest),
)


def release() -> str:
    """The release that this tree becomes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"]).partition(".dev")[0]


def recording(kind: Kind) -> str:
    """The file for a kind, as this release writes it."""
    data = kind.encode()
    form = kind.message.DESCRIPTOR.full_name if kind.message else "text"
    content = {"form": form, "bytes": base64.b64encode(data).decode(), "readable": kind.readable(data)}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def schemas_read() -> list[int]:
    """Which schema numbers the readers of this release take, found by trying."""
    return [number for number in range(SCHEMA + 3) if _is_read(number)]


def _is_read(schema: int) -> bool:
    message = bus_pb2.JobRecord.FromString(records.encode_record(RECORD))
    message.schema = schema
    try:
        records.decode_record(message.SerializeToString())
    except UnreadableMessage:
        return False
    return True


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    folder = FOLDER / release()
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        (folder / f"{kind.name}.json").write_text(recording(kind), encoding="utf-8")
    (folder / SCHEMAS).write_text(json.dumps({"written": SCHEMA, "read": schemas_read()}) + "\n")
    print(f"{folder.relative_to(ROOT)}: {len(KINDS)} kinds of messages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
