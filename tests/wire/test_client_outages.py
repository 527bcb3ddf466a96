"""Streams of jobs that exist, while the door goes away and comes back: the client reads on where it stopped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from laneway.client import Aborted, Client, JobState, RetryParams, Surroundings, Unavailable
from laneway.client.stream import STOOD_S
from laneway.core.clock import ManualClock
from laneway.v1 import admission_pb2, common_pb2
from tests.support.door import Door, Script, accepted, chunk, finished, forever, serving
from tests.support.nats import eventually

pytestmark = pytest.mark.wire

SUCCEEDED = admission_pb2.Job(job_id="local-job", state=common_pb2.JOB_STATE_SUCCEEDED)


class Street:
    """The way to a door: open, or gone as if the door's host had died. Keeps its address."""

    def __init__(self, door: Door) -> None:
        self.address = ""
        self._door = door
        self._server: asyncio.Server | None = None
        self._ways: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        host, _, port = (self.address or "127.0.0.1:0").rpartition(":")
        self._server = await asyncio.start_server(self._forward, host, int(port))
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for way in self._ways:
            way.transport.abort()
        await asyncio.sleep(0)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._door.address.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        self._ways |= {writer, back}
        try:
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        finally:
            self._ways -= {writer, back}
            writer.close()
            back.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65_536):
            target.write(data)
            await target.drain()
    target.transport.abort()


@contextlib.asynccontextmanager
async def street_to(door: Door) -> AsyncIterator[Street]:
    street = Street(door)
    await street.open()
    try:
        yield street
    finally:
        await street.close()


class Time:
    """Virtual time. `later` is called once when the sleeps add up to `after_s`; from then on they also take a moment,
    for the gRPC library reconnects in its own time."""

    def __init__(self, after_s: float = float("inf"), later: Callable[[], Awaitable[None]] | None = None) -> None:
        self.clock = ManualClock()
        self.slept: list[float] = []
        self._after_s = after_s
        self._later = later

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds)
        if sum(self.slept) >= self._after_s:
            if self._later is not None:
                later, self._later = self._later, None
                await later()
            await asyncio.sleep(0.15)

    @property
    def surroundings(self) -> Surroundings:
        return Surroundings(self.clock, self.sleep, lambda: 0.5)


def silent_after(*words: str) -> Script:
    async def script(request, context):
        yield chunk(request.from_index, *words)
        await forever()

    return script


def breaking_after(*words: str) -> Script:
    async def script(request, context):
        yield chunk(request.from_index, *words)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    return script


def ending_after(*words: str) -> Script:
    async def script(request, context):
        if words:
            yield chunk(request.from_index, *words)
        yield finished()

    return script


def refusing(error: Exception) -> Script:
    async def script(request, context):
        raise error
        yield

    return script


async def test_a_watch_outlasts_a_door_that_dies_and_comes_back():
    async with serving(Door(watches=[silent_after("a", "b"), ending_after("c")])) as door, street_to(door) as street:
        time = Time(30.0, street.open)
        async with (
            Client(street.address, surroundings=time.surroundings) as client,
            client.watch("local-job") as stream,
        ):
            assert (await anext(stream)).text == "ab"
            await street.close()
            assert await stream.text() == "c"
            assert not stream.outlasted
        assert [watch.from_index for watch in door.watched] == [0, 2]
    assert time.slept[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.5]), "half of ceilings that double up to 5 s"
    assert sum(time.slept) >= 30.0


async def test_wait_outlasts_a_door_that_dies_and_comes_back():
    door = Door(watches=[silent_after("a"), ending_after()], jobs=[SUCCEEDED])
    async with serving(door), street_to(door) as street:
        time = Time(30.0, street.open)
        async with Client(street.address, surroundings=time.surroundings) as client:
            waiting = asyncio.ensure_future(client.wait("local-job"))
            await eventually(lambda: bool(door.watched))
            await street.close()
            assert (await waiting).state is JobState.SUCCEEDED


