"""A fake of `trtllm-serve --grpc`: the published proto, invented tokens, no TensorRT-LLM.

It does what upstream's servicer was read to do in NVIDIA/TensorRT-LLM, tensorrt_llm/grpc/smg/servicer.py (commit
543654b) and request_manager.py (3c68ae6): deltas while streaming and none without tokens, then one message with all of
it and its finish reason; a stop token is in neither; Abort ends a request, and so does a cancelled call, unless it was
being written to, which the handler does not notice; errors are INVALID_ARGUMENT for what makes no sense and INTERNAL
for the rest; HealthCheck tells "OK" or what is wrong. max_tokens beyond its context are cut without a word
(executor/base_worker.py). The tokens come from the simulated core, so each is a function of those before it. `script`
answers instead where a test wants something else of it.

As a program it serves until it is killed: python -m tests.support.trtllm_server <options as JSON>.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import msgspec
from smg_grpc_proto import trtllm_service_pb2 as pb
from smg_grpc_proto import trtllm_service_pb2_grpc as pb_grpc

from laneway.core.lanes import FinishReason
from laneway.runtime.catalogue import ENGINE_CAPABILITIES
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStats, SequenceStep
from laneway.workers.engines.simulated import make_core
from laneway.workers.engines.simulated_inline import InlineEngine

MIB = 1024 * 1024
SERVER_OPTIONS = [  # as upstream's server.py has them, the key that gRPC does not know among them
    ("grpc.max_send_message_length", 32 * MIB),
    ("grpc.max_receive_message_length", 32 * MIB),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", True),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
]
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "cancelled"}

Script = Callable[[pb.GenerateRequest, grpc.aio.ServicerContext], AsyncIterator[pb.GenerateResponse]]


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    slots: int = 16
    kv_tokens: int = 16_384
    context_length: int = 2048
    told_max_seq_len: int = 0  # as given on its command line; 0: not
    told_max_batch_size: int = 0  # upstream tells none
    vocabulary_size: int = 260
    version: str = "1.4.0rc4"
    pace_s: float = 0.002
    eos_mean_tokens: float = 0.0
    chunk_tokens: int = 64


class FakeTrtllmServer(pb_grpc.TrtllmServiceServicer):  # type: ignore[misc] # generated without types
    """Attributes may be changed while it serves."""

    def __init__(self, options: FakeOptions | None = None) -> None:
        self.options = options = options or FakeOptions()
        self.status = "OK"
        self.script: Script | None = None
        self.requests: list[pb.GenerateRequest] = []
        self.aborted: list[str] = []  # by Abort or a cancelled call, each once
        self.abort_calls: list[str] = []
        self.on_abort: Callable[[grpc.aio.ServicerContext], Awaitable[None]] | None = None  # before it is looked at
        self.stopped = False
        self.cancelled: list[str] = []  # calls, as far as it noticed
        self.leaked: list[str] = []  # calls that were cut while it wrote: computed to their end
        self.health_checks = 0
        self._streams: dict[str, asyncio.Queue[SequenceStep]] = {}
        self._numbers: dict[str, int] = {}
        self._abortable: set[str] = set()
        self._count = 0
        capacity = EngineCapacity(options.slots, options.kv_tokens, options.context_length, options.vocabulary_size)
        engine = EngineOptions(
            pace_s=options.pace_s,
            eos_mean_tokens=options.eos_mean_tokens,
            alphabet="unicode",
            prefill_chunk_tokens=options.chunk_tokens,
        )
        core = make_core(capacity, load_tokenizer("bytes").eos_ids, engine)
        self.engine = InlineEngine(core, ENGINE_CAPABILITIES["simulated"])
        self._server = grpc.aio.server(options=SERVER_OPTIONS)

    async def start(self, port: int = 0) -> str:
        """Its address."""
        await self.engine.start(self)
        pb_grpc.add_TrtllmServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        self.stopped = True
        await self._server.stop(None)
        await self.engine.close()

    @property
    def live(self) -> int:
        """Requests that it computes, by a recount."""
        stats = self.engine.stats()
        return stats.running + stats.queued

    # --- StepSink --------------------------------------------------------------------------------------

    def on_step(self, steps: Sequence[SequenceStep], stats: EngineStats) -> None:
        by_number = {number: request_id for request_id, number in self._numbers.items()}
        for step in steps:
            request_id = by_number.get(step.id)
            if request_id is not None and request_id in self._streams:
                self._streams[request_id].put_nowait(step)

    def on_closed(self, reason: str) -> None:
        raise AssertionError(reason)

    # --- TrtllmService ---------------------------------------------------------------------------------

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        if self.script is not None:
            async for response in self.script(request, context):
                yield response
            return
        if not request.HasField("tokenized"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Missing tokenized input")
        room = self.options.context_length - len(request.tokenized.input_token_ids)
        if room <= 0 or request.max_tokens < 1:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "`max_tokens` (0) must be greater than 0")
        self._count += 1
        number, steps = self._count, asyncio.Queue[SequenceStep]()
        self._numbers[request.request_id], self._streams[request.request_id] = number, steps
        self._abortable.add(request.request_id)
        self.engine.submit(_engine_request(number, request, room))
        try:
            async for response in self._answer(request, steps):
                yield response
            self._abortable.discard(request.request_id)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            self._abort(request.request_id)
            raise
        finally:
            self._streams.pop(request.request_id, None)
            self._numbers.pop(request.request_id, None)
            if request.request_id in self._abortable:
                self._abortable.discard(request.request_id)
                self.leaked.append(request.request_id)

    async def _answer(
        self, request: pb.GenerateRequest, steps: asyncio.Queue[SequenceStep]
    ) -> AsyncIterator[pb.GenerateResponse]:
        ids: list[int] = []
        logprobs: list[pb.TokenLogprob] = []
        told = {"prompt_tokens": len(request.tokenized.input_token_ids), "cached_tokens": 0}
        while True:
            step = await steps.get()
            new = _logprobs(step)
            ids += step.token_ids
            logprobs += new
            told["cached_tokens"] = told["cached_tokens"] or step.cached_tokens
            told["completion_tokens"] = len(ids)
            if step.token_ids and request.streaming:
                yield pb.GenerateResponse(
                    request_id=request.request_id,
                    chunk=pb.GenerateStreamChunk(token_ids=step.token_ids, logprobs=new, **told),
                )
            if step.finish is not None:
                yield pb.GenerateResponse(
                    request_id=request.request_id,
                    complete=pb.GenerateComplete(
                        output_token_ids=ids, logprobs=logprobs, finish_reason=_REASONS[step.finish], **told
                    ),
                )
                return

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        self.abort_calls.append(request.request_id)
        if self.on_abort is not None:
            await self.on_abort(context)
        return pb.AbortResponse(success=self._abort(request.request_id))

    def _abort(self, request_id: str) -> bool:
        if request_id not in self._abortable:
            return False
        self._abortable.discard(request_id)
        self.aborted.append(request_id)
        self.engine.abort(self._numbers[request_id])
        return True

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        self.health_checks += 1
        return pb.HealthCheckResponse(status=self.status)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """max_input_len has a default of 1024, and stands in for a max_seq_len that was not given."""
        return pb.GetModelInfoResponse(
            model_id="fake",
            max_input_len=1024,
            max_seq_len=self.options.told_max_seq_len or 1024,
            max_batch_size=self.options.told_max_batch_size,
            vocab_size=256,  # without added tokens
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(version=self.options.version, backend="tensorrt-llm", world_size=1)


def _engine_request(number: int, request: pb.GenerateRequest, room: int) -> EngineRequest:
    config, count = request.sampling_config, request.output_config.logprobs
    return EngineRequest(
        number,
        tuple(request.tokenized.input_token_ids),
        min(request.max_tokens, room),
        temperature=config.temperature,
        stop_token_ids=tuple(request.stop_token_ids),
        logprobs=count > 0,
        top_logprobs=count,
        min_tokens=config.min_tokens,
        ignore_eos=request.ignore_eos,
    )


def _logprobs(step: SequenceStep) -> list[pb.TokenLogprob]:
    return (
        [
            pb.TokenLogprob(
                token_id=token_id,
                logprob=logprob,
                top_logprobs=[pb.TopLogprob(token_id=each, logprob=value) for each, value in top],
            )
            for token_id, logprob, top in zip(step.token_ids, step.logprobs or (), step.top or (), strict=True)
        ]
        if step.logprobs is not None
        else []
    )


async def _serve(options: FakeOptions) -> None:
    server = FakeTrtllmServer(options)
    print(await server.start(), flush=True)
    await asyncio.Event().wait()


def main(arguments: list[str]) -> Any:
    asyncio.run(_serve(msgspec.json.decode(arguments[0], type=FakeOptions)))


if __name__ == "__main__":
    main(sys.argv[1:])
