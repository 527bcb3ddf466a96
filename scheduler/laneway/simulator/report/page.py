"""The page: one file that needs nothing else, every name in it escaped."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from laneway.simulator.judge import P99_REQUESTS
from laneway.simulator.report.figures import Report
from laneway.simulator.report.rows import by_policy_and_load

TEMPLATE = Path(__file__).with_name("page.html.j2")
MISSING = "-"


def page(report: Report, plots: Mapping[str, tuple[str, bytes]]) -> str:
    """HTML. `plots`: by name, caption and PNG."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(percent=percent, ms=milliseconds, seconds=seconds, number=number)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    images = [(name, caption, base64.b64encode(png).decode("ascii")) for name, (caption, png) in plots.items()]
    groups = list(by_policy_and_load(report.verdicts).values())
    return template.render(report=report, images=images, groups=groups, few=P99_REQUESTS, **_parameters(report))


def _parameters(report: Report) -> dict[str, object]:
    """Of each policy at each load those of its first seed, and which are the same for all."""
    groups = list(by_policy_and_load(report.verdicts).items())
    first = [(key, seeds[0].parameters) for key, seeds in groups]
    names = sorted({name for _, parameters in first for name in parameters})
    heads = [policy if load is None else f"{policy} at {load:g}" for (policy, load), _ in first]
    rows = [(name, [parameters.get(name) for _, parameters in first]) for name in names]
    return {
        "parameter_heads": heads,
        "common": [(name, values[0]) for name, values in rows if len(heads) > 1 and _one(values)],
        "differing": [(name, values) for name, values in rows if len(heads) == 1 or not _one(values)],
    }


def _one(values: list[float | str | bool | None]) -> bool:
    return all(value == values[0] and type(value) is type(values[0]) for value in values)


def percent(share: float | None) -> str:
    return MISSING if share is None else f"{100.0 * share:.1f} %"


def milliseconds(value_s: float | None) -> str:
    return MISSING if value_s is None else f"{1000.0 * value_s:,.1f}"


def seconds(value_s: float | None) -> str:
    return MISSING if value_s is None else f"{value_s:,.2f}"


def number(value: object) -> str:
    if value is None:
        return MISSING
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return str(value)
