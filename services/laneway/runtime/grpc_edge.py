"""What happens around every handler of a gRPC server: live-call set, credential, decoding, and statuses.

Handlers see a decoded request and a caller (auth.current_caller), raise LanewayError, and may return, yield or
`context.write` either messages or bytes that are already serialised. Only this module catches broadly.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable, Mapping
from types import TracebackType
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from laneway.core.errors import InvalidRequest, LanewayError, Unavailable
from laneway.runtime import metrics
from laneway.runtime.auth import Authenticator, set_caller
from laneway.runtime.exception_groups import leaf_errors
from laneway.runtime.grpc_errors import status_code, status_message, trailing_metadata
from laneway.runtime.logging import get_logger

log = get_logger("laneway.grpc")

HEALTH = "/grpc.health.v1.Health/"
DRAINING_RETRY_S = 1.0

# grpc.aio's handlers and contexts are generic over messages that this module never looks into.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = Callable[..., Any]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_ended = metrics.counter("laneway_grpc_calls_total", "Calls that ended, by status.", ("method", "outcome"))
_duration = metrics.histogram("laneway_grpc_call_seconds", "Length of calls.", ("method",))


class _Names:
    """A method and its metrics, looked up once."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.health = method.startswith(HEALTH)
        self.ok = _ended.labels(method=_short(method), outcome="ok")
        self.seconds = _duration.labels(method=_short(method))


class LiveCall:
    """One call between its arrival and its end. A class, since a generator would take three times as long."""

    __slots__ = ("_context", "_edge", "names", "started_s")

    def __init__(self, edge: CallEdge, names: _Names, context: Context) -> None:
        self.names = names
        self.started_s = time.monotonic()  # for people and metrics; decides nothing
        self._edge = edge
        self._context = context

    def __enter__(self) -> None:
        self._edge.begin(self)
        if self.names.health:
            return
        try:
            self._edge.admit(self._context)
        except BaseException:
            self._over()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.names.ok.inc()
        self._over()

    def _over(self) -> None:
        self._edge.end(self)
        self.names.seconds.observe(time.monotonic() - self.started_s)


