"""Hosts whose clocks are an hour off, or are set by an hour while jobs wait and run: nobody starts or ends at another
time for it. NATS keeps the time of this machine."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from laneway.cli.doctor import check_clock
from laneway.core import subjects
from laneway.core.errors import Code
from laneway.core.job import JobRecord
from laneway.core.lanes import JobState, Lane, Phase
from laneway.runtime.bus import Bus
from laneway.runtime.clock import SystemClock
from laneway.runtime.headers import SCHEDULE
from laneway.runtime.lanes import LaneStore
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.nats_clock import NatsClock
from laneway.runtime.reading import last_message
from laneway.runtime.settings import Settings
from laneway.runtime.wire.times import timestamp_of
from laneway.v1 import admission_pb2 as pb
from tests.support.admission import error_of_call, gate, generate, spec
from tests.support.nats import REGION, connected, eventually, nats_settings
from tests.support.scheduling import running_scheduler, scheduler_settings
from tests.support.worker import yard

HOUR_S = 3600.0
EITHER_WAY = pytest.mark.parametrize("off_s", [-HOUR_S, HOUR_S])
LATE_S_MAX = 2.0  # after a deadline, whoever ends the job


class HostClock:
    """A host's clock that is `off_s` wrong, and may be set."""

    monotonic = staticmethod(SystemClock.monotonic)

    def __init__(self, off_s: float = 0.0) -> None:
        self.off_s = off_s

    def now(self) -> float:
        return SystemClock.now() + self.off_s


def ended_in_time(record: JobRecord) -> bool:
    return 0.0 <= record.timings.ended_s - record.contract.deadline_s <= LATE_S_MAX


@EITHER_WAY
async def test_the_clock_of_nats_is_learned_and_learned_again(nats_server: LocalNats, off_s: float) -> None:
    host = HostClock(off_s)
    async with connected(nats_server) as bus:
        clock = NatsClock(bus, host)
        assert abs(clock.now() - SystemClock.now()) > 3599.0
        async with clock.kept():
            assert abs(clock.now() - SystemClock.now()) < 0.2
            assert clock.skew_s == pytest.approx(-off_s, abs=0.2)
            host.off_s = 0.0
            assert abs(clock.now() - SystemClock.now()) < 0.2
            assert clock.skew_s == pytest.approx(0.0, abs=0.2)
            await eventually(lambda: not clock.due())  # it was measured again
            await nats_server.kill()
            await eventually(lambda: not bus.connected)
            await nats_server.start()
            await eventually(lambda: bus.connected and not clock.due())
            assert abs(clock.now() - SystemClock.now()) < 0.2


@pytest.mark.slow
async def test_without_an_answer_the_hosts_clock_counts(nats_server: LocalNats) -> None:
    host = HostClock(HOUR_S)
    async with connected(nats_server, request_timeout_s=0.2) as bus:
        nats_server.pause()
        try:
            clock = NatsClock(bus, host)
            async with clock.kept():
                assert clock.skew_s is None
                assert abs(clock.now() - host.now()) < 0.1
                nats_server.resume()
                await eventually(lambda: clock.skew_s is not None)
                assert abs(clock.now() - SystemClock.now()) < 0.5
        finally:
            nats_server.resume()


@pytest.mark.slow
@EITHER_WAY
async def test_a_worker_whose_clock_is_off_neither_expires_nor_starts_nor_ends_at_another_time(
    nats_server: LocalNats, off_s: float
) -> None:
    async with yard(nats_server) as place:
        await place.start_worker(clock=HostClock(off_s))
        now_s = SystemClock.now()
        usual = await place.submit(contract={"deadline_s": now_s + 60.0})
        later = await place.submit(lane=Lane.BATCH, contract={"not_before_s": now_s + 0.7})
        over = await place.submit(max_tokens=4000, contract={"deadline_s": now_s + 0.6})
        ids = [job.record.job_id for job in (usual, later, over)]
        first, second, third = await place.ended(*ids)
        assert (first.state, second.state) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
        assert second.timings.claimed_s >= second.contract.not_before_s
        assert third.state is JobState.EXPIRED
        assert third.error is not None
        assert third.error.phase is Phase.DECODE
        assert ended_in_time(third)
        for record in (first, second):  # its times are those of NATS
            assert now_s - 0.2 < record.timings.claimed_s < record.timings.ended_s < SystemClock.now() + 0.2