async def test_wait_outlasts_a_door_that_dies_between_the_end_and_the_look_up():
    async def ends(request, context):
        yield finished()
        await context.abort(grpc.StatusCode.ABORTED, "the end of the job")

    door = Door(watches=[ends], jobs=[SUCCEEDED])
    looked_up = door.GetJob
    async with serving(door):

        async def once_away(request, context):
            door.GetJob = looked_up  # type: ignore[method-assign]  # only the first look-up finds nobody
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

        door.GetJob = once_away  # type: ignore[method-assign]
        async with Client(door.address, surroundings=Time().surroundings, retry_budget=RetryParams.never()) as client:
            assert (await client.wait("local-job")).state is JobState.SUCCEEDED


async def test_an_outage_ends_a_stream_once_it_is_longer_than_is_waited_for():
    time = Time()

    async def watched(client: Client) -> None:
        async with client.watch("local-job") as stream:
            await stream.text()

    async def waited(client: Client) -> None:
        await client.wait("local-job")

    async with Client("127.0.0.1:1", surroundings=time.surroundings) as client:
        for call in (watched, waited):
            began_s = time.clock.monotonic()
            with pytest.raises(Unavailable, match="no service answers"):
                await call(client)
            assert 54.0 <= time.clock.monotonic() - began_s < 60.0


async def test_no_retries_means_none_here_too():
    time = Time()
    async with Client("127.0.0.1:1", surroundings=time.surroundings, retry_budget=RetryParams.never()) as client:
        with pytest.raises(Unavailable):
            async with client.watch("local-job") as stream:
                await stream.text()
        with pytest.raises(Unavailable):
            await client.wait("local-job")
    assert time.slept == []


async def test_attempts_count_from_the_last_that_was_heard():
    broken = 30
    time = Time()
    async with (
        serving(Door(watches=[*[breaking_after("a")] * broken, ending_after("z")])) as door,
        Client(door.address, surroundings=time.surroundings) as client,
        client.watch("local-job") as stream,
    ):
        assert await stream.text() == "a" * broken + "z"
    assert time.slept == pytest.approx([0.1] * broken), "each failure was the first of its outage"


async def test_a_connection_that_stood_ends_the_outage_though_the_job_was_silent():
    time = Time()
    calls = 0

    async def stands(request, context):
        nonlocal calls
        calls += 1
        if calls > 40:
            yield finished()
            return
        time.clock.advance(STOOD_S + 0.1)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async with (
        serving(Door(watches=[stands])) as door,
        Client(door.address, surroundings=time.surroundings) as client,
        client.watch("local-job") as stream,
    ):
        assert await stream.text() == ""
    assert time.clock.monotonic() - stream.started_s >= 40 * STOOD_S
    assert time.slept == pytest.approx([0.1] * 40)


async def test_a_door_that_drains_is_left_for_as_long_as_it_says_and_a_little():
    time = Time()
    draining = Unavailable("this server is shutting down", reason="DRAINING", retry_after_s=1.0)
    async with (
        serving(Door(watches=[refusing(draining), ending_after("a")])) as door,
        Client(door.address, surroundings=time.surroundings) as client,
        client.watch("local-job") as stream,
    ):
        assert await stream.text() == "a"
    assert time.slept == pytest.approx([1.1]), "its callers do not all come back in the same moment"


@pytest.mark.parametrize(
    "end", [Unavailable("never stored", reason="NOT_ACCEPTED", job_id="local-job"), Aborted("lost")]
)
async def test_the_jobs_own_end_is_no_outage(end: Exception):
    time = Time()
    async with (
        serving(Door(watches=[refusing(end)])) as door,
        Client(door.address, surroundings=time.surroundings) as client,
        client.watch("local-job") as stream,
    ):
        with pytest.raises(type(end)):
            await stream.text()
    assert time.slept == []


async def test_a_kept_job_that_was_accepted_is_followed_from_its_first_token():
    async def breaks(request, context):
        yield accepted()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    time = Time()
    async with (
        serving(Door([breaks], watches=[breaking_after("a")] * 5 + [ending_after("b")])) as door,
        Client(door.address, surroundings=time.surroundings) as client,
        client.generate(model="chat", prompt="Hi", on_disconnect="keep", retry_s_max=0.0) as stream,
    ):
        assert await stream.text() == "aaaaab"
    assert len(door.calls) == 1
