"""Counts after a drill, from every place that claims to know: what was stored, what callers were told, what is live."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import dropwhile

from prometheus_client.parser import text_string_to_metric_families

from laneway.client import JobState, LanewayError, SchedulerClient
from laneway.core import subjects
from laneway.core.job import JobRecord, never_accepted
from laneway.core.lanes import LANES
from laneway.runtime.bus import Bus, BusError
from laneway.runtime.following import follow
from laneway.runtime.headers import ack_sequence
from laneway.runtime.reading import last_from_leader, next_from_leader, subject_list
from laneway.runtime.wire.records import decode_record
from laneway.v1 import bus_pb2
from tests.support.drill_load import TENANT, Asked, Way
from tests.support.drill_stack import DrillStack
from tests.support.nats import REGION, eventually

# Ends of the names of gauges that say what there is or should be, not what is live.
NOT_LIVE = (
    "_capacity_slots", "_capacity_tokens", "_desired_workers", "_created", "_used_ratio", "_skew_seconds",
    "_policy_version", "_refused_state", "_credit_tokens", "_theta_ratio", "_prefill_ratio", "_ready_workers",
)  # fmt: skip
QUIET_S_MAX = 45.0  # from the last end to all counts being zero: leases and beats of what died must run out


@dataclass
class Ends:
    """Terminal records as they were stored, each once: a second one under another sequence is a second end. But for
    refusals before it: nothing was in the lane, and the key, or the message of a producer, was free for another try.
    """

    stored: dict[str, dict[int, JobState]] = field(default_factory=lambda: defaultdict(dict))  # by job and sequence

    @property
    def twice(self) -> dict[str, dict[int, JobState]]:
        return {job_id: found for job_id, found in self.stored.items() if len(_ends(found)) > 1}

    async def listen(self, bus: Bus) -> None:
        async with follow(bus, subjects.jobs_stream(REGION), subjects.records_of(REGION)) as stored:
            async for msg in stored:
                state = (msg.headers or {}).get(subjects.H_RECORD_STATE)
                if state is not None and JobState(state).terminal:
                    # What the scheduler gave up, since no door put it into its lane, is free for another try too.
                    record = decode_record(msg.data)
                    ended = JobState.REFUSED if never_accepted(record) else record.state
                    self.stored[record.job_id][ack_sequence(msg.reply)] = ended


def _ends(stored: dict[int, JobState]) -> list[JobState]:
    """Of a job that was accepted; of one that never was, its refusal."""
    in_order = [stored[sequence] for sequence in sorted(stored)]
    accepted = list(dropwhile(lambda state: state is JobState.REFUSED, in_order))
    return accepted or in_order[-1:]


@asynccontextmanager
async def ends_of(bus: Bus) -> AsyncIterator[Ends]:
    """All ends from now on, across restarts of NATS."""
    ends = Ends()
    task = asyncio.ensure_future(ends.listen(bus))
    try:
        yield ends
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def all_records(bus: Bus) -> dict[str, JobRecord]:
    """Every record that the region holds, from its leader."""
    stream = subjects.jobs_stream(REGION)
    out: dict[str, JobRecord] = {}
    found = await subject_list(bus, stream, subjects.records_of(REGION))
    for begin in range(0, len(found), 100):
        part = found[begin : begin + 100]
        for last in await asyncio.gather(*(last_from_leader(bus, stream, subject) for subject in part)):
            if last is not None:
                record = decode_record(last.data)
                out[record.job_id] = record
    return out


async def open_records(bus: Bus) -> list[tuple[str, JobState]]:
    """The jobs that have not ended."""
    records = await all_records(bus)
    return [(job_id, record.state) for job_id, record in records.items() if not record.state.terminal]


async def verdicts(bus: Bus) -> dict[str, Counter[str]]:
    """Every stored verdict, by job: how often which."""
    stream, wanted = subjects.verdict_stream(REGION), f"verdict.{REGION}.{TENANT}.*"
    out: dict[str, Counter[str]] = defaultdict(Counter)
    message = await next_from_leader(bus, stream, wanted, 1)
    while message is not None:
        verdict = bus_pb2.IngestVerdict.FromString(message.data)
        out[verdict.job_id][verdict.error.reason if verdict.HasField("error") else "OK"] += 1
        message = await next_from_leader(bus, stream, wanted, message.sequence + 1)
    return out


# --- what is live ------------------------------------------------------------------------------------


async def live(stack: DrillStack, bus: Bus) -> dict[str, float]:
    """A recount of all that is live, from everybody who counts."""
    counts: dict[str, float] = {}
    streams = [subjects.lane_stream(REGION, lane) for lane in LANES]
    for stream in (*streams, subjects.ingest_stream(REGION)):
        info = await bus.api(f"STREAM.INFO.{stream}", {})
        counts[f"messages of {stream}"] = info["state"]["messages"]
        listed = await bus.api(f"CONSUMER.LIST.{stream}", {})
        for consumer in listed["consumers"]:
            counts[f"{stream} {consumer['name']} unacknowledged"] = consumer["num_ack_pending"]
            counts[f"{stream} {consumer['name']} pending"] = consumer["num_pending"]
    for child in stack.children:
        address = stack.addresses.metrics.get(child.name)
        if address and child.alive:
            for name, value in (await gauges(address)).items():
                counts[f"{name} of {child.name}"] = value
    async with SchedulerClient(stack.addresses.scheduler) as scheduler:
        async for worker in scheduler.list_workers():
            counts[f"running at {worker.name}"] = worker.running
            counts[f"KV of {worker.name}"] = worker.kv_tokens_used
        async for lane in scheduler.list_lanes():
            counts[f"{lane.lane} as listed"] = lane.ready + lane.running + lane.parked
    return counts


async def gauges(address: str) -> dict[str, float]:
    request = f"http://{address}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=10).read().decode())
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type == "gauge" and family.name.startswith("laneway_") and not family.name.endswith(NOT_LIVE):
            found[family.name] = sum(sample.value for sample in family.samples)
    return found


async def nothing_is_live(stack: DrillStack, bus: Bus, timeout_s: float = QUIET_S_MAX) -> dict[str, float]:
    """Waits until every count is zero and every record has ended; fails with what has not.

    A record whose job never came into its lane is in no count: the scheduler ends it, some time after the door that
    wrote it should have been done.
    """
    last: dict[str, float] = {}

    async def quiet() -> bool:
        nonlocal last
        with contextlib.suppress(BusError, LanewayError):
            last = await live(stack, bus)
            if not any(last.values()):
                last |= {f"{job_id} is {state}": 1 for job_id, state in await open_records(bus)}
            return not any(last.values())
        return False

    try:
        await eventually(quiet, timeout_s)
    except TimeoutError:
        left = {name: count for name, count in last.items() if count}
        raise AssertionError(f"still live: {left}") from None
    assert sum(name.startswith("laneway_worker_running_jobs") for name in last) >= 1
    assert sum(name.startswith("laneway_door_streams") for name in last) == len(stack.doors)
    return last


# --- what was promised -------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What came of a drill."""

    jobs: int
    states: Counter[str]
    told: dict[str, Counter[str]]
    attempts: Counter[int]
    wrong: list[str]

    def __str__(self) -> str:
        told = "; ".join(f"{way}: {dict(words)}" for way, words in self.told.items())
        return f"{self.jobs} jobs: {dict(self.states)}; by attempts {dict(sorted(self.attempts.items()))}\n  {told}"


