"""Reading stored messages: what cannot be read is one error, whatever is wrong with it."""

from __future__ import annotations

from google.protobuf.message import DecodeError, Message


class UnreadableMessage(ValueError):
    """A stored message is malformed or of a schema that this release does not read."""


def parse_message(message: Message, data: bytes, what: str) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise UnreadableMessage(f"the {what} is not a valid protobuf message") from None
