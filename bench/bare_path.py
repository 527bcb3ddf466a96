"""The bare limit of the whole token path: the same hops as Laneway's, and nothing decided on the way.

A grpc.aio door stores each request twice in JetStream (as a record and as a job), a worker with one open pull submits
it to the same simulated engine, and tokens go back as core NATS messages, three in one as Laneway's do. No validation,
no records, no claims, no leases, no recovery. token_path.py runs `serve_door` and `serve_worker` in processes of their
own.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

import grpc.aio
from nats.aio.msg import Msg

from laneway.core.catalogue import Pool
from laneway.runtime.connecting import SafeClient
from laneway.runtime.requests import Requests, listen
from laneway.v1 import admission_pb2, task_pb2
from laneway.workers.engines.protocol import EngineRequest, EngineStats, SequenceStep
from laneway.workers.engines.registry import EngineOptions, make_engine

ACCEPTED = admission_pb2.GenerateResponse(accepted=admission_pb2.Accepted(job_id="j" * 30)).SerializeToString()
PIECE = admission_pb2.GenerateResponse(chunk=task_pb2.Chunk(text="t" * 50)).SerializeToString()
RECORD, JOB = bytes(400), bytes(500)  # about what Laneway stores
JOINED = 3  # tokens a message, after the first
TIMEOUT_S = 5.0
PULL = b'{"batch":1,"expires":5000000000}'


async def _connect(url: str) -> tuple[SafeClient, Requests]:
    client = SafeClient()
    await client.connect(url)
    requests = Requests(client, client.new_inbox())
    await requests.start()
    return client, requests


async def serve_door(url: str, tokens: int) -> None:
    client, requests = await _connect(url)
    streams = client.jetstream()
    await streams.add_stream(name="RECORDS", subjects=["record.>"])
    await streams.add_stream(name="LANE", subjects=["lane.>"], retention="workqueue")
    await streams.add_consumer("LANE", durable_name="any", ack_policy="explicit")
    waiting: dict[int, asyncio.Queue[int]] = {}
    numbers = itertools.count(1)

    def on_tokens(msg: Msg) -> None:
        for part in msg.data.split(b"|"):
            number, count = part.split(b":")
            waiting[int(number)].put_nowait(int(count))

    async def generate(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        number = next(numbers)
        queue = waiting[number] = asyncio.Queue()
        await requests.send(f"record.{number}", RECORD, timeout_s=TIMEOUT_S)
        await requests.send(f"lane.{number}", JOB, timeout_s=TIMEOUT_S)
        yield ACCEPTED
        got = 0
        while got < tokens:
            got += await queue.get()
            yield PIECE
        del waiting[number]

    await listen(client, "tokens", on_tokens)
    server = grpc.aio.server()
    methods = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.Event().wait()


class _Sink:
    def __init__(self, post: Callable[[str, bytes], None]) -> None:
        self._post = post
        self._unsent: dict[int, int] = {}
        self._steps: dict[int, int] = {}

    def begin(self, number: int) -> None:
        self._unsent[number] = self._steps[number] = 0

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        first, later = [], []
        for step in steps:
            number = step.id
            self._steps[number] += 1
            self._unsent[number] += len(step.token_ids)
            due = (self._steps[number] - 1) % JOINED == 0 or step.finish is not None
            if due and self._unsent[number]:
                (first if self._steps[number] == 1 else later).append(f"{number}:{self._unsent[number]}")
                self._unsent[number] = 0
            if step.finish is not None:
                del self._unsent[number], self._steps[number]
        for batch in (first, later):
            if batch:
                self._post("tokens", "|".join(batch).encode())

    def on_closed(self, reason: str) -> None:
        raise RuntimeError(reason)


async def serve_worker(url: str, pool: Pool, options: EngineOptions, prompt: Sequence[int], tokens: int) -> None:
    client, _ = await _connect(url)
    engine = make_engine(pool, options)
    sink = _Sink(client.post)
    await engine.start(sink)
    inbox = client.new_inbox()
    pulls = itertools.count(1)

    def pull() -> None:
        client.post("$JS.API.CONSUMER.MSG.NEXT.LANE.any", PULL, f"{inbox}.{next(pulls)}")

    def on_job(msg: Msg) -> None:
        if msg.data:
            number = int(msg.subject.removeprefix("lane."))
            sink.begin(number)
            engine.submit(EngineRequest(number, tuple(prompt), tokens, temperature=0.0, ignore_eos=True))
            client.post(msg.reply, b"+ACK")
        pull()

    await listen(client, f"{inbox}.*", on_job)
    pull()
    print("ready", flush=True)
    await asyncio.Event().wait()
