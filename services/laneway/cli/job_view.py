"""How jobs and answers look in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laneway.cli.console import describe, moment, output, print_json, say, seconds
from laneway.core.job import JobError, Verdict
from laneway.core.lanes import JobState, VerdictKind

if TYPE_CHECKING:
    from laneway.client import Finished, Job, TokenStream

DUE_OR_ERROR = "DUE OR ERROR"
JOB_COLUMNS = ("JOB", "STATE", "LANE", "AGE", DUE_OR_ERROR, "PROMPT", "ANSWER", "MODEL", "ATTEMPT")


async def print_stream(stream: TokenStream, as_json: bool) -> None:
    if as_json:
        text = await stream.text()
        print_json({"job_id": stream.job_id, "verdict": stream.verdict, "text": text, "finished": stream.finished})
        return
    async for chunk in stream:
        if chunk.output == 0:
            print(chunk.text, end="", flush=True)
    print()
    say(_summary(stream.finished))


def _summary(end: Finished) -> str:
    parts = [f"{end.usage.completion_tokens} tokens", f"ended by {end.finish_reason.replace('_', ' ')}"]
    if end.ttft_s is not None:
        parts.append(f"first token after {seconds(end.ttft_s)}")
    if end.tpot_s is not None:
        parts.append(f"then {seconds(end.tpot_s)} a token")
    if end.attempt > 1:
        parts.append(f"attempt {end.attempt}")
    return f"[{', '.join(parts)}; job {end.job_id}]"


def say_verdict(verdict: Verdict | None) -> None:
    if verdict is not None and verdict.kind is not VerdictKind.ACCEPTED:
        say(verdict_sentence(verdict))


def verdict_sentence(verdict: Verdict) -> str:
    parts = [f"{verdict.kind}: {verdict.message.rstrip('.')} ({verdict.reason})"]
    where = ", ".join(word for word in (f"{verdict.lane} lane", verdict.pool and f"pool {verdict.pool}") if word)
    parts.append(where)
    if verdict.ttft_eta_s is not None:
        parts.append(f"first token in about {seconds(verdict.ttft_eta_s)}{_bound(verdict.ttft_bound_s)}")
    if verdict.completion_eta_s is not None:
        parts.append(f"whole answer in about {seconds(verdict.completion_eta_s)}{_bound(verdict.completion_bound_s)}")
    if verdict.hold_until_s:
        parts.append(f"released {moment(verdict.hold_until_s)} at the latest")
    if verdict.retry_after_s is not None:
        parts.append(f"try again in {seconds(verdict.retry_after_s)}")
    return "; ".join(parts)


def _bound(bound_s: float | None) -> str:
    return "" if bound_s is None else f", nine of ten within {seconds(bound_s)}"


def ending(state: JobState) -> str:
    return {JobState.SUCCEEDED: "succeeded", JobState.FAILED: "failed", JobState.EXPIRED: "expired"}.get(
        state, f"ended as {state}"
    )


def job_row(job: Job) -> tuple[object, ...]:
    return (
        job.job_id,
        job.state,
        job.contract.lane,
        moment(job.timings.created_s).removesuffix(" ago"),
        _due_or_error(job),
        job.prompt_tokens,
        job.usage.completion_tokens,
        job.model,
        job.attempt,
    )


def _due_or_error(job: Job) -> str:
    if job.error is not None:
        return job.error.reason
    return "" if job.state.terminal else moment(job.contract.deadline_s)


def print_job(job: Job) -> None:
    facts: list[tuple[str, object]] = [
        ("job", job.job_id),
        ("state", job.state),
        ("model", job.model),
        ("lane", job.contract.lane),
        ("verdict", verdict_sentence(job.verdict) if job.verdict else ""),
        ("created", moment(job.timings.created_s)),
        ("due", moment(job.contract.deadline_s)),
        ("ended", moment(job.timings.ended_s)),
        ("attempt", job.attempt),
        ("yielded", _yielded(job.preemptions)),
        ("tokens", f"{job.prompt_tokens} prompt, {job.usage.completion_tokens} answer of at most {job.max_tokens}"),
        ("requeued", job.requeued_from and f"from {job.requeued_from}"),
        ("labels", ", ".join(f"{k}={v}" for k, v in job.contract.labels.items())),
        ("error", _error_sentence(job.error) if job.error else ""),
    ]
    for name, value in facts:
        if value != "":
            print(f"{name:9}{value}")
    if job.result is not None:
        output().rule()
        print(job.result.text)


def _yielded(preemptions: int) -> str:
    """To priority work, and how often."""
    return f"{preemptions} time{'s' if preemptions > 1 else ''} to priority work" if preemptions else ""


def _error_sentence(error: JobError) -> str:
    from laneway.runtime.grpc_errors import error_of

    return describe(error_of(error))
