"""TensorRT-LLM behind `trtllm-serve --grpc`: token ids in and out, by the proto that `smg-grpc-proto` publishes.

Owns one channel, in plain text as that server has no other, and knows when the server at its end is no more: a call
says so, or the health check that is made all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator

import grpc
import grpc.aio
import structlog
from msgspec.structs import replace
from smg_grpc_proto import trtllm_service_pb2 as pb
from smg_grpc_proto import trtllm_service_pb2_grpc as pb_grpc

from laneway.core.catalogue import Capabilities, Pool
from laneway.core.errors import ConfigError
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.grpc_channel import channel_options
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStartError, SequenceStep
from laneway.workers.engines.remote import RemoteEngine, RemoteGone, RemoteRefusal
from laneway.workers.engines.trtllm_answers import has_penalties
from laneway.workers.engines.trtllm_wire import Answer, capacity_of, generate_request

MESSAGE_BYTES = 32 * 1024 * 1024  # what the server sets for itself; its last message has the whole answer
ABORT_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 30.0  # its event loop serves all streams as well
LOADING_LOOK_S = 0.5  # between two looks at a server that is not well yet

_STOPPED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # the connection broke; it shut down
_FAILED = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)  # its catch-all: perhaps it serves nobody any more
_WORDS = {
    grpc.StatusCode.INVALID_ARGUMENT: "the server refused the request as invalid",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the request or its answer is too large for the server",
}

log = structlog.get_logger(__name__)


class TrtllmServer:
    """A RemoteServer over one channel."""

    def __init__(self, address: str, pool: EngineCapacity, eos_ids: frozenset[int], health_interval_s: float) -> None:
        self.name = f"the trtllm-serve at {address}"
        self.trouble = "nothing answers there"
        self._pool = pool
        self._eos_ids = eos_ids
        self._health_interval_s = health_interval_s
        self._address = address
        self._space = uuid.uuid4().hex  # the server takes a request id that it has for the same request
        self._version = ""
        self._channel: grpc.aio.Channel | None = None

    async def open(self) -> EngineCapacity:
        # Here and not before: a channel belongs to the loop that it was made in.
        self._channel = grpc.aio.insecure_channel(self._address, options=channel_options(MESSAGE_BYTES))
        self._stub = pb_grpc.TrtllmServiceStub(self._channel)
        try:
            await self._healthy()
            model = await self._stub.GetModelInfo(pb.GetModelInfoRequest())
            server = await self._stub.GetServerInfo(pb.GetServerInfoRequest())
        except grpc.aio.AioRpcError as error:
            raise EngineStartError(
                f"{self.name} answered with {error.code().name}: is it a trtllm-serve that was started with --grpc?"
            ) from None
        self._version = server.version
        log.info("trtllm_server_found", address=self._address, version=server.version, model=model.model_id)
        return capacity_of(self._pool, model)

    def able(self, offered: Capabilities) -> Capabilities:
        if has_penalties(self._version):
            return offered
        log.warning("trtllm_server_ignores_penalties", address=self._address, version=self._version)
        return replace(offered, penalties=False)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SequenceStep, None]:
        answer = Answer(request, self._eos_ids, self._pool.vocabulary_size)
        call = self._stub.Generate(generate_request(request, self._id_of(request.id), self._eos_ids))
        try:
            async for response in call:
                step = answer.read(response)
                if step is None:
                    continue
                if step.finish is not None and not response.HasField("complete"):
                    await self.stop(request.id)
                yield step
        except grpc.aio.AioRpcError as error:
            raise await self._meaning_of(error) from None
        except RemoteRefusal:
            await self.stop(request.id)
            raise
        finally:
            call.cancel()  # of one that has ended: nothing

    async def stop(self, request_id: int) -> None:
        """By Abort: a cancelled call that was just being written to does not reach the server's code that aborts."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub.Abort(pb.AbortRequest(request_id=self._id_of(request_id)), timeout=ABORT_TIMEOUT_S)

    def _id_of(self, request_id: int) -> str:
        return f"{self._space}-{request_id}"

    async def lost(self) -> str:
        while True:
            await asyncio.sleep(self._health_interval_s)
            if trouble := await self._trouble():
                return trouble

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    # --- health --------------------------------------------------------------------------------------

    async def _healthy(self) -> None:
        """Returns once the server says that it is well. Raises AioRpcError where no server of this kind answers."""
        while True:
            try:
                health = await self._stub.HealthCheck(pb.HealthCheckRequest(), wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                self.trouble = "the connection broke"
            else:
                if health.status == "OK":
                    return
                self.trouble = "it says that it is not well"
            await asyncio.sleep(LOADING_LOOK_S)

    async def _trouble(self) -> str:
        """Why the server is taken for gone; empty if it is not."""
        try:
            health = await self._stub.HealthCheck(pb.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return f"{self.name} does not answer ({error.code().name})"
        if health.status == "OK":
            return ""
        log.warning("trtllm_server_unwell", address=self._address, status=health.status)
        return f"{self.name} says that it is not well"

    async def _meaning_of(self, error: grpc.aio.AioRpcError) -> RemoteGone | RemoteRefusal:
        """Its words may be of any kind and stay in our log."""
        code = error.code()
        if code in _STOPPED:
            return RemoteGone(f"{self.name} is gone ({code.name})")
        log.warning("trtllm_request_failed", address=self._address, code=code.name, details=error.details())
        if code in _FAILED and (trouble := await self._trouble()):
            return RemoteGone(trouble)
        return RemoteRefusal(_WORDS.get(code, f"the server failed on this request ({code.name})"))


def make_trtllm_grpc(pool: Pool, options: EngineOptions) -> RemoteEngine:
    """Raises ConfigError."""
    if not options.address or "://" in options.address:
        raise ConfigError(
            f"pool {pool.name}: engine_options.address is {options.address!r}; the trtllm_grpc engine needs the "
            "host:port of a trtllm-serve --grpc"
        )
    capacity = EngineCapacity(pool.slots, pool.kv_tokens, pool.context_length, pool.vocabulary_size)
    eos_ids = load_tokenizer(pool.tokenizer).eos_ids
    server = TrtllmServer(options.address, capacity, eos_ids, options.health_interval_s)
    return RemoteEngine(server, capabilities_of("trtllm_grpc"), options.start_timeout_s)
