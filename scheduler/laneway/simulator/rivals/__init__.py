"""The baselines that Laneway is compared with, each as good as its idea allows, and what a search may try of each.

Not here, since they are no disciplines: pools kept apart (a split of the fleet, any rival in each part), autoscalers,
and the bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laneway.core.fleet import StepTimes
from laneway.simulator.rivals.base import Rival
from laneway.simulator.rivals.deadlines import DeadlineParams, Edf, LeastLaxity
from laneway.simulator.rivals.fair import Dlpm, DlpmParams, Vtc, VtcParams
from laneway.simulator.rivals.feed import Feed, FeedParams
from laneway.simulator.rivals.fifo import Fifo
from laneway.simulator.rivals.gate import Gate, GateParams
from laneway.simulator.rivals.gradient import Gradient, GradientParams
from laneway.simulator.rivals.in_engine import InEngine, InEngineParams
from laneway.simulator.rivals.params import Common
from laneway.simulator.rivals.reserved import Reserved, ReservedParams
from laneway.simulator.rivals.strict import PreemptParams, Strict, StrictPreempt

Values = tuple[float | bool, ...]
Grid = Mapping[str, Values]

# Of the engine, for all.
_ENGINE: Grid = {"chunk_tokens": (256, 512, 1024, 2048, 4096, 8192), "slots": (16, 32, 64, 128, 256)}
# For those that hold requests until there is room.
_HELD: Grid = {"kv_ceiling": (0.8, 0.9, 1.0), "pending_tokens": (0, 2048, 4096, 8192, 16384)}
_DEADLINES: Grid = {"relegates": (True, False), "urgent_s": (0.0, 0.1, 0.3, 1.0)}


@dataclass(frozen=True, slots=True)
class Entry:
    """How a rival is made, and by parameter the values worth a try; all others stay at their defaults."""

    rival: type[Rival[Any]]
    params: type[Common]
    grid: Grid

    def make(self, times: StepTimes, params: Common) -> Rival[Any]:
        """`times`: of the profile at the chunk of `params`; engines must have `params.size`."""
        assert isinstance(params, self.params), f"{self.rival.name} has {self.params.__name__}"
        return self.rival(times, params)


def _entry(rival: type[Rival[Any]], params: type[Common], *grids: Grid) -> Entry:
    return Entry(rival, params, {name: values for grid in (_ENGINE, *grids) for name, values in grid.items()})


_ENTRIES = (
    _entry(Fifo, Common, _HELD),
    _entry(Strict, Common, _HELD),
    _entry(
        StrictPreempt,
        PreemptParams,
        _HELD,
        {"preempting_lanes": (1, 2), "after_s": (0.0, 0.1, 0.25), "yields": (1, 3, 0)},
    ),
    _entry(InEngine, InEngineParams, _HELD, {"by_budget": (True, False)}),
    _entry(
        Reserved,
        ReservedParams,
        _HELD,
        {"slots_kept": (0.1, 0.2, 0.3, 0.5, 0.7), "kv_kept": (0.0, 0.2, 0.4), "preempts": (False, True)},
    ),
    _entry(Edf, DeadlineParams, _HELD, _DEADLINES),
    _entry(LeastLaxity, DeadlineParams, _HELD, _DEADLINES),
    _entry(
        Gate,
        GateParams,
        {
            "ceiling": (1.0, 2.0),
            "deferrable_ceiling": (0.25, 0.5, 0.75, 1.0),
            "batch_ceiling": (0.1, 0.25, 0.5, 0.75, 1.0),
            "inflight": (0, 16, 32, 64, 100, 200),
        },
    ),
    _entry(
        Feed,
        FeedParams,
        {"kv_ceiling": _HELD["kv_ceiling"], "low": (0.25, 0.5, 0.7), "high": (0.3, 0.6, 0.8)},
        {"at_low": (1, 2, 4), "urgent_s": (0.0, 10.0, 30.0)},
    ),
    _entry(Vtc, VtcParams, _HELD),
    _entry(Dlpm, DlpmParams, _HELD, {"quantum": (1024.0, 4096.0, 16384.0)}),
    _entry(
        Gradient,
        GradientParams,
        _HELD,
        {"tolerance": (1.5, 3.0, 6.0, 10.0), "learns": (True, False), "growth": (1, 4), "least": (4, 8, 16)},
    ),
)

RIVALS: Mapping[str, Entry] = {entry.rival.name: entry for entry in _ENTRIES}
