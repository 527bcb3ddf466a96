"""What a replay came to, in a few figures for people and as a JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from laneway.cli.replaying.notes import LATE_S, Keeping
from laneway.core.errors import ConfigError
from laneway.core.lanes import LANES
from laneway.simulator.outcomes import End, Run
from laneway.simulator.trace import Floats

COLUMNS = ("LANE", "ASKED", "KEPT", "DONE", "REFUSED", "LEFT", "EXPIRED", "FAILED", "OPEN",
           "TTFT P50", "P99", "TPOT P50", "P99")  # fmt: skip


@dataclass(frozen=True, slots=True)
class LaneSummary:
    """Of one lane. `kept`: share of all that was asked for that was done within all its promises."""

    lane: str
    asked: int
    kept: float
    ends: dict[str, int]
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    tokens: int
    cached_share: float  # of the prompts' tokens that were read


def summary_of(run: Run) -> list[LaneSummary]:
    """A value for each lane that the trace has."""
    trace, outcomes = run.trace, run.outcomes
    done = outcomes.end == End.DONE
    kept = (
        done
        & (outcomes.ttft_s <= trace.ttft_s)
        & (outcomes.tpot_s <= trace.tpot_s)
        & (outcomes.end_s - outcomes.asked_s <= trace.deadline_s)
    )
    found = []
    for number, lane in enumerate(LANES):
        mine = np.equal(trace.lane, number)
        asked = int(np.count_nonzero(mine))
        if not asked:
            continue
        ttft_p50_s, ttft_p99_s = _quantiles(outcomes.ttft_s[mine & done])
        tpot_p50_s, tpot_p99_s = _quantiles(outcomes.tpot_s[mine & done & (outcomes.tokens > 1)])
        read = int(trace.prompt_tokens[mine & done].sum())
        found.append(
            LaneSummary(
                lane=lane.value,
                asked=asked,
                kept=float(np.count_nonzero(kept & mine)) / asked,
                ends={end.name.lower(): int(np.count_nonzero(mine & (outcomes.end == end))) for end in End},
                ttft_p50_s=ttft_p50_s,
                ttft_p99_s=ttft_p99_s,
                tpot_p50_s=tpot_p50_s,
                tpot_p99_s=tpot_p99_s,
                tokens=int(outcomes.tokens[mine].sum()),
                cached_share=float(outcomes.cached_tokens[mine & done].sum()) / read if read else 0.0,
            )
        )
    return found


def document(run: Run, keeping: Keeping) -> dict[str, object]:
    return {
        "trace": run.trace.name,
        "notes": run.trace.notes,
        "parameters": run.parameters,
        "lanes": [asdict(lane) for lane in summary_of(run)],
        "counts": run.counts,
        "usage": {
            "every_s": run.usage.every_s,
            "workers": _known_mean(run.usage.workers),
            "busy": _known_mean(run.usage.busy),
            "kv": _known_mean(run.usage.kv),
        },
        "player": {**asdict(keeping), "kept_up": keeping.kept_up},
    }


def write_report(run: Run, keeping: Keeping, folder: Path) -> None:
    """The document as `replay.json`. ConfigError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(document(run, keeping), indent=2, ensure_ascii=False)
        (folder / "replay.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written: {error.strerror}") from None


def rows(found: list[LaneSummary]) -> list[tuple[object, ...]]:
    """For COLUMNS."""
    return [
        (
            lane.lane,
            lane.asked,
            f"{100 * lane.kept:.1f} %",
            *(lane.ends[name] for name in ("done", "refused", "left", "expired", "failed", "open")),
            *(_ms(value) for value in (lane.ttft_p50_s, lane.ttft_p99_s, lane.tpot_p50_s, lane.tpot_p99_s)),
        )
        for lane in found
    ]


def sentences(run: Run, keeping: Keeping) -> list[str]:
    """What else a reader has to know."""
    said = []
    busy = _known_mean(run.usage.busy)
    if busy is not None:
        said.append(f"workers: {_known_mean(run.usage.workers):.1f} on average, busy {100 * busy:.0f} % of their time")
    others = [f"{name} {count:g}" for name, count in sorted(run.counts.items()) if count and "." in name]
    if others:
        said.append("counted: " + ", ".join(others))
    off = run.counts.get("prompt_tokens_off_most", 0.0)
    if off:
        said.append(
            f"prompts were not of the trace's lengths: {run.counts['prompt_tokens_off_mean']:.1f} tokens off on"
            f" average, {off:g} at most"
        )
    pace = (
        f"{keeping.late} of {keeping.starts} priority requests began more than {LATE_S * 1000:g} ms late"
        f" (p50 {_ms(keeping.late_p50_s)}, p99 {_ms(keeping.late_p99_s)}, most {_ms(keeping.late_most_s)});"
        f" this process woke up {_ms(keeping.pulse_p99_s)} late at p99"
    )
    said.append(f"the player kept up: {pace}" if keeping.kept_up else f"THE PLAYER DID NOT KEEP UP: {pace}."
                " The figures are its own as much as the system's")  # fmt: skip
    return said


def _quantiles(values: Floats) -> tuple[float | None, float | None]:
    known = values[~np.isnan(values)]
    if not len(known):
        return None, None
    median, p99 = np.quantile(known, (0.5, 0.99))
    return float(median), float(p99)


def _known_mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _ms(value_s: float | None) -> str:
    return "" if value_s is None else f"{value_s * 1000:.1f} ms"
