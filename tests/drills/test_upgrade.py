"""A running region is upgraded under load, one service after the other, with both builds at work at each stage.

Order: the region's streams, then workers, scheduler, routing, admission. 1,000 jobs are parked before it begins and
come due all the while; callers stream, submit and produce over NATS meanwhile. Nothing is lost, everything ends once,
and nobody meets a message that it cannot read.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg

from laneway.cli.stack import LocalStack, StackOptions
from laneway.client import Client, JobState, Lane, RequestFields, RetryParams
from laneway.v1 import admission_pb2, bus_pb2, common_pb2, task_pb2
from tests.support.nats import REGION, eventually
from tests.support.older_build import NoHistory, OlderBuild, OlderStack, older_build
from tests.support.watching import Watcher, one_more, watching
from tools.record_messages import FOLDER, release

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(300)]

PARKED = 1000
PARKED_S = 50.0  # the last of them may start this long after the first
TOKENS = 16
MODEL = {
    "name": "chat",
    "engine": "simulated",
    "slots": 8,
    "workers": 2,
    "engine_options": {"pace_s": 0.01},
    "queue_length": 1000,
}
OPTIONS = StackOptions(settings={"models": [MODEL], "process": {"drain_s": 5.0}})
PATIENT: RequestFields = {
    "model": "chat",
    "ttft_target_s": 600.0,
    "deadline_s": 900.0,
    "max_tokens": TOKENS,
    "ignore_eos": True,
}
# A door needs a second to start again; by default the client gives up on an unreachable one before that.
PATIENCE = RetryParams(attempts_max=dict.fromkeys(Lane, 100), floor_per_s=50.0)
BAD_WORDS = ("unreadable", "unknown field", "unknown value", "Traceback", "ermissions violation")


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> OlderBuild:
    try:
        return older_build(tmp_path_factory.mktemp("older"))
    except NoHistory as why:
        pytest.skip(str(why))


def request(prompt: str, lane: Lane = Lane.PRIORITY) -> RequestFields:
    return {**PATIENT, "prompt": prompt, "lane": lane}


# --- load -------------------------------------------------------------------------------------------


@dataclass
class Load:
    """Callers of all kinds; they go from door to door, and go on until the block ends."""

    doors: list[Client]
    nats_url: str
    parked: list[str] = field(default_factory=list)
    submitted: list[str] = field(default_factory=list)
    streamed: list[str] = field(default_factory=list)
    produced: int = 0
    verdicts: dict[str, str] = field(default_factory=dict)  # job by key
    _number: Iterator[int] = field(default_factory=itertools.count)

    def door(self) -> Client:
        return self.doors[next(self._number) % len(self.doors)]

    async def park(self) -> None:
        async def one(number: int) -> None:
            lane = Lane.BATCH if number % 2 else Lane.DEFERRABLE
            not_before_s = 5.0 + PARKED_S * number / PARKED
            fields = request(f"Story {number}.", lane)
            fields["not_before_s"] = not_before_s
            submitted = await self.door().submit(**fields)
            self.parked.append(submitted.job_id)

        for begin in range(0, PARKED, 50):
            await asyncio.gather(*(one(number) for number in range(begin, begin + 50)))

    async def stream(self) -> None:
        async with self.door().generate(**request(f"Question {next(self._number)}?")) as stream:
            indices = [i async for c in stream for i in range(c.first_index, c.first_index + len(c.token_ids))]
        assert indices == list(range(TOKENS)), "each token comes once and in order"
        self.streamed.append(stream.job_id)

    async def submit(self) -> None:
        submitted = await self.door().submit(**request(f"Page {next(self._number)}.", Lane.DEFERRABLE))
        self.submitted.append(submitted.job_id)

    async def heard_verdict(self, msg: Msg) -> None:
        verdict = bus_pb2.IngestVerdict.FromString(msg.data)
        self.verdicts[verdict.key] = verdict.job_id if not verdict.HasField("error") else verdict.error.message

    @property
    def job_ids(self) -> list[str]:
        return [*self.parked, *self.submitted, *self.streamed, *self.verdicts.values()]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        nc = await nats.connect(self.nats_url)

        async def produce() -> None:
            spec = task_pb2.JobSpec(
                model="chat",
                generate=task_pb2.GenerateTask(text="Row.", sampling=task_pb2.Sampling(max_tokens=TOKENS)),
                contract=common_pb2.Contract(lane=common_pb2.LANE_BATCH),
            )
            body = admission_pb2.SubmitRequest(spec=spec).SerializeToString()
            headers = {"Laneway-Key": f"row-{self.produced}"}
            await nc.jetstream().publish(f"ingest.{REGION}.batch.default", body, headers=headers, timeout=10)
            self.produced += 1

        await nc.subscribe(f"verdict.{REGION}.default.*", cb=self.heard_verdict)
        stop = asyncio.Event()
        acts: list[Callable[[], Awaitable[None]]] = [self.stream, self.stream, self.stream, self.submit, produce]
        try:
            async with asyncio.TaskGroup() as group:
                for act in acts:
                    group.create_task(_again_and_again(act, stop))
                try:
                    yield
                finally:
                    stop.set()
            await eventually(lambda: len(self.verdicts) == self.produced, 60.0)
        finally:
            await nc.close()


async def _again_and_again(act: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
    while not stop.is_set():
        await act()
        await asyncio.sleep(0.1)


# --- the upgrade ------------------------------------------------------------------------------------


async def test_a_region_is_upgraded_under_load_and_loses_nothing(older: OlderBuild) -> None:
    async with OlderStack(OPTIONS, older) as stack, watching(stack) as watcher:
        async with Client(stack.addresses.admission, retry_budget=PATIENCE) as door:
            load = Load([door], stack.addresses.nats)
            await load.park()

            async def at_work(stage: str) -> None:
                """Some more of everything has ended, and some of what was parked is parked still."""
                ends, streams, produced = watcher.ends.total(), len(load.streamed), load.produced
                await eventually(lambda: watcher.ends.total() >= ends + 60, 60.0)
                await eventually(lambda: len(load.streamed) >= streams + 5 and load.produced >= produced + 2, 60.0)
                left = PARKED - sum(watcher.terminal_writes[job_id] > 0 for job_id in load.parked)
                builds = Counter(f"{child.name.split('-')[0]} {stack.build_of(child)}" for child in stack.children[1:])
                print(f"{stage}: {left} parked jobs left; {', '.join(sorted(builds))}")
                assert left, "the drill took longer than the parked jobs last"

            async with load.running():
                await at_work("before")
                await stack.provision()
                for worker in list(stack.workers):
                    await stack.upgrade(worker.name)
                    await at_work(worker.name)
                async with one_more(stack, "scheduler"):
                    await at_work("a standby of the present build")
                    await stack.upgrade("scheduler")
                    await at_work("scheduler")
                await stack.upgrade("routing")
                async with (
                    one_more(stack, "admission") as (_, address),
                    Client(address, retry_budget=PATIENCE) as another,
                ):
                    load.doors.append(another)
                    await at_work("a second door, of the present build")
                    load.doors.remove(another)
                    await stack.upgrade("admission")
                    await at_work("admission")
            await everything_ended_once(watcher, load)
        look_at_logs(stack)


async def everything_ended_once(watcher: Watcher, load: Load) -> None:
    assert len(load.parked) == PARKED
    job_ids = load.job_ids
    assert len(set(job_ids)) == len(job_ids)
    await eventually(lambda: all(watcher.terminal_writes[job_id] for job_id in job_ids), 120.0)
    assert watcher.terminal_writes == dict.fromkeys(job_ids, 1), "each once, and no others"
    assert watcher.ends == {JobState.SUCCEEDED: len(job_ids)}
    attempts = Counter(watcher.claims[job_id] for job_id in job_ids)
    print(f"{len(job_ids)} jobs ended once: {len(load.parked)} parked before, {len(load.streamed)} streamed,"
          f" {len(load.submitted)} submitted, {load.produced} produced; by attempts {dict(attempts)}")  # fmt: skip


def look_at_logs(stack: LocalStack) -> None:
    lines = [
        (log.name, line)
        for log in sorted(stack.logs.glob("*.log"))
        for line in log.read_text(errors="replace").splitlines()
    ]
    levels = Counter(_level(line) for _, line in lines)
    assert levels["info"] > 20, "they are read as they are written"
    assert not [(log, line) for log, line in lines if _level(line) == "error" or any(w in line for w in BAD_WORDS)]


def _level(line: str) -> str:
    try:
        return str(json.loads(line).get("level", ""))
    except (ValueError, AttributeError):
        return ""


# --- what the older build reads ---------------------------------------------------------------------

READ = """
import base64, json, pathlib, sys
from laneway.admission.ingest_messages import parse_body
from laneway.admission.signals import decode_event, decode_tokens
from laneway.core.subjects import ParkSubject
from laneway.routing.wire import decode_digest
from laneway.runtime.wire.records import decode_lane_job, decode_lease, decode_plan, decode_record
from laneway.workers.messages import parse_control

