"""What waits to be sent while NATS is away: a bound on how much that is, for one connection.

Publishes and requests wait for the connection, for as long as their callers let them; core messages (acknowledgements,
hints) wait in the client's own buffer until it is connected again. Together they are no more than MESSAGES_MAX and
BYTES_MAX; whatever comes beyond is refused at once, so that an outage fills no memory and its end brings no flood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from laneway.runtime.bus_errors import NotConnected

MESSAGES_MAX = 1_000
BYTES_MAX = 16 * 1024 * 1024  # of payloads


class Outbox:
    """`buffered`: messages and bytes that the client holds until it is connected again."""

    def __init__(self, buffered: Callable[[], tuple[int, int]]) -> None:
        self._buffered = buffered
        self._messages = 0
        self._bytes = 0

    @property
    def waiting(self) -> tuple[int, int]:
        """Messages and bytes, those that the client holds among them."""
        messages, size = self._buffered()
        return self._messages + messages, self._bytes + size

    def check(self, size_bytes: int) -> None:
        """Raises NotConnected where one more message of this size may not wait."""
        messages, size = self.waiting
        if messages >= MESSAGES_MAX or size + size_bytes > BYTES_MAX:
            raise NotConnected(f"no connection to NATS, and {messages} messages of {size} bytes wait for it already")

    @contextmanager
    def room(self, size_bytes: int) -> Iterator[None]:
        """For one message that waits inside the block. Raises NotConnected where there is none."""
        self.check(size_bytes)
        self._messages += 1
        self._bytes += size_bytes
        try:
            yield
        finally:
            self._messages -= 1
            self._bytes -= size_bytes
