"""The requests of $JS.API that the product makes, and their answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from laneway.runtime import headers as names
from tests.sim.memory_nats.consumer import Consumer
from tests.sim.memory_nats.messages import Refused, as_answer, rfc3339
from tests.sim.memory_nats.stream import Stream

if TYPE_CHECKING:
    from tests.sim.memory_nats.server import MemoryNats

SUBJECTS_A_PAGE = 100_000
CONSUMERS_A_PAGE = 256


class Api:
    """Of one server."""

    def __init__(self, nats: MemoryNats) -> None:
        self._nats = nats
        self._ephemeral = 0

    def serve(self, subject: str, data: bytes, reply: str) -> bool:
        """Answers to the reply subject; False where nobody serves the subject."""
        verb, _, rest = subject.partition(".")
        if subject.startswith("DIRECT.GET."):
            return self._direct_get(subject.removeprefix("DIRECT.GET."), reply)
        if subject.startswith("CONSUMER.MSG.NEXT."):
            return self._next(subject.removeprefix("CONSUMER.MSG.NEXT."), data, reply)
        body = json.loads(data) if data else {}
        try:
            if verb == "INFO":
                answer = self._account()
            elif verb == "STREAM":
                answer = self._stream_request(rest, body)
            elif verb == "CONSUMER":
                answer = self._consumer_request(rest, body)
            else:
                return False
        except Refused as refusal:
            answer = {"error": refusal.answer}
        self._nats.emit(reply, json.dumps(answer).encode())
        return True

    def _direct_get(self, wanted: str, reply: str) -> bool:
        name, _, subject = wanted.partition(".")
        stream = self._nats.streams.get(name)
        if stream is None or not stream.config.get("allow_direct"):
            return False
        message = stream.last_of(subject)
        if message is None:
            self._nats.emit(reply, b"", {names.STATUS: "404", names.DESCRIPTION: "Message Not Found"})
        else:
            self._nats.emit(reply, message.data, message.headers | stream.position_headers(message))
        return True

    def _next(self, wanted: str, data: bytes, reply: str) -> bool:
        name, _, consumer_name = wanted.partition(".")
        stream = self._nats.streams.get(name)
        consumer = stream.consumers.get(consumer_name) if stream else None
        if consumer is None:
            return False
        consumer.pull(json.loads(data) if data else {}, reply)
        return True

    def _account(self) -> dict[str, Any]:
        limit = self._nats.storage_bytes_max
        limits = {"max_storage": -1 if limit == float("inf") else limit}
        return {"storage": self._nats.storage_used(), "limits": limits, "streams": len(self._nats.streams)}

    def _stream_request(self, request: str, body: dict[str, Any]) -> dict[str, Any]:
        verb, _, name = request.partition(".")
        if verb == "MSG":
            return self._message(name.removeprefix("GET."), body)
        if verb == "CREATE":
            return self._create_stream(name, body)
        stream = self._stream(name)
        if verb == "UPDATE":
            stream.configure(body)
        elif verb == "DELETE":
            del self._nats.streams[name]
            return {"success": True}
        elif verb == "PURGE":
            return {"success": True, "purged": stream.purge(body.get("filter", ">"))}
        return _stream_info(stream, body)

    def _stream(self, name: str) -> Stream:
        stream = self._nats.streams.get(name)
        if stream is None:
            raise Refused(404, 10059, "stream not found")
        return stream

    def _create_stream(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        present = self._nats.streams.get(name)
        if present is None:
            present = self._nats.streams[name] = Stream(self._nats, body)
        elif any(present.config.get(key) != value for key, value in body.items()):
            raise Refused(400, 10058, "stream name already in use with a different configuration")
        return _stream_info(present, {})

    def _message(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream(name)
        if "last_by_subj" in body:
            message = stream.last_of(body["last_by_subj"])
        elif "next_by_subj" in body:
            message = stream.next_of(body["next_by_subj"], body.get("seq", 1))
        else:
            message = stream.messages.get(body["seq"])
        if message is None:
            raise Refused(404, 10037, "no message found")
        return {"message": as_answer(message)}

    def _consumer_request(self, request: str, body: dict[str, Any]) -> dict[str, Any]:
        verb, name, *rest = request.split(".", 3)
        stream = self._stream(name)
        if verb == "CREATE":
            return self._create_consumer(stream, rest[0] if rest else "", body)
        if verb == "LIST":
            return _consumer_list(stream, body)
        consumer = stream.consumers.get(rest[0])
        if consumer is None:
            raise Refused(404, 10014, "consumer not found")
        if verb == "DELETE":
            del stream.consumers[consumer.name]
            consumer.end_all_pulls()
            return {"success": True}
        return consumer.info()

    def _create_consumer(self, stream: Stream, name: str, body: dict[str, Any]) -> dict[str, Any]:
        config, action = body["config"], body.get("action", "")
        if not name:
            self._ephemeral += 1
            name = f"ephemeral{self._ephemeral}"
        present = stream.consumers.get(name)
        if present is None:
            if action == "update":
                raise Refused(400, 10149, "consumer does not exist")
            present = stream.consumers[name] = Consumer(self._nats, stream, name, config)
            present.deliver()
        elif action == "create" and present.config != config:
            raise Refused(400, 10148, "consumer already exists")
        else:
            present.config = config
            present.deliver()
        return present.info()


def _consumer_list(stream: Stream, body: dict[str, Any]) -> dict[str, Any]:
    names_, offset = sorted(stream.consumers), body.get("offset", 0)
    page = [stream.consumers[name].info() for name in names_[offset : offset + CONSUMERS_A_PAGE]]
    return {"total": len(names_), "offset": offset, "limit": CONSUMERS_A_PAGE, "consumers": page}


def _stream_info(stream: Stream, body: dict[str, Any]) -> dict[str, Any]:
    state = stream.state()
    answer: dict[str, Any] = {"config": stream.config, "created": rfc3339(stream.created_s), "state": state}
    if "subjects_filter" in body:
        subjects, offset = stream.subjects(body["subjects_filter"]), body.get("offset", 0)
        page = subjects[offset : offset + SUBJECTS_A_PAGE]
        state["subjects"] = {subject: len(stream.by_subject[subject]) for subject in page}
        answer |= {"total": len(subjects), "offset": offset, "limit": SUBJECTS_A_PAGE}
    return answer
