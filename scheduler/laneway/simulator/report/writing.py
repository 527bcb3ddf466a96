"""A report as files: `report.html`, `report.json` and a PNG for each plot."""

from __future__ import annotations

from pathlib import Path

import msgspec

from laneway.core.errors import ConfigError
from laneway.simulator.report.figures import Report
from laneway.simulator.report.page import page
from laneway.simulator.report.plots import plots


def write_report(report: Report, folder: Path) -> Path:
    """The page's path. Raises ConfigError where there is no matplotlib or the folder cannot be written."""
    drawn = plots(report)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_bytes(encoded(report))
        for name, (_, png) in drawn.items():
            (folder / f"{name}.png").write_bytes(png)
        target = folder / "report.html"
        target.write_text(page(report, drawn), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written: {error.strerror}") from None
    return target


def encoded(report: Report) -> bytes:
    """JSON; what is no finite number becomes null."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def decoded(raw: bytes) -> Report:
    """What `encoded` made. Raises msgspec.ValidationError for anything else."""
    return msgspec.json.decode(raw, type=Report)
