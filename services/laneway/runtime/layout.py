"""What a region needs on JetStream, as values: streams, buckets and consumers with their limits and why.

provision.py makes it so. Durations are nanoseconds, as JetStream's API has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from laneway.core import subjects
from laneway.core.catalogue import Catalogue, Pool
from laneway.core.lanes import LANES, PARKING_LANES, Lane
from laneway.runtime.settings import NatsSettings

_NS = 1_000_000_000
_DAY_S = 86_400

CHECKPOINT_AGE_S = 1 * _DAY_S
VERDICT_AGE_S = 7 * _DAY_S
DEAD_AGE_S = 30 * _DAY_S
INGEST_MESSAGES_MAX = 100_000
INGEST_ACK_WAIT_S = 30.0
INGEST_PENDING_MAX = 1024  # of all doors: delivered and not judged yet, those put off among them
WAITING_PULLS_MAX = 4096
ACK_PENDING_FACTOR = 4  # delayed NAKs count as pending
ACK_PENDING_MIN = 1000  # at the limit the server leaves pulls without an answer; workers claim only what they can run
INGEST_CONSUMER = "admission"

Config = dict[str, object]


@dataclass(frozen=True, slots=True)
class StreamPlan:
    name: str
    config: Config
    consumers: Mapping[str, Config] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()  # settings that may change whatever they drop


def region_layout(
    region: str, catalogue: Catalogue, settings: NatsSettings, ack_wait_s: Mapping[Lane, float]
) -> list[StreamPlan]:
    """All streams of a region; key-value buckets are streams too."""
    streams = [_records(region, settings)]
    streams += [_lane(region, lane, catalogue, ack_wait_s[lane]) for lane in LANES]
    streams += [
        _stream(
            subjects.checkpoint_stream(region), [f"ckpt.{region}.>"],
            max_age=CHECKPOINT_AGE_S * _NS, max_bytes=settings.checkpoints_bytes_max, allow_direct=True,
        ),
        _ingest(region, settings),
        _stream(
            subjects.verdict_stream(region), [f"verdict.{region}.>"],
            max_age=VERDICT_AGE_S * _NS, max_bytes=settings.verdicts_bytes_max, allow_direct=True,
        ),
        _dead_letters(region, settings),
        _objects(region, settings),
        _bucket(subjects.workers_bucket(region)),
        _bucket(subjects.leader_bucket(region)),
        _bucket(subjects.plan_bucket(region)),
    ]  # fmt: skip
    for stream in streams:
        stream.config["num_replicas"] = settings.replicas
    return streams


def _stream(name: str, subject_filters: list[str], **limits: object) -> StreamPlan:
    config: Config = {
        "name": name,
        "subjects": subject_filters,
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": 0,
        "max_msgs_per_subject": -1,
        "allow_direct": False,
        "allow_msg_ttl": False,
    }
    return StreamPlan(name, config | limits)


def _records(region: str, settings: NatsSettings) -> StreamPlan:
    # A full stream refuses: the default would drop the oldest records, that is, accepted jobs.
    return _stream(
        subjects.jobs_stream(region),
        [subjects.records_of(region)],
        discard="new",
        max_msgs_per_subject=1,
        max_bytes=settings.records_bytes_max,
        allow_msg_ttl=True,
        allow_direct=True,
    )


def _lane(region: str, lane: Lane, catalogue: Catalogue, ack_wait_s: float) -> StreamPlan:
    bell = {"src": ">", "dest": subjects.bell(">"), "headers_only": True}
    name = subjects.lane_stream(region, lane)
    ready = f"lane.{region}.{lane.value}.>"
    if lane in PARKING_LANES:
        # Schedules forbid discard=new, and a limit with the default discard would silently drop accepted jobs. Without
        # allow_msg_ttl the server refuses a Nats-TTL, which would lose accepted jobs as silently.
        stream = _stream(
            name, [ready, subjects.park_filter(region, lane)],
            retention="workqueue", allow_msg_schedules=True, allow_direct=True, republish=bell,
        )  # fmt: skip
    else:
        limit = sum(pool.priority_limit for pool in catalogue.pools)
        stream = _stream(
            name, [ready],
            retention="workqueue", discard="new", max_msgs=max(1, limit), allow_direct=True, republish=bell,
        )  # fmt: skip
    consumers = {
        subjects.consumer(lane, pool.name, home): _consumer(
            subjects.consumer(lane, pool.name, home),
            subjects.ready_filter(region, lane, pool.name, home),  # of a work queue no two may overlap
            ack_wait_s,
            _ack_pending_max(pool),
        )
        for pool in catalogue.pools
        for home in (subjects.HOME_ANY, *pool.homes)
    }
    return StreamPlan(stream.name, stream.config, consumers)


def _ack_pending_max(pool: Pool) -> int:
    return max(ACK_PENDING_MIN, ACK_PENDING_FACTOR * pool.slots * max(1, pool.workers))


def _ingest(region: str, settings: NatsSettings) -> StreamPlan:
    stream = _stream(
        subjects.ingest_stream(region),
        [subjects.ingest_filter(region)],
        retention="workqueue",
        discard="new",
        max_msgs=INGEST_MESSAGES_MAX,
        max_bytes=settings.ingest_bytes_max,
    )
    admission = _consumer(INGEST_CONSUMER, subjects.ingest_filter(region), INGEST_ACK_WAIT_S, INGEST_PENDING_MAX)
    return StreamPlan(stream.name, stream.config, {INGEST_CONSUMER: admission})


def _objects(region: str, settings: NatsSettings) -> StreamPlan:
    # As the official clients make an object store, except that it refuses when it is full. Objects expire by their TTL.
    return _stream(
        subjects.objects_stream(region),
        [f"$O.{subjects.objects_bucket(region)}.{kind}.>" for kind in "CM"],
        discard="new",
        max_bytes=settings.objects_bytes_max,
        allow_msg_ttl=True,
        allow_direct=True,
        allow_rollup_hdrs=True,
    )


def _dead_letters(region: str, settings: NatsSettings) -> StreamPlan:
    stream = _stream(
        subjects.dead_stream(region),
        [f"dead.{region}.>"],
        max_age=DEAD_AGE_S * _NS,
        max_bytes=settings.dead_bytes_max,
        max_msgs_per_subject=1,
        allow_direct=True,
    )
    # An earlier release makes it without that limit, and what it would drop is the same letter once more.
    return StreamPlan(stream.name, stream.config, harmless=("max_msgs_per_subject",))


def _bucket(bucket: str) -> StreamPlan:
    return _stream(
        f"KV_{bucket}",
        [f"$KV.{bucket}.>"],
        discard="new",
        max_msgs_per_subject=1,
        allow_msg_ttl=True,
        allow_direct=True,
        allow_rollup_hdrs=True,
        deny_delete=True,
    )


def _consumer(name: str, subject_filter: str, ack_wait_s: float, ack_pending_max: int) -> Config:
    return {
        "durable_name": name,
        "name": name,
        "filter_subject": subject_filter,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": round(ack_wait_s * _NS),
        "max_deliver": -1,  # a limit would strand the message in the stream; the record counts starts instead
        "max_ack_pending": ack_pending_max,
        "max_waiting": WAITING_PULLS_MAX,
    }
