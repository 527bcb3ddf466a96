"""Commands of callers: generate, submit, watch, cancel, quote, jobs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laneway.cli import connect
from laneway.cli.connect import AddressOption, JsonOption, TimeoutOption, TokenOption
from laneway.cli.console import print_json, print_table, run, say
from laneway.cli.facts import fact_words
from laneway.cli.job_view import (
    DUE_OR_ERROR,
    JOB_COLUMNS,
    ending,
    job_row,
    print_job,
    print_stream,
    say_verdict,
    verdict_sentence,
)
from laneway.core.errors import ConfigError
from laneway.core.lanes import Isolation, JobState, Lane

if TYPE_CHECKING:
    from laneway.client import RequestFields

PROMPT_BYTES_MAX = 16 * 1024 * 1024  # of standard input; the service has its own, lower limit

PromptArgument = Annotated[str, typer.Argument(help="What to ask; - reads standard input.")]
ModelOption = Annotated[str, typer.Option("--model", "-m", help="A model of the catalogue, or model/tier.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="System message.")]
RawOption = Annotated[bool, typer.Option("--raw", help="Complete the text as it is, without the chat template.")]
LaneOption = Annotated[Lane, typer.Option("--lane", "-l", help="Lane to travel in.")]
MaxTokensOption = Annotated[int | None, typer.Option("--max-tokens", "-n", min=1, help="Most tokens of the answer.")]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", "-t", help="0 is greedy.")]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="Same seed, same draws.")]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="End the answer before this text; repeatable.")]
DeadlineOption = Annotated[
    float | None, typer.Option("--deadline", min=0.001, help="Seconds from now until the whole answer is due.")
]
TierOption = Annotated[str | None, typer.Option("--least-tier", help="Lowest tier that is good enough.")]
LabelOption = Annotated[list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Of your own; repeatable.")]
SessionOption = Annotated[
    str | None, typer.Option("--session", help="Jobs of one session meet the same worker's caches, if they can.")
]
RouteOption = Annotated[
    str | None, typer.Option("--route", help="Name of this kind of request; how long its answers get is learned.")
]
IsolationOption = Annotated[
    Isolation | None,
    typer.Option("--isolation", help="strict: other lanes slow its tokens by a twentieth at most, where a pool can."),
]
KeyOption = Annotated[str | None, typer.Option("--key", help="Idempotency key: the same key names the same job.")]


def generate(
    prompt: PromptArgument,
    model: ModelOption = "chat",
    system: SystemOption = None,
    raw: RawOption = False,
    lane: LaneOption = Lane.PRIORITY,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    deadline: DeadlineOption = None,
    least_tier: TierOption = None,
    isolation: IsolationOption = None,
    label: LabelOption = None,
    session: SessionOption = None,
    route: RouteOption = None,
    key: KeyOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Ask, and read the answer as it comes. Ctrl-C cancels the job."""
    request = _request(
        prompt, model, system, raw, lane, max_tokens, temperature, seed, stop, deadline, least_tier, label
    )
    _say_what_it_is_like(request, session, route, isolation)

    async def work() -> None:
        async with (
            connect.admission(address, token_file) as client,
            client.generate(idempotency_key=key, timeout_s=timeout, **request) as stream,
        ):
            say_verdict(stream.verdict)
            await print_stream(stream, as_json)

    run(work)


