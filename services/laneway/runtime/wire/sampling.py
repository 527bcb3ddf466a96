"""A caller's sampling and response format, checked. What means "off" becomes unset, and then needs no ability."""

from __future__ import annotations

import json
from collections.abc import Mapping

from msgspec import Struct, field

from laneway.core.job import Sampling
from laneway.runtime.wire import checks
from laneway.runtime.wire.needs import Need
from laneway.v1 import task_pb2

GREEDY_BELOW = 1e-3  # dividing logits by less overflows 16-bit floats
STOP_MAX = 16
STOP_BYTES_MAX = 256
STOP_TOKEN_IDS_MAX = 64
TOP_LOGPROBS_MAX = 20
LOGIT_BIAS_MAX = 1024
N_MAX = 16
FORMAT_BYTES_MAX = 65_536
JSON_OBJECT_SCHEMA = '{"type":"object"}'


class SamplingRequest(Struct, frozen=True):
    """What the caller chose; None where the pool's default applies."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    min_tokens: int | None = None
    ignore_eos: bool = False

    def resolved(self, max_tokens: int, temperature_default: float) -> Sampling:
        """With the room for the answer that was found, and the pool's default temperature."""
        if self.min_tokens is not None and self.min_tokens > max_tokens:
            checks.refuse("spec.generate.sampling.min_tokens", f"must be at most max_tokens, here {max_tokens}")
        temperature = temperature_default if self.temperature is None else self.temperature
        return Sampling(
            max_tokens=max_tokens,
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            n=self.n,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
        )


def parse_sampling(message: task_pb2.Sampling, field: str, needs: list[Need]) -> SamplingRequest:
    checks.no_unknown_fields(message, field)
    has = message.HasField
    temperature = _temperature(message, field)
    return SamplingRequest(
        max_tokens=_count(message.max_tokens, 1, f"{field}.max_tokens") if has("max_tokens") else None,
        temperature=temperature,
        top_p=_top_p(message.top_p, f"{field}.top_p") if has("top_p") else None,
        top_k=_top_k(message.top_k, f"{field}.top_k", needs) if has("top_k") else None,
        min_p=_min_p(message.min_p, f"{field}.min_p", needs) if has("min_p") else None,
        seed=_seed(message.seed, temperature, f"{field}.seed", needs) if has("seed") else None,
        stop=_stop(message, f"{field}.stop") if message.stop else (),
        stop_token_ids=_stop_token_ids(message, f"{field}.stop_token_ids"),
        logprobs=_flag(message.logprobs, "logprobs", f"{field}.logprobs", needs),
        top_logprobs=_top_logprobs(message, f"{field}.top_logprobs", needs) if has("top_logprobs") else None,
        repetition_penalty=_repetition(message, f"{field}.repetition_penalty", needs),
        presence_penalty=_penalty(message.presence_penalty, f"{field}.presence_penalty", needs),
        frequency_penalty=_penalty(message.frequency_penalty, f"{field}.frequency_penalty", needs),
        logit_bias=_logit_bias(message.logit_bias, f"{field}.logit_bias", needs) if message.logit_bias else {},
        n=_n(message.n, f"{field}.n", needs) if has("n") else 1,
        min_tokens=_min_tokens(message, f"{field}.min_tokens", needs) if has("min_tokens") else None,
        ignore_eos=_flag(message.ignore_eos, "ignore_eos", f"{field}.ignore_eos", needs),
    )


def _count(value: int, least: int, field: str) -> int:
    if value < least:
        checks.refuse(field, f"must be at least {least}")
    return value


def _flag(value: bool, ability: str, field: str, needs: list[Need]) -> bool:
    if value:
        needs.append(Need(ability, field))
    return value


def _temperature(message: task_pb2.Sampling, field: str) -> float | None:
    if not message.HasField("temperature"):
        return None
    value = checks.within(message.temperature, 0.0, 2.0, f"{field}.temperature")
    return 0.0 if value < GREEDY_BELOW else value


def _top_p(value: float, field: str) -> float | None:
    if not 0.0 < value <= 1.0:
        checks.refuse(field, "must be above 0 and at most 1")
    return value if value < 1.0 else None


def _top_k(value: int, field: str, needs: list[Need]) -> int:
    needs.append(Need("top_k", field))
    return _count(value, 1, field)


def _min_p(value: float, field: str, needs: list[Need]) -> float | None:
    if checks.within(value, 0.0, 1.0, field) == 0.0:
        return None
    needs.append(Need("min_p", field))
    return value


