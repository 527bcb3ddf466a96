"""Runs in a container: publishes batch jobs over NATS one by one and waits until each has ended; prints JSON lines.

python producer.py JOBS GAP_S. A line for each job that was received or that a worker started, and one with what became
of its own. Then it reads a line with ids of jobs, and says of each how often the region told its end. Whatever breaks
meanwhile, a key is published until it is received: that is all a producer has to do.
"""

import asyncio
import json
import sys
import uuid
from collections import Counter
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from laneway.core import subjects
from laneway.core.ids import keyed_job_id
from laneway.core.lanes import Lane
from laneway.runtime.wire import enums
from laneway.v1 import admission_pb2, bus_pb2, common_pb2, task_pb2

URL, REGION, TENANT, TOKENS = "nats://nats:4222", "local", "demo", 24
EVENT_TENTHS_MAX = 50
TROUBLE = (nats.errors.Error, nats.js.errors.Error, OSError)


async def main(jobs: int, gap_s: float) -> None:
    ends: Counter[str] = Counter()  # terminal events of every job of the region
    watcher, producer = await connected("nats-operator", "operator"), await connected("nats-producer", "producer-demo")

    async def count(msg: Msg) -> None:
        event = bus_pb2.JobEvent.FromString(msg.data)
        state = enums.JOB_STATE_FROM_WIRE.get(event.state)
        ends[event.job_id] += state is not None and state.terminal
        if event.worker_id:
            say(started=event.job_id, worker=event.worker_id)

    await watcher.subscribe(subjects.events(REGION), cb=count)
    await watcher.flush()
    say(ready=True)
    retries: Counter[str] = Counter()
    keys = [str(uuid.uuid4()) for _ in range(jobs)]
    for number, key in enumerate(keys):
        await received(producer, number, key, retries)
        say(received=number + 1)
        await asyncio.sleep(gap_s)
    accepted, refused, states = [], 0, Counter[str]()
    for key in keys:
        job = keyed_job_id(REGION, TENANT, key)
        verdict = bus_pb2.IngestVerdict.FromString(
            await stored(producer, subjects.verdict_stream(REGION), subjects.verdict(REGION, TENANT, job))
        )
        refused += verdict.HasField("error")
        if not verdict.HasField("error"):
            accepted.append(job)
    for job in accepted:
        states[await ended(producer, job)] += 1
    say(accepted=accepted, refused=refused, states=states, retries=retries)
    jobs_asked: list[str] = json.loads(await asyncio.to_thread(sys.stdin.readline))
    # A record is there before its end is told.
    for _ in range(EVENT_TENTHS_MAX):
        if all(ends[job] for job in jobs_asked):
            break
        await asyncio.sleep(0.1)
    say(ends={job: ends[job] for job in jobs_asked})
    await producer.close()
    await watcher.close()


async def connected(secret: str, name: str) -> Client:
    seed = Path("/run/secrets", secret).read_text().strip()

    async def on_error(error: Exception) -> None:
        print(f"{name}: {error!r}", file=sys.stderr)

    return await nats.connect(
        URL,
        name=name,
        nkeys_seed_str=seed,
        inbox_prefix=f"_INBOX_{name}",
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.25,
        error_cb=on_error,
    )


async def received(nc: Client, number: int, key: str, retries: Counter[str]) -> None:
    chat = task_pb2.ChatPrompt(messages=[{"role": "user", "parts": [{"text": f"Describe the number {number}."}]}])
    sampling = task_pb2.Sampling(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    spec = task_pb2.JobSpec(model="chat", generate=task_pb2.GenerateTask(chat=chat, sampling=sampling))
    body = admission_pb2.SubmitRequest(spec=spec).SerializeToString()
    subject = subjects.ingest(REGION, Lane.BATCH, TENANT)
    while True:
        try:
            await nc.jetstream().publish(subject, body, headers={subjects.H_KEY: key}, timeout=2.0)
            return
        except TROUBLE as error:
            retries[type(error).__name__] += 1
            await asyncio.sleep(0.2)


async def stored(nc: Client, stream: str, subject: str) -> bytes:
    """The newest message of a subject, as soon as there is one."""
    while True:
        try:
            found = await nc.request(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", timeout=2.0)
            if not (found.headers or {}).get("Status"):
                return found.data
        except TROUBLE:
            pass
        await asyncio.sleep(0.2)


async def ended(nc: Client, job: str) -> str:
    """What a job's record says in the end, with the number of its tokens if that is not as asked for."""
    while True:
        record = bus_pb2.JobRecord.FromString(
            await stored(nc, subjects.jobs_stream(REGION), subjects.record(REGION, TENANT, job))
        )
        state = enums.JOB_STATE_FROM_WIRE.get(record.state)
        if state is not None and state.terminal:
            made = record.result.usage.completion_tokens
            whole = record.state != common_pb2.JOB_STATE_SUCCEEDED or made == TOKENS
            return state.value if whole else f"{state.value} with {made} tokens"
        await asyncio.sleep(0.2)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
