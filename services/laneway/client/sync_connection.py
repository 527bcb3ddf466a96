"""What the sync clients are made of: a connection on a loop in the background, its streams and its lists."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from laneway.client import stream
from laneway.client.background import BackgroundLoop, ClientClosed
from laneway.client.channel import KEEPALIVE_S, ServiceConnection, Surroundings
from laneway.client.values import Chunk, Finished
from laneway.core.errors import LanewayError
from laneway.core.job import Verdict
from laneway.policy.retry import RetryParams

Connection = TypeVar("Connection", bound=ServiceConnection)
Item = TypeVar("Item")


class TokenStream:
    """`with client.generate(...) as stream`, then `for chunk in stream`, once. For one thread at a time."""

    def __init__(self, background: BackgroundLoop, source: stream.TokenStream) -> None:
        self._background = background
        self._source = source

    def __enter__(self) -> Self:
        """Returns once the job is accepted; raises the refusal."""
        self._background.run(self._source.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ClientClosed):  # which ended the call
            self._background.run(self._source.__aexit__(kind, error, trace))

    @property
    def job_id(self) -> str:
        return self._source.job_id

    @property
    def verdict(self) -> Verdict | None:
        return self._source.verdict

    @property
    def outlasted(self) -> bool:
        return self._source.outlasted

    @property
    def ended(self) -> bool:
        """Whether the whole answer was read."""
        return self._source.ended

    @property
    def finished(self) -> Finished:
        """How the answer ended; RuntimeError before its end was read."""
        return self._source.finished

    @property
    def started_s(self) -> float:
        """When generate() was called, on the monotonic clock."""
        return self._source.started_s

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        return _given(self._background.run(_next_of(self._source)))

    def text(self) -> str:
        """The rest of the answer as text. With n > 1 this is the first answer; see texts()."""
        return self._background.run(self._source.text())

    def texts(self) -> dict[int, str]:
        """The rest of each of n answers."""
        return self._background.run(self._source.texts())


class Items(Iterator[Item]):
    """What a list or a watch gives, one after the other. Close it, or leave its with-block, to end the call early."""

    def __init__(self, background: BackgroundLoop, source: AsyncIterator[Item]) -> None:
        self._background = background
        self._source = source

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> Item:
        return _given(self._background.run(_next_of(self._source)))

    def close(self) -> None:
        """Ends the call."""
        with contextlib.suppress(ClientClosed):
            self._background.run(_close(self._source))


class SyncConnection(Generic[Connection]):
    """Base of the clients: a context manager around one channel. Threads may share it."""

    _kind: type[Connection]

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        retry_budget: RetryParams | None = None,
        on_retry: Callable[[LanewayError, float], None] | None = None,
        keepalive_s: float = KEEPALIVE_S,
        surroundings: Surroundings | None = None,
    ) -> None:
        """`address` is host:port. `token` goes as a bearer token with each call. Without `credentials`, which
        channel_credentials makes from files, the connection is plain text: for this machine only. `on_retry` hears of
        each failure that is retried, and the wait in seconds."""

        async def make() -> Connection:  # a channel belongs to the loop in which it is made
            return self._kind(
                address,
                token=token,
                credentials=credentials,
                retry_budget=retry_budget,
                on_retry=on_retry,
                keepalive_s=keepalive_s,
                surroundings=surroundings,
            )

        self.address = address
        self._background = BackgroundLoop(f"laneway {address}")
        try:
            self._client = self._background.run(make())
        except BaseException:
            self._background.close(_nothing())
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and every call on it."""
        self._background.close(self._client.close())

    def _run(self, call: Coroutine[Any, Any, Item]) -> Item:
        return self._background.run(call)

    def _items(self, source: AsyncIterator[Item]) -> Items[Item]:
        return Items(self._background, source)


async def _next_of(source: AsyncIterator[Item]) -> tuple[Item] | None:
    """The next item, wrapped; None at the end, which no coroutine can tell by StopIteration."""
    try:
        return (await anext(source),)
    except StopAsyncIteration:
        return None


def _given(found: tuple[Item] | None) -> Item:
    if found is None:
        raise StopIteration
    return found[0]


async def _close(source: AsyncIterator[Item]) -> None:
    if isinstance(source, AsyncGenerator):
        await source.aclose()


async def _nothing() -> None:
    pass