def _seed(value: int, temperature: float | None, field: str, needs: list[Need]) -> int:
    if temperature != 0.0:  # greedy answers do not depend on it
        needs.append(Need("seed", field))
    return value


def _stop(message: task_pb2.Sampling, field: str) -> tuple[str, ...]:
    checks.at_most(message.stop, STOP_MAX, field)
    return tuple(checks.filled(stop, f"{field}[{i}]", bytes_max=STOP_BYTES_MAX) for i, stop in enumerate(message.stop))


def _stop_token_ids(message: task_pb2.Sampling, field: str) -> tuple[int, ...]:
    checks.at_most(message.stop_token_ids, STOP_TOKEN_IDS_MAX, field)
    return tuple(message.stop_token_ids)


def _top_logprobs(message: task_pb2.Sampling, field: str, needs: list[Need]) -> int:
    if not 1 <= message.top_logprobs <= TOP_LOGPROBS_MAX:
        checks.refuse(field, f"must be 1 to {TOP_LOGPROBS_MAX}")
    if not message.logprobs:
        checks.refuse(field, "needs logprobs to be set as well")
    needs.append(Need("top_logprobs", field, message.top_logprobs))
    return message.top_logprobs


def _repetition(message: task_pb2.Sampling, field: str, needs: list[Need]) -> float | None:
    if not message.HasField("repetition_penalty"):
        return None
    value = message.repetition_penalty
    if not 0.0 < value <= 2.0:
        checks.refuse(field, "must be above 0 and at most 2")
    if value == 1.0:
        return None
    needs.append(Need("penalties", field))
    return value


def _penalty(value: float, field: str, needs: list[Need]) -> float | None:
    """Unset reads as 0, which is off."""
    if checks.within(value, -2.0, 2.0, field) == 0.0:
        return None
    needs.append(Need("penalties", field))
    return value


def _logit_bias(message: Mapping[int, float], field: str, needs: list[Need]) -> dict[int, float]:
    checks.at_most(message, LOGIT_BIAS_MAX, field)
    needs.append(Need("logit_bias", field))
    return {token_id: checks.within(bias, -100.0, 100.0, f"{field}[{token_id}]") for token_id, bias in message.items()}


def _n(value: int, field: str, needs: list[Need]) -> int:
    if not 1 <= value <= N_MAX:
        checks.refuse(field, f"must be 1 to {N_MAX}")
    needs.append(Need("n", field, value))
    return value


def _min_tokens(message: task_pb2.Sampling, field: str, needs: list[Need]) -> int | None:
    if message.min_tokens == 0:
        return None
    if message.HasField("max_tokens") and message.min_tokens > message.max_tokens:
        checks.refuse(field, f"must be at most max_tokens, here {message.max_tokens}")
    needs.append(Need("min_tokens", field))
    return message.min_tokens


# --- response format -------------------------------------------------------------------------------


class FormatRequest(Struct, frozen=True):
    json_object: bool = False
    json_schema: str = ""
    regex: str = ""
    grammar: str = ""


def parse_format(message: task_pb2.ResponseFormat, field: str, needs: list[Need]) -> FormatRequest:
    checks.no_unknown_fields(message, field)
    kind = message.WhichOneof("format")
    if kind is None:
        checks.refuse(field, "is empty: give json_object, json_schema, regex or grammar")
    if kind == "json_object":
        if not message.json_object:
            checks.refuse(f"{field}.json_object", "must be true where it is given")
        needs.append(Need("json_schema", f"{field}.json_object"))
        return FormatRequest(json_object=True)
    if kind == "json_schema":
        needs.append(Need("json_schema", f"{field}.json_schema"))
        return FormatRequest(json_schema=_json_schema(message.json_schema, f"{field}.json_schema"))
    if kind == "regex":
        needs.append(Need("regex", f"{field}.regex"))
        return FormatRequest(regex=checks.filled(message.regex, f"{field}.regex", bytes_max=FORMAT_BYTES_MAX))
    needs.append(Need("grammar", f"{field}.grammar"))
    return FormatRequest(grammar=checks.filled(message.grammar, f"{field}.grammar", bytes_max=FORMAT_BYTES_MAX))


def _json_schema(schema: str, field: str) -> str:
    checks.filled(schema, field, bytes_max=FORMAT_BYTES_MAX)
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        checks.refuse(field, "is not valid JSON")
    if not isinstance(parsed, dict):
        checks.refuse(field, "must be a JSON object")
    return schema
