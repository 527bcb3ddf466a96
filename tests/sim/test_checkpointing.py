"""When checkpoints are written and what they cost, on the NATS in memory and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from laneway.core import subjects
from laneway.core.catalogue import Capabilities
from laneway.core.job import GenerateTask, JobRecord, Sampling, TokenLogprob, claim
from laneway.core.lanes import Lane, OnDisconnect
from laneway.runtime.checkpoints import IDS_MAX, CheckpointStore
from laneway.runtime.provision import provision
from laneway.runtime.settings import NatsSettings
from laneway.v1 import bus_pb2
from laneway.workers.checkpointing import (
    AGE_S,
    KEEP_S_MAX,
    MESSAGES_PER_S_MAX,
    PURGES_WAITING_MAX,
    TOKENS,
    TOKENS_MIN,
    Checkpointing,
    Tail,
    kept_while_running,
    worth_keeping,
)
from laneway.workers.engines.protocol import SequenceStep
from laneway.workers.transcript import Transcript
from tests.sim.memory_nats import LoopClock, MemoryBus, MemoryNats
from tests.sim.memory_nats.client import MAX_PAYLOAD_BYTES
from tests.support.nats import REGION, make_record, small_catalogue

pytestmark = pytest.mark.looptime

STREAM = subjects.checkpoint_stream(REGION)
GREEDY = Sampling(max_tokens=100_000, temperature=0.0)


@dataclass
class Running:
    """One run, as far as its checkpoints are concerned."""

    tail: Tail
    desk: Desk
    ours: bool = True

    @property
    def size(self) -> int:
        return len(self.tail.transcript)

    def generate(self, count: int, *, token_id: int = 97) -> None:
        """So many steps of one token, as JobRun takes them."""
        for _ in range(count):
            step = SequenceStep(1, [token_id], [-0.5], [[(token_id, -0.5)]])
            self.tail.transcript.take(step)
            if self.size >= self.tail.due_at:
                self.desk.checkpointing.due(self.tail)
            self.desk.checkpointing.write_due()

    async def read(self) -> int:
        """How many tokens somebody who takes over would go on from."""
        record = claim(replace(self.tail.record, owner=""), "taker", 2.0, owner_is_dead=True)
        return len(await CheckpointStore(self.desk.bus).read(record))


@dataclass
class Desk:
    """The checkpoints of a worker."""

    server: MemoryNats
    bus: MemoryBus
    checkpointing: Checkpointing
    runs: list[Running] = field(default_factory=list)

    def begin(self, sampling: Sampling = GREEDY, *, follow: bool = True) -> Running:
        record = claim(make_record(), "w1", 1.0)
        transcript = Transcript(lambda token_id: b"a", GenerateTask((1,), sampling))
        running = Running(Tail(record, transcript, lambda: running.ours), self)
        if follow:
            self.checkpointing.follow(running.tail)
        self.runs.append(running)
        return running

    async def settled(self) -> list[bus_pb2.Checkpoint]:
        """What is stored, once all has arrived."""
        await asyncio.sleep(0.01)
        return [bus_pb2.Checkpoint.FromString(m.data) for m in self.server.streams[STREAM].messages.values()]

    def look(self) -> None:
        self.checkpointing.look(asyncio.get_running_loop().time())


@asynccontextmanager
async def desk() -> AsyncIterator[Desk]:
    clock = LoopClock()
    server = MemoryNats(clock)
    driver = server.drive()
    bus = await MemoryBus.to(server, clock)
    await provision(bus, REGION, small_catalogue(), NatsSettings(), ack_wait_s=dict.fromkeys(Lane, 10.0))
    checkpointing = Checkpointing(CheckpointStore(bus), clock, "chat-small")
    task = asyncio.create_task(checkpointing.run())
    try:
        yield Desk(server, bus, checkpointing)
    finally:
        task.cancel()
        await asyncio.wait({task})
        await bus.close()
        driver.close()


# --- how often ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "deltas"), [(TOKENS - 1, []), (TOKENS, [32]), (2 * TOKENS, [32, 32])])
async def test_a_delta_leaves_every_so_many_tokens(tokens: int, deltas: list[int]):
    async with desk() as place:
        place.begin().generate(tokens)
        assert [len(each.token_ids) for each in await place.settled()] == deltas


@pytest.mark.parametrize(
    ("tokens", "age_s", "deltas"),
    [(TOKENS_MIN, AGE_S, 1), (TOKENS_MIN, AGE_S - 0.01, 0), (TOKENS_MIN - 1, 10 * AGE_S, 0)],
)
async def test_a_slow_run_is_written_after_a_while_if_it_is_worth_a_message(tokens: int, age_s: float, deltas: int):
    async with desk() as place:
        run = place.begin()
        run.generate(tokens)
        await asyncio.sleep(age_s)
        place.look()
        place.look()
        assert len(await place.settled()) == deltas


@pytest.mark.parametrize("runs", [MESSAGES_PER_S_MAX, MESSAGES_PER_S_MAX + 1])
async def test_a_worker_sends_no_more_messages_a_second_than_it_may(runs: int):
    async with desk() as place:
        for _ in range(runs):
            place.begin().generate(TOKENS)
        assert len(await place.settled()) == MESSAGES_PER_S_MAX
        for _ in range(100):
            await asyncio.sleep(0.1)
            for run in place.runs:
                run.generate(7)
        sent = len(await place.settled())
        assert 10 * MESSAGES_PER_S_MAX * 0.99 <= sent - MESSAGES_PER_S_MAX <= 10.5 * MESSAGES_PER_S_MAX
        behind = [run.size - run.tail.stored for run in place.runs]
        assert max(behind) <= TOKENS + 2 * 70 * runs / MESSAGES_PER_S_MAX, "they take turns"


@pytest.mark.parametrize("token_id", [97, 300, 70_000])
@pytest.mark.parametrize("pause_s", [0.0, 0.1, 0.21, 1.0])
async def test_checkpoints_weigh_no_more_than_twice_the_ids(token_id: int, pause_s: float):
    """As bytes on the stream, against the ids as varints."""
    async with desk() as place:
        run = place.begin()
        for _ in range(400):
            run.generate(1, token_id=token_id)
            await asyncio.sleep(pause_s)
            place.look()
        stored = await place.settled()
        ids = [token_id for each in stored for token_id in each.token_ids]
        assert 400 - TOKENS < len(ids) <= 400
        varints = sum(max(1, -(-token_id.bit_length() // 7)) for token_id in ids)
        assert sum(each.ByteSize() for each in stored) <= 2 * varints


async def test_nothing_is_written_while_the_job_may_be_anothers():
    async with desk() as place:
        run = place.begin()
        run.ours = False
        run.generate(3 * TOKENS)
        assert await place.settled() == []
        run.ours = True
        run.generate(TOKENS)
        assert await run.read() == run.size


@pytest.mark.parametrize(
    ("changes", "sampling", "written"),
    [
        ({}, GREEDY, True),
        ({"attached": True}, GREEDY, False),  # its door holds what was delivered
        ({"attached": True, "on_disconnect": OnDisconnect.KEEP}, GREEDY, True),
        ({}, replace(GREEDY, temperature=1.0), True),
        ({}, replace(GREEDY, temperature=1.0, seed=1), False),  # ids do not say where the seed is
        ({}, replace(GREEDY, repetition_penalty=1.1), False),
    ],
)
def test_only_tokens_that_nobody_else_holds_are_written_while_a_job_runs(changes, sampling: Sampling, written: bool):
    can = Capabilities()
    record: JobRecord = make_record(attached=changes.get("attached", False))
    on_disconnect = changes.get("on_disconnect", OnDisconnect.CANCEL)
    record = replace(record, contract=replace(record.contract, on_disconnect=on_disconnect))
    task = GenerateTask((1,), sampling)
    assert kept_while_running(record, task, can) is written
    assert worth_keeping(task, can) or not written


def test_tokens_of_a_seeded_run_are_kept_where_the_engine_goes_on_from_them():
    task = GenerateTask((1,), replace(GREEDY, temperature=1.0, seed=1))
    assert kept_while_running(make_record(attached=False), task, Capabilities(resumable_sampling=True))


# --- trouble -----------------------------------------------------------------------------------------


async def test_deltas_that_were_lost_on_the_way_are_sent_again_with_what_followed():
    async with desk() as place:
        run = place.begin()
        run.generate(TOKENS)
        await place.settled()
        place.bus.nc.to_server.copies = lambda *frame: 0
        run.generate(2 * TOKENS)
        await asyncio.sleep(0.01)
        place.bus.nc.to_server.copies = lambda *frame: 1
        run.generate(TOKENS)
        assert await run.read() == TOKENS, "there is a gap"
        await asyncio.sleep(10.0)  # until nobody waits for an answer any more
        run.generate(TOKENS)
        await place.settled()
        assert await run.read() == run.size == 5 * TOKENS


async def test_a_worker_without_a_connection_writes_when_it_has_one_again():
    async with desk() as place:
        run = place.begin()
        place.bus.nc.cut()
        run.generate(3 * TOKENS)
        await asyncio.sleep(5.0)
        place.bus.nc.mend()
        await asyncio.sleep(0.1)
        place.look()
        await place.settled()
        assert await run.read() == run.size


# --- when jobs leave ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, TOKENS + 1, IDS_MAX, IDS_MAX + 1])
async def test_the_rest_is_stored_before_a_job_is_handed_back(tokens: int):
    async with desk() as place:
        run = place.begin()
        run.generate(tokens)
        place.checkpointing.leave(run.tail)
        assert await place.checkpointing.keep(run.tail) == tokens
        assert await run.read() == tokens


@pytest.mark.parametrize(("tokens", "messages"), [(IDS_MAX, 1), (IDS_MAX + 1, 2)])
async def test_a_delta_holds_no_more_than_so_many_ids(tokens: int, messages: int):
    async with desk() as place:
        run = place.begin(follow=False)
        run.generate(tokens)
        await place.checkpointing.keep(run.tail)
        assert len(await place.settled()) == messages


async def test_a_delta_is_cut_to_what_nats_takes():
    async with desk() as place:
        run = place.begin(Sampling(max_tokens=1000, temperature=0.0, logprobs=True, top_logprobs=1), follow=False)
        run.generate(300)
        place.bus.nc._max_payload -= place.bus.payload_bytes_max - 1024
        assert await place.checkpointing.keep(run.tail) == 300
        stored = await place.settled()
        assert len(stored) > 5
        assert max(each.ByteSize() for each in stored) <= 1024
        place.bus.nc._max_payload = MAX_PAYLOAD_BYTES
        record = claim(replace(run.tail.record, owner=""), "taker", 2.0, owner_is_dead=True)
        found = await CheckpointStore(place.bus).read(record)
        assert found.logprobs == (TokenLogprob(-0.5, ((97, -0.5),)),) * 300


async def test_a_hand_back_does_not_wait_long_for_a_silent_server():
    async with desk() as place:
        run = place.begin()
        run.generate(TOKENS)
        await place.settled()
        run.generate(5)
        place.server.pause()
        began_s = asyncio.get_running_loop().time()
        assert await place.checkpointing.keep(run.tail) == TOKENS, "what is known to be stored"
        assert asyncio.get_running_loop().time() - began_s <= KEEP_S_MAX + 0.01
        place.server.resume()


async def test_checkpoints_of_jobs_that_ended_are_removed_and_others_are_not():
    async with desk() as place:
        ended, other = place.begin(), place.begin()
        for run in (ended, other):
            run.generate(2 * TOKENS)
        await place.settled()
        place.checkpointing.leave(ended.tail)
        place.checkpointing.forget(ended.tail.record)
        await place.settled()
        assert (await ended.read(), await other.read()) == (0, other.size)


@pytest.mark.parametrize("jobs", [PURGES_WAITING_MAX, PURGES_WAITING_MAX + 1])
async def test_no_more_than_so_many_jobs_wait_for_their_removal(jobs: int):
    async with desk() as place:
        for number in range(jobs):
            place.checkpointing.forget(make_record(f"local-{number}"))
        assert len(place.checkpointing._purges) == PURGES_WAITING_MAX
        assert f"local-{jobs - 1}" in place.checkpointing._purges
