"""Checkpoints as bytes. What the subject says is not said again: most of them carry a few dozen ids."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from laneway.core.checkpoints import Delta
from laneway.core.job import SCHEMA, TokenLogprob
from laneway.runtime.wire.jobs import token_logprobs_from_proto, token_logprobs_to_proto
from laneway.v1 import bus_pb2


def encode_checkpoint(writer: str, ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> bytes:
    return bus_pb2.Checkpoint(
        schema=SCHEMA,
        owner_check=_check(writer),
        token_ids=ids,
        logprobs=token_logprobs_to_proto(logprobs),
    ).SerializeToString()


def decode_checkpoint(data: bytes, writer: str, attempt: int, from_index: int) -> Delta | None:
    """None where it cannot be read, or is not this writer's: an earlier job of the same id may have left it."""
    message = bus_pb2.Checkpoint()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return None
    if message.schema not in (SCHEMA, SCHEMA - 1) or message.schema < 1 or message.owner_check != _check(writer):
        return None
    logprobs = token_logprobs_from_proto(message.logprobs)
    ids = tuple(message.token_ids)
    return Delta(attempt, from_index, ids, logprobs if len(logprobs) == len(ids) else ())


def _check(writer: str) -> int:
    return zlib.crc32(writer.encode())