READERS = {
    "job_record": decode_record, "lane_message": decode_lane_job, "worker_lease": decode_lease, "plan": decode_plan,
    "job_event": decode_event, "token_batch": decode_tokens, "region_digest": decode_digest,
    "submit_request": parse_body,
    "control_beat": parse_control, "control_cancel": parse_control, "control_drain": parse_control,
    "park_subject": lambda data: ParkSubject.parse(data.decode()),
}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    if path.stem in READERS:
        value = READERS[path.stem](base64.b64decode(json.loads(path.read_text())["bytes"]))
        assert value is not None, path.stem
        print(path.stem)
"""
OTHERWISE_READ = {"schemas", "leader_term", "paused_lanes", "ingest_verdict"}
NOT_READ = {"checkpoint", "dead_letter", "provider_quota"}  # kinds that the older build has no reader for
UNKNOWN_FIELD = {"submit_request_json"}  # a caller's newer field is refused by an older door, never ignored
REFUSE = """
import base64, json, pathlib, sys
from laneway.admission.ingest_messages import parse_body
from laneway.core.errors import InvalidRequest
from laneway.runtime.wire import records

for path in sorted(pathlib.Path(sys.argv[1]).glob("*_by_reference.json")):
    data = base64.b64decode(json.loads(path.read_text())["bytes"])
    decode = records.decode_record if path.stem.startswith("job_record") else records.decode_lane_job
    try:
        decode(data)
    except records.UnreadableMessage:
        print(path.stem)
newer = pathlib.Path(sys.argv[1]) / "submit_request_json.json"
try:
    parse_body(base64.b64decode(json.loads(newer.read_text())["bytes"]))
except InvalidRequest:
    print(newer.stem)
"""
REFUSED = {"job_record_by_reference", "lane_message_by_reference"}  # it would take what is left for the whole


def test_the_older_build_reads_what_the_present_one_writes(older: OlderBuild) -> None:
    """While both run, it gets messages of the newer one: an old door reads records that new workers write."""
    folder: Path = FOLDER / release()
    assert (
        set(older.run(READ, str(folder)).split())
        == {path.stem for path in folder.iterdir()} - OTHERWISE_READ - NOT_READ - REFUSED - UNKNOWN_FIELD
    )


def test_the_older_build_refuses_what_it_does_not_know(older: OlderBuild) -> None:
    """It must not run an empty prompt, give an empty answer, nor leave out what a caller asked for."""
    assert set(older.run(REFUSE, str(FOLDER / release())).split()) == REFUSED | UNKNOWN_FIELD
