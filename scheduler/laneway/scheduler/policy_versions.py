"""The version of the parameters that a leader publishes with its plans.

It rises with each change of a value, over all leaders: each goes on from the plan before its term. A leader whose own
settings differ from what was published last publishes its own, as a new version, and says so.
"""

from __future__ import annotations

import msgspec
import structlog

from laneway.core.clock import Clock
from laneway.core.fleet import PolicyVersion
from laneway.runtime.live_policy import LivePolicy, flat, policy_json
from laneway.scheduler.policy_reload import PolicyReload, changes

_log = structlog.get_logger(__name__)


class PolicyVersions:
    """Of one term. `reload`: None where settings are not read again."""

    def __init__(
        self, policy: LivePolicy, clock: Clock, before: PolicyVersion, reload: PolicyReload | None = None
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._last = PolicyVersion(before.version, before.json, before.loaded_s)  # not what another scheduler lacks
        self._reload = reload
        self._text = policy.derive(policy_json)

    def now(self) -> PolicyVersion:
        """What the plan of this moment says."""
        text, before = self._text(), self._last
        if not before.version or text != before.json:
            self._last = PolicyVersion(before.version + 1, text, self._clock.now())
            changed = changes(_values(before.json), _values(text)) if before.version else {}
            _log.info("policy_published", version=self._last.version, changed=changed)
        self._policy.version = self._last.version
        if self._reload is None:
            return self._last
        return msgspec.structs.replace(self._last, refused=self._reload.refused, restart=self._reload.restart)


def _values(text: str) -> dict[str, object]:
    try:
        return flat(msgspec.json.decode(text, type=dict[str, object]))
    except msgspec.MsgspecError:  # another release's
        return {}
