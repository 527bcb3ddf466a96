"""Sends the demo's arrivals through the real ways in and notes what became of each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from laneway.cli.demo.outcome import Outcome
from laneway.cli.demo.script import PRIORITY_TPOT_S, PRIORITY_TTFT_S, Arrival, Way
from laneway.cli.demo.show import Board
from laneway.client import Client
from laneway.client.request import RequestFields
from laneway.client.values import Job, Message
from laneway.core.errors import LanewayError
from laneway.core.lanes import JobState, Lane
from laneway.core.subjects import H_KEY, ingest, verdict
from laneway.v1 import admission_pb2, bus_pb2, common_pb2, task_pb2

MODEL = "chat"
RESULT_WAIT_S = 180.0
FIFO_TTFT_S = 3600.0  # in the comparison nothing is refused for its time to first token


@dataclass(frozen=True, slots=True)
class Mode:
    """How arrivals are sent: by their own lanes, or all through one."""

    name: str
    single_lane: bool
    tenant: str = "default"
    region: str = "local"

    def lane(self, arrival: Arrival) -> Lane:
        return Lane.PRIORITY if self.single_lane else arrival.lane


class Traffic:
    """One pass over the arrivals. `outcomes` is complete once `run` has returned."""

    def __init__(self, client: Client, bus: NatsClient, mode: Mode, board: Board) -> None:
        self._client, self._bus, self._mode, self._board = client, bus, mode, board
        self.outcomes: list[Outcome] = []
        self._verdicts: dict[str, asyncio.Future[bus_pb2.IngestVerdict]] = {}

    async def run(self, arrivals: Sequence[Arrival], started_s: float) -> None:
        """Sends each arrival at its time after `started_s` (monotonic) and waits for all to end."""
        subject = verdict(self._mode.region, self._mode.tenant, "*")
        subscription = await self._bus.subscribe(subject, cb=self._on_verdict)
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                await asyncio.sleep(max(0.0, started_s + arrival.at_s - time.monotonic()))
                outcome = Outcome(arrival)
                self.outcomes.append(outcome)
                group.create_task(self._one(outcome))
        with contextlib.suppress(NatsError):
            await subscription.unsubscribe()

    async def _one(self, outcome: Outcome) -> None:
        ways = {Way.STREAM: self._stream, Way.SUBMIT: self._submit, Way.PRODUCER: self._produce}
        self._board.accepted += 1
        try:
            async with asyncio.timeout(RESULT_WAIT_S):
                await ways[outcome.arrival.way](outcome)
        except LanewayError as error:
            outcome.ends += 1
            outcome.error = error.reason
            outcome.refused = not outcome.job_id
            word = "was refused" if outcome.refused else "ended"
            self._board.tell(f"{outcome.arrival.name} {word}: {error.reason}, {error.message}")
        except TimeoutError:
            outcome.error = "NO_END"
        self._board.ended += 1

    async def _stream(self, outcome: Outcome) -> None:
        arrival = outcome.arrival
        started_s = time.monotonic()
        async with self._client.generate(**self._fields(arrival)) as stream:
            outcome.job_id = stream.job_id
            said, first = "", True
            async for chunk in stream:
                if first:
                    self._board.ttfts_s.append(time.monotonic() - started_s)
                    first = False
                said += chunk.text
                self._board.saying = f"{arrival.name}: {said}"
            finished = stream.finished
        outcome.ends += 1
        outcome.ttft_s, outcome.tpot_s, outcome.stall_s = finished.ttft_s, finished.tpot_s, finished.stall_s
        outcome.completion_s, outcome.tokens = finished.total_s, finished.usage.completion_tokens
        outcome.attempts = finished.attempt

    def _fields(self, arrival: Arrival) -> RequestFields:
        fields: RequestFields = {
            "model": MODEL,
            "messages": [Message("user", arrival.text)],
            "lane": self._mode.lane(arrival),
            "max_tokens": arrival.max_tokens,
            "temperature": 0.0,
            "deadline_s": RESULT_WAIT_S if self._mode.single_lane else arrival.within_s or RESULT_WAIT_S,
        }
        if self._mode.single_lane:
            fields["ttft_target_s"] = FIFO_TTFT_S
        elif arrival.lane is Lane.PRIORITY:
            fields["ttft_target_s"], fields["tpot_target_s"] = PRIORITY_TTFT_S, PRIORITY_TPOT_S
        return fields

    async def _submit(self, outcome: Outcome) -> None:
        arrival = outcome.arrival
        fields = self._fields(arrival)
        submitted = await self._client.submit(**fields)
        outcome.job_id = submitted.job_id
        self._note(outcome, await self._client.wait(submitted.job_id))

    async def _produce(self, outcome: Outcome) -> None:
        """As any batch producer would: a message on the ingest subject, then the verdict, then the record."""
        arrival = outcome.arrival
        key = f"{self._mode.name}-{arrival.name}"
        request = admission_pb2.SubmitRequest(
            spec=task_pb2.JobSpec(
                model=MODEL,
                generate=task_pb2.GenerateTask(
                    chat=task_pb2.ChatPrompt(
                        messages=[task_pb2.ChatMessage(role="user", parts=[task_pb2.ContentPart(text=arrival.text)])]
                    ),
                    sampling=task_pb2.Sampling(max_tokens=arrival.max_tokens, temperature=0.0),
                ),
                contract=common_pb2.Contract(),
            )
        )
        within_s = RESULT_WAIT_S if self._mode.single_lane else arrival.within_s or RESULT_WAIT_S
        request.spec.contract.deadline.FromMilliseconds(int((time.time() + within_s) * 1000))
        if self._mode.single_lane:
            request.spec.contract.ttft_target.FromSeconds(int(FIFO_TTFT_S))
        answer = self._verdicts[key] = asyncio.get_running_loop().create_future()
        subject = ingest(self._mode.region, self._mode.lane(arrival), self._mode.tenant)
        await self._bus.jetstream().publish(subject, request.SerializeToString(), headers={H_KEY: key})
        said = await answer
        outcome.job_id = said.job_id
        if said.HasField("error"):
            outcome.ends, outcome.error, outcome.refused = outcome.ends + 1, said.error.reason, True
            return
        self._note(outcome, await self._client.wait(said.job_id))

    async def _on_verdict(self, message: Msg) -> None:
        said = bus_pb2.IngestVerdict.FromString(message.data)
        future = self._verdicts.get(said.key)
        if future is not None and not future.done():
            future.set_result(said)

    def _note(self, outcome: Outcome, job: Job) -> None:
        outcome.ends += 1
        outcome.attempts = job.attempt
        timings = job.timings
        outcome.completion_s = timings.ended_s - timings.created_s
        if job.state is not JobState.SUCCEEDED:
            outcome.error = job.error.reason if job.error else job.state.value
            return
        outcome.tokens = job.usage.completion_tokens
        if timings.first_token_s:
            outcome.ttft_s = timings.first_token_s - timings.created_s
        if outcome.tokens > 1:
            outcome.tpot_s = timings.decode_span_s / (outcome.tokens - 1)
