"""A Python-backend model with the tensors of TensorRT-LLM's models for Triton, for tests of the adapter.

Three interfaces, as they were read in NVIDIA/TensorRT-LLM, triton_backend/all_models (docs/engines.md): `llmapi`,
`bls` and `ids` (the inner model `tensorrt_llm`). One thread computes; `execute` only hands over. A cancelled call is
noticed every `cancellation_check_period_ms`, as upstream does, and a stop request at once.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found] # pyright: ignore[reportMissingImports]

from tests.support.triton_models.cores import Asked, Core, Made, make_core

IDLE_S = 0.05


# As the classic model tells of its room, where a test sets the last of these.
TOLD = (
    ("nv_trt_llm_request_metrics", "request_type", "max", "told_requests"),
    ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "max", "told_blocks"),
    ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "tokens_per", "told_block_tokens"),
)


class Gauges:
    """On the server's metrics page. A family has to outlive its metrics."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, str], Any] = {}

    def set(self, name: str, value: float, labels: dict[str, str] | None = None) -> None:
        key = (name, str(labels))
        if key not in self._metrics:
            if name not in self._families:
                kind = pb_utils.MetricFamily.GAUGE
                self._families[name] = pb_utils.MetricFamily(name=name, description="of a test", kind=kind)
            self._metrics[key] = self._families[name].Metric(labels={"model": self._model, **(labels or {})})
        self._metrics[key].set(value)


