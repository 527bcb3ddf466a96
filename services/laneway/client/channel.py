"""One gRPC channel of a client: its settings, its credential, and the one layer that retries.

Knows no service. Every error leaves as a LanewayError.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio

from laneway.core.clock import Clock
from laneway.core.errors import Code, ConfigError, DeadlineExceeded, ErrorRow, LanewayError, Unavailable
from laneway.core.lanes import Lane
from laneway.policy.retry import Attempted, RetryBudget, RetryParams, decide_retry
from laneway.runtime import grpc_options
from laneway.runtime.clock import SystemClock
from laneway.runtime.grpc_errors import DETAILS_KEY, from_rpc_error
from laneway.runtime.grpc_options import Options
from laneway.runtime.settings import GrpcSettings
from laneway.runtime.tls import handshake_failure

KEEPALIVE_S = 10.0  # the services permit one ping every 5 s (settings: grpc.keepalive_permit_s)
CALL_S_MAX = 10.0  # of a call with one answer, where the caller names no limit
RECONNECT_S_MAX = 5.0
NO_SERVICE = "NO_SERVICE"  # reason of an error: nothing answers at the address
# In messages of the gRPC library, which has one status for all failures of a connection.
_HUNG_UP = ": Socket closed"  # before a first byte
TLS_HINT = (
    ", what listens there hangs up: if it speaks TLS, check grpc.tls_ca_file; if it asks callers for certificates,"
    " grpc.tls_cert_file and grpc.tls_key_file"
)
_NEVER_CONNECTED = ("failed to connect", "DNS resolution failed")

Metadata = tuple[tuple[str, str], ...]
Request = TypeVar("Request")
Response = TypeVar("Response")
Item = TypeVar("Item")


class TlsFailed(Unavailable):
    """The service and we could not agree on a TLS connection; the message names the setting to check."""

    row = ErrorRow(Code.UNAVAILABLE, 503, False, "unavailable")
    default_reason = "TLS_FAILED"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the client takes from the world outside; tests replace it."""

    clock: Clock
    sleep: Callable[[float], Awaitable[None]]
    draw: Callable[[], float]  # uniform in [0, 1)


def real_surroundings() -> Surroundings:
    return Surroundings(SystemClock(), asyncio.sleep, random.random)


class Retrier:
    """Applies the retry policy; one budget for each lane, shared by all calls of a client."""

    def __init__(
        self, params: RetryParams, surroundings: Surroundings, on_retry: Callable[[LanewayError, float], None] | None
    ) -> None:
        self._params = params
        self._on_retry = on_retry
        self._surroundings = surroundings
        self._budgets: dict[Lane, RetryBudget] = {}

    def first_attempt(self, lane: Lane) -> None:
        now_s = self._surroundings.clock.monotonic()
        self._budgets[lane] = self._budgets.get(lane, RetryBudget()).first_attempt(now_s, self._params)

    async def wait_or_raise(self, tried: Attempted) -> None:
        """Returns when the next attempt is due; raises the error if there is to be none."""
        surroundings = self._surroundings
        budget = self._budgets.get(tried.lane, RetryBudget())
        now_s = surroundings.clock.monotonic()
        decision = decide_retry(tried, budget, now_s, surroundings.draw(), self._params)
        self._budgets[tried.lane] = decision.budget
        if not decision.retry:
            raise tried.error
        if self._on_retry is not None:
            self._on_retry(tried.error, decision.wait_s)
        await surroundings.sleep(decision.wait_s)


class Deadline:
    """A caller's time limit for one call, turned once into this process's monotonic time."""

    def __init__(self, clock: Clock, timeout_s: float | None) -> None:
        self._clock = clock
        self.at_s = None if timeout_s is None else clock.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """Seconds that remain, None without a limit. DeadlineExceeded if none remain."""
        if self.at_s is None:
            return None
        left_s = self.at_s - self._clock.monotonic()
        if not left_s > 0.0:
            raise DeadlineExceeded("the call's time limit passed")
        return left_s


class ServiceConnection:
    """Base of the clients: an async context manager around one channel. Calls may run concurrently."""

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
        if not address or "://" in address:
            raise ConfigError(f"address must be host:port, not {address!r}")
        self.address = address
        self._metadata: Metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._surroundings = surroundings or real_surroundings()
        self._retrier = Retrier(retry_budget or RetryParams(), self._surroundings, on_retry)
        options = channel_options(keepalive_s)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and every call on it."""
        await self._channel.close()

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        make_request: Callable[[LanewayError | None], Request],
        *,
        timeout_s: float | None,
        lane: Lane = Lane.PRIORITY,
        idempotent: bool = True,
        retry_s_max: float | None = None,
    ) -> Response:
        """A call with one answer. `make_request` gets the error of the attempt before, None at first."""
        limit_s = CALL_S_MAX if timeout_s is None else timeout_s
        deadline = Deadline(self._surroundings.clock, limit_s)
        give_up = Deadline(self._surroundings.clock, least(limit_s, retry_s_max))
        self._retrier.first_attempt(lane)
        attempt = 1
        error: LanewayError | None = None
        while True:
            request = make_request(error)
            try:
                return await method(request, timeout=deadline.left_s(), metadata=self._metadata)
            except grpc.aio.AioRpcError as rpc_error:
                error = failure_of(rpc_error, self.address)
                error.__cause__ = rpc_error
            await self._retrier.wait_or_raise(
                Attempted(error, attempt, lane=lane, idempotent=idempotent, deadline_s=give_up.at_s)
            )
            attempt += 1

    async def _pages(
        self, page: Callable[[str], Awaitable[tuple[list[Item], str]]], limit: int | None = None
    ) -> AsyncIterator[Item]:
        """Items of all pages in order, `limit` at most. `page` takes a page token and gives items and the next one."""
        token, given = "", 0
        while True:
            items, token = await page(token)
            for item in items if limit is None else items[: limit - given]:
                given += 1
                yield item
            if not token or given == limit:
                return


def failure_of(rpc_error: grpc.aio.AioRpcError, address: str) -> LanewayError:
    """What a failed call means. Where no service spoke we say so, and keep the gRPC library's words as a fact."""
    error = from_rpc_error(rpc_error)
    spoken = any(key == DETAILS_KEY for key, _ in rpc_error.trailing_metadata() or ())
    if spoken or rpc_error.code() is not grpc.StatusCode.UNAVAILABLE:
        return error
    facts = {"transport": error.message}
    if why := handshake_failure("grpc", f"the service at {address}", error.message):
        return TlsFailed(why, facts=facts)
    if any(words in error.message for words in _NEVER_CONNECTED):
        hint = TLS_HINT if error.message.endswith(_HUNG_UP) else ""
        return Unavailable(f"no service answers at {address}{hint}", reason=NO_SERVICE, facts=facts)
    return Unavailable(
        f"the connection to {address} broke: {error.message}",
        reason="CONNECTION_LOST",
        retry_after_s=error.retry_after_s,
        facts=facts,
    )


def least(*limits: float | None) -> float | None:
    """The smallest of the limits that are given; None if none is."""
    given = [limit for limit in limits if limit is not None]
    return min(given) if given else None


def channel_options(keepalive_s: float) -> Options:
    """The runtime's options with this client's keepalive."""
    return [
        *grpc_options.channel_options(GrpcSettings(keepalive_s=keepalive_s)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", round(RECONNECT_S_MAX * 1000)),
        # Channels of one process would else share a connection, whose flow control a slow reader can fill for others.
        ("grpc.use_local_subchannel_pool", 1),
    ]
