"""The plots of a report as PNG bytes. Figures are objects on an Agg canvas: nothing of pyplot's global state."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

from laneway.core.errors import ConfigError
from laneway.core.lanes import LANES
from laneway.simulator.report.figures import Bar, LaneRow, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by readers who see few colours, without its yellow (too light on white).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":")  # with these, 21 policies differ
Look = dict[str, Any]  # of a policy's line
LANE_COLOURS = {"priority": "#0072B2", "deferrable": "#E69F00", "batch": "#999999"}
INK, FAINT = "#1a1a1a", "#d9d9d9"
WIDTH_IN, DPI = 10.0, 110
TICKS = 7  # of a logarithmic axis; with more, powers of ten alone
MEASURES = {"ttft": "TTFT (s)", "tpot": "TPOT (ms)", "completion": "completion (s)"}
SCALE = {"tpot": 1000.0}
COST = "GPU-hours paid for until the last request has ended, booting included, with 95 % intervals over seeds."
NEVER = "What was refused, left or dropped never arrives, so a curve need not reach 100 %."
USAGE = (
    "Left: share of the paid time in which engines ran steps, and of KV in use. Right: useful work by lane, in "
    "device-seconds by the profile for each second paid for, counted when an answer is done; more than 1 where "
    "prefixes are found in caches or batches are larger than 32 sequences. Of the first seed."
)


def plots(report: Report) -> dict[str, tuple[str, bytes]]:
    """By name, the caption and the PNG of each plot that the report has figures for. Raises ConfigError where there is
    no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'laneway[simulate]'") from None
    return {name: (caption, _png(figure)) for name, caption, figure in _drawn(report)}


def _drawn(report: Report) -> Iterator[tuple[str, str, Figure]]:
    looks = _looks(report)
    if report.attainment:
        yield "attainment", "SLO attainment by lane over time, over all that was offered.", _attainment(report, looks)
    for lane in LANES:
        if any(curve.lane == lane for curve in report.curves):
            yield (
                f"cdf-{lane}",
                f"The {lane} lane: share of all offered with at most this TTFT, TPOT, time to the end. {NEVER}",
                _curves(report, lane, looks),
            )
    if report.usage:
        yield (
            "usage",
            USAGE,
            _usage(report),
        )
    if len({row.load for row in report.lanes if row.load is not None}) > 1:
        yield "goodput", "Goodput against load: answers within their promises.", _goodput(report, looks)
    if report.harvest:
        yield "harvest", _harvest_caption(report), _bars(report.harvest, "harvest (device-hours)", looks)
    if report.gpu_hours:
        yield (
            "cost",
            COST,
            _bars(report.gpu_hours, "cost (GPU-hours)", looks),
        )


def _harvest_caption(report: Report) -> str:
    said = "Batch jobs done in time, in device-hours by the profile, with 95 % intervals over seeds."
    if any(bar.counts is False for bar in report.harvest):
        said += " Hatched: does not count, as the other lanes attained less than they must."
    return said


def _looks(report: Report) -> dict[str, Look]:
    """Of each policy. The first lies on top; others are the wider the later they come, so that none hides another."""
    endless = cycle(product(STYLES, COLOURS))
    policies = dict.fromkeys(verdict.policy for verdict in report.verdicts)
    return {
        policy: {"color": colour, "ls": style, "lw": 1.5 + 0.6 * min(place, 4), "zorder": 3.0 - 0.01 * place}
        for place, (policy, (style, colour)) in enumerate(zip(policies, endless, strict=False))
    }


def _attainment(report: Report, looks: dict[str, Look]) -> Figure:
    lanes = [lane for lane in LANES if any(line.lane == lane for line in report.attainment)]
    figure, axes = _figure(len(lanes), 1, 2.1, sharex=True)
    for axis, lane in zip(axes, lanes, strict=True):
        for line in report.attainment:
            if line.lane == lane:
                share = [float("nan") if value is None else 100.0 * value for value in line.share]
                known = sum(value is not None for value in line.share)
                style = dict(looks[line.policy])
                if known == 1:
                    style |= {"marker": "o", "ms": 7.0 + 4.0 * (style["lw"] - 1.5), "clip_on": False}
                axis.plot([at / 60.0 for at in line.at_s], share, label=line.policy, **style)
        axis.set_ylim(-3.0, 103.0)
        axis.set_ylabel(f"{lane}\nattainment (%)")
        axis.margins(x=0.01)
    axes[-1].set_xlabel("time asked for (min)")
    _legend(figure, axes)
    return figure


def _curves(report: Report, lane: str, looks: dict[str, Look]) -> Figure:
    figure, axes = _figure(1, len(MEASURES), 3.2, sharey=True)
    for axis, (measure, label) in zip(axes, MEASURES.items(), strict=True):
        scale = SCALE.get(measure, 1.0)
        promised: set[float] = set()
        for curve in report.curves:
            if curve.lane == lane and curve.measure == measure:
                points = [(at * scale, 100.0 * share) for at, share in zip(curve.at_s, curve.share, strict=True)]
                positive = [point for point in points if point[0] > 0.0]  # an answer of one token has a TPOT of 0
                if positive:
                    axis.step(*zip(*positive, strict=True), where="post", label=curve.policy, **looks[curve.policy])
                if curve.promised_s is not None:
                    promised.add(curve.promised_s)
        for value in promised:
            axis.axvline(value * scale, color=INK, lw=1.0, ls=(0, (1, 2)))
            axis.annotate("promised", (value * scale, 2.0), rotation=90, fontsize=8, color=INK, ha="right", va="bottom")
        axis.set_xscale("log")
        _plain_ticks(axis)
        axis.set_xlabel(label)
        axis.set_ylim(0.0, 103.0)
    axes[0].set_ylabel("share of offered (%)")
    _legend(figure, axes)
    return figure


