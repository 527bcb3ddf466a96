"""Files of rows: CSV with a header and JSON lines, plain or .gz, with errors that name file, line and field.

CSV is read in chunks into numpy columns; only a chunk with something wrong in it is looked at row by row.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from laneway.core.errors import ConfigError

ROWS = 65_536  # of a CSV that are converted at once
HEAD_BYTES = 65_536  # of a file that are looked at to say which format it is
_ZONE = re.compile(r"(\+00:?00|Z)$")

Row = TypeVar("Row")
Parse = Callable[[list[str]], NDArray[Any]]


def fault(path: Path, line: int, field: str, why: str) -> ConfigError:
    return ConfigError(f"{path}, line {line}, {field}: {why}")


@contextmanager
def opened(path: Path) -> Iterator[io.TextIOBase]:
    """A text, decompressed where it is gzip by its first bytes. ConfigError where it cannot be read."""
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            file = gzip.GzipFile(fileobj=raw) if packed else raw
            with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
                yield text
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the trace {path} is no UTF-8 text: {error.reason}") from None


def head(path: Path) -> str:
    """The first lines, or the begin of the first one."""
    with opened(path) as text:
        return text.read(HEAD_BYTES)


def number(values: list[str]) -> NDArray[np.float64]:
    found = np.array([float(value) for value in values], dtype=np.float64)
    if not np.all(np.isfinite(found)):
        raise ValueError("is not a finite number")
    return found


def positive(values: list[str]) -> NDArray[np.float64]:
    """A number of at least 0."""
    found = number(values)
    if found.min(initial=0.0) < 0.0:
        raise ValueError("is below 0")
    return found


def count(values: list[str]) -> NDArray[np.int64]:
    """Whole numbers of at least 0."""
    found = np.array([int(value) for value in values], dtype=np.int64)
    if found.min(initial=0) < 0:
        raise ValueError("is below 0")
    return found


def maybe(values: list[str]) -> NDArray[np.float64]:
    """Like `positive`; nan where nothing is known."""
    found = np.array([float(value) if value else np.nan for value in values], dtype=np.float64)
    if not np.all(np.isnan(found) | ((found >= 0.0) & np.isfinite(found))):
        raise ValueError("is no number of at least 0")
    return found


def text(values: list[str]) -> NDArray[np.object_]:
    return np.array(values, dtype=np.object_)


def moment_s(values: list[str]) -> NDArray[np.float64]:
    """Date and time (UTC) as seconds since 1970, to the microsecond."""
    try:
        moments = np.array([_ZONE.sub("", value.strip()) for value in values], dtype="datetime64[us]")
    except (ValueError, DeprecationWarning, UserWarning):
        raise ValueError("is no date and time in UTC") from None
    if np.any(np.isnat(moments)):
        raise ValueError("is no date and time in UTC")
    return moments.astype(np.int64) / 1e6


def read_csv(path: Path, columns: Mapping[str, Parse]) -> dict[str, NDArray[Any]]:
    """The named columns. ConfigError: a missing column, a short row, a value that its parser (ValueError) rejects."""
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in columns}
    with opened(path) as lines:
        rows = csv.reader(lines)
        header = [name.strip() for name in next(rows, [])]
        missing = [name for name in columns if name not in header]
        if missing:
            raise fault(path, 1, missing[0], "no such column in the header")
        places = {name: header.index(name) for name in columns}
        line = 2
        while chunk := _chunk(path, rows, line):
            for name, place in places.items():
                values = _column(path, chunk, line, place, name, len(header))
                parts[name].append(_parsed(path, values, line, name, columns[name]))
            line += len(chunk)
    return {name: np.concatenate(found) if found else columns[name]([]) for name, found in parts.items()}


def _chunk(path: Path, rows: Iterator[list[str]], line: int) -> list[list[str]]:
    try:
        return list(islice(rows, ROWS))
    except csv.Error as error:
        raise ConfigError(f"{path}, after line {line}: {error}") from None


def _column(path: Path, chunk: list[list[str]], line: int, place: int, name: str, width: int) -> list[str]:
    try:
        return [row[place] for row in chunk]
    except IndexError:
        at = next(at for at, row in enumerate(chunk) if len(row) <= place)
        raise fault(path, line + at, name, f"missing: {len(chunk[at])} fields, the header has {width}") from None


def _parsed(path: Path, values: list[str], line: int, name: str, parse: Parse) -> NDArray[Any]:
    try:
        return parse(values)
    except (ValueError, OverflowError):
        for at, value in enumerate(values):
            try:
                parse([value])
            except (ValueError, OverflowError) as error:
                raise fault(path, line + at, name, f"{value!r} {_why(error)}") from None
        raise


def _why(error: Exception) -> str:
    """Ours as they are; Python's own name the value again."""
    said = str(error)
    return said if said.startswith("is ") else "is no such number"


def read_jsonl(path: Path, row: type[Row]) -> Iterator[tuple[int, Row]]:
    """Line numbers and rows; empty lines are passed over. ConfigError names the field that is at fault."""
    decoder = msgspec.json.Decoder(row)
    with opened(path) as lines:
        for at, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield at, decoder.decode(line)
                except msgspec.MsgspecError as error:
                    raise ConfigError(f"{path}, line {at}: {error}") from None