def submit(
    prompt: PromptArgument,
    model: ModelOption = "chat",
    system: SystemOption = None,
    raw: RawOption = False,
    lane: LaneOption = Lane.BATCH,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    deadline: DeadlineOption = None,
    least_tier: TierOption = None,
    isolation: IsolationOption = None,
    label: LabelOption = None,
    session: SessionOption = None,
    route: RouteOption = None,
    key: KeyOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Leave a job to be done by its deadline, and print its id. Follow it with `laneway watch`."""
    request = _request(
        prompt, model, system, raw, lane, max_tokens, temperature, seed, stop, deadline, least_tier, label
    )
    _say_what_it_is_like(request, session, route, isolation)

    async def work() -> None:
        async with connect.admission(address, token_file) as client:
            submitted = await client.submit(idempotency_key=key, timeout_s=timeout, **request)
        if as_json:
            print_json(submitted)
        else:
            say(verdict_sentence(submitted.verdict))
            print(submitted.job_id)

    run(work)


def quote(
    prompt: PromptArgument,
    model: ModelOption = "chat",
    system: SystemOption = None,
    raw: RawOption = False,
    lane: LaneOption = Lane.PRIORITY,
    max_tokens: MaxTokensOption = None,
    deadline: DeadlineOption = None,
    least_tier: TierOption = None,
    isolation: IsolationOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Say what would happen to a request, without running it."""
    request = _request(prompt, model, system, raw, lane, max_tokens, None, None, None, deadline, least_tier, None)
    _say_what_it_is_like(request, None, None, isolation)

    async def work() -> None:
        async with connect.admission(address, token_file) as client:
            found = await client.quote(timeout_s=timeout, **request)
        if as_json:
            print_json(found)
        else:
            print(verdict_sentence(found.verdict))
            print(f"prompt {found.prompt_tokens} tokens, answer up to {found.max_tokens} tokens", end="")
            print(f", cost {found.verdict.cost:g}" if found.verdict.cost else "")
            if found.verdict.facts:
                print(f"because: {fact_words(found.verdict.facts)}")

    run(work)


def watch(
    job_id: Annotated[str, typer.Argument(help="Job to follow.")],
    from_index: Annotated[int, typer.Option("--from", min=0, help="First token wanted.")] = 0,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Follow a job while it runs, or read its answer after it ended. Ctrl-C leaves the job alone."""

    async def work() -> None:
        async with (
            connect.admission(address, token_file) as client,
            client.watch(job_id, from_index=from_index, timeout_s=timeout) as stream,
        ):
            await print_stream(stream, as_json)

    run(work)


def cancel(
    job_id: Annotated[str, typer.Argument(help="Job to cancel.")],
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Cancel a job in any state; says where that left it."""

    async def work() -> None:
        async with connect.admission(address, token_file) as client:
            left = await client.cancel(job_id, timeout_s=timeout)
        if as_json:
            print_json(left)
        elif left.state is JobState.CANCELLED:
            print(f"{job_id} is cancelled")
        else:
            print(f"{job_id} had already {ending(left.state)}")

    run(work)


def jobs(
    job_id: Annotated[str | None, typer.Argument(help="Show this job in full.")] = None,
    lane: Annotated[Lane | None, typer.Option("--lane", "-l", help="Only jobs of this lane.")] = None,
    state: Annotated[JobState | None, typer.Option("--state", "-s", help="Only jobs in this state.")] = None,
    label: LabelOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most jobs to show.")] = 50,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """List your jobs, those that changed last first; or show one."""

    async def work() -> None:
        async with connect.admission(address, token_file) as client:
            if job_id is not None:
                job = await client.get_job(job_id, timeout_s=timeout)
                print_json(job) if as_json else print_job(job)
                return
            listed = client.list_jobs(lane=lane, state=state, labels=labels_of(label), limit=limit, timeout_s=timeout)
            found = [job async for job in listed]
        if as_json:
            print_json(found)
            return
        print_table(JOB_COLUMNS, [job_row(job) for job in found], empty="no jobs", folded=[DUE_OR_ERROR])

    run(work)


# --- requests --------------------------------------------------------------------------------------


def _request(
    prompt: str,
    model: str,
    system: str | None,
    raw: bool,
    lane: Lane,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    stop: list[str] | None,
    deadline_s: float | None,
    least_tier: str | None,
    labels: list[str] | None,
) -> RequestFields:
    text = _standard_input() if prompt == "-" else prompt
    request: RequestFields = {"model": model, "lane": lane}
    if raw:
        request["prompt"] = text
    else:
        first = [{"role": "system", "content": system}] if system else []
        request["messages"] = [*first, {"role": "user", "content": text}]
    if max_tokens is not None:
        request["max_tokens"] = max_tokens
    if temperature is not None:
        request["temperature"] = temperature
    if seed is not None:
        request["seed"] = seed
    if stop:
        request["stop"] = stop
    if deadline_s is not None:
        request["deadline_s"] = deadline_s
    if least_tier:
        request["least_tier"] = least_tier
    if labels:
        request["labels"] = labels_of(labels)
    return request


def _say_what_it_is_like(
    request: RequestFields, session: str | None, route: str | None, isolation: Isolation | None
) -> None:
    if isolation:
        request["isolation"] = isolation
    if session:
        request["session_id"] = session
    if route:
        request["route"] = route


def labels_of(given: list[str] | None) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"a label is KEY=VALUE, not {text}")
        labels[key] = value
    return labels


def _standard_input() -> str:
    if Path("/dev/stdin").is_char_device() and sys.stdin.isatty():
        say("reading the prompt from standard input; end it with Ctrl-D")
    text = sys.stdin.read(PROMPT_BYTES_MAX + 1)
    if len(text) > PROMPT_BYTES_MAX:
        raise ConfigError(f"standard input is longer than {PROMPT_BYTES_MAX} characters")
    return text
