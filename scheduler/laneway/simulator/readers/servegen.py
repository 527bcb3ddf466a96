"""ServeGen: a pool of clients with published windows and lengths, from which arrivals are drawn.

What is published are no requests but, for each client and window of 600 s, a rate, a coefficient of variation and a
family of gaps, and distributions of lengths. Read here:
- the repository's own folder of a pool: chunk-<client>-trace.csv (no header: window_s, rate, cv, Gamma|Weibull|empty,
  shape, scale) and chunk-<client>-dataset.json (window_s -> input_tokens, output_tokens as "{tokens: share, ...}");
- the compact summary: servegen-windows and servegen-lengths (quantiles), one file each for all pools.
Source: alibaba/ServeGen, Apache-2.0. Met: both, for m-large (162 clients, but for 15 length files; the summary has
the 52 clients with most traffic, for a day). Clients without lengths get those of the others. Rates, burstiness and
lengths are real, the single requests are drawn.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from laneway.core.errors import ConfigError
from laneway.simulator.clients import Client, Quantiles, trace_of_clients
from laneway.simulator.readers.rows import fault, opened, positive, read_csv, text
from laneway.simulator.trace import Trace

EVERY_S = 600.0
DAY_S = 86_400.0
SOURCE = "alibaba/ServeGen, Apache-2.0"
_SHARE = re.compile(r"(\d+): ([0-9.eE+-]+)")
_QUANTILES = ("q1", "q5", "q10", "q20", "q30", "q40", "q50", "q60", "q70", "q80", "q90", "q95", "q99", "q99.9", "q100")


def read(path: Path, *, seed: int = 0, per_s: float | None = None, from_s: float = 0.0, span_s: float = DAY_S) -> Trace:
    """A pool's folder. `per_s`: mean rate to scale to. `from_s`, `span_s`: the windows that are taken.

    Raises ConfigError that names file, line and field.
    """
    files = sorted(path.glob("chunk-*-trace.csv*")) if path.is_dir() else []
    if not files:
        raise ConfigError(f"{path} is no folder of a ServeGen pool: it has no chunk-<client>-trace.csv")
    clients = [_client(file, from_s, span_s) for file in files]
    return _drawn(path.name, [client for client in clients if len(client.rate)], seed, per_s)


def read_summary(
    path: Path, *, lengths: Path | None = None, pool: str = "m-large", seed: int = 0, per_s: float | None = None
) -> Trace:
    """The compact windows file; `lengths`: by default the file of that name beside it."""
    lengths = path.with_name(path.name.replace("windows", "lengths")) if lengths is None else lengths
    return _drawn(pool, clients_of_summary(path, lengths, pool), seed, per_s)


def clients_of_summary(path: Path, lengths: Path, pool: str = "m-large") -> list[Client]:
    """A pool's clients by the compact files. ConfigError names file, line and field."""
    columns = {"pool": text, "client": text, "window_s": positive, "rate": positive, "cv": positive, "family": text}
    rows = read_csv(path, columns)
    mine = rows["pool"] == pool
    if not np.any(mine):
        raise ConfigError(f"{path}, pool: none is {pool!r}; there are {sorted(set(rows['pool'].tolist()))}")
    known = _quantiles(lengths, pool)
    windows = int(rows["window_s"][mine].max() // EVERY_S) + 1
    clients = []
    for name in dict.fromkeys(rows["client"][mine].tolist()):
        of = mine & (rows["client"] == name)
        place = (rows["window_s"][of] // EVERY_S).astype(np.int64)
        rate, cv, weibull = np.zeros(windows), np.ones(windows), np.zeros(windows, dtype=np.bool_)
        rate[place], cv[place], weibull[place] = rows["rate"][of], rows["cv"][of], rows["family"][of] == "W"
        clients.append(Client(f"c{name}", rate, cv, weibull, known.get((name, "input")), known.get((name, "output"))))
    return clients


def _drawn(name: str, clients: list[Client], seed: int, per_s: float | None) -> Trace:
    notes = [f"{name}: {SOURCE}; requests drawn (seed {seed}) from the windows of {len(clients)} clients"]
    without = sum(client.prompts is None or client.answers is None for client in clients)
    if without:
        notes.append(f"{without} clients have no published lengths here and get those of the others")
    if per_s is not None:
        notes.append(f"rates scaled alike to {per_s:g}/s on average")
    random = np.random.default_rng(np.random.SeedSequence([seed, 2]))
    return trace_of_clients(name, clients, EVERY_S, random, per_s=per_s, notes=notes)


def _quantiles(path: Path, pool: str) -> dict[tuple[str, str], Quantiles]:
    rows = read_csv(path, {"pool": text, "client": text, "field": text} | dict.fromkeys(_QUANTILES, positive))
    shares = np.array([float(name[1:]) / 100.0 for name in _QUANTILES])
    known = {}
    for row in np.flatnonzero(rows["pool"] == pool).tolist():
        tokens = np.array([rows[name][row] for name in _QUANTILES])
        known[rows["client"][row], rows["field"][row]] = Quantiles(shares, tokens)
    return known


def _client(file: Path, from_s: float, span_s: float) -> Client:
    rate, cv, weibull = [], [], []
    with opened(file) as lines:
        for at, line in enumerate(lines, 1):
            cells = line.strip().split(",")
            if len(cells) < 4:
                raise fault(file, at, "pattern", f"missing: {len(cells)} fields")
            values = [
                _number(file, at, field, cell) for field, cell in zip(("window", "rate", "cv"), cells, strict=False)
            ]
            if cells[3] not in ("Gamma", "Weibull", ""):
                raise fault(file, at, "pattern", f"{cells[3]!r} is neither Gamma nor Weibull")
            if from_s <= values[0] < from_s + span_s:
                rate.append(values[1])
                cv.append(values[2] or 1.0)
                weibull.append(cells[3] == "Weibull")
    number = file.name.split("-")[1]
    data = next(iter(sorted(file.parent.glob(f"chunk-{number}-dataset.json*"))), None)
    prompts, answers = _distributions(data) if data is not None else (None, None)
    families: NDArray[np.bool_] = np.array(weibull, dtype=np.bool_)
    return Client(f"c{number}", np.array(rate), np.array(cv), families, prompts, answers)


def _number(file: Path, line: int, field: str, cell: str) -> float:
    try:
        return float(positive([cell])[0])
    except ValueError:
        raise fault(file, line, field, f"{cell!r} is no number of at least 0") from None


class _Window(msgspec.Struct, frozen=True):
    input_tokens: str
    output_tokens: str


def _distributions(path: Path) -> tuple[Quantiles | None, Quantiles | None]:
    """Over all windows that are published, each counting the same."""
    with opened(path) as lines:
        try:
            windows = msgspec.json.decode(lines.read(), type=dict[str, _Window])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}: {error}") from None
    return (
        _distribution(path, "input_tokens", [window.input_tokens for window in windows.values()]),
        _distribution(path, "output_tokens", [window.output_tokens for window in windows.values()]),
    )


def _distribution(path: Path, field: str, tables: list[str]) -> Quantiles | None:
    found = [(float(tokens), float(share)) for table in tables for tokens, share in _SHARE.findall(table)]
    if not found:
        if any(table.strip("{} ") for table in tables):
            raise ConfigError(f"{path}, {field}: no table of tokens and their shares")
        return None
    tokens, place = np.unique([pair[0] for pair in found], return_inverse=True)
    shares = np.bincount(place, weights=[pair[1] for pair in found])
    return Quantiles(np.cumsum(shares) / shares.sum(), tokens)
