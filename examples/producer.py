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

REGION, TENANT = "local", "default"


async def main(prompts: list[str], url: str = "nats://127.0.0.1:4222") -> None:
    bus = await nats.connect(url)
    stream = bus.jetstream()
    new = DeliverPolicy.NEW
    verdicts = await stream.subscribe(f"verdict.{REGION}.{TENANT}.*", ordered_consumer=True, deliver_policy=new)
    records = await stream.subscribe(f"job.{REGION}.{TENANT}.*", ordered_consumer=True, deliver_policy=new)
    run = uuid.uuid4().hex[:8]
    for number, prompt in enumerate(prompts):
        message = task_pb2.ChatMessage(role="user", parts=[task_pb2.ContentPart(text=prompt)])
        task = task_pb2.GenerateTask(
            chat=task_pb2.ChatPrompt(messages=[message]), sampling=task_pb2.Sampling(max_tokens=48, temperature=0)
        )
        request = admission_pb2.SubmitRequest(spec=task_pb2.JobSpec(model="chat", generate=task))
        # The key makes a repeated publish harmless; the acknowledgement means received, the verdict comes later.
        headers = {"Laneway-Key": f"{run}-{number}"}
        await stream.publish(f"ingest.{REGION}.batch.{TENANT}", request.SerializeToString(), headers=headers)
    waiting = {}
    for _ in prompts:
        verdict = bus_pb2.IngestVerdict.FromString((await verdicts.next_msg(timeout=60)).data)
        print(f"{verdict.key}: {verdict.verdict.message or verdict.error.message}")
        if not verdict.HasField("error"):
            waiting[verdict.job_id] = verdict.key
    while waiting:
        record = bus_pb2.JobRecord.FromString((await records.next_msg(timeout=600)).data)
        if record.state >= common_pb2.JOB_STATE_SUCCEEDED and record.job_id in waiting:
            print(f"{waiting.pop(record.job_id)}: {record.result.text or record.error.message}")
    await bus.close()


if __name__ == "__main__":
    asyncio.run(main([line.strip() for line in sys.stdin if line.strip()], *sys.argv[1:]))
