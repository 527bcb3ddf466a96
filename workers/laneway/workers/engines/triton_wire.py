"""What goes to a Triton server with TensorRT-LLM's models and comes back, tensor by tensor, in three dialects.

- `llmapi`: the model on TensorRT-LLM's LLM API. Text in; text of the whole answer so far out, and why it ended.
- `bls`: the classic `ensemble` or `tensorrt_llm_bls`. Text in and out, log probabilities; it does not say why it ended.
- `ids`: the classic inner model, `tensorrt_llm`. Token ids in and out, log probabilities.

Pure: no connection. What the server really does was read in its sources; docs/engines.md says where.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import numpy
from msgspec import Struct
from numpy.typing import NDArray

from laneway.core.lanes import FinishReason
from laneway.runtime.tokenizer import Tokenizer
from laneway.workers.engines.logprob_spread import LogprobSpread
from laneway.workers.engines.prompt_text import NotText, prompt_text
from laneway.workers.engines.protocol import EngineRequest, EngineStartError, SequenceStep
from laneway.workers.engines.remote import RemoteRefusal
from laneway.workers.engines.text_ids import NotSpelled, Spelling, TextIds

LLMAPI, BLS, IDS = "llmapi", "bls", "ids"
NO_END_ID = -1  # TensorRT-LLM's "ends at no token"
UNFINISHED = "\ufffd"  # what a detokeniser makes of the first bytes of a character, until it has the rest

_ENDS = {
    "stop": (FinishReason.STOP, ""),
    "length": (FinishReason.LENGTH, ""),
    "cancelled": (FinishReason.ERROR, "the request was aborted at the server by somebody else"),
    "timeout": (FinishReason.ERROR, "the server's own time limit ended the answer"),
}

Tensors = dict[str, NDArray[Any]]
Outputs = Callable[[str], NDArray[Any] | None]  # a tensor by its name; None: the response has none


class Served(Struct, frozen=True):
    """A model as its server describes it."""

    dialect: str
    batched: bool  # each tensor has a first dimension for the requests of a batch
    stoppable: bool  # takes a request that stops another
    accumulates: bool  # its text is that of the whole answer so far
    priority_levels: int = 0  # 1 is the first served; 0: it orders nothing


def served_of(
    inputs: Collection[str],
    outputs: Collection[str],
    parameters: Mapping[str, str],
    *,
    wanted: str = "",
    max_batch_size: int = 0,
    priority_levels: int = 0,
    decoupled: bool = True,
) -> Served:
    """From the model's configuration. Raises EngineStartError where it is none that we can speak to."""
    found = _dialect_of(inputs, outputs)
    if not found:
        raise EngineStartError(
            "the model's tensors are not those of TensorRT-LLM: set served_model to tensorrt_llm, tensorrt_llm_bls or "
            "ensemble, or to what they are called on this server"
        )
    if wanted and wanted != found:
        raise EngineStartError(f'the model speaks {found}; engine_options have dialect = "{wanted}"')
    if not decoupled:
        raise EngineStartError("the model does not stream: set decoupled in its configuration")
    return Served(
        dialect=found,
        batched=max_batch_size > 0,
        stoppable="stop" in inputs,
        accumulates=found == LLMAPI or parameters.get("accumulate_tokens", "").lower() in ("true", "yes", "1", "t"),
        priority_levels=priority_levels,
    )


def _dialect_of(inputs: Collection[str], outputs: Collection[str]) -> str:
    if "input_ids" in inputs and "output_ids" in outputs:
        return IDS
    if "text_input" not in inputs or "text_output" not in outputs:
        return ""
    if "sampling_param_max_tokens" in inputs:
        return LLMAPI
    return BLS if "max_tokens" in inputs else ""


def priority_level(priority: float, levels: int) -> int:
    """Triton's level for 0 .. 1, higher first; 0 where the model has none."""
    return 1 + round((1.0 - priority) * (levels - 1)) if levels > 0 else 0


def end_ids_of(request: EngineRequest, eos_ids: frozenset[int]) -> frozenset[int]:
    """The ids that end an answer and are not among those given out."""
    return frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else eos_ids)


# --- what goes out ---------------------------------------------------------------------------------------


def request_tensors(request: EngineRequest, served: Served, tokenizer: Tokenizer) -> Tensors:
    """Raises RemoteRefusal where the prompt cannot be said in text."""
    if served.dialect == IDS:
        named = _ids_tensors(request, tokenizer.eos_ids)
    else:
        try:
            text = prompt_text(request.prompt_ids, tokenizer)
        except NotText as error:
            raise RemoteRefusal(str(error)) from None
        named = _llmapi_tensors(request, text) if served.dialect == LLMAPI else _bls_tensors(request, text)
    return {name: value[numpy.newaxis] if served.batched else value for name, value in named.items()}


