"""A caller's JobSpec as core values, or an InvalidRequest or Unsupported that names the field. Nothing is ignored.

The one place where what callers send is judged, whichever front it came through. Pure: needs no tokenizer; lengths
in tokens are checked after tokenising (policy.contract).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from laneway.core.catalogue import Catalogue, Pool
from laneway.core.errors import InvalidRequest, Unsupported
from laneway.core.job import Contract, GenerateTask, Sampling
from laneway.core.lanes import Isolation
from laneway.core.prompt import Prompt, TokenPrompt
from laneway.runtime.settings import PolicySettings
from laneway.runtime.wire import checks
from laneway.runtime.wire.contracts import parse_repeated_contract
from laneway.runtime.wire.needs import Need, check_needs
from laneway.runtime.wire.prompts import parse_prompt
from laneway.runtime.wire.sampling import FormatRequest, SamplingRequest, parse_format, parse_sampling
from laneway.v1 import common_pb2, task_pb2

SESSION_ID_LENGTH_MAX = 128  # characters
_GENERATE = "spec.generate"
_REPEATED_BYTES_MAX = 256  # of a sampling that is remembered


class ParsedSpec(Struct, frozen=True):
    """A request that is well-formed, and the pools that can do all of it."""

    model: str  # as asked for
    pools: tuple[Pool, ...]  # at least 1, cheapest first
    prompt: Prompt
    sampling: SamplingRequest
    format: FormatRequest
    contract: Contract
    needs: tuple[Need, ...]
    adapter: str = ""
    cache_salt: str = ""
    route: str = ""
    session_id: str = ""

    @property
    def max_tokens(self) -> int | None:
        """As asked for; None: the pool's default."""
        return self.sampling.max_tokens

    @property
    def features(self) -> frozenset[str]:
        """Names of the abilities that it uses."""
        return frozenset(need.ability for need in self.needs)

    def sampling_of(self, pool: Pool, max_tokens: int) -> Sampling:
        return self.sampling.resolved(max_tokens, pool.temperature_default)

    def task_of(self, pool: Pool, prompt_ids: tuple[int, ...], max_tokens: int) -> GenerateTask:
        """The task for a pool, once the prompt is token ids and the room for the answer is known."""
        return GenerateTask(
            prompt_ids=prompt_ids,
            sampling=self.sampling_of(pool, max_tokens),
            json_object=self.format.json_object,
            json_schema=self.format.json_schema,
            regex=self.format.regex,
            grammar=self.format.grammar,
            adapter=self.adapter,
            cache_salt=self.cache_salt,
            session_id=self.session_id,
        )


def parse_spec(
    spec: task_pb2.JobSpec, catalogue: Catalogue, now_s: float, defaults: PolicySettings, *, attached: bool = True
) -> ParsedSpec:
    """`attached`: Generate rather than Submit, which decides the default of on_disconnect."""
    checks.no_unknown_fields(spec, "spec")
    needs: list[Need] = []
    model = _model(spec.model)
    contract = parse_repeated_contract(spec.contract, now_s, defaults, attached=attached, field="spec.contract")
    if spec.contract.isolation == common_pb2.ISOLATION_STRICT:
        needs.append(Need("strict_isolation", "spec.contract.isolation"))
    pools = catalogue.resolve(model, contract.least_tier)
    task = _generate_task(spec)
    prompt = parse_prompt(task, _GENERATE, needs)
    sampling, sampling_needs = _sampling(task.sampling)
    needs += sampling_needs
    wanted = FormatRequest()
    if task.HasField("response_format"):
        wanted = parse_format(task.response_format, f"{_GENERATE}.response_format", needs)
    _parse_tools(task, needs)
    adapter = _named(task.adapter, "adapters", f"{_GENERATE}.adapter", needs)
    cache_salt = _named(task.cache_salt, "cache_salt", f"{_GENERATE}.cache_salt", needs)
    able = _able_pools(pools, prompt, sampling, needs)
    if contract.isolation is Isolation.STRICT:  # asked for, or the default: that binds only where it can be kept
        keeping = tuple(pool for pool in able if pool.capabilities.strict_isolation)
        able, contract = (keeping, contract) if keeping else (able, replace(contract, isolation=Isolation.SLO))
    return ParsedSpec(
        model=model,
        pools=able,
        prompt=prompt,
        sampling=sampling,
        format=wanted,
        contract=contract,
        adapter=adapter,
        cache_salt=cache_salt,
        route=checks.token(spec.route, "spec.route") if spec.route else "",
        session_id=_session_id(task),
        needs=tuple(needs),
    )


