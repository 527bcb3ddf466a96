"""What goes to a `trtllm-serve --grpc` server and comes back, message by message, by the proto of `smg-grpc-proto`.

Pure: no connection. What the server really does with the fields was read in its sources; docs/engines.md says where.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smg_grpc_proto import trtllm_service_pb2 as pb

from laneway.core.lanes import FinishReason
from laneway.workers.engines.protocol import EngineCapacity, EngineRequest, EngineStartError, SequenceStep
from laneway.workers.engines.remote import RemoteRefusal
from laneway.workers.engines.trtllm_answers import end_ids_of, finish_of


def generate_request(request: EngineRequest, request_id: str, eos_ids: frozenset[int]) -> pb.GenerateRequest:
    """The ends of an answer that the pool's tokenizer knows go along as stop tokens: a server knows one of its own."""
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_token_ids=request.prompt_ids),
        sampling_config=_sampling_config(request),
        # Of the chosen token alone: releases before the present sampler take 0 for none.
        output_config=pb.OutputConfig(
            logprobs=max(1, request.top_logprobs) if request.logprobs else None, exclude_input_from_output=True
        ),
        max_tokens=request.max_tokens,
        streaming=True,
        stop_token_ids=sorted(end_ids_of(request, eos_ids)),
        ignore_eos=request.ignore_eos,
    )


def _sampling_config(request: EngineRequest) -> pb.SamplingConfig:
    config = pb.SamplingConfig(
        beam_width=1,
        num_return_sequences=1,
        min_tokens=request.min_tokens or None,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
    )
    config.temperature = request.temperature
    if request.temperature <= 0.0:
        config.top_k = 1  # greedy by temperature alone is known to newer servers only
        return config
    for name in ("top_p", "top_k", "min_p"):
        value = getattr(request, name)
        if value is not None:
            setattr(config, name, value)
    return config


class Answer:
    """Reads the responses to one request: deltas while it streams, then all of it once more with its finish."""

    def __init__(self, request: EngineRequest, eos_ids: frozenset[int], vocabulary_size: int) -> None:
        self._request = request
        self._ends = end_ids_of(request, eos_ids)
        self._vocabulary_size = vocabulary_size
        self._received = 0  # tokens, an end token among them

    def read(self, response: pb.GenerateResponse) -> SequenceStep | None:
        """None where it says nothing. Raises RemoteRefusal where it makes no sense."""
        kind = response.WhichOneof("response")
        if kind == "chunk":
            chunk = response.chunk
            step = self._delta(chunk.token_ids, chunk.logprobs, chunk.cached_tokens)
            return step if step.token_ids or step.finish is not None else None
        if kind == "complete":
            complete = response.complete
            step = self._delta(
                complete.output_token_ids[self._received :],
                complete.logprobs[self._received :],
                complete.cached_tokens,
            )
            if step.finish is None:
                step.finish, step.message = finish_of(complete.finish_reason, self._received, self._request.max_tokens)
            return step
        return None  # of a newer server

    def _delta(self, token_ids: Iterable[int], logprobs: Sequence[pb.TokenLogprob], cached_tokens: int) -> SequenceStep:
        """The new ids up to the end of the answer, where an end token is among them."""
        ids = list(token_ids)
        if ids and max(ids) >= self._vocabulary_size:
            raise RemoteRefusal(f"the server gave a token outside the vocabulary of {self._vocabulary_size}")
        first, self._received = not self._received, self._received + len(ids)
        if self._request.logprobs:
            _check_logprobs(ids, logprobs)
        end = next((i for i, token_id in enumerate(ids) if token_id in self._ends), None)
        step = SequenceStep(self._request.id, ids[:end], cached_tokens=cached_tokens if first else 0)
        if self._request.logprobs:
            step.logprobs = [each.logprob for each in logprobs[: len(step.token_ids)]]
            if count := self._request.top_logprobs:
                step.top = [_likeliest(each, count) for each in logprobs[: len(step.token_ids)]]
        if end is not None:
            step.finish = FinishReason.STOP
        return step


def _check_logprobs(ids: list[int], logprobs: Sequence[pb.TokenLogprob]) -> None:
    if [each.token_id for each in logprobs] != ids:
        raise RemoteRefusal(f"the server gave {len(logprobs)} log probabilities for {len(ids)} tokens")
    for each in logprobs:
        # It sends 0 for a chosen token that is not among those it has figures of.
        if each.logprob == 0.0 and each.top_logprobs and all(t.token_id != each.token_id for t in each.top_logprobs):
            raise RemoteRefusal("the server gave no log probability of a chosen token")


def _likeliest(each: pb.TokenLogprob, count: int) -> list[tuple[int, float]]:
    """It sends the chosen token first, whatever its rank, and `count` others."""
    ranked = sorted(each.top_logprobs, key=lambda top: -top.logprob)
    return [(top.token_id, top.logprob) for top in ranked[:count]]


def capacity_of(pool: EngineCapacity, told: pb.GetModelInfoResponse) -> EngineCapacity:
    """The pool's figures where the server tells none. EngineStartError where the two cannot be true together."""
    # Without --max_seq_len a server tells the default of its max_input_len for both, whatever the model can do.
    limit = told.max_seq_len if told.max_seq_len != told.max_input_len else 0
    if 0 < limit < pool.context_length:
        raise EngineStartError(
            f"the server takes {limit} tokens of prompt and answer, the pool's context_length is "
            f"{pool.context_length}: set context_length = {limit}, or start it with a larger --max_seq_len"
        )
    if told.vocab_size > pool.vocabulary_size:  # it leaves out added tokens, so fewer are no contradiction
        raise EngineStartError(
            f"the server's model has {told.vocab_size} tokens, the pool's vocabulary_size is {pool.vocabulary_size}: "
            "set the tokenizer and the vocabulary_size of that model"
        )
    slots = min(pool.slots, told.max_batch_size) if told.max_batch_size > 0 else pool.slots
    return EngineCapacity(slots, pool.kv_tokens, pool.context_length, pool.vocabulary_size)
