"""One policy on one trace: by its name, with its parameters, on engines of a profile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from laneway.core.errors import ConfigError
from laneway.runtime.engine_profile import EngineProfile
from laneway.runtime.settings import PolicySettings
from laneway.simulator.ours.discipline import Laneway
from laneway.simulator.ours.params import OurParams
from laneway.simulator.outcomes import Run
from laneway.simulator.rivals import RIVALS
from laneway.simulator.setup import EngineSize, Setup
from laneway.simulator.trace import Trace
from laneway.simulator.world import FleetParams, World

OURS = "laneway"
_SIZE = EngineSize()
_SETTINGS = PolicySettings()


def policies() -> tuple[str, ...]:
    """What `play` knows: Laneway first."""
    return (OURS, *sorted(RIVALS))


def play(
    policy: str,
    trace: Trace,
    profile: EngineProfile,
    fleet: FleetParams,
    *,
    size: EngineSize = _SIZE,
    settings: PolicySettings = _SETTINGS,
    autoscale: bool = False,
    seed: int = 0,
    deaths: Iterable[tuple[float, int]] = (),
) -> Run:
    """`size`: of each engine; `settings` and `autoscale`: Laneway's. One seed gives one run. Raises ConfigError for a
    policy that is not known, and ValueError where a request could never fit an engine."""
    setup = Setup(profile, size, fleet.workers)
    if policy == OURS:
        ours = OurParams.of(settings, slots=size.slots, look_s=fleet.tick_s)
        discipline = Laneway(setup.pool(), setup.times, replace(ours, autoscale=autoscale))
        return World(trace, discipline, fleet, setup.engine, setup.times, seed=seed, deaths=deaths).run()
    entry = RIVALS.get(policy)
    if entry is None:
        raise ConfigError(f"there is no policy {policy!r}: {', '.join(policies())}")
    params = entry.params(chunk_tokens=size.chunk_tokens, slots=size.slots)
    rival = entry.make(setup.times, params)
    return World(trace, rival, fleet, setup.engine, setup.times, seed=seed, deaths=deaths).run()
