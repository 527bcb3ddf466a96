"""TensorRT-LLM in the engine's own process: `tensorrt_llm.LLM` (PyTorch backend), token ids in and out.

Owns the LLM and the outputs of live requests. It is never asked of in the worker's process: `async_host.py` runs it.

What its iterations were is read all the time, whether anything runs or not: nothing else empties their queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import structlog
from msgspec.structs import replace

from laneway.core.catalogue import Capabilities
from laneway.core.errors import ConfigError
from laneway.core.lanes import FinishReason
from laneway.workers.engines.iterations import Iteration, Iterations
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStartError, SequenceStep
from laneway.workers.engines.registry import EngineSpec
from laneway.workers.engines.remote import RemoteEngine, RemoteGone, RemoteRefusal
from laneway.workers.engines.trtllm_llm import Answer, Library, iterations_of, kv_told
from laneway.workers.engines.trtllm_settings import LlmFile, load_llm_file

STATS_EVERY_S = 0.005  # less than an iteration of any GPU, so that each is told of by itself
STATS_WAIT_S = 0.001  # in which get_stats looks for one more
WARM_TOKENS = 3

log = structlog.get_logger(__name__)


class InProcessLlm:
    """A RemoteServer that is no server. `on_iterations` hears of them as they are read."""

    name = "TensorRT-LLM"
    trouble = "it loads its model"

    def __init__(self, spec: EngineSpec, file: LlmFile) -> None:
        self._spec = spec
        self._file = file
        self._eos_ids = frozenset(spec.eos_ids)
        self._outputs: dict[int, Any] = {}  # of live requests
        self._begun = asyncio.Event()
        self._library: Library | None = None
        self._llm: Any = None
        self.on_iterations: Callable[[list[Iteration]], None] = lambda iterations: None

    async def open(self) -> EngineCapacity:
        """Blocks: there is nothing else to do, and the library expects to be made by the main thread."""
        self._library = library = Library()
        capacity, options = self._spec.capacity, self._spec.options
        log.info("trtllm_found", version=library.version, priority=library.has_priority, salts=library.has_cache_salt)
        try:
            self._llm = library.make_llm(self._file, capacity, options)
        except ConfigError:
            raise
        except Exception as error:
            raise EngineStartError(
                f"TensorRT-LLM {library.version} did not start with this llm_file: its own words are in the log"
            ) from error
        told = await self._warm_up()
        kv_tokens, block_tokens = kv_told(self._llm, told)
        if 0 < kv_tokens < capacity.kv_tokens:
            log.warning("trtllm_kv_is_less", kv_tokens=kv_tokens, pool_kv_tokens=capacity.kv_tokens)
        return replace(
            capacity,
            kv_tokens=min(capacity.kv_tokens, kv_tokens or capacity.kv_tokens),
            block_tokens=block_tokens or capacity.block_tokens,
            paged=self._file.capacity == "page",
        )

    def able(self, offered: Capabilities) -> Capabilities:
        assert self._library is not None
        return self._library.able(offered)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SequenceStep, None]:
        assert self._library is not None
        library, answer = self._library, Answer(request, self._eos_ids, self._spec.capacity.vocabulary_size)
        try:
            output = self._llm.generate_async(
                list(request.prompt_ids),
                library.sampling_params(request, self._eos_ids),
                **library.generate_arguments(request, self._spec.options.adapter_folders),
            )
            self._outputs[request.id] = output
            self._begun.set()
            async for _ in output:
                step = answer.read(output)
                if step is None:
                    continue
                if step.finish is not None and not output.finished:
                    output.abort()
                yield step
        except RemoteRefusal:
            await self.stop(request.id)
            raise
        except Exception as error:
            log.warning("trtllm_request_failed", error=repr(error))
            if library.is_refusal(error):
                raise RemoteRefusal("TensorRT-LLM failed on this request") from error
            raise RemoteGone(f"TensorRT-LLM failed ({type(error).__name__})") from error
        finally:
            self._outputs.pop(request.id, None)

    async def stop(self, request_id: int) -> None:
        """Nothing is awaited of it: where the request still waits in its queue, some versions end it without a word."""
        output = self._outputs.get(request_id)
        if output is not None:
            output.abort()

    async def lost(self) -> str:
        """Reads its iterations as well, until it is lost."""
        while True:
            idle = not self._outputs
            try:
                told = await asyncio.to_thread(self._read_stats)
            except Exception as error:  # noqa: BLE001 - whatever it is, without it nobody empties their queue
                log.warning("trtllm_statistics_not_read", error=repr(error))
                return f"TensorRT-LLM tells nothing more of itself ({type(error).__name__})"
            if told:
                self.on_iterations(iterations_of(told))
            if trouble := self._unwell():
                return trouble
            if idle and not self._outputs:
                await self._something_begins()
            await asyncio.sleep(STATS_EVERY_S)

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    # --- helpers -------------------------------------------------------------------------------------

    async def _warm_up(self) -> list[Any]:
        """The first requests pay for nothing that is made at first use; and some versions tell their KV only after
        one. What its iterations say."""
        request = EngineRequest(0, (0,), WARM_TOKENS, temperature=0.0, ignore_eos=True)
        try:
            async for step in self.generate(request):
                if step.finish is FinishReason.ERROR:
                    raise RemoteRefusal(step.message)
        except (RemoteRefusal, RemoteGone) as error:
            raise EngineStartError(f"a first request failed: {error}") from error
        return await asyncio.to_thread(self._read_stats)

    def _read_stats(self) -> list[Any]:
        """In a thread: it waits for more, in some versions for an answer of another process."""
        llm = self._llm
        if llm is None:
            return []
        # Old versions read nothing more once they found nothing, until the next request; this is what that calls.
        results: Any = getattr(getattr(llm, "_executor", None), "_iter_stats_result", None)
        if hasattr(results, "mark_undone"):
            results.mark_undone()
        return list(llm.get_stats(timeout=STATS_WAIT_S))

    def _unwell(self) -> str:
        """New versions say whether they are well; of others, a failed request does."""
        check = getattr(self._llm, "_check_health", None)
        return "" if check is None or check() else "TensorRT-LLM says that it is not well"

    async def _something_begins(self) -> None:
        self._begun.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._spec.options.health_interval_s):
                await self._begun.wait()


def make_trtllm(spec: EngineSpec) -> RemoteEngine:
    """Called in the engine's own process, on its event loop. Raises ConfigError."""
    llm = InProcessLlm(spec, load_llm_file(spec.options.llm_file))
    engine = RemoteEngine(llm, spec.capabilities, spec.options.start_timeout_s, iterations=Iterations())
    llm.on_iterations = engine.hear_iterations
    return engine
