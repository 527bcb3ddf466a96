"""What each role may do on NATS: the least subjects with which its service does its whole job.

Pure: a role and a region in, lists of subjects out. nats_users.py makes users of a server from them; docs/security.md
says what remains possible with them. A subject that a service begins to use must be added here, or it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from laneway.core import subjects
from laneway.core.lanes import LANES, PARKING_LANES, Lane

# Of clients that name no inbox prefix, as most do. No role of ours listens there.
PLAIN_INBOX = "_INBOX"
DEFAULT_TENANT = "default"


class Role(StrEnum):
    ADMISSION = "admission"
    SCHEDULER = "scheduler"
    ROUTING = "routing"
    WORKER = "worker"
    PRODUCER = "producer"
    OPERATOR = "operator"


SERVICES = (Role.ADMISSION, Role.SCHEDULER, Role.ROUTING, Role.WORKER)


@dataclass(frozen=True, slots=True)
class Rights:
    """Subjects, wildcards among them, as NATS permissions have them. What is not listed is refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox_prefix(name: str) -> str:
    """Under which a user receives its answers, and nobody else may listen. `name`: of a role or a producer."""
    return f"{PLAIN_INBOX}_{name}"


def producer_name(tenant: str) -> str:
    """The user of one tenant's producers, and the name of its inbox."""
    return Role.PRODUCER.value if tenant == DEFAULT_TENANT else f"{Role.PRODUCER}-{tenant}"


def service_rights(role: Role, region: str) -> Rights:
    """Of the services of a region, and of its operator."""
    match role:
        case Role.ADMISSION:
            return _admission(region)
        case Role.SCHEDULER:
            return _scheduler(region)
        case Role.ROUTING:
            return _routing(region)
        case Role.WORKER:
            return _worker(region)
        case Role.OPERATOR:
            return _operator(region)
        case Role.PRODUCER:
            raise ValueError("a producer's rights are those of a tenant: producer_rights")


def producer_rights(region: str, tenant: str, lanes: Iterable[Lane] = LANES, *, inbox: str = "") -> Rights:
    """Of one tenant's producers: its own jobs in, its own verdicts, records and objects out.

    No consumers: whoever may make one chooses the subject that the server delivers to, in the server's own name.
    """
    own_verdicts, own_records = subjects.verdict(region, tenant, "*"), subjects.records_of(region, tenant)
    inbox = inbox or inbox_prefix(producer_name(tenant))
    return Rights(
        publish=(
            *(subjects.ingest(region, lane, tenant) for lane in lanes),
            _direct(subjects.verdict_stream(region), own_verdicts),
            _direct(subjects.jobs_stream(region), own_records),
            _direct(subjects.objects_stream(region), subjects.objects_of(region, tenant)),
            f"{inbox}.>",
        ),
        subscribe=(own_verdicts, own_records, f"{inbox}.>"),
    )


def _admission(region: str) -> Rights:
    jobs, ingest, dead = subjects.jobs_stream(region), subjects.ingest_stream(region), subjects.dead_stream(region)
    workers, plan = _bucket_streams(subjects.workers_bucket(region), subjects.plan_bucket(region))
    lanes = _lane_streams(region)
    return _with_inbox(
        Role.ADMISSION,
        publish=(
            *_ACCOUNT,
            _CLOCK,
            *_into_lanes(region),
            subjects.records_of(region),
            subjects.verdict(region, "*", "*"),
            subjects.events(region),
            subjects.control("*"),
            *(_api("STREAM.INFO", stream) for stream in (jobs, ingest, dead, workers, plan, *lanes)),
            *(_api("STREAM.MSG.GET", stream) for stream in (jobs, dead, plan, *lanes)),
            *(_direct(stream) for stream in (jobs, workers, plan, *lanes)),
            *(_api("STREAM.PURGE", stream) for stream in (dead, *lanes)),
            *_objects(region),
            _api("STREAM.INFO", subjects.objects_stream(region)),
            *_pulls(region, ingest),
        ),
        subscribe=(
            subjects.tokens("*"),
            subjects.events(region),
            subjects.kv_subject(subjects.workers_bucket(region), "*"),
            subjects.kv_subject(subjects.plan_bucket(region), "*"),
        ),
    )


