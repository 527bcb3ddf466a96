"""What the time of jobs is while clocks differ, step and answer slowly; the server is a stub, time is the test's."""

from __future__ import annotations

from typing import cast

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from laneway.core.clock import ManualClock
from laneway.runtime.bus import Bus
from laneway.runtime.bus_errors import NoAnswer
from laneway.runtime.nats_clock import MEASURE_EVERY_S, ROUND_TRIP_S_MAX, SKEW_S_MAX, STEP_S, NatsClock


class Server:
    """Answers with its own time, half a round trip after it was asked."""

    def __init__(self, host: ManualClock, ahead_s: float = 0.0) -> None:
        self._host = host
        self.time_s = host.wall_s + ahead_s - host.elapsed_s  # at the host's origin
        self.round_trips_s = [0.0]  # the last one stays
        self.silent = False
        self.asked = 0

    def now(self) -> float:
        return self.time_s + self._host.elapsed_s

    async def server_time_s(self, timeout_s: float) -> float:
        self.asked += 1
        if self.silent:
            raise NoAnswer
        took_s = self.round_trips_s[0] if len(self.round_trips_s) == 1 else self.round_trips_s.pop(0)
        self._host.advance(took_s / 2)
        answer_s = self.now()
        self._host.advance(took_s / 2)
        return answer_s


def clock_of(server: Server, host: ManualClock) -> NatsClock:
    return NatsClock(cast("Bus", server), host)


@pytest.mark.parametrize("ahead_s", [-3600.0, -0.3, 0.0, 2.0, 3600.0])
async def test_it_is_the_servers_time_however_the_host_is_set(ahead_s: float) -> None:
    host = ManualClock()
    server = Server(host, ahead_s)
    clock = clock_of(server, host)
    assert clock.now() == host.now()  # nothing better is known
    assert clock.skew_s is None
    await clock.measure()
    assert clock.skew_s == pytest.approx(ahead_s)
    for passed_s in (0.0, 1.0, 3600.0):
        host.advance(passed_s)
        assert clock.now() == pytest.approx(server.now())
        assert clock.monotonic() == host.monotonic()


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
async def test_a_step_of_the_hosts_clock_does_not_move_it(step_s: float) -> None:
    host = ManualClock()
    server = Server(host)
    clock = clock_of(server, host)
    await clock.measure()
    host.wall_s += step_s
    assert clock.now() == pytest.approx(server.now())
    assert clock.skew_s == pytest.approx(-step_s)  # and it is told
    host.advance(10.0)
    await clock.measure()
    assert clock.now() == pytest.approx(server.now())


async def test_a_host_that_slept_is_right_again_with_the_next_answer() -> None:
    """Its monotonic clock stood still meanwhile."""
    host = ManualClock()
    server = Server(host)
    clock = clock_of(server, host)
    await clock.measure()
    assert not clock.due()
    host.wall_s += 500.0
    server.time_s += 500.0
    assert clock.due()
    await clock.measure()
    assert not clock.due()
    assert clock.now() == pytest.approx(server.now())
    assert clock.skew_s == pytest.approx(0.0)


async def test_it_is_measured_at_intervals_and_when_wall_and_monotonic_time_part() -> None:
    host = ManualClock()
    clock = clock_of(Server(host), host)
    assert clock.due()
    await clock.measure()
    host.advance(MEASURE_EVERY_S - 0.01)
    assert not clock.due()
    host.advance(0.01)
    assert clock.due()
    await clock.measure()
    host.wall_s += STEP_S
    assert not clock.due()
    host.wall_s += 0.01
    assert clock.due()


@pytest.mark.parametrize(("took_s", "believed"), [(ROUND_TRIP_S_MAX, True), (ROUND_TRIP_S_MAX + 0.01, False)])
async def test_an_answer_that_took_too_long_is_not_believed(took_s: float, believed: bool) -> None:
    host = ManualClock()
    server = Server(host, 60.0)
    server.round_trips_s = [took_s]
    clock = clock_of(server, host)
    assert await clock.measure() == believed
    assert (clock.skew_s is not None) == believed
    assert clock.now() == pytest.approx(server.now() if believed else host.now())


@pytest.mark.parametrize("sign", [-1, 1])
async def test_a_difference_that_cannot_be_is_not_believed(sign: int) -> None:
    host = ManualClock()
    for ahead_s, believed in ((SKEW_S_MAX, True), (SKEW_S_MAX + 1.0, False)):
        clock = clock_of(Server(host, sign * ahead_s), host)
        with capture_logs() as logs:
            assert await clock.measure() == believed
            await clock.measure()
        assert clock.now() == pytest.approx(host.now() + (sign * ahead_s if believed else 0.0))
        assert [line["event"] for line in logs] == ["clock_differs" if believed else "clock_not_believed"]


async def test_what_was_known_stays_while_answers_cannot_be_believed() -> None:
    host = ManualClock()
    server = Server(host, 100.0)
    clock = clock_of(server, host)
    await clock.measure()
    server.time_s += 40 * 86_400.0
    assert not await clock.measure()
    assert clock.skew_s == pytest.approx(100.0)


async def test_the_quickest_answer_counts_and_small_differences_are_smoothed() -> None:
    host = ManualClock()
    server = Server(host)
    server.round_trips_s = [0.4, 0.02, 0.2, 0.0]
    clock = clock_of(server, host)
    await clock.measure()
    assert server.asked == 3  # none was good
    before_s = clock.now() - server.now()
    server.time_s += 0.2
    await clock.measure()
    assert server.asked == 4  # the first was
    assert clock.now() - server.now() == pytest.approx(before_s - 0.1, abs=1e-3)
    server.time_s += STEP_S + 0.2
    await clock.measure()  # no noise any more
    assert clock.now() == pytest.approx(server.now())


async def test_a_change_above_a_second_is_told_once() -> None:
    host = ManualClock()
    server = Server(host)
    clock = clock_of(server, host)
    with capture_logs() as logs:
        for by_s in (0.9, 0.2, 0.0, 3599.0, 0.0, -3600.1, 0.0):
            server.time_s += by_s
            await clock.measure()
    told = [(line["event"], line["log_level"], round(line["skew_s"], 1)) for line in logs]
    assert told == [("clock_differs", "warning", skew_s) for skew_s in (1.1, 3600.1, 0.0)]


async def test_a_server_that_does_not_answer_leaves_the_clock_as_it_is() -> None:
    host = ManualClock()
    server = Server(host, 7.0)
    clock = clock_of(server, host)
    await clock.measure()
    server.silent = True
    host.advance(100.0)
    with pytest.raises(NoAnswer):
        await clock.measure()
    assert clock.now() == pytest.approx(server.now())


@pytest.mark.parametrize(
    "answer", ["", "no JSON", "[]", '{"error":{"code":503}}', '{"server":{"time":7}}', '{"server":{"time":"noon"}}']
)
async def test_a_server_that_answers_something_else_is_one_that_does_not_answer(answer: str) -> None:
    class Odd(Bus):
        def __init__(self) -> None:
            pass

        async def request(self, *_: object, **__: object) -> Msg:
            return Msg(cast("Client", None), data=answer.encode())

    with pytest.raises(NoAnswer):
        await NatsClock(Odd(), ManualClock()).measure()
