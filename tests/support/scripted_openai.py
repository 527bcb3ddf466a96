"""An HTTP server with the routes of OpenAI's API that does what a test tells it: above all what a sound one does not.

Each POST gets the next of `replies`, or else an answer of a few words; `models` is what GET /v1/models gets. What it
was asked is in `requests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

MODEL = "scripted"
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
REASONS = {200: "OK", 307: "Temporary Redirect", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Reply:
    """Events of a stream, or a body. An event that is an Event object is waited for, and text is sent as it is."""

    events: Sequence[Any] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None  # instead of events
    cut: bool = False  # the connection breaks where the stream should end
    mute: bool = False  # the connection breaks before a word
    hang: bool = False  # the stream does not end before the client leaves


def text_event(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]}


def chat_event(text: str | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish, **more}]}


def usage_event(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


def error_reply(status: int, message: str = "no", headers: dict[str, str] | None = None, **more: Any) -> Reply:
    return Reply(status=status, headers=headers or {}, body={"error": {"message": message, **more}})


def answer(text: str, finish: str = "stop", chat: bool = False) -> Reply:
    event = chat_event if chat else text_event
    return Reply([*(event(character) for character in text), event("", finish), "[DONE]"])


class ScriptedOpenAi:
    """`async with` it; attributes may be changed while it serves."""

    def __init__(self) -> None:
        self.replies: deque[Reply] = deque()
        self.models = Reply(body=MODELS)
        self.model_replies: deque[Reply] = deque()  # these first
        self.requests: list[Asked] = []
        self.looks = 0  # at the models
        self.left = 0  # streams that the client closed before their end
        self.open = 0  # streams that have not ended
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._port = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """At the port that it had, if it had one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Breaks all connections."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reply_to(self, asked: Asked) -> Reply:
        """What a POST gets."""
        chat = asked.path.endswith("/chat/completions")
        return self.replies.popleft() if self.replies else answer("so it is", chat=chat)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its reply; whether the connection goes on."""
        asked = await _read(reader)
        if asked.path == "/v1/models":
            self.looks += 1
            return await self._reply(
                reader, writer, self.model_replies.popleft() if self.model_replies else self.models
            )
        self.requests.append(asked)
        reply = self.reply_to(asked)
        return not reply.mute and await self._reply(reader, writer, reply)

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Reply) -> bool:
        body = None if reply.body is None else reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body)
        kind = {"content-type": "text/event-stream" if body is None else "application/json"}
        size = {"transfer-encoding": "chunked"} if body is None else {"content-length": str(len(body))}
        head = [f"HTTP/1.1 {reply.status} {REASONS.get(reply.status, 'Other')}"]
        head += [f"{name}: {value}" for name, value in (kind | size | reply.headers).items()]
        writer.write("\r\n".join([*head, "", ""]).encode())
        if body is not None:
            writer.write(body if isinstance(body, bytes) else body.encode())
            await writer.drain()
            return True
        self.open += 1
        leaving = asyncio.create_task(reader.read(1))  # nothing comes before the answer's end but the client's leaving
        try:
            streaming = asyncio.create_task(_stream(writer, reply))
            await asyncio.wait((leaving, streaming), return_when=asyncio.FIRST_COMPLETED)
            whole = streaming.done() and not reply.cut
            self.left += not streaming.done()
            streaming.cancel()
            await asyncio.gather(streaming, return_exceptions=True)
        finally:
            self.open -= 1
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        return whole


async def _stream(writer: asyncio.StreamWriter, reply: Reply) -> None:
    for event in reply.events:
        if isinstance(event, asyncio.Event):
            await event.wait()
            continue
        data = event if isinstance(event, str) else json.dumps(event)
        line = f"data: {data}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(line), line))
        await writer.drain()
    if reply.hang:
        await asyncio.Event().wait()
    if not reply.cut:
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    _, path, _ = head[0].split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(path, headers, json.loads(body) if body else None)