def _scheduler(region: str) -> Rights:
    jobs, lanes = subjects.jobs_stream(region), _lane_streams(region)
    workers, leader, plan = _bucket_streams(
        subjects.workers_bucket(region), subjects.leader_bucket(region), subjects.plan_bucket(region)
    )
    return _with_inbox(
        Role.SCHEDULER,
        publish=(
            *_ACCOUNT,
            _CLOCK,
            *_into_lanes(region),
            subjects.records_of(region),
            subjects.events(region),
            subjects.control("*"),
            subjects.kv_subject(subjects.leader_bucket(region), "leader"),
            subjects.plan_changes(region),
            subjects.kv_subject(subjects.plan_bucket(region), "paused"),
            # It looks whether the region is as its settings want it, and changes nothing: provisioning is the
            # operator's.
            *(_api("STREAM.INFO", stream) for stream in region_streams(region)),
            *(_api("CONSUMER.INFO", stream, "*") for stream in (*lanes, subjects.ingest_stream(region))),
            *(_api("CONSUMER.LIST", stream) for stream in lanes),
            *(_api("STREAM.MSG.GET", stream) for stream in (jobs, leader, plan, *lanes)),
            *(_direct(stream) for stream in (jobs, workers, plan, *lanes)),
            *(_api("STREAM.PURGE", stream) for stream in (*lanes, subjects.objects_stream(region))),
            *_reads_by_consumer(region, jobs),
        ),
        subscribe=(
            subjects.bell(f"lane.{region}.>"),
            subjects.bell(f"park.{region}.>"),
            subjects.kv_subject(subjects.workers_bucket(region), "*"),
            subjects.kv_subject(subjects.leader_bucket(region), "leader"),
            subjects.kv_subject(subjects.plan_bucket(region), "*"),
        ),
    )


def _routing(region: str) -> Rights:
    (plan,) = _bucket_streams(subjects.plan_bucket(region))
    return _with_inbox(
        Role.ROUTING,
        publish=(
            *_ACCOUNT,
            _CLOCK,
            subjects.digest(region),
            subjects.region_control("*"),
            subjects.kv_subject(subjects.plan_bucket(region), "draining"),
            _api("STREAM.MSG.GET", plan),
            _direct(plan),
        ),
        subscribe=(
            subjects.digest("*"),
            subjects.region_control(region),
            subjects.kv_subject(subjects.plan_bucket(region), "*"),
        ),
    )


def _worker(region: str) -> Rights:
    jobs, checkpoints = subjects.jobs_stream(region), subjects.checkpoint_stream(region)
    workers, plan = _bucket_streams(subjects.workers_bucket(region), subjects.plan_bucket(region))
    return _with_inbox(
        Role.WORKER,
        publish=(
            *_ACCOUNT,
            _CLOCK,
            subjects.records_of(region),
            *(subjects.park_filter(region, lane) for lane in PARKING_LANES),  # work that yielded to priority
            subjects.tokens("*"),
            subjects.events(region),
            subjects.dead_letters(region),
            *_objects(region),
            f"ckpt.{region}.>",
            subjects.kv_subject(subjects.workers_bucket(region), "*"),
            subjects.kv_subject(subjects.plan_bucket(region), subjects.quota_key("*")),
            *(_api("STREAM.INFO", stream) for stream in (workers, checkpoints)),
            _api("STREAM.PURGE", checkpoints),
            *(_api("STREAM.MSG.GET", stream) for stream in (jobs, plan)),
            *(_direct(stream) for stream in (jobs, checkpoints, workers, plan)),
            *(subject for stream in _lane_streams(region) for subject in _pulls(region, stream)),
            # Home slots that the settings have no longer: jobs may still be in them.
            *(_api("CONSUMER.INFO", stream, "*") for stream in _lane_streams(region)),
        ),
        subscribe=(
            subjects.control("*"),
            subjects.bell(f"lane.{region}.>"),
            subjects.kv_subject(subjects.workers_bucket(region), "*"),
            subjects.kv_subject(subjects.plan_bucket(region), "plan"),
            subjects.kv_subject(subjects.plan_bucket(region), subjects.quota_key("*")),
        ),
    )