def stop_tensors(served: Served) -> Tensors:
    """Of the request that stops the one with its id. What it must have besides means nothing."""
    if served.dialect == IDS:
        named = {"input_ids": _int([0]), "input_lengths": _int([1]), "request_output_len": _int([0])}
    else:
        named = {"text_input": _text("")}
    named["stop"] = _flag()
    return {name: value[numpy.newaxis] if served.batched else value for name, value in named.items()}


def _llmapi_tensors(request: EngineRequest, text: str) -> Tensors:
    return {
        "text_input": _text(text),
        "streaming": _flag(),
        "sampling_param_exclude_input_from_output": _flag(),
        "return_finish_reason": _flag(),
        "sampling_param_max_tokens": _int([request.max_tokens]),
        **_sampling(request, "sampling_param_top_k", "sampling_param_top_p", "sampling_param_temperature"),
    }


def _bls_tensors(request: EngineRequest, text: str) -> Tensors:
    return {
        "text_input": _text(text),
        "stream": _flag(),
        "exclude_input_in_output": _flag(),
        "return_log_probs": _flag(),  # whether they are wanted or not: they say how many tokens there were
        "max_tokens": _int([request.max_tokens]),
        **_sampling(request, "top_k", "top_p", "temperature"),
        **_classic_sampling(request),
    }


def _ids_tensors(request: EngineRequest, eos_ids: frozenset[int]) -> Tensors:
    eos = frozenset() if request.ignore_eos else eos_ids
    stops = sorted(end_ids_of(request, eos_ids))
    tensors = {
        "input_ids": _int(request.prompt_ids),
        "input_lengths": _int([len(request.prompt_ids)]),
        "request_output_len": _int([request.max_tokens]),
        "streaming": _flag(),
        "exclude_input_in_output": _flag(),
        "end_id": _int([min(eos, default=NO_END_ID)]),
        **_sampling(request, "runtime_top_k", "runtime_top_p", "temperature"),
        **_classic_sampling(request),
    }
    if stops:  # words of one id each, and where each ends
        tensors["stop_words_list"] = _int([stops, range(1, len(stops) + 1)])
    if request.logprobs:
        tensors["return_log_probs"] = _flag()
    return tensors


def _sampling(request: EngineRequest, top_k: str, top_p: str, temperature: str) -> Tensors:
    if request.temperature <= 0.0:
        return {top_k: _int([1])}
    tensors = {temperature: _float(request.temperature)}
    if request.top_k is not None:
        tensors[top_k] = _int([request.top_k])
    if request.top_p is not None:
        tensors[top_p] = _float(request.top_p)
    return tensors


def _classic_sampling(request: EngineRequest) -> Tensors:
    tensors: Tensors = {}
    if request.seed is not None:
        tensors["seed"] = numpy.array([request.seed % 2**64], dtype=numpy.uint64)
    if request.min_tokens:
        tensors["min_tokens"] = _int([request.min_tokens])
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        value = getattr(request, name)
        if value is not None:
            tensors[name] = _float(value)
    return tensors


def _text(text: str) -> NDArray[Any]:
    return numpy.array([text.encode()], dtype=numpy.object_)


def _flag() -> NDArray[Any]:
    return numpy.array([True])


def _int(values: Any) -> NDArray[Any]:
    return numpy.array(values, dtype=numpy.int32)


def _float(value: float) -> NDArray[Any]:
    return numpy.array([value], dtype=numpy.float32)


# --- what comes back -------------------------------------------------------------------------------------


class Answer(Protocol):
    """Reads the responses to one request, in their order."""

    def read(self, outputs: Outputs) -> SequenceStep | None:
        """None where it says nothing; nothing more is read after a finish. Raises RemoteRefusal."""
        ...

    def end(self) -> SequenceStep:
        """The stream has ended: what was held back, and why it ended. Raises RemoteRefusal."""
        ...


def answer_of(request: EngineRequest, served: Served, tokenizer: Tokenizer, spelling: Spelling) -> Answer:
    if served.dialect == IDS:
        return IdsAnswer(request, tokenizer)
    return TextAnswer(request, served, tokenizer, spelling)


