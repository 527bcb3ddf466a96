"""Callers of the region: each does what its ask says, as well as doors that come and go let it."""

from __future__ import annotations

import asyncio
from random import Random

from laneway.core import subjects
from laneway.core.errors import AlreadyExists, JobNotFound, LanewayError, NotFound, OutcomeUnknown, Unavailable
from laneway.core.lanes import JobState
from laneway.runtime.auth import Caller
from laneway.runtime.bus import BusError
from laneway.runtime.wire import enums
from laneway.v1 import admission_pb2 as pb
from tests.sim.memory_nats import MemoryBus
from tests.sim.system.asks import TENANTS, Ask, StreamLog, Told, Way
from tests.sim.system.calls import Call, Dropped, Gone
from tests.sim.system.region import REGION, Gate, Region

TRIES_MAX = 12
AGAIN_S = 0.5
PATIENCE_S = 20.0  # beyond its deadline; then a caller gives up on its stream and asks anew
SLOW_S = 0.4


class Callers:
    """All of one run; `run` until each ask is done. `complaints`: what no caller may see."""

    def __init__(self, region: Region, asks: list[Ask]) -> None:
        self.asks = asks
        self.complaints: list[str] = []
        self._region = region
        self._producer: MemoryBus | None = None

    async def run(self) -> None:
        self._producer = await MemoryBus.to(self._region.server, self._region.clock, name="producer")
        async with asyncio.TaskGroup() as group:
            for ask in self.asks:
                group.create_task(self._ask(ask), name=f"ask {ask.label}")
            group.create_task(self._pry(Random(f"{self._region.seed} pry")))
        await self._producer.close()

    async def _ask(self, ask: Ask) -> None:
        random = Random(f"{self._region.seed} ask {ask.label}")
        await asyncio.sleep(ask.at_s)
        way = {Way.ATTACHED: self._attached, Way.SUBMIT: self._detached, Way.INGEST: self._ingest}[ask.way]
        async with asyncio.TaskGroup() as group:
            ways = [group.create_task(way(ask, random))]
            if ask.twins:
                ways.append(group.create_task(way(ask, Random(f"{self._region.seed} twin {ask.label}"))))
            if ask.cancels_after_s is not None:
                group.create_task(self._cancel_later(ask, random, ask.cancels_after_s))
        ask.done = True

    async def _gate(self, random: Random) -> Gate:
        """A door that its health check would call well, whether or not it can do anything."""
        while True:
            gates = [host.part for host in self._region.doors if host.serves and not host.part.draining]
            if gates:
                gate: Gate = random.choice(gates)
                return gate
            await asyncio.sleep(0.1)

    def _overdue(self, ask: Ask) -> bool:
        return bool(ask.deadline_s) and self._region.clock.now() > ask.deadline_s + PATIENCE_S

    # --- attached ------------------------------------------------------------------------------------

    async def _attached(self, ask: Ask, random: Random) -> None:
        for _ in range(TRIES_MAX):
            gate = await self._gate(random)
            request = pb.GenerateRequest(spec=ask.spec(self._region.clock.now()), idempotency_key=ask.key)
            call = Call(gate, Caller(ask.tenant), window=2 if ask.slow else 64)
            log = StreamLog(slow=ask.slow)
            ask.streams.append(log)
            job_id = await self._read(call.begin(gate.service.Generate, request), log, ask, random, ask.leaves_after)
            told = _told(log, job_id)
            ask.tries.append(told)
            if job_id and ask.returns and isinstance(log.error, Dropped):
                return await self._follow(ask, random, job_id, tuple(log.ids))
            if log.finished or ask.left or log.end is not None:
                return
            if told is Told.ACCEPTED and ask.keeps:
                return await self._follow(ask, random, job_id, tuple(log.ids))
            if not (ask.key and _again(log.error)) or self._overdue(ask):
                return
            await asyncio.sleep(AGAIN_S * random.uniform(0.5, 2.0))

    async def _read(self, call: Call, log: StreamLog, ask: Ask, random: Random, leaves_after: int | None = None) -> str:
        """Reads to the end; the job's id, if it was told. Leaves where the ask says so, or nobody answers any more."""
        job_id, count = "", 0
        try:
            while True:
                if leaves_after is not None and count >= leaves_after:
                    call.leave()
                    if ask.returns and job_id:
                        log.error = Dropped("the caller's own connection broke")
                    else:
                        ask.left, ask.left_s = True, self._region.loop.time()
                    return job_id
                async with asyncio.timeout(ask.deadline_s + PATIENCE_S - self._region.clock.now()):
                    message = await call.read()
                if message is None:
                    if not log.finished:
                        self.complaints.append(f"ask {ask.label}: a stream ended without a word")
                    return job_id
                if log.finished:
                    self.complaints.append(f"ask {ask.label}: something came after the end")
                count += 1
                if message.HasField("accepted"):
                    job_id = message.accepted.job_id
                    ask.knows(job_id)
                elif message.HasField("chunk"):
                    self._take(ask, log, message)
                else:
                    log.finished = True
                if ask.slow:
                    await asyncio.sleep(random.uniform(0.0, SLOW_S))
        except (LanewayError, Dropped) as error:
            log.error = error
            if isinstance(error, Gone):
                log.dropped_s = self._region.loop.time()
            retryable = isinstance(error, LanewayError) and error.row.retryable and not _of_the_job(error)
            if retryable and isinstance(error, LanewayError) and error.retry_after_s is None:
                self.complaints.append(f"ask {ask.label}: told to try again, and not when: {error!r}")
        except TimeoutError:
            log.error = Dropped("no answer")
            call.leave()
            calm_s = self._region.calm_since_s
            if calm_s is not None and self._region.loop.time() - calm_s > PATIENCE_S:
                self.complaints.append(f"ask {ask.label}: nobody told it an end, {PATIENCE_S} s after its deadline")
        return job_id

    def _take(self, ask: Ask, log: StreamLog, message: pb.GenerateResponse) -> None:
        chunk = message.chunk
        if chunk.first_index != log.next_index:
            self.complaints.append(
                f"ask {ask.label}: a chunk begins at {chunk.first_index} where {log.next_index} was due"
            )
        log.ids += chunk.token_ids
        log.text += chunk.text
        log.next_index = chunk.first_index + len(chunk.token_ids)

    async def _follow(self, ask: Ask, random: Random, job_id: str, got: tuple[int, ...] = ()) -> None:
        """Watches through whichever door there is, until it has been told the end."""
        while not self._overdue(ask):
            gate = await self._gate(random)
            log = StreamLog(len(got), len(got), got, slow=ask.slow)
            ask.streams.append(log)
            request = pb.WatchRequest(job_id=job_id, from_index=len(got), delivered_ids=got)
            call = Call(gate, Caller(ask.tenant), window=2 if ask.slow else 64).begin(gate.service.Watch, request)
            await self._read(call, log, ask, random)
            got += tuple(log.ids)
            if log.finished or log.end is not None or not _again(log.error) or _of_the_job(log.error):
                return
            await asyncio.sleep(AGAIN_S * random.uniform(0.5, 2.0))

    # --- detached ------------------------------------------------------------------------------------

    async def _detached(self, ask: Ask, random: Random) -> None:
        for _ in range(TRIES_MAX):
            gate = await self._gate(random)
            request = pb.SubmitRequest(spec=ask.spec(self._region.clock.now()), idempotency_key=ask.key)
            error: BaseException | None = None
            try:
                answer = (
                    await Call(gate, Caller(ask.tenant), timeout_s=12.0).begin(gate.service.Submit, request).answer()
                )
            except (LanewayError, Dropped) as failure:
                error = failure
                ask.tries.append(_told_by(failure))
            else:
                ask.tries.append(Told.ACCEPTED)
                ask.knows(answer.job_id)
                if random.random() < 0.5:
                    await asyncio.sleep(random.uniform(0.0, 3.0))
                return await self._follow(ask, random, answer.job_id)
            if not (ask.key and _again(error)) or self._overdue(ask):
                return
            await asyncio.sleep(AGAIN_S * random.uniform(0.5, 2.0))

    # --- by NATS -------------------------------------------------------------------------------------

    async def _ingest(self, ask: Ask, random: Random) -> None:
        request = pb.SubmitRequest(spec=ask.spec(self._region.clock.now()))
        subject = f"ingest.{REGION}.{ask.lane.value}.{ask.tenant}"
        assert self._producer is not None
        while not self._overdue(ask):
            try:
                await self._producer.store(subject, request.SerializeToString(), {subjects.H_KEY: ask.key})
                break
            except BusError:
                await asyncio.sleep(AGAIN_S)
        ask.tries.append(Told.UNKNOWN)
        job_id = ask.keyed_id()
        while not self._overdue(ask):
            await asyncio.sleep(1.0)
            gate = await self._gate(random)
            call = Call(gate, Caller(ask.tenant), timeout_s=5.0)
            try:
                await call.begin(gate.service.GetJob, pb.GetJobRequest(job_id=job_id)).answer()
            except (LanewayError, Dropped):
                continue
            ask.knows(job_id)
            return await self._follow(ask, random, job_id)

    # --- cancelling, and prying ----------------------------------------------------------------------

    async def _cancel_later(self, ask: Ask, random: Random, after_s: float) -> None:
        await asyncio.sleep(after_s)
        for _ in range(TRIES_MAX):
            if not ask.job_ids:
                if ask.tries and ask.tries[-1] is Told.REFUSED:
                    return
                await asyncio.sleep(0.5)
                continue
            gate = await self._gate(random)
            call = Call(gate, Caller(ask.tenant), timeout_s=10.0)
            try:
                answer = await call.begin(gate.service.CancelJob, pb.CancelJobRequest(job_id=ask.job_ids[0])).answer()
            except NotFound:
                return
            except (LanewayError, Dropped):
                await asyncio.sleep(AGAIN_S)
                continue
            ask.cancel_told = enums.JOB_STATE_FROM_WIRE[answer.state]
            if ask.cancel_told is JobState.CANCELLED and ask.left_s is None:
                ask.left_s = self._region.loop.time()
            return

    async def _pry(self, random: Random) -> None:
        """Another tenant's jobs do not exist."""
        for _ in range(12):
            await asyncio.sleep(random.uniform(0.5, 4.0))
            known = [ask for ask in self.asks if ask.job_ids]
            if not known:
                continue
            ask = random.choice(known)
            stranger = Caller(random.choice([tenant for tenant in TENANTS if tenant != ask.tenant]))
            gate = await self._gate(random)
            job_id = ask.job_ids[0]
            handler, request = random.choice(
                (
                    (gate.service.GetJob, pb.GetJobRequest(job_id=job_id)),
                    (gate.service.CancelJob, pb.CancelJobRequest(job_id=job_id)),
                    (gate.service.Watch, pb.WatchRequest(job_id=job_id)),
                )
            )
            try:
                await Call(gate, stranger, timeout_s=5.0).begin(handler, request).answer()
            except (LanewayError, Dropped) as error:
                if isinstance(error, LanewayError) and error.row.label not in ("not_found", "unavailable", "expired"):
                    self.complaints.append(f"ask {ask.label}: a stranger was told {error!r}")
                continue
            self.complaints.append(f"ask {ask.label}: a stranger could reach it")


def _told(log: StreamLog, job_id: str) -> Told:
    if job_id:
        return Told.ACCEPTED
    return Told.UNKNOWN if log.error is None else _told_by(log.error)


def _told_by(error: BaseException) -> Told:
    """Whether an error says for sure that nothing runs."""
    if isinstance(error, LanewayError) and not isinstance(error, OutcomeUnknown):
        if error.row.label in ("saturated", "storage_full", "tenant_limit", "invalid", "infeasible"):
            return Told.REFUSED
        if error.row.label == "unavailable" and error.reason not in ("DRAINING", "OUTCOME_UNKNOWN"):
            return Told.REFUSED
    return Told.UNKNOWN


def _of_the_job(error: BaseException | None) -> bool:
    """Whether what a watcher is told is how the job ended: then it names the job."""
    return isinstance(error, LanewayError) and bool(error.job_id) and not isinstance(error, Unavailable)


def _again(error: BaseException | None) -> bool:
    """Whether the same request, or the same watch, makes sense again."""
    if isinstance(error, AlreadyExists | JobNotFound):
        return False
    return isinstance(error, Dropped | Unavailable) or (isinstance(error, LanewayError) and error.row.retryable)
