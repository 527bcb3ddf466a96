"""What travels between a worker and its engine process: msgpack behind a 4-byte length, both ways.

Down go `EngineSpec` once, then commands; up go `Ready` or `Failed` once, then one `Stepped` for each step with all its
sequences. Both ends are of one version and start together, so there is no negotiation.
"""

from __future__ import annotations

import msgspec

from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStats, SequenceStep

FRAME_BYTES_MAX = 64 * 2**20  # 16 M token ids would fit; a longer one is a broken stream
LENGTH_BYTES = 4


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=1):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=2):
    request_id: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag=3):
    pass


Command = Submit | Abort | Close


class Ready(msgspec.Struct, array_like=True, tag=1):
    capacity: EngineCapacity


class Failed(msgspec.Struct, array_like=True, tag=2):
    """The engine could not start; why and what to do."""

    message: str


class Stepped(msgspec.Struct, array_like=True, tag=3):
    steps: list[SequenceStep]
    stats: EngineStats
    received: int  # Submits taken in by then, so that the worker's stats can add those on their way


Report = Ready | Failed | Stepped


class Frames:
    """Cuts a byte stream into frames. Raises ValueError when the stream is broken."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        at = 0
        while len(buffer) - at >= LENGTH_BYTES:
            length = int.from_bytes(buffer[at : at + LENGTH_BYTES], "big")
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {length} bytes; at most {FRAME_BYTES_MAX} are allowed")
            end = at + LENGTH_BYTES + length
            if len(buffer) < end:
                break
            frames.append(bytes(buffer[at + LENGTH_BYTES : end]))
            at = end
        if at:
            del buffer[:at]
        return frames


def framed(encoder: msgspec.msgpack.Encoder, message: object) -> bytearray:
    frame = bytearray(LENGTH_BYTES)
    encoder.encode_into(message, frame, LENGTH_BYTES)
    frame[:LENGTH_BYTES] = (len(frame) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
    return frame
