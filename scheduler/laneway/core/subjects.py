"""Every NATS name in one place: streams, subjects, consumers, buckets. Strings in, strings out.

Caller text never enters a subject: each token was checked or is ours. See docs/wire.md for the table.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256
from sys import intern

from msgspec import Struct

from laneway.core.ids import is_token
from laneway.core.lanes import Lane
from laneway.core.objects import ObjectName

SUBJECT_BYTES_MAX = 512
HOME_ANY = "any"

# Headers of our own.
H_RECORD_SEQUENCE = "Laneway-Record-Sequence"
H_KEY = "Laneway-Key"
H_RELEASED_BY = "Laneway-Released-By"
# On every write of a record, so that sweeps can follow records by their headers alone.
H_RECORD_STATE = "Laneway-State"  # a JobState
H_RECORD_DEADLINE = "Laneway-Deadline"  # Unix ms
H_RECORD_CREATED = "Laneway-Created"  # Unix ms
H_RECORD_LANE = "Laneway-Lane"  # a Lane; older releases write none
H_RECORD_USAGE = "Laneway-Usage"  # of a job with a result: tokens of its prompt, cached ones of these, of its answer
H_RECORD_OUTCOME = "Laneway-Outcome"  # of a job that ended: its times against its verdict (policy.calibration), JSON


# As many tokens as one likes: one match for a whole subject.
_SUBJECT = re.compile(r"(?:[A-Za-z0-9_-]{1,64}|\*)(?:\.(?:[A-Za-z0-9_-]{1,64}|\*))*(?:\.>)?\Z")


def _join(*tokens: str) -> str:
    subject = ".".join(tokens)
    if subject.count(".") == len(tokens) - 1 and _SUBJECT.match(subject):
        return subject
    for token in tokens:
        if not (is_token(token) or token in ("*", ">")):
            raise ValueError(f"not a subject token: {token!r}")
    return ".".join(tokens)


# --- streams and buckets ---------------------------------------------------------------------------


def jobs_stream(region: str) -> str:
    return f"JOBS_{region}"


def lane_stream(region: str, lane: Lane) -> str:
    return f"{lane.name}_{region}"


def checkpoint_stream(region: str) -> str:
    return f"CKPT_{region}"


def ingest_stream(region: str) -> str:
    return f"INGEST_{region}"


def verdict_stream(region: str) -> str:
    return f"VERDICTS_{region}"


def dead_stream(region: str) -> str:
    return f"DEAD_{region}"


def workers_bucket(region: str) -> str:
    return f"WORKERS_{region}"


def leader_bucket(region: str) -> str:
    return f"LEADER_{region}"


def plan_bucket(region: str) -> str:
    return f"PLAN_{region}"


def kv_subject(bucket: str, key: str) -> str:
    return f"$KV.{bucket}.{key}"


def quota_key(provider: str) -> str:
    """In the plan's bucket: the record of a provider's quotas. `*` for the filter of all; no filter of one token covers
    it. A name that is no token, as a host and port are none, has its hash behind what is left of it."""
    if provider == "*" or is_token(provider):
        return f"quota.{provider}"
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", provider)[:47]
    return f"quota.{plain}-{sha256(provider.encode()).hexdigest()[:16]}"


# --- records, lanes, parked jobs -------------------------------------------------------------------


def record(region: str, tenant: str, job: str) -> str:
    return _join("job", region, tenant, job)


def records_of(region: str, tenant: str = "*") -> str:
    return _join("job", region, tenant, "*")


def record_parts(subject: str) -> tuple[str, str, str]:
    """(region, tenant, job) of a record subject."""
    _, region, tenant, job = subject.split(".")
    return region, tenant, job


def ready(region: str, lane: Lane, pool: str, tenant: str, job: str, home: str = HOME_ANY) -> str:
    return _join("lane", region, lane.value, pool, home, tenant, job)


def ready_filter(region: str, lane: Lane, pool: str, home: str = HOME_ANY) -> str:
    return _join("lane", region, lane.value, pool, home, ">")


def ready_filter_parts(subject: str) -> tuple[str, str] | None:
    """(pool, home) of a filter of ready subjects; None for any other filter."""
    tokens = subject.split(".")
    return (tokens[3], tokens[4]) if len(tokens) == 6 and tokens[0] == "lane" and tokens[5] == ">" else None


def bell(subject: str) -> str:
    """The headers-only copy of a lane or park subject that the server republishes (core NATS)."""
    return f"bell.{subject}"


class ParkSubject(Struct, frozen=True):
    """What a park subject says: all that a scheduler needs to rebuild its index. Fixed for a job's life."""

    region: str
    lane: Lane
    pool: str
    tenant: str
    not_before_ms: int  # Unix ms; 0: none
    due_ms: int  # Unix ms of the latest start
    cost_ms: int  # predicted device-ms
    group: str  # hash of the coalescing key
    job: str

    def __str__(self) -> str:
        return _join(
            "park", self.region, self.lane.value, self.pool, self.tenant,
            str(self.not_before_ms), str(self.due_ms), str(self.cost_ms), self.group, self.job,
        )  # fmt: skip

    @property
    def ready(self) -> str:
        """The ready subject this job is released to where its message names no other, as one with a home does."""
        return ready(self.region, self.lane, self.pool, self.tenant, self.job)

    @classmethod
    def parse(cls, subject: str) -> ParkSubject:
        word, region, lane, pool, tenant, not_before, due, cost, group, job = subject.split(".")
        if word != "park":
            raise ValueError(f"not a park subject: {subject}")
        # What many jobs have in common is kept once: a scheduler holds a million of these.
        return cls(
            intern(region), Lane(lane), intern(pool), intern(tenant), int(not_before), int(due), int(cost),
            intern(group), job,
        )  # fmt: skip