def _sampling(message: task_pb2.Sampling) -> tuple[SamplingRequest, tuple[Need, ...]]:
    """Callers with many jobs say the same in each."""
    data = message.SerializeToString()
    return _repeated_sampling(data) if len(data) <= _REPEATED_BYTES_MAX else _checked_sampling(message)


@lru_cache(64)
def _repeated_sampling(data: bytes) -> tuple[SamplingRequest, tuple[Need, ...]]:
    return _checked_sampling(task_pb2.Sampling.FromString(data))


def _checked_sampling(message: task_pb2.Sampling) -> tuple[SamplingRequest, tuple[Need, ...]]:
    needs: list[Need] = []
    return parse_sampling(message, f"{_GENERATE}.sampling", needs), tuple(needs)


def _check_pool(pool: Pool, prompt: Prompt, sampling: SamplingRequest, needs: Sequence[Need]) -> None:
    """Unsupported, or InvalidRequest for a token id that the pool does not know, naming the field."""
    check_needs(pool, needs)
    if isinstance(prompt, TokenPrompt):
        _check_ids(prompt.ids, pool, f"{_GENERATE}.tokens.ids")
    if sampling.stop_token_ids:
        _check_ids(sampling.stop_token_ids, pool, f"{_GENERATE}.sampling.stop_token_ids")
    if sampling.logit_bias:
        _check_ids(tuple(sampling.logit_bias), pool, f"{_GENERATE}.sampling.logit_bias")


def _able_pools(
    pools: Sequence[Pool], prompt: Prompt, sampling: SamplingRequest, needs: Sequence[Need]
) -> tuple[Pool, ...]:
    """The pools that can do all that is asked; where none can, the first one's objection is raised."""
    able: list[Pool] = []
    objection: InvalidRequest | None = None
    for pool in pools:
        try:
            _check_pool(pool, prompt, sampling, needs)
            able.append(pool)
        except InvalidRequest as error:
            objection = objection or error
    if objection is not None and not able:
        raise objection
    return tuple(able)


def _check_ids(ids: tuple[int, ...], pool: Pool, field: str) -> None:
    if max(ids) >= pool.vocabulary_size:
        index = next(i for i, token_id in enumerate(ids) if token_id >= pool.vocabulary_size)
        raise InvalidRequest(
            f"{field}[{index}] is {ids[index]}, outside the vocabulary of {pool.vocabulary_size} token ids",
            field=f"{field}[{index}]",
            reason="TOKEN_ID_OUT_OF_RANGE",
        )


def _model(name: str) -> str:
    if not name:
        checks.refuse("spec.model", "must not be empty")
    for part in name.split("/", 1):
        checks.token(part, "spec.model")
    return name


def _generate_task(spec: task_pb2.JobSpec) -> task_pb2.GenerateTask:
    kind = spec.WhichOneof("task")
    if kind is None:
        checks.refuse(_GENERATE, "is missing: the request has no task", reason="TASK_MISSING")
    if kind != "generate":
        raise Unsupported(f"spec.{kind} is not offered by this model", field=f"spec.{kind}")
    checks.no_unknown_fields(spec.generate, _GENERATE)
    return spec.generate


def _parse_tools(task: task_pb2.GenerateTask, needs: list[Need]) -> None:
    """No pool offers tools yet, so using them is all there is to know."""
    if task.tools:
        needs.append(Need("tools", f"{_GENERATE}.tools"))
    if not task.HasField("tool_choice"):
        return
    field = f"{_GENERATE}.tool_choice"
    checks.no_unknown_fields(task.tool_choice, field)
    match task.tool_choice.WhichOneof("choice"):
        case None:
            checks.refuse(field, "is empty: give mode or name")
        case "mode" if task.tool_choice.mode not in task_pb2.ToolChoiceMode.values():
            checks.refuse(f"{field}.mode", f"is {task.tool_choice.mode}, which is no value of this enum")
        case _:
            needs.append(Need("tools", field))


def _session_id(task: task_pb2.GenerateTask) -> str:
    field = f"{_GENERATE}.session_id"
    if len(task.session_id) > SESSION_ID_LENGTH_MAX:
        checks.refuse(field, f"is longer than {SESSION_ID_LENGTH_MAX} characters")
    return checks.text(task.session_id, field)


def _named(value: str, ability: str, field: str, needs: list[Need]) -> str:
    if value:
        needs.append(Need(ability, field))
        checks.token(value, field)
    return value
