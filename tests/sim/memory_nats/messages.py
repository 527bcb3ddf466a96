"""Messages as a stream keeps them, what the server's API refuses, and how both look on the wire."""

import base64
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tests.sim.memory_nats.timers import Timer

Headers = dict[str, str]


@dataclass(slots=True)
class Stored:
    sequence: int
    subject: str
    data: bytes
    headers: Headers
    time_s: float
    timers: list[Timer] = field(default_factory=list)  # its end of life, its firing

    @property
    def size_bytes(self) -> int:
        """As the server's file store counts (its server/filestore.go)."""
        head = len(header_block(self.headers)) + 4 if self.headers else 0
        return 22 + len(self.subject) + head + len(self.data) + 8


class Refused(Exception):
    """The server's answer to a publish or an API request; numbers of its server/errors.json."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.answer = {"code": code, "err_code": err_code, "description": description}


def header_block(headers: Headers) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode() if headers else b""


def rfc3339(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def as_answer(message: Stored) -> dict[str, object]:
    """As STREAM.MSG.GET gives it."""
    answer: dict[str, object] = {
        "subject": message.subject,
        "seq": message.sequence,
        "time": rfc3339(message.time_s),
    }
    if message.headers:
        answer["hdrs"] = base64.b64encode(header_block(message.headers)).decode()
    if message.data:
        answer["data"] = base64.b64encode(message.data).decode()
    return answer


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?\Z")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def ttl_s(text: str) -> float | None:
    """Seconds to live; None: for ever."""
    if text == "never":
        return None
    found = _DURATION.match(text)
    seconds = float(found[1]) * _UNIT_S[found[2]] if found else 0.0
    if seconds < 1.0:
        raise Refused(400, 10165, "invalid per-message TTL")
    return seconds
