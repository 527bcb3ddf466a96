"""The NATS client with some of its faults mended, and when to dial again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import nats.errors
from nats.aio.client import Client, Server
from nats.aio.transport import TcpTransport

from laneway.runtime.bus_errors import PayloadTooLarge
from laneway.runtime.clock import SYSTEM_RANDOM

RECONNECT_S_MAX = 2.0
NO_TLS = "nats: the server does not ask for TLS"
UNSENT_BYTES_MAX = 64 * 1024  # in the socket's buffer; beyond it the client's flusher waits for the socket
WRITE_GAP_S = 0.001  # between writes, on average
PATIENT_GAP_S = 0.003  # where no message is in a hurry
WRITES_AT_ONCE = 8  # may come without a gap: steps of a few streams never wait
PAYLOAD_HEADROOM_BYTES = 4096  # for what the server adds: schedule, republish and direct-get headers

_HEADER_LINE = re.compile(r"^([!-9;-~]+): ([!-~](?:[ -~]*[!-~])?)?\r\n", re.MULTILINE)


class SafeClient(Client):
    """nats-py's client, mended where a fault of 2.16.0 would take down the whole connection."""

    wants_certificate = False  # the server last dialled asks for a client's certificate
    _later: asyncio.Handle | None = None  # of the write for what is published until then
    _unhurried = False  # nothing that waits for that write is in a hurry
    _paced_s = 0.0  # on the loop's clock: when as many writes would have been due as there were
    _patient_s = 0.0  # the same, had none been in a hurry

    @property
    def payload_bytes_max(self) -> int:
        """Most bytes of payload and headers that may be published."""
        return self.max_payload - PAYLOAD_HEADROOM_BYTES

    @property
    def buffered(self) -> tuple[int, int]:
        """Messages and bytes that are to be written yet; without a connection, once there is one."""
        return len(self._pending), self._pending_data_size

    def forget_buffered(self) -> None:
        """What is to be written yet never will be."""
        self._pending = []
        self._pending_data_size = 0

    def post(
        self,
        subject: str,
        payload: bytes,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
        *,
        patient: bool = False,
    ) -> None:
        """Publishes without waiting, and writes at once where the original leaves that to its flusher, a turn later.

        What one turn of the loop publishes after its first goes into one write at the turn's end; above 1,000 writes
        a second, what a millisecond publishes. Writes cost more than messages, here and at the server; so what is
        `patient` may wait PATIENT_GAP_S for others, unless one of them is in a hurry. Subjects are not checked.
        Raises PayloadTooLarge, and errors of nats.errors: ConnectionClosedError, BadHeaderError,
        OutboundBufferLimitError when more is unsent than the client may hold.
        """
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        if self.is_draining_pubs:
            raise nats.errors.ConnectionDrainingError
        size = len(payload)
        if headers:
            head = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
            if head.count("\n") != len(headers) or head.count("\r") != len(headers):
                raise nats.errors.BadHeaderError("a header has a line break in it")
            block = f"NATS/1.0\r\n{head}\r\n".encode()
            size += len(block)
            start = f"HPUB {subject} {reply} {len(block)} {size}\r\n".encode()
            command = b"".join((start, block, payload, b"\r\n"))
        else:
            command = b"".join((f"PUB {subject} {reply} {size}\r\n".encode(), payload, b"\r\n"))
        if size > self.payload_bytes_max:
            raise PayloadTooLarge(size, self.payload_bytes_max)
        if self._pending_data_size + len(command) > self._max_pending_size:
            raise nats.errors.OutboundBufferLimitError
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        self._pending.append(command)
        self._pending_data_size += len(command)
        if self._pending_data_size > UNSENT_BYTES_MAX:
            self._write_pending()
        elif self._later is None or (self._unhurried and not patient):
            self._begin_write(patient)

    def _begin_write(self, patient: bool) -> None:
        if self._later is not None:
            self._later.cancel()
        self._unhurried = patient
        loop = asyncio.get_running_loop()
        paced_s, gap_s = (self._patient_s, PATIENT_GAP_S) if patient else (self._paced_s, WRITE_GAP_S)
        ahead_s = paced_s - loop.time() - WRITES_AT_ONCE * gap_s
        if ahead_s > 0.0:
            self._later = loop.call_later(ahead_s, self._write_later)
        else:
            self._later = loop.call_soon(self._write_later)
            self._write_paced(loop.time())

    def _write_later(self) -> None:
        self._later = None
        if self._pending:
            self._write_paced(asyncio.get_running_loop().time())

    def _write_paced(self, now_s: float) -> None:
        self._paced_s = max(self._paced_s, now_s) + WRITE_GAP_S
        # Those in a hurry come faster than that, and must not pile up a debt for the patient.
        most_s = now_s + (WRITES_AT_ONCE + 1) * PATIENT_GAP_S
        self._patient_s = min(max(self._patient_s, now_s) + PATIENT_GAP_S, most_s)
        self._write_pending()

    def _write_pending(self) -> None:
        """Writes what is to be sent, or leaves it to the flusher; without a connection to the reconnect."""
        if not self.is_connected:
            return
        transport = self._transport
        if isinstance(transport, TcpTransport) and transport:
            writer = transport._io_writer
            assert writer is not None
            if writer.transport.get_write_buffer_size() <= UNSENT_BYTES_MAX and not writer.transport.is_closing():
                pending, self._pending, self._pending_data_size = self._pending, [], 0
                writer.write(pending[0] if len(pending) == 1 else b"".join(pending))
                return
        if self._flush_queue is not None and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """As the original, which takes six times as long: for what has the usual form, one match."""
        try:
            text = raw.decode("ascii")
        except UnicodeDecodeError:
            return Client._parse_header_lines(raw)
        headers = _HEADER_LINE.findall(text)
        whole = text.endswith("\r\n") and text.count("\n") == len(headers) + text.endswith("\r\n\r\n")
        if not whole:
            return Client._parse_header_lines(raw)
        return dict(headers)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Who asked for TLS gets no other connection: the original goes on in the clear if the server, or somebody
        between, says that it needs none."""
        if initial_connection and self.options.get("tls") is not None and not info.get("tls_required"):
            raise nats.errors.Error(NO_TLS)
        self.wants_certificate = bool(info.get("tls_verify"))
        await super()._process_info(info, initial_connection)

    async def _process_op_err(self, e: Exception) -> None:
        """What was to be sent when the connection broke is not sent after it: whoever waits for an answer to it is told
        that it is lost, perhaps, and may have asked again by then."""
        connected = self.is_connected
        await super()._process_op_err(e)
        if connected and self.is_reconnecting:  # since this very turn of the loop
            self.forget_buffered()

    async def _process_pong(self) -> None:
        """Of a flush that timed out or was cancelled, the future cannot be resolved.

        The original tries to; the error ends the read loop, and the connection looks alive and is deaf until enough
        pings go unanswered.
        """
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        """What is still to be sent cannot go to a dead socket.

        The original lets that error through before it has ended subscriptions and their tasks; as well the cancellation
        of a read loop that died while the close waited for the same socket, which is nobody's wish to cancel us.
        """
        if not self.is_connected:
            self.forget_buffered()
        task = asyncio.current_task()
        try:
            await super()._close(status, do_cbs)
        except (OSError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            self.forget_buffered()
            self._status = Client.DISCONNECTED  # a closed client would not be closed again
            if self._transport is not None:  # whoever waits for its end once more may get that cancellation again
                self._transport.close()  # type: ignore[no-untyped-call]  # nats-py has no types for it
                self._transport = None
            await super()._close(status, do_cbs)


def redial(
    wait_s: float, random: Random = SYSTEM_RANDOM
) -> Callable[[list[Server], dict[str, Any]], tuple[Server, float]]:
    """Which server to dial next and after how long: the least tried, jittered so that clients do not return in step."""

    def next_server(servers: list[Server], info: dict[str, Any]) -> tuple[Server, float]:
        server = min(servers, key=lambda s: s.reconnects)
        ceiling_s = min(RECONNECT_S_MAX, wait_s * 2 ** min(server.reconnects, 6))
        return server, random.uniform(0.0, ceiling_s)

    return next_server
