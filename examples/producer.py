"""A batch producer that speaks NATS alone: each line of standard input becomes a job of the batch lane.

printf 'Describe a lighthouse.\nDescribe a harbour.\n' | python examples/producer.py [nats://host:port [seed file]]

`laneway up --fixed-ports` has its NATS at the default address; without the flag, give the one that it prints. Where
NATS asks who we are, the seed is nkeys/producer.seed of `laneway secrets`. The same lines are the same jobs: run it
again after an interruption, and it goes on where it was.
"""

import asyncio
import sys
import uuid
from hashlib import sha256

import nats
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from laneway.core.ids import keyed_job_id
from laneway.v1 import admission_pb2, bus_pb2, common_pb2, task_pb2


async def last(js: JetStreamContext, stream: str, subject: str) -> bytes:
    """The last message of a subject, once there is one. It is stored: nothing is missed while nobody listens."""
    while True:
        try:
            return (await js.get_last_msg(stream, subject, direct=True)).data or b""
        except NotFoundError:
            await asyncio.sleep(0.2)


async def result_of(js: JetStreamContext, record: bus_pb2.JobRecord) -> task_pb2.Result:
    """A result that is too large for its record is in the object store, in chunks."""
    stored, data, number = record.result_object, b"", 0
    while len(data) < stored.size_bytes:
        chunk = f"$O.OBJECTS_local.C.{stored.name.replace('/', '.')}.{number}"
        data, number = data + await last(js, "OBJ_OBJECTS_local", chunk), number + 1
    if stored.size_bytes and sha256(data).digest() != stored.sha256:
        raise ValueError(f"the result {stored.name} is damaged")
    return task_pb2.Result.FromString(data) if data else record.result


async def main(prompts: list[str], url: str = "nats://127.0.0.1:4222", seed_file: str = "") -> None:
    credential = {"nkeys_seed": seed_file, "inbox_prefix": "_INBOX_producer"} if seed_file else {}
    bus = await nats.connect(url, **credential)
    js = bus.jetstream()
    jobs = {}
    for prompt in prompts:
        # The key names the job: a repeated publish is harmless. The acknowledgement means received, not accepted.
        key = str(uuid.uuid5(uuid.NAMESPACE_OID, prompt))
        chat = task_pb2.ChatPrompt(messages=[{"role": "user", "parts": [{"text": prompt}]}])
        task = task_pb2.GenerateTask(chat=chat, sampling={"max_tokens": 48, "temperature": 0})
        request = admission_pb2.SubmitRequest(spec={"model": "chat", "generate": task})
        await js.publish("ingest.local.batch.default", request.SerializeToString(), headers={"Laneway-Key": key})
        jobs[keyed_job_id("local", "default", key)] = prompt
    for job_id, prompt in jobs.items():
        verdict = bus_pb2.IngestVerdict.FromString(await last(js, "VERDICTS_local", f"verdict.local.default.{job_id}"))
        print(f"{prompt} {verdict.verdict.message or verdict.error.message}")
    for job_id, prompt in jobs.items():
        record = bus_pb2.JobRecord()
        while record.state < common_pb2.JOB_STATE_SUCCEEDED:  # this and the states after it are ends
            await asyncio.sleep(0.2)
            record = bus_pb2.JobRecord.FromString(await last(js, "JOBS_local", f"job.local.default.{job_id}"))
        print(f"{prompt} {(await result_of(js, record)).text or record.error.message}")
    await bus.close()


if __name__ == "__main__":
    asyncio.run(main([line.strip() for line in sys.stdin if line.strip()], *sys.argv[1:]))
