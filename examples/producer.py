"""A batch producer that speaks NATS alone: each line of standard input becomes a job of the batch lane.

printf 'Describe a lighthouse.\nDescribe a harbour.\n' | python examples/producer.py [nats://host:port]

`laneway up --fixed-ports` has its NATS at the default address; without the flag, give the one that it prints.
"""

import asyncio
import sys
import uuid

import nats
from nats.js.api import DeliverPolicy

from laneway.v1 import admission_pb2, bus_pb2, common_pb2, task_pb2


async def main(prompts: list[str], url: str = "nats://127.0.0.1:4222") -> None:
    bus = await nats.connect(url)
    js = bus.jetstream()
    verdicts = await js.subscribe("verdict.local.default.*", ordered_consumer=True, deliver_policy=DeliverPolicy.NEW)
    records = await js.subscribe("job.local.default.*", ordered_consumer=True, deliver_policy=DeliverPolicy.NEW)
    # A key makes a repeated publish harmless. The acknowledgement means received; the verdict comes later.
    keys = {str(uuid.uuid4()): prompt for prompt in prompts}
    for key, prompt in keys.items():
        chat = task_pb2.ChatPrompt(messages=[{"role": "user", "parts": [{"text": prompt}]}])
        task = task_pb2.GenerateTask(chat=chat, sampling={"max_tokens": 48, "temperature": 0})
        request = admission_pb2.SubmitRequest(spec={"model": "chat", "generate": task})
        await js.publish("ingest.local.batch.default", request.SerializeToString(), headers={"Laneway-Key": key})
    jobs: dict[str, str] = {}
    while keys:
        verdict = bus_pb2.IngestVerdict.FromString((await verdicts.next_msg(timeout=60)).data)
        if prompt := keys.pop(verdict.key, ""):
            print(f"{prompt} {verdict.verdict.message or verdict.error.message}")
            if not verdict.HasField("error"):
                jobs[verdict.job_id] = prompt
    while jobs:
        record = bus_pb2.JobRecord.FromString((await records.next_msg(timeout=600)).data)
        if record.job_id in jobs and record.state >= common_pb2.JOB_STATE_SUCCEEDED:
            print(f"{jobs.pop(record.job_id)} {record.result.text or record.error.message}")
    await bus.close()


if __name__ == "__main__":
    asyncio.run(main([line.strip() for line in sys.stdin if line.strip()], *sys.argv[1:]))