class CallEdge(grpc.GenericRpcHandler):
    """All methods of a server, each with what happens around it. Generated code adds services to it as to a server.

    Methods are found here and not registered with grpc.aio, which for each registered method waits with a task of its
    own, and at every call waits anew with all of them.
    """

    def __init__(self, authenticator: Authenticator, *, calls_max: int) -> None:
        self.live: set[LiveCall] = set()
        self.draining = False
        self._authenticator = authenticator
        self._calls_max = calls_max
        self._handlers: dict[str, Handler] = {}
        self._ended = asyncio.Event()

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """What generated code calls with a service's methods."""
        for name, handler in method_handlers.items():
            method = f"/{service_name}/{name}"
            self._handlers[method] = self._wrap(method, handler)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Generated code calls this as well, with the same methods."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        return self._handlers.get(handler_call_details.method)  # None: gRPC answers UNIMPLEMENTED

    def live_calls(self) -> list[LiveCall]:
        """Calls of our own services: watching health keeps nothing alive."""
        return [call for call in self.live if not call.names.health]

    async def wait_quiet(self, timeout_s: float) -> bool:
        """Whether all live calls ended within timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.live_calls():
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return not self.live_calls()
        return True

    # --- one call ---

    def begin(self, call: LiveCall) -> None:
        self.live.add(call)

    def end(self, call: LiveCall) -> None:
        self.live.discard(call)
        self._ended.set()

    def admit(self, context: Context) -> None:
        """Raises where the caller has to go away."""
        if self.draining:
            raise Unavailable("this server is shutting down", reason="DRAINING", retry_after_s=DRAINING_RETRY_S)
        if len(self.live) > self._calls_max:
            raise Unavailable("this server has too many live calls", reason="TOO_MANY_CALLS", retry_after_s=1.0)
        set_caller(self._authenticator.authenticate(_pairs(context), context.peer()))

    def _wrap(self, method: str, handler: Handler) -> Handler:
        decode, names = _decoder(method, handler), _Names(method)
        if handler.request_streaming:
            return self._wrap_stream_stream(method, handler)
        if handler.response_streaming:
            write_all = _writer(cast("Behaviour", handler.unary_stream))

            async def stream(data: bytes, context: Context) -> None:
                try:
                    with LiveCall(self, names, context):
                        await write_all(decode(data), context)
                except BaseException as error:  # noqa: BLE001 - the edge: each error becomes a status or goes on
                    await _fail(method, context, error)

            return grpc.unary_stream_rpc_method_handler(stream, response_serializer=_to_bytes)

        answer = cast("Behaviour", handler.unary_unary)

        async def unary(data: bytes, context: Context) -> object:
            try:
                with LiveCall(self, names, context):
                    return await answer(decode(data), context)
            except BaseException as error:  # noqa: BLE001 - the edge: each error becomes a status or goes on
                await _fail(method, context, error)

        return grpc.unary_unary_rpc_method_handler(unary, response_serializer=_to_bytes)

    def _wrap_stream_stream(self, method: str, handler: Handler) -> Handler:
        """A coroutine reads the requests' bytes from its context. Reflection's generator keeps its own decoding."""
        inner = cast("Behaviour", handler.stream_stream)
        ours, names = inspect.iscoroutinefunction(inner), _Names(method)

        async def stream(requests: AsyncIterable[Message], context: Context) -> None:
            try:
                with LiveCall(self, names, context):
                    if ours:
                        await inner(requests, context)
                    else:
                        async for response in inner(requests, context):
                            await context.write(response)
            except BaseException as error:  # noqa: BLE001 - the edge: each error becomes a status or goes on
                await _fail(method, context, error)

        return grpc.stream_stream_rpc_method_handler(
            stream,
            request_deserializer=None if ours else handler.request_deserializer,
            response_serializer=_to_bytes if ours else handler.response_serializer,
        )


# --- requests and responses ------------------------------------------------------------------------


def _decoder(method: str, handler: Handler) -> Callable[[bytes], object]:
    parse = handler.request_deserializer

    def decode(data: bytes) -> object:
        try:
            return parse(data) if parse else data
        except (DecodeError, UnicodeDecodeError):
            raise InvalidRequest(
                f"the request of {_short(method)} is malformed: not a protobuf message of its type, or a string in it "
                "is not UTF-8",
                reason="MALFORMED_REQUEST",
            ) from None

    return decode


def _to_bytes(message: Any) -> bytes:  # Any: a message of any type, or bytes
    if type(message) is bytes:
        return message
    data: bytes = message.SerializeToString()
    return data


def _writer(handler: Behaviour) -> Callable[[object, Context], Awaitable[None]]:
    """One coroutine for both styles of streaming handlers: `context.write` inside, or an async generator."""
    if inspect.iscoroutinefunction(handler):
        return handler

    async def write_all(request: object, context: Context) -> None:
        async for response in handler(request, context):
            await context.write(response)

    return write_all


def _pairs(context: Context) -> Iterable[tuple[str, str | bytes]]:
    return context.invocation_metadata() or ()


# --- statuses --------------------------------------------------------------------------------------


async def _fail(method: str, context: Context, error: BaseException) -> NoReturn:
    """Ends the call with the error's status. Cancellation and grpc's own aborts go on as they are."""
    if isinstance(error, asyncio.CancelledError):
        _ended.labels(method=_short(method), outcome="cancelled").inc()
        raise error
    leaves = list(leaf_errors(error))
    if isinstance(error, grpc.aio.AbortError) or not all(isinstance(leaf, Exception) for leaf in leaves):
        _ended.labels(method=_short(method), outcome="aborted").inc()
        raise error
    known = _known(leaves)
    if known is None and (context.done() or context.cancelled()):  # a write to a caller that has just gone
        log.debug("call_ended_early", method=_short(method), error=type(error).__name__)
        _ended.labels(method=_short(method), outcome="gone").inc()
        raise asyncio.CancelledError from error
    status = known or _unknown(method, error)
    _ended.labels(method=_short(method), outcome=status.row.label).inc()
    await context.abort(status_code(status), status_message(status), trailing_metadata(status))


def known_or_logged(method: str, error: Exception) -> LanewayError:
    """What a caller is told of an error: a LanewayError as it is; anything else is a bug and logged."""
    return error if isinstance(error, LanewayError) else _unknown(method, error)


def _known(leaves: Collection[BaseException]) -> LanewayError | None:
    """The LanewayError to answer with, if nothing else is among the errors."""
    known = [leaf for leaf in leaves if isinstance(leaf, LanewayError)]
    return known[0] if known and len(known) == len(leaves) else None


def _unknown(method: str, error: BaseException) -> LanewayError:
    """A bug: logged here, once, and answered without internals."""
    reference = secrets.token_hex(4)
    log.error("call_failed", method=_short(method), reference=reference, exc_info=error)
    return LanewayError(f"internal error; reference {reference}", facts={"reference": reference})


def _short(method: str) -> str:
    return method.rpartition("/")[2]
