"""Reading streams: the last message of a subject, and the subjects that hold one."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Mapping

from msgspec import Struct

from laneway.runtime.bus import ApiError, Bus, NoAnswer
from laneway.runtime.bus_errors import ERR_MESSAGE_NOT_FOUND
from laneway.runtime.headers import DESCRIPTION, SEQUENCE, STATUS

LIST_TIMEOUT_S = 30.0  # a page of a million subjects takes 1.3 s
PAGE_OVERLAP = 1_000


class StoredMessage(Struct, frozen=True):
    data: bytes
    sequence: int
    headers: Mapping[str, str]


async def last_message(bus: Bus, stream: str, subject: str) -> StoredMessage | None:
    """By direct get, the fastest way. A replica that is behind answers with an older message, or with none."""
    msg = await bus.request(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"")
    headers = msg.headers or {}
    status = headers.get(STATUS)
    if status == "404":
        return None
    if status is not None:
        raise NoAnswer(f"direct get from {stream}: {status} {headers.get(DESCRIPTION, '')}")
    return StoredMessage(msg.data, int(headers[SEQUENCE]), headers)


async def last_from_leader(bus: Bus, stream: str, subject: str) -> StoredMessage | None:
    """From the stream's leader: None means that there is no such message."""
    return await _from_leader(bus, stream, {"last_by_subj": subject})


async def next_from_leader(bus: Bus, stream: str, subject_filter: str, sequence: int) -> StoredMessage | None:
    """The first message of this sequence or a later one that matches the filter, whatever the stream holds beside."""
    return await _from_leader(bus, stream, {"seq": sequence, "next_by_subj": subject_filter})


async def _from_leader(bus: Bus, stream: str, wanted: Mapping[str, object]) -> StoredMessage | None:
    try:
        answer = await bus.api(f"STREAM.MSG.GET.{stream}", wanted)
    except ApiError as error:
        if error.err_code == ERR_MESSAGE_NOT_FOUND:
            return None
        raise
    message = answer["message"]
    data = base64.b64decode(message.get("data", ""))
    return StoredMessage(data, message["seq"], _header_lines(message.get("hdrs", "")))


def _header_lines(encoded: str) -> dict[str, str]:
    """Headers as STREAM.MSG.GET gives them: base64 of the raw block."""
    lines = base64.b64decode(encoded).decode("utf-8", "replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip(): value.strip() for name, _, value in pairs}


async def subject_list(bus: Bus, stream: str, subject_filter: str) -> list[str]:
    """All subjects of a stream that match the filter and hold a message."""
    found: dict[str, None] = {}
    async for page in subject_pages(bus, stream, subject_filter):
        found.update(dict.fromkeys(page))
    return list(found)


async def subject_pages(bus: Bus, stream: str, subject_filter: str) -> AsyncGenerator[list[str], None]:
    """As subject_list, in the order of subjects and in pages as the server gives them (100,000 each).

    Pages overlap: a subject that comes or goes meanwhile moves the others, and up to PAGE_OVERLAP of them may go while
    a page is made without hiding one. The server works on every matching subject for each page (1.3 s at a million),
    and answers nothing else on this connection meanwhile: where there may be many, use a connection of its own.
    """
    offset = 0
    while True:
        body = {"subjects_filter": subject_filter, "offset": offset}
        answer = await bus.api(f"STREAM.INFO.{stream}", body, timeout_s=LIST_TIMEOUT_S)
        page: list[str] = list(answer["state"].get("subjects") or {})
        if page:
            yield page
        if not page or offset + len(page) >= answer.get("total", 0):
            return
        offset += max(1, len(page) - PAGE_OVERLAP)