def _operator(region: str) -> Rights:
    """Provisions the region and reads its records; moves and ends nothing: that is what services are asked for."""
    streams = region_streams(region)
    read = (
        subjects.jobs_stream(region),
        subjects.verdict_stream(region),
        subjects.dead_stream(region),
        subjects.objects_stream(region),
        *_bucket_streams(*_buckets(region)),
    )
    return _with_inbox(
        Role.OPERATOR,
        publish=(
            *_ACCOUNT,
            _CLOCK,
            *(_api(f"STREAM.{verb}", stream) for verb in ("CREATE", "UPDATE", "INFO") for stream in streams),
            *(_api("CONSUMER.INFO", stream, "*") for stream in streams),
            *(_api("CONSUMER.CREATE", stream, ">") for stream in streams),
            *(_api("STREAM.MSG.GET", stream) for stream in read),
            *(_direct(stream) for stream in read),
        ),
        subscribe=(
            subjects.records_of(region),
            subjects.events(region),
            subjects.verdict(region, "*", "*"),
            subjects.digest("*"),
            subjects.bell(f"lane.{region}.>"),
            subjects.bell(f"park.{region}.>"),
            *(subjects.kv_subject(bucket, "*") for bucket in _buckets(region)),
        ),
    )


# --- what the lists are made of --------------------------------------------------------------------

_ACCOUNT = ("$JS.API.INFO",)  # asked at each connect: is JetStream on
_CLOCK = "$SYS.REQ.USER.INFO"  # the server's time is in the answer


def region_streams(region: str) -> tuple[str, ...]:
    """Every stream of a region, buckets among them."""
    return (
        subjects.jobs_stream(region),
        *_lane_streams(region),
        subjects.checkpoint_stream(region),
        subjects.ingest_stream(region),
        subjects.verdict_stream(region),
        subjects.dead_stream(region),
        subjects.objects_stream(region),
        *_bucket_streams(*_buckets(region)),
    )


def _buckets(region: str) -> tuple[str, ...]:
    return subjects.workers_bucket(region), subjects.leader_bucket(region), subjects.plan_bucket(region)


def _bucket_streams(*buckets: str) -> tuple[str, ...]:
    return tuple(f"KV_{bucket}" for bucket in buckets)


def _lane_streams(region: str) -> tuple[str, ...]:
    return tuple(subjects.lane_stream(region, lane) for lane in LANES)


def _into_lanes(region: str) -> tuple[str, ...]:
    return (f"lane.{region}.>", *(subjects.park_filter(region, lane) for lane in PARKING_LANES))


def _objects(region: str) -> tuple[str, ...]:
    """Stores objects, reads them, and takes away what it stored in part or in vain."""
    stream = subjects.objects_stream(region)
    return (
        subjects.objects(region),
        _direct(stream),
        _api("STREAM.MSG.GET", stream),
        _api("STREAM.PURGE", stream),
    )


def _api(verb: str, *rest: str) -> str:
    return ".".join(("$JS.API", verb, *rest))


def _direct(stream: str, subject: str = ">") -> str:
    return _api("DIRECT.GET", stream, subject)


def _pulls(region: str, stream: str) -> tuple[str, ...]:
    """Pulls from the consumers of a stream, and acknowledges."""
    return (_api("CONSUMER.MSG.NEXT", stream, "*"), *_replies("$JS.ACK", region, stream))


def _reads_by_consumer(region: str, stream: str) -> tuple[str, ...]:
    """Follows or lists a stream by an ephemeral push consumer, with the answers to its flow control."""
    return (
        _api("CONSUMER.CREATE", stream),
        _api("CONSUMER.DELETE", stream, "*"),
        *_replies("$JS.FC", region, stream),
    )


def _replies(word: str, region: str, stream: str) -> tuple[str, ...]:
    """What may be published about deliveries of a stream. In version 2 the domain (`_`, or the region's) and a hash of
    the account come before it. Were the domain a wildcard, another stream could be put in its place: the server looks
    at the place of the numbers alone, and takes that for an acknowledgement of the other stream's message."""
    return (f"{word}.{stream}.>", *(f"{word}.{domain}.*.{stream}.>" for domain in ("_", region)))


def _with_inbox(role: Role, *, publish: tuple[str, ...], subscribe: tuple[str, ...]) -> Rights:
    """With the role's own inbox, to which it also echoes to itself."""
    inbox = f"{inbox_prefix(role)}.>"
    return Rights(publish=(*publish, inbox), subscribe=(*subscribe, inbox))