def park_filter(region: str, lane: Lane) -> str:
    return _join("park", region, lane.value, ">")


def parked_in_any_group(park: ParkSubject) -> str:
    """The park subject of a job whose group is not known. A filter with more wildcards costs the server a look at
    every parked job of the tenant."""
    head, _, job = str(park).rsplit(".", 2)
    return f"{head}.*.{job}"


def consumer(lane: Lane, pool: str, home: str = HOME_ANY) -> str:
    """Durable name of the consumer of one pool, lane and home slot."""
    return f"{lane.value}_{pool}_{home}"


# --- producers -------------------------------------------------------------------------------------


def ingest(region: str, lane: Lane, tenant: str) -> str:
    return _join("ingest", region, lane.value, tenant)


def ingest_filter(region: str) -> str:
    """Every lane and tenant. A publish to a subject of another shape finds no stream, and its producer hears so."""
    return _join("ingest", region, "*", "*")


def ingest_parts(subject: str) -> tuple[str, str, str]:
    """(region, lane word, tenant) of an ingest subject."""
    _, region, lane, tenant = subject.split(".")
    return region, lane, tenant


def verdict(region: str, tenant: str, job: str) -> str:
    return _join("verdict", region, tenant, job)


# --- checkpoints -----------------------------------------------------------------------------------


def checkpoint(region: str, job: str, attempt: int, from_index: int) -> str:
    return _join("ckpt", region, job, str(attempt), str(from_index))


def checkpoints_of(region: str, job: str) -> str:
    return _join("ckpt", region, job, ">")


def checkpoint_parts(subject: str) -> tuple[int, int]:
    """(attempt, index of the first token) of a checkpoint subject."""
    *_, attempt, from_index = subject.split(".")
    return int(attempt), int(from_index)


# --- dead letters ----------------------------------------------------------------------------------


def dead_letter(region: str, lane: Lane, reason: str, job: str) -> str:
    return _join("dead", region, lane.value, reason, job)


def dead_letters(region: str, lane: Lane | None = None, reason: str = "", job: str = "") -> str:
    """Filter of those of a lane, for a reason, of a job; what is not given is any."""
    return _join("dead", region, lane.value if lane is not None else "*", reason or "*", job or "*")


# --- object store ----------------------------------------------------------------------------------
# The official format: an object `name` of a bucket has its facts at $O.<bucket>.M.<base64 of the name> and its chunks
# at $O.<bucket>.C.<the id in the facts>. Our id ends with a wildcard: each chunk has a subject of its own, so that it
# can be read by a direct get, to which rights can be given for one tenant alone.


def objects_bucket(region: str) -> str:
    return f"OBJECTS_{region}"


def objects_stream(region: str) -> str:
    return f"OBJ_{objects_bucket(region)}"


def objects(region: str) -> str:
    """Filter of all objects' facts and chunks."""
    return f"$O.{objects_bucket(region)}.>"


def objects_of(region: str, tenant: str) -> str:
    """Filter of the chunks of one tenant's objects."""
    return f"$O.{objects_bucket(region)}.C.{_join(tenant)}.>"


def object_facts(region: str, name: ObjectName) -> str:
    return f"$O.{objects_bucket(region)}.M.{urlsafe_b64encode(str(name).encode()).decode()}"


def object_id(name: ObjectName) -> str:
    """As the facts give it: clients put it behind `$O.<bucket>.C.` and get the filter of the object's chunks."""
    return f"{_join(*name.tokens)}.*"


def object_chunk(region: str, name: ObjectName, number: int | None = None) -> str:
    """The subject of a chunk, from 0; without a number, the filter of all."""
    return f"$O.{objects_bucket(region)}.C.{_join(*name.tokens)}.{'*' if number is None else number}"


def object_parts(subject: str) -> tuple[ObjectName, bool]:
    """Whose object a subject belongs to, and whether it is that of its facts. ValueError: not one of ours."""
    _, _, kind, rest = subject.split(".", 3)
    if kind == "M":
        return ObjectName.parse(urlsafe_b64decode(rest).decode()), True
    return ObjectName.parse("/".join(rest.split(".")[:-1])), False


# --- core NATS -------------------------------------------------------------------------------------


def tokens(door: str) -> str:
    return _join("tok", door)


def control(worker: str) -> str:
    return _join("ctl", worker)


def region_control(region: str) -> str:
    """Of a region's routing service. One token longer than `control`, so that rights to one do not cover the other."""
    return _join("ctl", "routing", region)


def event(region: str, job: str) -> str:
    return _join("ev", region, job)


def events(region: str) -> str:
    return _join("ev", region, "*")


def digest(region: str) -> str:
    return _join("digest", region)


def plan_changes(region: str) -> str:
    """Subject of the KV entry that holds the plan; a core subscription sees each new one."""
    return kv_subject(plan_bucket(region), "plan")
