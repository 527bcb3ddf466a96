"""A gRPC caller that costs next to nothing: HTTP/2 frames written and read by hand on one connection.

On a machine that the callers share with what they measure, a client library's own CPU and hand-offs count as the
server's latency (grpc.aio: 2 ms CPU a stream of 64 tokens). This one only does what a benchmark needs: unary-stream
calls without compression, flow-control windows that never fill, no decoding of response headers.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Self, cast

_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7, 0x8
_END_STREAM, _END_HEADERS, _ACK = 0x1, 0x4, 0x1
_WINDOW_BYTES = (1 << 31) - 1
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field for HPACK (RFC 7541 6.2.2): not indexed, not compressed; `name` is encoded already."""
    assert len(value) < 127
    return name + bytes((len(value),)) + value


class Stream:
    """One call: `on_message` gets each message's bytes when it comes; `done` ends with the call."""

    __slots__ = ("buffer", "done", "on_message")

    def __init__(self, on_message: Callable[[bytes], None]) -> None:
        self.on_message = on_message
        self.buffer = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def feed(self, data: bytes | bytearray) -> None:
        self.buffer += data
        while len(self.buffer) >= 5:
            end = 5 + int.from_bytes(self.buffer[1:5])
            if len(self.buffer) < end:
                return
            message = bytes(self.buffer[5:end])
            del self.buffer[:end]
            self.on_message(message)

    def end(self, error: str = "") -> None:
        if not self.done.done():
            if error:
                self.done.set_exception(ConnectionError(error))
            else:
                self.done.set_result(None)


class LeanCaller(asyncio.Protocol):
    def __init__(self, authority: str) -> None:
        self._authority = authority.encode()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._streams: dict[int, Stream] = {}
        self._next = 1

    @classmethod
    async def connect(cls, address: str) -> Self:
        host, port = address.rsplit(":", 1)
        _, caller = await asyncio.get_running_loop().create_connection(lambda: cls(address), host, int(port))
        return caller

    def call(self, path: str, request: bytes, on_message: Callable[[bytes], None]) -> asyncio.Future[None]:
        """Starts a call; the future ends with it, whatever its status: look at what came."""
        assert self._transport is not None
        number, self._next = self._next, self._next + 2
        stream = self._streams[number] = Stream(on_message)
        headers = b"\x83\x86" + _literal(b"\x04", path.encode()) + _literal(b"\x01", self._authority)
        headers += _literal(b"\x0f\x10", b"application/grpc") + _literal(b"\x00\x02te", b"trailers")
        body = b"\0" + struct.pack(">I", len(request)) + request
        self._transport.write(
            _frame(_HEADERS, _END_HEADERS, number, headers) + _frame(_DATA, _END_STREAM, number, body)
        )
        return stream.done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)
        settings = struct.pack(">HI", 0x4, _WINDOW_BYTES)  # SETTINGS_INITIAL_WINDOW_SIZE
        window = struct.pack(">I", _WINDOW_BYTES - 65_535)
        transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, window))

    def connection_lost(self, exc: Exception | None) -> None:
        for stream in self._streams.values():
            stream.end(f"the connection was lost: {exc}")

    def data_received(self, data: bytes) -> None:
        buffer, at = self._buffer, 0
        buffer += data
        while len(buffer) - at >= 9:
            end = at + 9 + int.from_bytes(buffer[at : at + 3])
            if len(buffer) < end:
                break
            self._received(
                buffer[at + 3], buffer[at + 4], int.from_bytes(buffer[at + 5 : at + 9]), buffer[at + 9 : end]
            )
            at = end
        del buffer[:at]

    def _received(self, kind: int, flags: int, number: int, payload: bytes | bytearray) -> None:
        assert self._transport is not None
        if kind == _DATA and number in self._streams:
            self._streams[number].feed(payload)
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._transport.write(_frame(kind, _ACK, 0, bytes(payload) if kind == _PING else b""))
        elif kind == _GOAWAY:
            self._transport.close()
        if kind == _RST or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            stream = self._streams.pop(number, None)
            if stream is not None:
                stream.end("the stream was reset" if kind == _RST and payload[-1] else "")