class IdsAnswer:
    """New ids in each response."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._ends = end_ids_of(request, tokenizer.eos_ids)
        self._vocabulary_size = tokenizer.vocabulary_size
        self._received = 0  # tokens, an end token among them

    def read(self, outputs: Outputs) -> SequenceStep | None:
        told = outputs("output_ids")
        ids = [] if told is None else [int(i) for i in told.ravel() if i >= 0]  # -1 fills up
        if not ids:
            return None
        if max(ids) >= self._vocabulary_size:
            raise RemoteRefusal(f"the server gave a token outside the vocabulary of {self._vocabulary_size}")
        self._received += len(ids)
        end = next((i for i, token_id in enumerate(ids) if token_id in self._ends), None)
        step = SequenceStep(self._request.id, ids[:end])
        if self._request.logprobs:
            logprobs = _floats(outputs("output_log_probs"))[-len(ids) :]  # of the whole answer so far, or of these
            if len(logprobs) != len(ids):
                raise RemoteRefusal(f"the server gave {len(logprobs)} log probabilities for {len(ids)} tokens")
            step.logprobs = logprobs[:end]
        if end is not None:
            step.finish = FinishReason.STOP
        elif self._received >= self._request.max_tokens:
            step.finish = FinishReason.LENGTH
        return step if step.token_ids or step.finish is not None else None

    def end(self) -> SequenceStep:
        """It says nothing of why: an answer that is shorter than asked for ended by itself."""
        return SequenceStep(self._request.id, [], finish=FinishReason.STOP)


class TextAnswer:
    """Text in each response, of which ids are made; log probabilities are laid onto them where its tokens began."""

    def __init__(self, request: EngineRequest, served: Served, tokenizer: Tokenizer, spelling: Spelling) -> None:
        self._request = request
        self._served = served
        self._tokenizer = tokenizer
        self._ends = end_ids_of(request, tokenizer.eos_ids)
        self._ids = TextIds(spelling)
        self._text = ""  # read so far, but for what is held
        self._held = ""  # of a character that is not whole
        self._given = 0  # ids
        self._logprobs: list[float] = []  # of the server's tokens
        self._spread = LogprobSpread() if request.logprobs else None
        self._reason = ""

    def read(self, outputs: Outputs) -> SequenceStep | None:
        self._reason = _word(outputs("finish_reason")) or self._reason
        self._read_logprobs(_floats(outputs("output_log_probs")))
        text = _word(outputs("text_output"))
        step = self._step(self._spelled(self._new(text)))
        return step if step.token_ids or step.finish is not None else None

    def end(self) -> SequenceStep:
        rest, self._held = self._held, ""
        ids = self._spelled(rest)
        try:
            step = self._step(ids + self._ids.end())
        except NotSpelled as error:
            raise _unspelled(error) from None
        if step.finish is None:
            step.finish, step.message = self._finish()
        return step

    def _new(self, text: str) -> str:
        """The new text of a response, without a character that is not whole."""
        if not self._served.accumulates:
            return text
        whole = text.rstrip(UNFINISHED)
        self._held = text[len(whole) :]
        if not whole.startswith(self._text):
            raise RemoteRefusal("the server changed text that it had given")
        new, self._text = whole[len(self._text) :], whole
        return new

    def _read_logprobs(self, told: list[float]) -> None:
        """Of the whole answer so far, as the classic model gives them, or of the new tokens only."""
        new = told[len(self._logprobs) :] if told[: len(self._logprobs)] == self._logprobs else told
        self._logprobs += new
        if self._spread is not None:
            self._spread.begin(new)

    def _spelled(self, text: str) -> list[int]:
        if self._spread is not None:
            self._spread.lengthen(len(text.encode()))
        try:
            return self._ids.feed(text)
        except NotSpelled as error:
            raise _unspelled(error) from None

    def _step(self, ids: list[int]) -> SequenceStep:
        """These ids, up to where the answer ends."""
        ids = ids[: self._request.max_tokens - self._given]
        end = next((i for i, token_id in enumerate(ids) if token_id in self._ends), None)
        ids = ids[:end]
        self._given += len(ids)
        step = SequenceStep(self._request.id, ids)
        if self._spread is not None:
            step.logprobs = [self._spread.take(len(self._tokenizer.token_bytes(i))) for i in ids]
        if end is not None:
            step.finish = FinishReason.STOP
        elif self._given >= self._request.max_tokens:
            step.finish = FinishReason.LENGTH
        return step

    def _finish(self) -> tuple[FinishReason, str]:
        if self._served.dialect == BLS:
            # It does not say: an answer of fewer tokens than asked for ended by itself.
            return (FinishReason.LENGTH if len(self._logprobs) >= self._request.max_tokens else FinishReason.STOP), ""
        return _ENDS.get(self._reason, (FinishReason.ERROR, "the server ended the answer and did not say why"))


def _unspelled(error: NotSpelled) -> RemoteRefusal:
    return RemoteRefusal(f"the server gave the character {error}, for which the pool's tokenizer has no tokens")


def _word(tensor: NDArray[Any] | None) -> str:
    """The first text of a tensor; empty if there is none."""
    if tensor is None or not tensor.size:
        return ""
    value = tensor.ravel()[0]
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _floats(tensor: NDArray[Any] | None) -> list[float]:
    """Log probabilities; a rounding error above 0 is 0."""
    return [] if tensor is None else [min(0.0, float(value)) for value in tensor.ravel()]
