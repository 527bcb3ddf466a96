"""What answers behind the tensors of `model.py`: bytes that are echoed, or the small real model.

Runs in the environment of the Triton server, with Python's standard library, numpy and OpenVINO GenAI, and is written
without the adapter that it is there to test.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Asked:
    """One request, whatever its tensors were called. `end_id` None: the model's own end; -1: none."""

    prompt_ids: list[int]
    max_tokens: int
    end_id: int | None = None
    stop_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_tokens: int = 0
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


@dataclass
class Made:
    """What a step gave to one request. `finish`: "stop" or "length", at the end."""

    number: int
    ids: list[int]
    logprobs: list[float]
    finish: str = ""


class Core(Protocol):
    """Computes step by step. All calls come from one thread; `encode` and `decode` from any."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def add(self, number: int, asked: Asked) -> None: ...

    def cancel(self, number: int) -> None: ...

    def step(self) -> list[Made]: ...


def make_core(parameters: Mapping[str, str]) -> Core:
    return Echo(parameters) if parameters["core"] == "echo" else SmolLM2(parameters)


class Echo:
    """Says the prompt over and over, a byte a step; a request that finds all slots taken waits for one."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self._slots = int(parameters["slots"])
        self._pace_s = float(parameters["pace_s"])
        self._asked: dict[int, Asked] = {}  # in the order in which they came
        self._given: dict[int, int] = {}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def add(self, number: int, asked: Asked) -> None:
        self._asked[number] = asked
        self._given[number] = 0

    def cancel(self, number: int) -> None:
        self._asked.pop(number, None)

    def step(self) -> list[Made]:
        time.sleep(self._pace_s)
        made = [self._next(number, self._asked[number]) for number in list(self._asked)[: self._slots]]
        for each in made:
            if each.finish:
                del self._asked[each.number]
        return made

    def _next(self, number: int, asked: Asked) -> Made:
        given = self._given[number]
        token_id = asked.prompt_ids[given % len(asked.prompt_ids)]
        self._given[number] = given + 1
        if (token_id in asked.stop_ids or token_id == asked.end_id) and given >= asked.min_tokens:
            return Made(number, [], [], "stop")
        # A figure that says which token of the answer it belongs to.
        return Made(number, [token_id], [-(given + 1) / 1024], "length" if given + 1 == asked.max_tokens else "")


class SmolLM2:
    """SmolLM2-135M on OpenVINO GenAI's continuous batching; what finds no slot waits here."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        import openvino_genai

        self._ov: Any = openvino_genai
        scheduler = self._ov.SchedulerConfig()
        scheduler.num_kv_blocks = -(-int(parameters["kv_tokens"]) // 32)
        scheduler.max_num_batched_tokens = max(128, int(parameters["slots"]))
        scheduler.max_num_seqs = int(parameters["slots"])
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties: dict[str, str | int] = {"INFERENCE_NUM_THREADS": int(parameters["threads"])}
        if parameters["exact"] == "true":
            properties |= {
                "INFERENCE_PRECISION_HINT": "f32",
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
                "KV_CACHE_PRECISION": "f32",
            }
        self._pipeline = self._ov.ContinuousBatchingPipeline(parameters["model_file"], scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._end_id: int = self._pipeline.get_config().eos_token_id
        self._slots = int(parameters["slots"])
        self._waiting: dict[int, Asked] = {}
        self._handles: dict[int, Any] = {}
        for length in (120, 40):  # the first steps build kernels
            self.add(0, Asked([self._end_id] * length, 2, end_id=-1))
            while self._waiting or self._handles:
                self.step()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).input_ids.data[0].tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids)) if ids else ""
        return text

    def add(self, number: int, asked: Asked) -> None:
        self._waiting[number] = asked

    def cancel(self, number: int) -> None:
        self._waiting.pop(number, None)
        handle = self._handles.pop(number, None)
        if handle is not None:
            handle.cancel()

    def step(self) -> list[Made]:
        for number in list(self._waiting)[: self._slots - len(self._handles)]:
            self._start(number, self._waiting.pop(number))
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        made = []
        for number, handle in list(self._handles.items()):
            each = self._read(number, handle)
            if each is not None:
                made.append(each)
                if each.finish:
                    del self._handles[number]
        return made

    def _start(self, number: int, asked: Asked) -> None:
        import numpy
        import openvino

        tensor = openvino.Tensor(numpy.array([asked.prompt_ids], dtype=numpy.int64))
        self._handles[number] = self._pipeline.add_request(number, tensor, self._config(asked))

    def _read(self, number: int, handle: Any) -> Made | None:
        made, stopped = Made(number, [], []), False
        while handle.can_read():
            for output in handle.read().values():
                made.ids += output.generated_ids
                made.logprobs += output.generated_log_probs
                stopped = output.finish_reason == self._ov.GenerationFinishReason.STOP
        status = handle.get_status()
        if status == self._ov.GenerationStatus.FINISHED:
            made.finish = "stop" if stopped else "length"
        elif status == self._ov.GenerationStatus.IGNORED:
            made.finish = "length"
        return made if made.ids or made.finish else None

    def _config(self, asked: Asked) -> Any:
        config = self._ov.GenerationConfig()
        config.max_new_tokens = asked.max_tokens
        config.min_new_tokens = min(asked.min_tokens, asked.max_tokens)
        end_id = self._end_id if asked.end_id is None else asked.end_id
        stops = set(asked.stop_ids) | ({end_id} if end_id >= 0 else set())
        if stops:
            config.stop_token_ids = stops
            config.eos_token_id = end_id if end_id >= 0 else min(stops)
        else:
            config.ignore_eos = True
        config.logprobs = 1 if asked.logprobs else 0
        config.do_sample = asked.temperature > 1e-3 and asked.top_k != 1
        if config.do_sample:
            config.temperature = asked.temperature
            config.top_p = 1.0 if asked.top_p is None else max(1e-6, asked.top_p)
            if asked.top_k:
                config.top_k = asked.top_k
            seed = random.getrandbits(32) if asked.seed is None else asked.seed
            config.rng_seed = (seed ^ seed >> 32) & 0xFFFF_FFFF
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(asked, name)
            if value is not None:
                setattr(config, name, value)
        return config