@pytest.mark.slow
@EITHER_WAY
async def test_a_door_whose_clock_is_off_keeps_deadlines_and_fire_times(
    nats_server: LocalNats, tmp_path: Path, off_s: float
) -> None:
    async with gate(nats_server, tmp_path, clock=HostClock(off_s)) as door:
        await door.plan(workers=1)
        await door.quotes("LANE_OPEN")
        call = door.stub.Generate(generate(due_s=0.8))
        asked_s = SystemClock.now()
        error = await error_of_call(call)
        assert error.row.code is Code.DEADLINE_EXCEEDED
        assert error.phase is Phase.QUEUE
        assert 0.7 <= SystemClock.now() - asked_s <= 0.8 + LATE_S_MAX
        wanted_s = SystemClock.now() + 600.0
        held = spec(lane=Lane.BATCH, due_s=1200.0, not_before=timestamp_of(wanted_s))
        job_id = (await door.stub.Submit(pb.SubmitRequest(spec=held))).job_id
        assert wanted_s - 0.01 <= await fire_time(door.bus, door.lanes) <= wanted_s + 600.0
        created_s = (await door.record(job_id)).timings.created_s
        assert abs(created_s - (wanted_s - 600.0)) < 2.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("off_s", "level", "said"),
    [
        (0.0, "ok", "this host's clock is that of NATS"),
        (HOUR_S, "broken", "3600.0 s ahead of that of NATS"),
        (-HOUR_S, "broken", "3600.0 s behind that of NATS"),
        (30 * 24 * HOUR_S, "broken", "more than a day off that of NATS"),
    ],
)
async def test_doctor_says_how_far_the_host_is_off(
    nats_server: LocalNats, monkeypatch: pytest.MonkeyPatch, off_s: float, level: str, said: str
) -> None:
    monkeypatch.setattr("laneway.runtime.clock.SystemClock", lambda: HostClock(off_s))
    settings = Settings(nats=nats_settings(nats_server))
    (finding,) = await asyncio.to_thread(lambda: list(check_clock(settings)))
    assert finding.level == level
    assert said in finding.what
    assert bool(finding.mend) == (level == "broken")


async def fire_time(bus: Bus, lanes: LaneStore) -> float:
    (park,) = await lanes.parked(Lane.BATCH)
    message = await last_message(bus, subjects.lane_stream(REGION, Lane.BATCH), str(park))
    assert message is not None
    return datetime.fromisoformat(message.headers[SCHEDULE].removeprefix("@at ")).timestamp()


@pytest.mark.slow
@EITHER_WAY
async def test_a_clock_that_is_set_while_jobs_wait_and_run_ends_nobody_at_another_time(
    nats_server: LocalNats, off_s: float
) -> None:
    """Worker and scheduler are of one host. One job runs, one waits for its slot, one is held and one is not yet due;
    then the host's clock is set by an hour."""
    host = HostClock()
    settings = scheduler_settings(nats_server)
    async with yard(nats_server, model__slots=1, engine__pace_s=0.01) as place:
        async with running_scheduler(nats_server, settings, clock=host):
            await place.start_worker(clock=host)
            now_s = SystemClock.now()
            running = await place.submit(max_tokens=4000, contract={"deadline_s": now_s + 3.0})
            await eventually(lambda: is_running(place, running.record.job_id))
            waiting = await place.submit(contract={"deadline_s": now_s + 2.0})
            held = await place.submit(lane=Lane.BATCH, contract={"not_before_s": now_s + 4.0})
            host.off_s = off_s
            ids = [job.record.job_id for job in (running, waiting, held)]
            first, second, third = await place.ended(*ids)
        assert [first.state, second.state, third.state] == [JobState.EXPIRED, JobState.EXPIRED, JobState.SUCCEEDED]
        assert ended_in_time(first)
        assert ended_in_time(second)
        assert third.contract.not_before_s <= third.timings.claimed_s <= third.contract.not_before_s + LATE_S_MAX


async def is_running(place: Any, job_id: str) -> bool:
    return (await place.record(job_id)).state is JobState.RUNNING
