"""Bad input as bytes on the wire, and what each must be answered with: a status, and the field at fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import grpc.aio
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from laneway.core.errors import Code
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import common_pb2, task_pb2

INF, NAN = float("inf"), float("nan")
VOCABULARY = 49_152  # of the small real model
SERVICE = "/laneway.v1.AdmissionService/"
STREAMS = ("Generate", "Watch")
PLACEHOLDER = "@@@@"
NOT_UTF8 = b"\xff\xfe\xc3\x28"
CONTEXT = 8192
UUID = "01890000-0000-7000-8000-000000000000"  # of no job


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a call ended, as google.rpc details say it."""

    code: Code
    fields: tuple[str, ...] = ()  # of BadRequest
    reason: str = ""  # of ErrorInfo
    message: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    body: bytes
    fields: tuple[str, ...] = ()
    code: Code = Code.INVALID_ARGUMENT
    method: str = "Generate"
    metadata: tuple[tuple[str, str], ...] = ()


async def refusal_of(channel: grpc.aio.Channel, case: Case) -> Refusal | None:
    """Sends the bytes as they are; None where the call was served."""
    method = SERVICE + case.method
    try:
        if case.method in STREAMS:
            stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
            async for _ in stream(case.body, metadata=case.metadata, timeout=60):
                pass
        else:
            unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            await unary(case.body, metadata=case.metadata, timeout=60)
    except grpc.aio.AioRpcError as error:
        return _details(error)
    return None


def _details(error: grpc.aio.AioRpcError) -> Refusal:
    fields: list[str] = []
    reason = ""
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        assert isinstance(value, bytes)
        for detail in status_pb2.Status.FromString(value).details:
            request, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
            if detail.Unpack(request):
                fields += [violation.field for violation in request.field_violations]
            elif detail.Unpack(info):
                assert info.domain == "laneway"
                reason = info.reason
    return Refusal(Code(error.code().value[0]), tuple(fields), reason, error.details() or "")


# --- the table -------------------------------------------------------------------------------------


def spec(prompt: str = "Hi", **parts: Message) -> task_pb2.JobSpec:
    """A good request; `sampling`, `contract` and the kinds of prompts replace its parts."""
    task = task_pb2.GenerateTask(text=prompt)
    wanted = task_pb2.JobSpec(model="chat", generate=task)
    for name, part in parts.items():
        getattr(wanted if name == "contract" else wanted.generate, name).CopyFrom(part)
    return wanted


def generate(wanted: task_pb2.JobSpec, key: str = "") -> bytes:
    return pb.GenerateRequest(spec=wanted, idempotency_key=key).SerializeToString()


def sampled(name: str, value: object, wrong: str = "") -> Case:
    sampling = task_pb2.Sampling(**{name: value})  # type: ignore[arg-type]  # any field
    shown = value if not isinstance(value, list) or len(value) < 4 else f"{len(value)} entries"
    return Case(f"{name} {shown}", generate(spec(sampling=sampling)), (f"spec.generate.sampling.{wrong or name}",))


def contracted(name: str, value: object, wrong: str = "", **more: object) -> Case:
    contract = common_pb2.Contract(**{name: value, **more})  # type: ignore[arg-type]  # any field
    shown = " ".join(str(value).split())[:40]
    return Case(f"{name} {shown}", generate(spec(contract=contract)), (f"spec.contract.{wrong or name}",))


def chat(*messages: task_pb2.ChatMessage, go_on: bool = False) -> task_pb2.JobSpec:
    return spec(chat=task_pb2.ChatPrompt(messages=messages, continue_final_message=go_on))


def said(text: str, role: str = "user") -> task_pb2.ChatMessage:
    return task_pb2.ChatMessage(role=role, parts=[task_pb2.ContentPart(text=text)])


# The allowed range, and values just outside of it.
FLOATS: Mapping[str, tuple[float, ...]] = {
    "temperature": (-0.1, 2.1, 1e9),
    "top_p": (-0.1, 0.0, 1.1),
    "min_p": (-0.1, 1.1),
    "repetition_penalty": (-0.1, 0.0, 2.1),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1),
}


def numbers() -> Iterator[Case]:
    for name, outside in FLOATS.items():
        for value in (NAN, INF, -INF, *outside):
            yield sampled(name, value)
    for value in (NAN, INF, -INF, -1.0):
        yield contracted("cost_max", value)
    for value in (NAN, INF, -INF):
        yield sampled("logit_bias", {7: value}, "logit_bias[7]")
    yield sampled("max_tokens", 0)
    yield sampled("max_tokens", 2**31 - 1)
    yield sampled("max_tokens", 2**32 - 1)
    yield sampled("top_k", 0)
    yield sampled("n", 0)
    yield sampled("top_logprobs", 21)
    yield Case(
        "min_tokens above max_tokens",
        generate(spec(sampling=task_pb2.Sampling(max_tokens=3, min_tokens=4))),
        ("spec.generate.sampling.min_tokens",),
    )
    yield sampled("stop_token_ids", [VOCABULARY], "stop_token_ids[0]")
    yield sampled("stop_token_ids", [1] * 65)


