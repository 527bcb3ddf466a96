"""When a client dials again, how it writes, and how it reads headers."""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client, Server

from laneway.runtime.connecting import PATIENT_GAP_S, RECONNECT_S_MAX, WRITES_AT_ONCE, SafeClient, redial
from tests.support.nats import eventually


@dataclass
class Tried:
    reconnects: int


def pick(*reconnects: int) -> tuple[Any, float]:
    servers = cast("list[Server]", [Tried(count) for count in reconnects])
    return redial(0.1)(servers, {})


def test_the_least_tried_server_is_next():
    assert pick(3, 1, 2)[0].reconnects == 1


def test_the_wait_grows_and_is_bounded():
    for tries, ceiling_s in ((0, 0.1), (3, 0.8), (50, RECONNECT_S_MAX)):
        waits = [pick(tries)[1] for _ in range(200)]
        assert all(0.0 <= wait_s <= ceiling_s for wait_s in waits)
        assert max(waits) > ceiling_s / 2


def test_clients_do_not_return_in_step():
    assert len({pick(2)[1] for _ in range(20)}) > 15


async def test_a_close_survives_the_cancellation_of_the_dead_socket(monkeypatch: pytest.MonkeyPatch):
    """Whoever waits for that socket's end again gets the same cancellation again."""
    closes = []

    class Socket:
        closed = False

        def close(self) -> None:
            self.closed = True

    async def close(self: Client, status: int, do_cbs: bool = True) -> None:
        closes.append(status)
        if self._transport is not None:
            raise asyncio.CancelledError

    monkeypatch.setattr(Client, "_close", close)
    client, socket = SafeClient(), Socket()
    client._transport = cast("Any", socket)
    await client._close(Client.CLOSED)
    assert closes == [Client.CLOSED, Client.CLOSED]
    assert socket.closed


async def test_a_close_that_is_cancelled_ends(monkeypatch: pytest.MonkeyPatch):
    async def close(self: Client, status: int, do_cbs: bool = True) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(Client, "_close", close)
    task = asyncio.create_task(SafeClient()._close(Client.CLOSED))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Written(SafeClient):
    """Keeps what would go to the socket, by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self._max_payload = 1 << 20
        self._max_pending_size = 2 << 20
        self._status = Client.CONNECTED

    def _write_pending(self) -> None:
        self.writes.append(b"".join(self._pending))
        self._pending, self._pending_data_size = [], 0

    def numbers(self) -> list[int]:
        """The payloads of all messages in the order in which they leave."""
        return [int(line) for line in b"".join(self.writes).split(b"\r\n")[1::2]]


async def test_the_first_of_a_turn_leaves_at_once_and_the_others_together():
    client = Written()
    for number in range(50):
        client.post("s", b"%d" % number)
        assert client.writes
    await asyncio.sleep(0)
    assert len(client.writes) == 2
    assert client.numbers() == list(range(50))


async def test_many_turns_share_their_writes_in_order():
    client = Written()
    for number in range(2000):
        client.post("s", b"%d" % number)
        await asyncio.sleep(0)
    await eventually(lambda: not client._pending)
    assert client.numbers() == list(range(2000))
    assert len(client.writes) < 1000


async def test_much_at_once_does_not_wait_for_the_turn():
    client = Written()
    for _ in range(100):
        client.post("s", bytes(50_000))
        assert client._pending_data_size <= 200_000
    await asyncio.sleep(0)
    assert sum(map(len, client.writes)) > 5_000_000


async def test_what_is_patient_is_written_together_and_not_for_ever():
    client = Written()
    for number in range(2000):
        client.post("s", b"%d" % number, patient=True)
        await asyncio.sleep(0)
    await eventually(lambda: not client._pending)
    assert client.numbers() == list(range(2000))
    assert len(client.writes) < 500


async def test_what_is_in_a_hurry_takes_the_patient_along_at_once():
    client = Written()
    client._patient_s = asyncio.get_running_loop().time() + 3600.0  # as after many writes
    client.post("s", b"1", patient=True)
    client.post("s", b"2", patient=True)
    assert not client.writes
    client.post("s", b"3")
    assert client.numbers() == [1, 2, 3]


async def test_who_is_in_a_hurry_runs_up_no_debt_for_the_patient():
    client, loop = Written(), asyncio.get_running_loop()
    until_s = loop.time() + 0.3
    while loop.time() < until_s:
        client.post("s", b"1")
        await asyncio.sleep(0)
    assert client._patient_s - loop.time() < 2 * WRITES_AT_ONCE * PATIENT_GAP_S


_names = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="-_"), min_size=1)
_lines = st.tuples(_names, st.sampled_from([": ", ":", ":\t", " : "]), st.text(max_size=8))


@given(st.lists(_lines, max_size=6), st.sampled_from(["\r\n", "", "\r\n\r\n"]))
def test_headers_are_read_as_nats_py_reads_them(lines: list[tuple[str, str, str]], end: str):
    block = ("".join(f"{name}{colon}{value}\r\n" for name, colon, value in lines) + end).encode()
    assert SafeClient._parse_header_lines(block) == Client._parse_header_lines(block)


@given(st.binary(max_size=60))
def test_headers_of_any_bytes_are_read_as_nats_py_reads_them(block: bytes):
    assert SafeClient._parse_header_lines(block) == Client._parse_header_lines(block)