@dataclass
class Live:
    """A request that is being answered."""

    request: Any
    sender: Any
    user_id: str
    asked: Asked
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._interface: Interface = INTERFACES[parameters["dialect"]](parameters)
        self._core = make_core(parameters)
        self._period_s = int(parameters["cancellation_check_period_ms"]) / 1000
        self._execute_s = float(parameters["execute_s"])
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._live: dict[int, Live] = {}
        self._numbers = 0
        self._gauges = Gauges(args["model_name"])
        for name, label, kind, parameter in TOLD:
            if parameter in parameters:
                self._gauges.set(name, float(parameters[parameter]), {label: kind})
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        self._gauges.set("laneway_test_executing", len(requests))
        time.sleep(self._execute_s)  # what comes meanwhile waits in Triton's own queue
        for request in requests:
            self._inbox.put(request)

    def finalize(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    # --- the one thread that computes -------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._compute()
        except BaseException:  # noqa: BLE001 - nothing else would tell of a thread's end
            traceback.print_exc()
            os._exit(1)  # the server must not go on without it

    def _compute(self) -> None:
        looked_s = time.monotonic()
        while self._take_all():
            if time.monotonic() - looked_s >= self._period_s:
                looked_s = time.monotonic()
                self._drop_cancelled()
            if self._live:
                for made in self._core.step():
                    self._answer(made)

    def _take_all(self) -> bool:
        """Takes what has come, and waits for it if there is nothing else to do; False at the end."""
        wait = not self._live
        while True:
            try:
                request = self._inbox.get(timeout=IDLE_S) if wait else self._inbox.get_nowait()
            except queue.Empty:
                return True
            if request is None:
                return False
            wait = False
            self._take(request)
            self._gauges.set("laneway_test_live", len(self._live))

    def _take(self, request: Any) -> None:
        sender = request.get_response_sender()
        if scalar(request, "stop"):
            self._stop(request.request_id())
            cancelled = pb_utils.TritonError("Request cancelled by client", pb_utils.TritonError.CANCELLED)
            finish(sender, pb_utils.InferenceResponse(error=cancelled))
            return
        try:
            asked = self._interface.asked(request, self._core)
            if not asked.prompt_ids or asked.max_tokens < 1:
                raise ValueError("nothing to do")
            self._gauges.set("laneway_test_timeout_us", request.timeout())
            self._numbers += 1
            self._core.add(self._numbers, asked)
        except Exception as error:  # noqa: BLE001 - as upstream does: whatever it is, this request fails
            text = f"Error generating request: {error!r} in /opt/model.py"
            finish(sender, pb_utils.InferenceResponse(error=pb_utils.TritonError(text)))
            return
        self._live[self._numbers] = Live(request, sender, request.request_id(), asked)

    def _stop(self, user_id: str) -> None:
        for number, live in list(self._live.items()):
            if live.user_id == user_id:
                self._end(number, live)

    def _drop_cancelled(self) -> None:
        for number, live in list(self._live.items()):
            if live.request.is_cancelled():
                self._end(number, live)

    def _end(self, number: int, live: Live) -> None:
        self._core.cancel(number)
        del self._live[number]
        self._gauges.set("laneway_test_live", len(self._live))
        finish(live.sender, None)

    def _answer(self, made: Made) -> None:
        live = self._live[made.number]
        live.ids += made.ids
        live.logprobs += made.logprobs
        response = pb_utils.InferenceResponse(output_tensors=self._interface.tensors(live, made, self._core))
        if made.finish:
            del self._live[made.number]
            self._gauges.set("laneway_test_live", len(self._live))
            finish(live.sender, response)
        else:
            live.sender.send(response)


class Interface:
    """The tensors of one dialect."""

    def __init__(self, parameters: dict[str, str]) -> None:
        self._accumulates = parameters.get("accumulate_tokens") == "true"

    def asked(self, request: Any, core: Core) -> Asked:
        raise NotImplementedError

    def tensors(self, live: Live, made: Made, core: Core) -> list[Any]:
        raise NotImplementedError


class LlmApi(Interface):
    """Text of the whole answer so far in each response, and why it ended."""

    def asked(self, request: Any, core: Core) -> Asked:
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        if text.ndim > 1:
            raise ValueError("text_input must have one dimension")
        if not scalar(request, "streaming") or not scalar(request, "sampling_param_exclude_input_from_output"):
            raise ValueError("the tests ask for neither")
        return Asked(
            core.encode(text[0].decode()),
            int(scalar(request, "sampling_param_max_tokens", 32)),
            **sampling(request, "sampling_param_"),
        )

    def tensors(self, live: Live, made: Made, core: Core) -> list[Any]:
        return [
            text_tensor("text_output", core.decode(live.ids)),
            text_tensor("finish_reason", made.finish or "None"),
        ]


class Bls(Interface):
    """Text, of the whole answer so far if tokens are accumulated; log probabilities of the whole answer so far."""

    def asked(self, request: Any, core: Core) -> Asked:
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        if not scalar(request, "stream") or not scalar(request, "exclude_input_in_output"):
            raise ValueError("the tests ask for neither")
        return Asked(
            core.encode(text.flatten()[0].decode()),
            int(scalar(request, "max_tokens")),
            logprobs=bool(scalar(request, "return_log_probs")),
            **sampling(request, ""),
        )

    def tensors(self, live: Live, made: Made, core: Core) -> list[Any]:
        ids = live.ids if self._accumulates else made.ids
        return [
            pb_utils.Tensor("text_output", np.array([[core.decode(ids).encode()]], dtype=np.object_)),
            *logprob_tensors(live),
        ]


class Ids(Interface):
    """New ids in each response; log probabilities of the whole answer so far."""

    def asked(self, request: Any, core: Core) -> Asked:
        ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy().flatten().tolist()
        if len(ids) != scalar(request, "input_lengths"):
            raise ValueError("input_lengths is another")
        if not scalar(request, "streaming"):
            raise ValueError("the tests ask for it")
        stops = pb_utils.get_input_tensor_by_name(request, "stop_words_list")
        return Asked(
            ids,
            int(scalar(request, "request_output_len")),
            end_id=int(scalar(request, "end_id", -1)),
            stop_ids=frozenset(stops.as_numpy()[0, 0].tolist()) if stops is not None else frozenset(),
            logprobs=bool(scalar(request, "return_log_probs")),
            **sampling(request, "", top="runtime_"),
        )

    def tensors(self, live: Live, made: Made, core: Core) -> list[Any]:
        return [
            pb_utils.Tensor("output_ids", np.array([[made.ids]], dtype=np.int32).reshape(1, 1, -1)),
            pb_utils.Tensor("sequence_length", np.array([[len(made.ids)]], dtype=np.int32)),
            *logprob_tensors(live),
        ]


INTERFACES: dict[str, type[Interface]] = {"llmapi": LlmApi, "bls": Bls, "ids": Ids}


def scalar(request: Any, name: str, default: Any = None) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().flatten()[0].item()


def sampling(request: Any, prefix: str, top: str = "") -> dict[str, Any]:
    names = ("temperature", "seed", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty")
    found = {name: scalar(request, prefix + name) for name in names}
    found |= {name: scalar(request, prefix + top + name) for name in ("top_k", "top_p")}
    return {name: value for name, value in found.items() if value is not None}


def text_tensor(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))


def logprob_tensors(live: Live) -> list[Any]:
    if not live.asked.logprobs:
        return []
    values = np.array([[live.logprobs]], dtype=np.float32).reshape(1, 1, -1)
    return [
        pb_utils.Tensor("output_log_probs", values),
        pb_utils.Tensor("cum_log_probs", values.sum(axis=-1, dtype=np.float32)),
    ]


def finish(sender: Any, response: Any) -> None:
    """The last word of an answer; None: nothing more to say."""
    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    if response is None:
        sender.send(flags=final)
    else:
        sender.send(response, flags=final)