def prompts() -> Iterator[Case]:
    yield Case("empty text", generate(spec("")), ("spec.generate.text",))
    yield Case("NUL in text", generate(spec("a\0b")), ("spec.generate.text",))
    yield Case("no prompt", generate(task_pb2.JobSpec(model="chat", generate={})), ("spec.generate.prompt",))
    yield Case("no messages", generate(chat()), ("spec.generate.chat.messages",))
    yield Case("unknown role", generate(chat(said("Hi", "robot"))), ("spec.generate.chat.messages[0].role",))
    yield Case("empty role", generate(chat(said("Hi", ""))), ("spec.generate.chat.messages[0].role",))
    yield Case(
        "message without parts",
        generate(chat(said("Hi", "system"), task_pb2.ChatMessage(role="user"))),
        ("spec.generate.chat.messages[1].parts",),
    )
    yield Case(
        "empty part",
        generate(chat(task_pb2.ChatMessage(role="user", parts=[task_pb2.ContentPart()]))),
        ("spec.generate.chat.messages[0].parts[0]",),
    )
    yield Case("NUL in a message", generate(chat(said("\0"))), ("spec.generate.chat.messages[0].parts[0].text",))
    yield Case(
        "continue a user's message",
        generate(chat(said("Hi"), go_on=True)),
        ("spec.generate.chat.continue_final_message",),
    )
    for ids, wrong in (([], "ids"), ([1, VOCABULARY], "ids[1]"), ([2**32 - 1], "ids[0]")):
        tokens = task_pb2.TokenPrompt(ids=ids)
        yield Case(f"token ids {ids}", generate(spec(tokens=tokens)), (f"spec.generate.tokens.{wrong}",))
    yield Case(
        "prompt as long as the context",
        generate(spec(tokens=task_pb2.TokenPrompt(ids=[7] * CONTEXT))),
        ("spec.generate.prompt",),
    )
    yield sampled("stop", [""], "stop[0]")
    yield sampled("stop", ["a\0"], "stop[0]")
    yield sampled("stop", ["x"] * 17)


def contracts() -> Iterator[Case]:
    yield contracted("lane", 99)
    yield contracted("isolation", 7)
    yield contracted("on_disconnect", -1)
    for name in ("ttft_target", "tpot_target"):
        yield contracted(name, {"seconds": -1})
        yield contracted(name, {"nanos": -1})
        yield contracted(name, {"seconds": 2**60})
        yield contracted(name, {"seconds": 1, "nanos": 2_000_000_000})
    yield contracted("deadline", {"seconds": 1})
    yield contracted("deadline", {"seconds": -(2**60)})
    yield contracted("deadline", {"seconds": 250_000_000_000})
    yield contracted("not_before", {"seconds": 250_000_000_000}, lane=common_pb2.LANE_PRIORITY)
    yield contracted("not_before", {"nanos": -1}, lane=common_pb2.LANE_BATCH)
    yield contracted("least_tier", "a.>")
    yield contracted("least_tier", "giant")
    yield contracted("regions", ["local", "a.>"], "regions[1]")
    yield contracted("labels", {"a\0": "b"})
    yield contracted("labels", {"": "b"})
    yield contracted("labels", {str(n): "" for n in range(17)})


def requests() -> Iterator[Case]:
    for model in ("", "nothing", "chat/giant", "a.>", "*", "x" * 65):
        wanted = spec()
        wanted.model = model
        yield Case(f"model {model[:12]!r}", generate(wanted), ("spec.model",))
    yield Case("no task", generate(task_pb2.JobSpec(model="chat")), ("spec.generate",))
    embed = task_pb2.JobSpec(model="chat", embed=task_pb2.EmbedTask(inputs=["Hi"]))
    yield Case("embed", generate(embed), ("spec.embed",))
    tools = spec()
    tools.generate.tools.add(name="search")
    yield Case("tools", generate(tools), ("spec.generate.tools",))
    choice = task_pb2.ToolChoice(mode=9)  # type: ignore[arg-type]  # no value of the enum
    yield Case("unknown tool choice", generate(spec(tool_choice=choice)), ("spec.generate.tool_choice.mode",))
    for name in ("adapter", "cache_salt"):
        wanted = spec()
        setattr(wanted.generate, name, "x")
        yield Case(name, generate(wanted), (f"spec.generate.{name}",))
    schema = task_pb2.ResponseFormat(json_schema="{")
    yield Case("broken schema", generate(spec(response_format=schema)), ("spec.generate.response_format.json_schema",))
    yield Case("long idempotency key", generate(spec(), "k" * 129), ("idempotency_key",))
    yield Case("NUL in the idempotency key", generate(spec(), "\0"), ("idempotency_key",))
    unknown = _field(99, b"new") + generate(spec())
    yield Case("field of a later release", unknown, ("request",))


