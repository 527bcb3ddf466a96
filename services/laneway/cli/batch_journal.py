"""What a batch has done so far, in a file beside its own: so that a run that was interrupted goes on where it was.

The first line names the run and what it was begun with; each further line says which job a line became. The run's name
is part of every idempotency key, so a line that was sent and is not in the journal yet is no second job.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from laneway.core.errors import ConfigError

SUFFIX = ".laneway"


class Header(msgspec.Struct, frozen=True):
    run: str
    began: datetime
    sha256: str
    options: dict[str, object]


class Entry(msgspec.Struct, frozen=True):
    line: int  # from 1
    job_id: str


class Journal:
    """Opened for one run; `jobs` are the lines that became jobs, by line number."""

    def __init__(self, path: Path, header: Header, jobs: dict[int, str], size: int) -> None:
        self.path = path
        self.header = header
        self.jobs = jobs
        self.resumed = size > 0
        self._file = path.open("ab")
        self._file.truncate(size)  # a line that was cut off by the interruption
        if not size:
            self._write(header)

    @classmethod
    def open(cls, batch: Path, sha256: str, options: dict[str, object]) -> Journal:
        """Goes on with the journal of this file, or begins one. ConfigError where it is of another file or of other
        options."""
        path = batch.with_name(batch.name + SUFFIX)
        whole = path.read_bytes() if path.exists() else b""
        whole = whole[: whole.rfind(b"\n") + 1]
        if not whole:
            return cls(path, Header(secrets.token_hex(8), datetime.now(UTC), sha256, options), {}, 0)
        first, *rest = whole.splitlines()
        try:
            header = msgspec.json.decode(first, type=Header)
            entries = [msgspec.json.decode(line, type=Entry) for line in rest]
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is not the journal of a batch ({error}); move it away") from None
        again = f"remove {path} to begin anew: every line becomes a second job"
        if header.sha256 != sha256:
            raise ConfigError(f"{batch} is not what it was when this batch was begun; {again}")
        if header.options != options:
            raise ConfigError(f"this batch was begun with other options ({_shown(header.options)}); {again}")
        return cls(path, header, {entry.line: entry.job_id for entry in entries}, len(whole))

    def accepted(self, line: int, job_id: str) -> None:
        self.jobs[line] = job_id
        self._write(Entry(line, job_id))

    def _write(self, entry: Header | Entry) -> None:
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()

    def remove(self) -> None:
        """The batch is done."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _shown(options: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if value is not None) or "none"


def survey(batch: Path) -> tuple[str, int]:
    """The file's SHA-256, and how many lines in it are not blank. ConfigError where it cannot be read."""
    digest, count = hashlib.sha256(), 0
    try:
        with batch.open("rb") as file:
            for line in file:
                digest.update(line)
                count += bool(line.strip())
    except OSError as error:
        raise ConfigError(f"{batch} cannot be read: {error.strerror}") from None
    return digest.hexdigest(), count


def written_lines(output: Path) -> set[int]:
    """Numbers of the lines whose results are in the output file; what was cut off at its end is removed."""
    if not output.exists():
        return set()
    whole = output.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if len(kept) < len(whole):
        output.write_bytes(kept)
    try:
        return {int(msgspec.json.decode(line)["line"]) for line in kept.splitlines() if line.strip()}
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        raise ConfigError(f"{output} holds something else than results of this batch; name another file") from None
