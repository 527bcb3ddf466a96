"""The NATS connection of a process: JetStream publishes with a definite outcome, core messages, raw API requests.

Owns how long things may take, what a refusal means (bus_errors) and that nothing above the server's max_payload is ever
sent, since the server would close the connection for everybody on it. Knows nothing of jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import datetime
from typing import Any

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from laneway.core.errors import LanewayError
from laneway.runtime import metrics
from laneway.runtime.bus_errors import (
    ApiError,
    BusError,
    NoAnswer,
    NoStream,
    NotConnected,
    NotPermitted,
    OutOfStorage,
    PayloadTooLarge,
    PublishUnknown,
    StreamFull,
    WrongSequence,
    api_error,
    refused_act,
)
from laneway.runtime.callbacks import Callbacks
from laneway.runtime.connecting import SafeClient, redial
from laneway.runtime.nats_login import check_version, connect_failure, credential_options, inbox_refused, no_jetstream
from laneway.runtime.outbox import Outbox
from laneway.runtime.publish_acks import Stored, read_ack
from laneway.runtime.requests import Handler, Requests, listen
from laneway.runtime.rights import inbox_prefix
from laneway.runtime.settings import NatsSettings
from laneway.runtime.tls import handshake_failure

__all__ = [
    "ApiError",
    "Bus",
    "BusError",
    "NoAnswer",
    "NoStream",
    "NotConnected",
    "NotPermitted",
    "OutOfStorage",
    "PayloadTooLarge",
    "PublishUnknown",
    "Stored",
    "StreamFull",
    "WrongSequence",
]

API_PATIENCE = 2.5  # requests of the API may take longer than publishes by this factor
CLOSE_TIMEOUT_S = 2.0

_log = structlog.get_logger(__name__)
_errors = metrics.counter("laneway_bus_errors_total", "Errors of NATS connections, refused permissions among them")
_reconnects = metrics.counter("laneway_bus_reconnects_total", "Times a NATS connection was made again")
_refused = metrics.counter("laneway_bus_publish_failures_total", "Publishes not acknowledged as stored", ("reason",))


class Bus:
    """One connection. All methods may be called concurrently from the loop that connected."""

    def __init__(self, client: SafeClient, name: str, timeout_s: float) -> None:
        self.nc = client
        self.js: JetStreamContext = client.jetstream()
        self.name = name
        self._timeout_s = timeout_s
        self.reconnects = 0
        self._requests: Requests
        self._deaf_to: set[str] = set()  # subjects whose subscription was refused, until its caller is told
        self._up = asyncio.Event()
        self._on_reconnect, self._on_disconnect = Callbacks(), Callbacks()
        self.outbox = Outbox(lambda: self.nc.buffered)  # while there is no connection
        self._connecting = True  # for the first time
        self._closing = False

    @classmethod
    async def connect(cls, settings: NatsSettings, *, name: str, role: str = "") -> Bus:
        """Connects and checks the server. ConfigError: mend the settings or the server; Unavailable: not reachable.

        `role` names the inbox, for which the user must have rights: by default it is the name.
        """
        client = SafeClient()
        bus = cls(client, name, settings.request_timeout_s)
        credentials = credential_options(settings)
        seen: list[Exception] = []

        async def on_error(error: Exception) -> None:
            if bus._connecting:
                seen.append(error)
            bus._failed(error)

        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                await client.connect(
                    settings.url.split(","),
                    name=f"laneway-{name}",
                    error_cb=on_error,
                    disconnected_cb=bus._disconnected,
                    reconnected_cb=bus._reconnected,
                    closed_cb=bus._closed,
                    max_reconnect_attempts=-1,
                    reconnect_to_server_handler=redial(settings.reconnect_wait_s),
                    connect_timeout=max(1, round(settings.connect_timeout_s)),
                    ping_interval=settings.ping_interval_s,  # type: ignore[arg-type]  # slept as it is
                    max_outstanding_pings=2,
                    inbox_prefix=inbox_prefix(role or name),
                    **credentials,
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            bus._closing = True
            await client.close()
            raise connect_failure(settings.url, seen or [error], wants_certificate=client.wants_certificate) from error
        bus._requests = Requests(client, client.new_inbox())
        bus._up.set()
        bus._connecting = False
        try:
            await bus._requests.start()
            await bus._check_server()
        except BaseException:
            await bus.close()
            raise
        return bus

    async def _check_server(self) -> None:
        """ConfigError where the server is not one that we can work with, or lets us do less than anybody needs."""
        check_version(self.nc.connected_server_version, self._url())
        try:
            await self.api("INFO", {})
        except NotPermitted:
            # Producers may not ask, and need nothing of JetStream but the answers to what they publish.
            if self._requests.inbox.lower() in self._deaf_to:
                raise inbox_refused(self._url(), self._requests.inbox) from None
        except (NoStream, ApiError) as error:
            raise no_jetstream(self._url(), error) from error

    def _url(self) -> str:
        url = self.nc.connected_url
        return f"{url.hostname}:{url.port}" if url else "an unknown server"

    # --- state of the connection ---------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return bool(self.nc.is_connected)

    async def wait_connected(self, timeout_s: float) -> None:
        """Raises NotConnected when there is no connection within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.nc.is_connected:
                    if self.nc.is_closed:
                        raise NotConnected
                    self._up.clear()  # we are told of a loss some moments after it
                    await self._up.wait()
        except TimeoutError as error:
            raise NotConnected(f"no connection to NATS for {timeout_s} s") from error

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back after each reconnect, subscriptions being in place again. Returns what takes it off."""
        return self._on_reconnect.add(callback)

    def on_disconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back when the connection is lost. Returns what takes it off."""
        return self._on_disconnect.add(callback)

    def _failed(self, error: Exception) -> None:
        _errors.inc()
        refused = refused_act(error)
        if refused is not None:
            self._refuse(*refused)
        if not self._closing:
            # Of a first connection the caller is told, with the reason.
            level = logging.DEBUG if self._connecting else logging.WARNING
            text = str(error) or type(error).__name__
            # As after a restart of the server with another certificate.
            advice = handshake_failure("nats", "NATS", text)
            _log.log(level, "bus_error", bus=self.name, error=text, **({"advice": advice} if advice else {}))

    def _refuse(self, kind: str, subject: str) -> None:
        """Whoever waits for it learns at once what else would show as a silence."""
        if kind == "subscription":
            self._deaf_to.add(subject)
            if subject == self._requests.inbox.lower():
                self._requests.fail_all(lambda: NotPermitted(f"subscribe to {subject}"))
        elif hasattr(self, "_requests"):
            self._requests.refuse(subject, lambda: NotPermitted(f"publish to {subject}"))

    async def _disconnected(self) -> None:
        self._up.clear()
        if not self._closing:
            _log.warning("bus_disconnected", bus=self.name)
        if hasattr(self, "_requests"):
            self._requests.fail_all(lambda: NoAnswer("the connection to NATS was lost"))
        self._on_disconnect.call()

    async def _reconnected(self) -> None:
        self.reconnects += 1
        _reconnects.inc()
        self._up.set()
        _log.info("bus_reconnected", bus=self.name, server=self._url())
        self._on_reconnect.call()

    async def _closed(self) -> None:
        self._up.set()  # who waits for a connection learns that there is none

    # --- publishing ----------------------------------------------------------------------------------

    async def store(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = None,
        patient: bool = False,
    ) -> int:
        """Publishes into JetStream and returns the stream sequence. bus_errors says what each error leaves behind.

        `patient`: some milliseconds do not matter, so that many may be written together.
        """
        return (await self.store_checked(subject, payload, headers, timeout_s=timeout_s, patient=patient)).sequence

    async def store_checked(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = None,
        patient: bool = False,
    ) -> Stored:
        """As `store`, and says whether the server took the message for a duplicate."""
        timeout_s = timeout_s or self._timeout_s
        return await self._stored(None, subject, payload, headers, timeout_s, patient)

    def begin_store(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> Coroutine[Any, Any, Stored]:
        """As `store_checked`; while there is a connection, the message is on its way when this returns."""
        sent: asyncio.Future[Msg] | None = None
        if self.nc.is_connected:
            with contextlib.suppress(nats.errors.Error, PayloadTooLarge):  # it fails again, where it is awaited
                sent = self._requests.send(subject, payload, headers, timeout_s=self._timeout_s)
        return self._stored(sent, subject, payload, headers, self._timeout_s, patient=False)

    async def _stored(
        self,
        sent: asyncio.Future[Msg] | None,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None,
        timeout_s: float,
        patient: bool,
    ) -> Stored:
        try:
            if sent is None and not self.nc.is_connected:
                await self._wait_to_send(len(payload), timeout_s)
            try:
                msg = await (
                    sent or self._requests.send(subject, payload, headers, timeout_s=timeout_s, patient=patient)
                )
            except NoAnswer as error:
                raise PublishUnknown(f"publish to {subject}: {error.message}") from error
            except nats.errors.Error as error:
                raise NotConnected(f"publish to {subject}: {error!r}") from error
            return read_ack(subject, msg.data)
        except LanewayError as error:
            _refused.labels(error.reason).inc()
            raise

    async def _wait_to_send(self, size_bytes: int, timeout_s: float) -> None:
        """Raises NotConnected at once where too much waits already, else when the time is over."""
        with self.outbox.room(size_bytes):
            await self.wait_connected(timeout_s)

    async def emit(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Publishes a core message: at most once, to whoever listens now, or when there is a connection again."""
        if not self.nc.is_connected:
            self.outbox.check(len(payload))
        try:
            self.nc.post(subject, payload, headers=headers)
        except nats.errors.Error as error:
            raise NotConnected(f"publish to {subject}: {error!r}") from error

    def post(self, subject: str, payload: bytes) -> None:
        """A core message that is sent now or not at all: raises NotConnected where it cannot be."""
        if not self.nc.is_connected:
            raise NotConnected
        try:
            self.nc.post(subject, payload)
        except nats.errors.Error as error:
            raise NotConnected(f"publish to {subject}: {error!r}") from error

    @property
    def payload_bytes_max(self) -> int:
        """Most bytes of payload and headers that may be published."""
        return self.nc.payload_bytes_max

    # --- requests and subscriptions ------------------------------------------------------------------

    async def api(self, subject: str, body: Mapping[str, object], *, timeout_s: float | None = None) -> dict[str, Any]:
        """A request to $JS.API.<subject>. Raises ApiError, NoStream (nobody serves it), NoAnswer, NotConnected."""
        msg = await self.request(f"$JS.API.{subject}", msgspec.json.encode(body) if body else b"", timeout_s=timeout_s)
        answer: dict[str, Any] = msgspec.json.decode(msg.data)
        error = answer.get("error")
        if error is not None:
            raise api_error(error.get("code", 0), error.get("err_code", 0), error.get("description", ""))
        return answer

    async def request(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Msg:
        """A plain request, such as a direct get. Raises NoStream, NoAnswer, NotConnected."""
        timeout_s = timeout_s or self._timeout_s * API_PATIENCE
        if not self.nc.is_connected:
            await self._wait_to_send(len(payload), timeout_s)
        try:
            return await self._requests.send(subject, payload, headers, timeout_s=timeout_s)
        except nats.errors.Error as error:
            raise NotConnected(f"request to {subject}: {error!r}") from error

    async def subscribe(
        self, subject: str, callback: Callable[[Msg], Awaitable[None]], queue: str = ""
    ) -> Subscription:
        """A core subscription; callbacks run one after the other, so they must only hand over."""
        return await self._in_place(await self.nc.subscribe(subject, queue=queue, cb=callback))

    async def listen(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        """A core subscription whose plain function is called straight from the read loop: the fastest way in."""
        return await self._in_place(await listen(self.nc, subject, handler, queue))

    async def _in_place(self, subscription: Subscription) -> Subscription:
        """Waits until the server knows it: what another connection publishes from now on is heard."""
        if self.nc.is_connected:
            with contextlib.suppress(BusError):
                await self.flush()
        subject = subscription.subject
        if subject.lower() in self._deaf_to:
            self._deaf_to.discard(subject.lower())
            await self.unsubscribe(subscription)
            raise NotPermitted(f"subscribe to {subject}")
        return subscription

    async def flush(self, timeout_s: float | None = None) -> None:
        """Returns once the server has got all that was sent. Raises NoAnswer, NotConnected."""
        try:
            await self._requests.echo(timeout_s or self._timeout_s)
        except nats.errors.Error as error:
            raise NotConnected(f"flush: {error!r}") from error

    async def drain(self, subscription: Subscription, timeout_s: float) -> None:
        """Ends a subscription after what is on its way to it; it is ended also when that takes too long."""
        with contextlib.suppress(BusError, nats.errors.Error):
            await self._requests.drain(subscription, timeout_s)

    async def unsubscribe(self, subscription: Subscription | None) -> None:
        """Ends a subscription, whatever state the connection is in."""
        if subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    async def server_time_s(self, timeout_s: float | None = None) -> float:
        """The wall time of the server that we are connected to, at some moment of this call. Raises a BusError."""
        msg = await self.request("$SYS.REQ.USER.INFO", b"", timeout_s=timeout_s)
        try:
            return datetime.fromisoformat(msgspec.json.decode(msg.data)["server"]["time"]).timestamp()
        except (KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
            raise NoAnswer("NATS does not tell its time") from error

    async def close(self) -> None:
        """Flushes what was published and closes, within CLOSE_TIMEOUT_S. Never drains: that may take 30 s."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(TimeoutError, nats.errors.Error):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if self.nc.is_connected and hasattr(self, "_requests"):
                    with contextlib.suppress(BusError):
                        await self.flush(1.0)
                await self.nc.close()