def bytes_on_the_wire() -> Iterator[Case]:
    for method in ("Generate", "Submit", "Quote", "GetJob", "Watch"):
        yield Case(f"body that does not parse, {method}", b"\xff\xff\xff", method=method)
    minus_one = _field(4, b"\x08" + _varint(2**64 - 1))  # as a C program would send it
    body = _field(1, _field(1, b"chat") + _field(2, _field(1, b"Hi") + minus_one))
    yield Case("max_tokens -1", body, ("spec.generate.sampling.max_tokens",))
    yield Case("truncated body", generate(spec("Hello"))[:-2])
    for name, wanted in (("text", spec(PLACEHOLDER)), ("message", chat(said(PLACEHOLDER)))):
        broken = generate(wanted).replace(PLACEHOLDER.encode(), NOT_UTF8)
        yield Case(f"{name} that is not UTF-8", broken)
    key = generate(spec(), PLACEHOLDER).replace(PLACEHOLDER.encode(), NOT_UTF8)
    yield Case("idempotency key that is not UTF-8", key)
    yield Case("body of nine mebibytes", generate(spec("x" * 9 * 2**20)), code=Code.RESOURCE_EXHAUSTED)
    yield Case("a mebibyte of text", generate(spec("x" * 2**20)), fields=("spec.generate.prompt",))
    huge = tuple((f"x-{n}", "v" * 1000) for n in range(64))
    yield Case("huge metadata", generate(spec()), code=Code.RESOURCE_EXHAUSTED, metadata=huge)


def lookups() -> Iterator[Case]:
    no_token, unknown = (Code.INVALID_ARGUMENT, ("job_id",)), (Code.NOT_FOUND, ())
    ids = dict.fromkeys(("", "a.>", "*", "\0", "x" * 1000, "local-1"), no_token) | dict.fromkeys(
        (f"local-{UUID}", f"eu-{UUID}"), unknown
    )
    for job_id, (code, fields) in ids.items():
        for method, message in (
            ("GetJob", pb.GetJobRequest(job_id=job_id)),
            ("CancelJob", pb.CancelJobRequest(job_id=job_id)),
            ("Watch", pb.WatchRequest(job_id=job_id)),
        ):
            yield Case(f"{method} of {job_id[:12]!r}", message.SerializeToString(), fields, code, method)
    for name, value in (("page_size", -1), ("lane", 99), ("state", -5), ("page_token", "forged")):
        request = pb.ListJobsRequest(**{name: value})  # type: ignore[arg-type]  # any field
        yield Case(f"ListJobs with {name} {value}", request.SerializeToString(), (name,), method="ListJobs")


def _field(number: int, value: bytes) -> bytes:
    """A length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


# What looks odd and has a meaning: all of these are served.
ODD: Mapping[str, task_pb2.JobSpec] = {
    "a blank": spec(" "),
    "a line break": spec("\n"),
    "control tokens alone": spec("<|im_end|><|im_start|><|endoftext|>"),
    "an empty message": chat(said("")),
    "only a system message": chat(said("Be brief.", "system")),
    "an assistant's message last": chat(said("Hi"), said("Hello", "assistant")),
    "control tokens as ids": spec(tokens=task_pb2.TokenPrompt(ids=[0, 1, 2])),
    "the last id of the vocabulary": spec(tokens=task_pb2.TokenPrompt(ids=[VOCABULARY - 1])),
    "a lone accent and a private character": spec("\u0301\U0010ffff"),
    "temperature 1e-12": spec(sampling=task_pb2.Sampling(temperature=1e-12)),
    "temperature -0.0": spec(sampling=task_pb2.Sampling(temperature=-0.0)),
    "temperature 1e-300": spec(sampling=task_pb2.Sampling(temperature=1e-300)),
    "top_p 1e-300": spec(sampling=task_pb2.Sampling(top_p=1e-300)),
    "min_p 1": spec(sampling=task_pb2.Sampling(min_p=1.0)),
    "top_k 2^32-1": spec(sampling=task_pb2.Sampling(top_k=2**32 - 1)),
    "repetition_penalty 1e-300": spec(sampling=task_pb2.Sampling(repetition_penalty=1e-300)),
    "seed 2^64-1": spec(sampling=task_pb2.Sampling(seed=2**64 - 1)),
}

GROUPS: Mapping[str, tuple[Case, ...]] = {
    "numbers": tuple(numbers()),
    "prompts": tuple(prompts()),
    "contracts": tuple(contracts()),
    "requests": tuple(requests()),
    "bytes": tuple(bytes_on_the_wire()),
    "lookups": tuple(lookups()),
}