def _usage(report: Report) -> Figure:
    figure, axes = _figure(len(report.usage), 2, 1.75, sharex=True, sharey="col")
    for row, line in enumerate(report.usage):
        left, right = axes[2 * row], axes[2 * row + 1]
        at = [value / 60.0 for value in line.at_s]
        for values, name, colour, style in ((line.busy, "busy", COLOURS[0], "-"), (line.kv, "KV", COLOURS[1], "--")):
            share = [float("nan") if value is None else 100.0 * value for value in values]
            left.plot(at, share, style, color=colour, label=name, lw=1.6)
        left.set_ylim(-3.0, 103.0)
        left.set_ylabel("in use (%)")
        left.set_title(line.policy, loc="left", fontsize=10, fontweight="bold", color=INK)
        right.stackplot(
            at, list(line.lanes.values()), labels=list(line.lanes), colors=[LANE_COLOURS[lane] for lane in line.lanes]
        )
        right.set_ylim(bottom=0.0)
        right.set_ylabel("useful (device-s/s)")
        left.margins(x=0.01)
    for axis in axes[-2:]:
        axis.set_xlabel("time (min)")
    _legend(figure, [axes[0], axes[1]])
    return figure


def _goodput(report: Report, looks: dict[str, Look]) -> Figure:
    lanes = [lane for lane in LANES if any(row.lane == lane and row.offered for row in report.lanes)]
    figure, axes = _figure(1, len(lanes), 3.2)
    for axis, lane in zip(axes, lanes, strict=True):
        for policy, look in looks.items():
            rows: list[LaneRow] = [row for row in report.lanes if row.policy == policy and row.lane == lane]
            points = sorted((row.load, row.goodput_tokens_per_s) for row in rows if row.load is not None)
            if points:
                axis.plot(*zip(*points, strict=True), label=policy, marker="o", ms=3.0 + look["lw"], **look)
        axis.set_title(lane, loc="left", fontsize=10, fontweight="bold", color=INK)
        axis.set_xlabel("load (rho99)")
        axis.set_ylim(bottom=0.0)
    axes[0].set_ylabel("goodput (output tokens/s)")
    _legend(figure, axes)
    return figure


def _bars(bars: list[Bar], label: str, looks: dict[str, Look]) -> Figure:
    figure, axes = _figure(1, 1, max(1.4, 0.5 + 0.36 * len(bars)))
    axis = axes[0]
    furthest = 0.0
    for place, bar in enumerate(reversed(bars)):
        void = bar.counts is False
        colour = looks[bar.policy]["color"]
        axis.barh(place, bar.value, height=0.64, color="white" if void else colour, edgecolor=colour,
                  hatch="////" if void else None, lw=1.2)  # fmt: skip
        end = bar.value
        if bar.interval is not None:
            low, high = bar.interval.low, bar.interval.high
            axis.errorbar(bar.value, place, xerr=[[bar.value - low], [high - bar.value]], color=INK, capsize=3, lw=1.2)
            end = max(end, high)
        furthest = max(furthest, end)
        text = f"{bar.value:.3g}"
        if bar.ratio is not None and not void:
            text += f"  ({bar.ratio.mean:.2f}x silo)"
        axis.annotate(text, (end, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
    axis.set_yticks(range(len(bars)), [bar.policy for bar in reversed(bars)])
    axis.set_xlim(0.0, 1.2 * furthest or 1.0)  # room for what is written beside the bars
    axis.grid(visible=False, axis="y")
    axis.set_xlabel(label)
    return figure


def _figure(rows: int, columns: int, row_in: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, row_in * rows + 0.75), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(INK)
        axis.tick_params(colors=INK, labelsize=9)
        axis.xaxis.label.set_color(INK)
        axis.yaxis.label.set_color(INK)
        axis.grid(visible=True, color=FAINT, lw=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def _plain_ticks(axis: Axes) -> None:
    """0.1, 1, 10 rather than powers, and what lies between where there is room."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    low, high = axis.get_xlim()
    ticks: list[float] = []
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in (range(1, 10), (1, 2, 5), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        if sum(low <= tick <= high for tick in ticks) <= TICKS:
            break
    axis.set_xlim(low, high)
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, axes: list[Axes]) -> None:
    """One for all, above: each name once."""
    named: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(list(named.values()), list(named), loc="outside upper center", ncols=6, frameon=False, fontsize=9,
                  labelcolor=INK)  # fmt: skip


def _png(figure: Figure) -> bytes:
    made = io.BytesIO()
    figure.savefig(made, format="png", metadata={"Software": None})
    return made.getvalue()
