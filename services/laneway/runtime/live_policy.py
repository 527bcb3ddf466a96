"""The policy's parameters as they hold at this moment in this process.

They begin as the process's own settings. What the leading scheduler publishes with its plan takes their place, and
stays until it publishes something else, also while the plan is stale. Whoever decides by parameters asks at the moment
of the decision (`settings`, or a `derive`d value), never once at its start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import msgspec
import msgspec.structs
import structlog

from laneway.core.errors import ConfigError
from laneway.core.fleet import Plan
from laneway.runtime import metrics
from laneway.runtime.params import check_params
from laneway.runtime.settings import PolicySettings

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class LivePolicy:
    """One for a process. `take` is to be called with each newer plan."""

    def __init__(self, own: PolicySettings) -> None:
        """ConfigError where the process's own settings contradict each other."""
        check_params(own)
        self.settings = own
        self.version = 0  # as published; 0: the process's own settings hold
        self._own = own
        self._taken = 0, 0  # epoch and version of what was published last
        self._json = ""
        self._callbacks: list[Callable[[], None]] = []

    def gauge(self) -> AbstractContextManager[None]:
        """The version that this process goes by, for Prometheus."""
        text = "Version of the parameters that it goes by; 0: its own settings."
        return metrics.live_gauge("laneway_policy_version", text, (), lambda: [({}, float(self.version))])

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls it after each change of a value. It must be short and must not fail."""
        self._callbacks.append(callback)

    def derive(self, make: Callable[[PolicySettings], T]) -> Callable[[], T]:
        """A function that gives `make` of the settings that hold then; made once for each of their values."""
        made: list[tuple[PolicySettings, T]] = []

        def now() -> T:
            if not made or made[0][0] is not self.settings:
                made[:] = [(self.settings, make(self.settings))]
            return made[0][1]

        return now

    def take(self, plan: Plan) -> None:
        """Goes by what a plan publishes, if that is news. A later leader's word counts, whatever its version."""
        published = plan.policy
        order = plan.epoch, published.version
        if not published.version or order <= self._taken:
            return
        self._taken, self.version = order, published.version
        if published.json != self._json:
            self._json = published.json
            self.set(merged(published.json, self._own))
            _log.info("policy_taken", version=self.version)

    def set(self, settings: PolicySettings) -> None:
        """Goes by these values from now on."""
        if settings == self.settings:
            return
        self.settings = settings
        for callback in self._callbacks:
            callback()


def policy_json(policy: PolicySettings) -> str:
    """All values, as they are published: the same text for the same values."""
    return msgspec.json.encode(policy, order="sorted").decode()


def flat(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Published values by dotted key."""
    out: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            out.update(flat(value, f"{prefix}{name}."))
        else:
            out[prefix + name] = value
    return out


def merged(published: str, own: PolicySettings) -> PolicySettings:
    """What was published, as far as this release can read it; the rest is `own`, said in one log line.

    Unknown keys are a newer scheduler's, missing ones an older one's: processes are upgraded one after the other.
    """
    ignored: list[str] = []
    try:
        values = msgspec.json.decode(published, type=dict[str, Any])
        settings = cast(PolicySettings, _merged(PolicySettings, values, own, "", ignored))
        check_params(settings)  # here, and not at a decision
    except (msgspec.DecodeError, ConfigError, TypeError, ValueError) as error:
        _log.warning("published_policy_not_read", error=str(error))
        return own
    if ignored:
        _log.warning("published_policy_partly_read", ignored=sorted(ignored))
    return settings


def _merged(
    struct: type[msgspec.Struct], values: Mapping[str, Any], own: msgspec.Struct, prefix: str, ignored: list[str]
) -> msgspec.Struct:
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    taken: dict[str, object] = {}
    for name, value in values.items():
        if name not in fields:
            ignored.append(prefix + name)
            continue
        mine = getattr(own, name)
        if isinstance(mine, msgspec.Struct) and isinstance(value, dict):
            taken[name] = _merged(type(mine), value, mine, f"{prefix}{name}.", ignored)
            continue
        try:
            taken[name] = msgspec.convert(value, type=fields[name])
        except msgspec.ValidationError:  # a value that this release does not allow
            ignored.append(prefix + name)
    return msgspec.structs.replace(own, **taken)
