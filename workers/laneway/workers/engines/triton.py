"""TensorRT-LLM behind a Triton server: `tritonclient.grpc.aio`, one client, a stream for each request.

Owns the client, in plain text, and knows when the server at its end is no more: a call says so, or a look at it that is
taken all the time. Deadlines are the worker's, which aborts; the server is told of a limit all the same, for requests
whose abort does not reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import grpc.aio
import structlog
from msgspec.structs import replace
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from laneway.core.catalogue import Capabilities, Pool
from laneway.core.errors import ConfigError
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.grpc_channel import channel_options
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStartError, SequenceStep
from laneway.workers.engines.remote import RemoteEngine, RemoteGone, RemoteRefusal
from laneway.workers.engines.text_ids import Spelling
from laneway.workers.engines.triton_capacity import Told, Waits, capacity_of, told_by
from laneway.workers.engines.triton_wire import (
    BLS,
    Served,
    Tensors,
    answer_of,
    priority_level,
    request_tensors,
    served_of,
    stop_tensors,
)

MESSAGE_BYTES = 32 * 1024 * 1024  # a text of a whole answer, and its log probabilities, in each response
STOP_TIMEOUT_S = 5.0
LOOK_TIMEOUT_S = 30.0
LOADING_LOOK_S = 0.5  # between two looks at a server that is not ready yet
# A model sends its responses one by one, and a busy machine spreads them: 49 deltas of 8 sequences came in 27 calls
# where 1 ms was waited for those of a step, in at most 16 with this.
GATHER_S = 0.005
WAIT_WARNING_S = 1.0  # in the server's own queue, where no lane orders

_STOPPED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # the connection broke; it shut down
_FAILED = (InferenceServerException, grpc.aio.AioRpcError)  # how the client tells of an error, unary and streaming

log = structlog.get_logger(__name__)


class TritonServer:
    """A RemoteServer over one client."""

    def __init__(self, pool: Pool, options: EngineOptions) -> None:
        self.name = f"the Triton server at {options.address}"
        self.trouble = "nothing answers there"
        self._pool = EngineCapacity(pool.slots, pool.kv_tokens, pool.context_length, pool.vocabulary_size)
        self._options = options
        self._tokenizer = load_tokenizer(pool.tokenizer)
        self._spelling = Spelling(self._tokenizer)
        self._space = uuid.uuid4().hex  # the server may have requests of others
        self._waits = Waits()
        self._wanted: dict[int, bool] = {}  # live requests, and whether anybody wants their answers
        self._client: Any = None
        self._served: Served

    async def open(self) -> EngineCapacity:
        # Here and not before: a channel belongs to the loop that it was made in.
        self._client = InferenceServerClient(self._options.address, channel_args=channel_options(MESSAGE_BYTES))
        while not await self._ready():  # noqa: ASYNC110 - it is elsewhere and sets no event
            await asyncio.sleep(LOADING_LOOK_S)
        model = self._options.served_model
        try:
            config = (await self._client.get_model_config(model)).config
        except InferenceServerException as error:
            raise EngineStartError(f"{self.name} does not describe its model ({_code(error)})") from None
        self._served = served = served_of(
            [each.name for each in config.input],
            [each.name for each in config.output],
            {name: value.string_value for name, value in config.parameters.items()},
            wanted=self._options.dialect,
            max_batch_size=config.max_batch_size,
            priority_levels=config.dynamic_batching.priority_levels,
            # An ensemble does not say: its steps do.
            decoupled=config.model_transaction_policy.decoupled or config.HasField("ensemble_scheduling"),
        )
        log.info("triton_model_found", address=self._options.address, model=model, dialect=served.dialect)
        if served.dialect == BLS and not served.accumulates:
            log.warning("triton_text_in_pieces", model=model, harm="characters of several tokens are lost there")
        return capacity_of(self._pool, await self._told())

    def able(self, offered: Capabilities) -> Capabilities:
        """All: `open` has refused another dialect than the settings name, and without one the least is offered."""
        return offered

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SequenceStep, None]:
        tensors = request_tensors(request, self._served, self._tokenizer)
        answer = answer_of(request, self._served, self._tokenizer, self._spelling)
        call = self._client.stream_infer(self._once(tensors, request))
        self._wanted[request.id] = True
        try:
            async for result, error in call:
                if error is not None:
                    raise error
                step = answer.read(result.as_numpy)
                if step is None:
                    continue
                yield step
                if step.finish is not None:
                    return
            if not self._wanted[request.id]:  # two dialects do not say why an answer ended: it did not by itself
                raise RemoteRefusal("the request was aborted")
            yield answer.end()
        except _FAILED as error:
            raise await self._meaning_of(error) from None
        finally:
            del self._wanted[request.id]
            call.cancel()  # of one that has ended: nothing

    async def stop(self, request_id: int) -> None:
        """By a stop request where the model takes one: it looks for cancelled calls every 100 ms only."""
        if request_id in self._wanted:
            self._wanted[request_id] = False
        if not self._served.stoppable:
            return
        call = self._client.stream_infer(self._once(stop_tensors(self._served), request_id), STOP_TIMEOUT_S)
        try:
            with contextlib.suppress(*_FAILED):
                async for _ in call:  # it answers with an error: cancelled
                    return
        finally:
            call.cancel()

    async def lost(self) -> str:
        while True:
            await asyncio.sleep(self._options.health_interval_s)
            if not await self._ready():
                return f"{self.name} is gone: {self.trouble}"
            await self._look_at_waits()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    # --- requests ------------------------------------------------------------------------------------

    async def _once(self, tensors: Tensors, request: EngineRequest | int) -> AsyncIterator[dict[str, Any]]:
        """One request for a stream: the server ends the stream after the answer to the last."""
        request_id, priority = (request, 1.0) if isinstance(request, int) else (request.id, request.priority)
        yield {
            "model_name": self._options.served_model,
            "inputs": [_input(name, value) for name, value in tensors.items()],
            "request_id": f"{self._space}-{request_id}",
            "priority": priority_level(priority, self._served.priority_levels),
            "timeout": round(self._options.server_timeout_s * 1e6),
        }

    async def _meaning_of(self, error: Exception) -> RemoteGone | RemoteRefusal:
        """Its words may be of any kind and stay in our log."""
        if isinstance(error, grpc.aio.AioRpcError) and error.code() in _STOPPED:
            return RemoteGone(f"{self.name} is gone ({error.code().name})")
        log.warning("triton_request_failed", address=self._options.address, error=repr(error))
        if not await self._ready():
            return RemoteGone(f"{self.name} is gone: {self.trouble}")
        return RemoteRefusal("the server refused the request, or failed on it")

    # --- the server ----------------------------------------------------------------------------------

    async def _ready(self) -> bool:
        """Whether the model can be asked; if not, `trouble` says why."""
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                ready = await self._client.is_model_ready(self._options.served_model)
        except TimeoutError:
            self.trouble = "it does not answer"
            return False
        except InferenceServerException as error:
            self.trouble = f"it does not answer ({_code(error)})"
            return False
        self.trouble = f'it has no model "{self._options.served_model}" that is ready'
        return bool(ready)

    async def _told(self) -> Told:
        """What its metrics say of its room."""
        address = self._options.metrics_address
        if not address:
            return Told()
        try:
            return told_by(await asyncio.to_thread(_page, f"http://{address}/metrics"), self._options.served_model)
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise EngineStartError(f"metrics_address {address} of {self.name} gave no metrics ({error})") from None

    async def _look_at_waits(self) -> None:
        with contextlib.suppress(InferenceServerException, TimeoutError):
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                statistics = await self._client.get_inference_statistics(self._options.served_model)
            queue = [each.inference_stats.queue for each in statistics.model_stats]
            mean_s = self._waits.mean_s(sum(each.count for each in queue), sum(each.ns for each in queue))
            if mean_s > WAIT_WARNING_S:
                log.warning("triton_requests_wait_inside", address=self._options.address, mean_s=round(mean_s, 3))


def make_triton(pool: Pool, options: EngineOptions) -> RemoteEngine:
    """Raises ConfigError."""
    if not options.address or "://" in options.address:
        raise ConfigError(
            f"pool {pool.name}: engine_options.address is {options.address!r}; the triton engine needs the host:port "
            "of a Triton server's gRPC"
        )
    if not options.served_model:
        raise ConfigError(
            f"pool {pool.name}: engine_options.served_model is empty; name the model on the Triton server, as "
            "tensorrt_llm"
        )
    offered = replace(capabilities_of("triton", options), exact=pool.capabilities.exact)
    return RemoteEngine(TritonServer(pool, options), offered, options.start_timeout_s, gather_s=GATHER_S)


def _input(name: str, value: Any) -> InferInput:
    tensor = InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
    tensor.set_data_from_numpy(value)
    return tensor


def _code(error: InferenceServerException) -> str:
    """gRPC's name for it."""
    return str(error.status()).rpartition(".")[2]


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=LOOK_TIMEOUT_S) as answer:
        text: str = answer.read().decode()
    return text
