"""`laneway batch submit`: a file of requests in, a file of results out, however often the run is interrupted."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from laneway.cli import connect
from laneway.cli.connect import AddressOption, TokenOption
from laneway.cli.console import EXIT_FAILED, describe, run, say
from laneway.cli.jobs import LabelOption, MaxTokensOption, TemperatureOption, TierOption, labels_of
from laneway.core.errors import ConfigError, JobNotFound, LanewayError
from laneway.core.lanes import JobState, Lane

if TYPE_CHECKING:
    from rich.progress import Progress

    from laneway.cli.batch_journal import Journal
    from laneway.client import Client, Job, ManyItem, ManyOutcome

WAITING_MAX = 16  # results that are waited for at once
BAD_SHOWN_MAX = 20  # lines of standard error; the results have them all

app = typer.Typer(no_args_is_help=True, help="Many requests from a file.")


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="One request a line, as JSON.", dir_okay=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the results; else standard output.")
    ] = None,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Print the jobs' ids and leave; without it later, collect the results.")
    ] = False,
    model: Annotated[str, typer.Option("--model", "-m", help="For lines that name none.")] = "chat",
    lane: Annotated[Lane, typer.Option("--lane", "-l", help="For lines that name none.")] = Lane.BATCH,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    deadline: Annotated[
        float | None,
        typer.Option("--deadline", min=0.001, help="Seconds from the batch's begin until its answers are due."),
    ] = None,
    least_tier: TierOption = None,
    label: LabelOption = None,
    address: AddressOption = None,
    token_file: TokenOption = None,
) -> None:
    """Submit every line of FILE, wait for the results and write one JSON line for each.

    A line holds what `generate` and `submit` take: {"prompt": "Hi", "max_tokens": 9} or {"messages": [...]}, an "id" of
    your own, or is a line of an OpenAI batch file. A bad line is reported and stops no other. Run the same command
    again after an interruption: it goes on where it was, by FILE.laneway beside the file.
    """
    defaults: dict[str, object] = {
        "model": model,
        "lane": lane.value,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "deadline_s": deadline,
        "least_tier": least_tier,
        "labels": labels_of(label) or None,
    }
    if no_wait and output is not None:
        raise typer.BadParameter("--no-wait has no results to put into --output")

    async def work() -> int:
        async with connect.admission(address, token_file) as client:
            return await _run(client, file, output, {k: v for k, v in defaults.items() if v is not None}, not no_wait)

    run(work)


async def _run(client: Client, file: Path, output: Path | None, options: dict[str, object], wait: bool) -> int:
    from laneway.cli.batch_journal import Journal, survey, written_lines

    sha256, count = survey(file)
    with ExitStack() as stack:
        journal = stack.enter_context(Journal.open(file, sha256, options))
        written = written_lines(output) if output is not None and journal.resumed else set()
        if journal.resumed:
            say(f"going on: {len(journal.jobs)} of {count} lines are jobs, {len(written)} have their result")
        results = stack.enter_context(_open(output, append=journal.resumed)) if output else sys.stdout
        batch = Batch(client, file, journal, results, written, wait, stack.enter_context(_progress()), count)
        try:
            await batch.run()
        except (asyncio.CancelledError, LanewayError):
            say(f"{len(journal.jobs)} of {count} lines are jobs; run the same command again to go on")
            raise
        if wait:
            journal.remove()
    return EXIT_FAILED if batch.failed else 0


@dataclass
class Batch:
    """One run over the file."""

    client: Client
    file: Path
    journal: Journal
    results: IO[str]
    written: set[int]  # lines whose result is there
    wait: bool
    progress: Progress
    count: int
    failed: int = 0
    _names: dict[int, str] = field(default_factory=dict)  # of lines that have one
    _jobs: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)  # lines whose job is to be waited for

    async def run(self) -> None:
        done = len(self.written)
        self._sent = self.progress.add_task("submitted", total=self.count, completed=done)
        self._ended = self.progress.add_task("finished", total=self.count, completed=done, visible=self.wait)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(WAITING_MAX if self.wait else 0):
                    group.create_task(self._collect())
                await self._submit()
                for _ in range(WAITING_MAX):
                    self._jobs.put_nowait(None)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        if self.failed:
            say(f"{self.failed} of {self.count} lines have no answer")

    async def _submit(self) -> None:
        async for outcome in self.client.submit_many(self._items()):
            line = int(outcome.ref)
            self.progress.advance(self._sent)
            if outcome.submitted is None:
                self._refuse(line, outcome)
                continue
            self.journal.accepted(line, outcome.submitted.job_id)
            self._took(line, outcome.submitted.job_id)

    def _took(self, line: int, job_id: str) -> None:
        if self.wait:
            self._jobs.put_nowait(line)
        else:
            self._write(line, job_id=job_id)

    def _items(self) -> Iterator[ManyItem]:
        """What is still to be sent. Bad lines are dealt with on the way."""
        from laneway.cli.batch_lines import Defaults, parse_line
        from laneway.client import ManyItem

        header = self.journal.header
        defaults = Defaults(header.began, header.options)
        with self.file.open("rb") as lines:
            for number, data in enumerate(lines, start=1):
                if not data.strip() or number in self.written:
                    continue
                try:
                    line = parse_line(data, defaults)
                except LanewayError as error:
                    self.progress.advance(self._sent)
                    self._fail(number, error)
                    continue
                if line.id:
                    self._names[number] = line.id
                if number in self.journal.jobs:
                    self.progress.advance(self._sent)
                    self._took(number, self.journal.jobs[number])
                    continue
                yield ManyItem(line.request, str(number), line.key or f"{header.run}-{number}")

    # --- results -------------------------------------------------------------------------------------

    async def _collect(self) -> None:
        while (line := await self._jobs.get()) is not None:
            job_id = self.journal.jobs[line]
            try:
                job = await self.client.get_job(job_id)
                if not job.state.terminal:
                    job = await self.client.wait(job_id)
            except JobNotFound as error:  # kept for a day beyond its deadline, by default
                self._fail(line, error, job_id=job_id)
                continue
            self.failed += job.state is not JobState.SUCCEEDED
            self.progress.advance(self._ended)
            self._write(line, **_result(job))

    def _refuse(self, line: int, outcome: ManyOutcome) -> None:
        assert outcome.error is not None
        self._fail(line, outcome.error)

    def _fail(self, line: int, error: LanewayError, **more: object) -> None:
        self.failed += 1
        self.progress.advance(self._ended)
        if self.failed <= BAD_SHOWN_MAX:
            say(f"{self.file}:{line}: {describe(error)}")
        shown = {"reason": error.reason, "message": error.message, "field": error.field}
        self._write(line, **more, error={name: value for name, value in shown.items() if value})

    def _write(self, line: int, **result: object) -> None:
        import msgspec

        row = {"line": line, "id": self._names.pop(line, ""), **result}
        self.results.write(msgspec.json.encode({k: v for k, v in row.items() if v not in ("", None)}).decode() + "\n")
        self.results.flush()


def _result(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {"job_id": job.job_id, "state": job.state.value}
    if job.result is not None:
        usage = {"prompt_tokens": job.usage.prompt_tokens, "completion_tokens": job.usage.completion_tokens}
        found |= {"text": job.result.text, "finish_reason": job.result.finish_reason.value, "usage": usage}
    if job.error is not None:
        found["error"] = {"reason": job.error.reason, "message": job.error.message}
    return found


def _open(output: Path, *, append: bool) -> IO[str]:
    try:
        return output.open("a" if append else "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None


def _progress() -> Progress:
    """On standard error, in a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal)
