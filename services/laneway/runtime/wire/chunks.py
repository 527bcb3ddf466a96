"""Serialised pieces of an answer: what is in them, and several made one. A piece is a GenerateResponse with a chunk.

Doors forward pieces untouched; these are for the rare moments when they must look inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from laneway.core.job import Result
from laneway.runtime.wire.responses import result_chunks
from laneway.v1 import admission_pb2

PIECE_BYTES_MAX = 256 * 1024  # of what is joined or cut here; callers take messages of 4 MiB at least


def piece_ids(piece: bytes) -> Sequence[int]:
    """The token ids in a piece."""
    return admission_pb2.GenerateResponse.FromString(piece).chunk.token_ids


def merged(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """As few pieces as are no larger than PIECE_BYTES_MAX, those aside that were larger before."""
    part: list[bytes] = []
    size = 0
    for piece in pieces:
        if part and size + len(piece) > PIECE_BYTES_MAX:
            yield merge_pieces(part)
            part, size = [], 0
        part.append(piece)
        size += len(piece)
    if part:
        yield merge_pieces(part)


def merge_pieces(pieces: Sequence[bytes]) -> bytes:
    """One piece that says what several consecutive ones say.

    Worth it at a slow writer: parsing and joining costs some microseconds a piece, a gRPC write 37 (reference
    measurement of the token path).
    """
    if len(pieces) == 1:
        return pieces[0]
    merged = admission_pb2.GenerateResponse.FromString(pieces[0])
    into = merged.chunk
    text = [into.text]
    for piece in pieces[1:]:
        chunk = admission_pb2.GenerateResponse.FromString(piece).chunk
        if chunk.output != into.output:
            raise ValueError("pieces of different outputs cannot be merged")
        into.token_ids.extend(chunk.token_ids)
        into.logprobs.extend(chunk.logprobs)
        text.append(chunk.text)
    into.text = "".join(text)
    return merged.SerializeToString()


def rest_of(result: Result, from_index: int) -> list[bytes]:
    """The pieces with all tokens of a result from an index on, none where there are none."""
    chunks = result_chunks(result, from_index, PIECE_BYTES_MAX)
    return [admission_pb2.GenerateResponse(chunk=chunk).SerializeToString() for chunk in chunks]