# What a caller may be told where its door or its NATS died, its job being attached to that door.
BROKEN = frozenset(
    {"CONNECTION_LOST", "NO_SERVICE", "UNAVAILABLE", "OUTCOME_UNKNOWN", "CANCELLED", "CALLER_GONE", "DRAINING"}
)


def judge(asked: Iterable[Asked], records: dict[str, JobRecord], ends: Ends, said: dict[str, Counter[str]]) -> Verdict:
    """Compares what callers saw with what is stored. Every promise that was broken is named with its job."""
    everybody = list(asked)
    wrong: list[str] = []
    told: dict[str, Counter[str]] = defaultdict(Counter)
    for each in everybody:
        told[each.way].update(each.told)
        wrong += [f"{each.key} ({each.way}, {each.job_id}): {text}" for text in _wrong(each, records, said)]
    for job_id, found in ends.twice.items():
        wrong.append(f"{job_id} ended {len(found)} times: {sorted(s.value for s in found.values())}")
    known = {each.job_id for each in everybody}
    for job_id, record in records.items():
        if not record.state.terminal:
            wrong.append(f"{job_id} is {record.state} for ever")
        if job_id not in known and record.state is JobState.SUCCEEDED:
            wrong.append(f"{job_id} ran for nobody")
        stored = ends.stored.get(job_id)
        if stored is not None and record.state not in stored.values():
            wrong.append(f"{job_id} ended {stored} and is {record.state} now")
    states = Counter(record.state.value for record in records.values())
    attempts = Counter(record.attempt for record in records.values() if record.state is JobState.SUCCEEDED)
    return Verdict(len(records), states, told, attempts, wrong)


def _wrong(asked: Asked, records: dict[str, JobRecord], said: dict[str, Counter[str]]) -> list[str]:
    if len(asked.told) != 1:
        return [f"was told {asked.told}"]
    told, expected = asked.told[0], asked.expected
    record = records.get(asked.job_id)
    if record is None:
        return [] if told in BROKEN and not asked.ids else [f"was told {told}, and there is no record"]
    out: list[str] = []
    if asked.ids != expected[: len(asked.ids)]:
        out.append(f"heard another answer: {asked.ids} for {expected}")
    if record.result is not None and list(record.result.token_ids) != expected:
        out.append(f"the stored answer is another: {record.result.token_ids}")
    may_break = asked.way in (Way.ATTACHED, Way.LEFT)
    match told:
        case JobState.SUCCEEDED:
            if record.state is not JobState.SUCCEEDED:
                out.append(f"was told {told}, and the record is {record.state}")
            if asked.way is not Way.LEFT and asked.ids != expected:
                out.append(f"was told {told} and heard {len(asked.ids)} of {len(expected)} tokens")
        case JobState.CANCELLED if asked.way in (Way.LEFT, Way.CANCELLED):
            if record.state is not JobState.CANCELLED:
                out.append(f"was told {told}, and the record is {record.state}")
        case _ if may_break and told in BROKEN:
            if record.state not in (JobState.SUCCEEDED, JobState.CANCELLED):
                out.append(f"was told {told}, and the record is {record.state}: {record.error}")
        case _:
            out.append(f"was told {told}; the record is {record.state}: {record.error}")
    # A message that is published or delivered again is answered again, with the same words.
    if asked.way is Way.PRODUCED and set(said.get(asked.job_id, ())) != {"OK"}:
        out.append(f"verdicts {said.get(asked.job_id)}")
    return out


def stalls(asked: Iterable[Asked]) -> str:
    """The silences of streams: their median, and the longest with what helps to find out why."""
    ordered = sorted((each for each in asked if each.stall_s), key=lambda each: -each.stall_s)
    if not ordered:
        return "none"
    worst = "; ".join(
        f"{each.stall_s:.1f} s at {each.stalled_at_s:.1f} s, {each.way} {each.lane}, attempt {each.attempts},"
        f" {each.job_id}"
        for each in ordered[:3]
    )
    return f"median {ordered[len(ordered) // 2].stall_s:.2f} s; the longest {worst}"
