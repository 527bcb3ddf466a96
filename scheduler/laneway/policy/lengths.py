"""How long answers get: quantiles of output tokens, learned for each (tenant, route, model) and its parents.

A prediction is the q-quantile of the newest observations of the narrowest key that has OBSERVATIONS_MIN of them:
(tenant, route, model), then (tenant, model), then the model alone. What is not learned yet is assumed: `q x max_tokens`
for q below 0.75, else `max_tokens`. Priority asks for q = 0.5 for its ETA and 0.9 for KV, deferrable for 0.8, batch for
0.5 (policy.md a).

Quantiles are off by RELATIVE_ACCURACY of a length at most (DDSketch). Cost: an observation adds to three keys, some
10 us; a prediction is a look-up between two refreshes of a key, and a walk over some hundred bins at a refresh, which
happens when the key grew by a 32nd. Memory: some 10 kB a key at worst, KEYS_MAX keys, 40 MB.

Failure modes: a changed prompt is learned within HALF_LIFE to 2 x HALF_LIFE answers of its key, and until then ETAs are
wrong by the change (audit-admission lets some of what is refused for it pass, policy.admit); a tenant with more than
ROUTES_MAX routes has the rest answered by its own (tenant, model).
"""

from __future__ import annotations

import math
from collections import OrderedDict

from ddsketch.ddsketch import LogCollapsingLowestDenseDDSketch

RELATIVE_ACCURACY = 0.05  # far below the spread of lengths
BINS_MAX = 160  # of one sketch: lengths from 1 to a million tokens at that accuracy
OBSERVATIONS_MIN = 50  # below, the parent key answers (policy: admission)
HALF_LIFE = 500  # observations: what is older than twice as many is forgotten
KEYS_MAX = 4096  # least recently used keys are forgotten
ROUTES_MAX = 64  # of one tenant and model: routes are callers' words, and must not push out other tenants
REFRESH_SHARE = 32  # a cached quantile serves until its sketch grew by this part

Key = tuple[str, str, str]  # model, tenant, route; the latter two empty for all


class LengthSketch:
    """The newest HALF_LIFE to 2 x HALF_LIFE lengths: two sketches half a life apart, of which the older answers."""

    __slots__ = ("_cached", "_main", "_next", "_serves")

    def __init__(self) -> None:
        self._main = _sketch()
        self._next = _sketch()
        self._cached: dict[float, int] = {}
        self._serves = 0  # observations until what is cached is made anew

    @property
    def count(self) -> int:
        return int(self._main.count)

    def add(self, tokens: int) -> None:
        if self._main.count >= 2 * HALF_LIFE:
            self._main, self._next = self._next, _sketch()
        value = float(max(1, tokens))
        self._main.add(value)
        if self._main.count > HALF_LIFE:
            self._next.add(value)
        self._serves -= 1
        if self._serves <= 0:
            self._cached.clear()
            self._serves = self.count // REFRESH_SHARE

    def quantile(self, q: float) -> int:
        """Tokens, at least 1; 0 when nothing was seen."""
        known = self._cached.get(q)
        if known is None:
            known = self._cached[q] = math.ceil(self._main.get_quantile_value(q) or 0.0)
        return known


class LengthBook:
    """Sketches by key. One owner feeds it with the answers that it heard end by themselves or at their limit."""

    def __init__(self) -> None:
        self._sketches: OrderedDict[Key, LengthSketch] = OrderedDict()
        self._routes: dict[tuple[str, str], OrderedDict[str, None]] = {}  # of a model and tenant, the newest last

    def __len__(self) -> int:
        return len(self._sketches)

    def observe(self, tenant: str, model: str, tokens: int, *, route: str = "") -> None:
        if route:
            self._note_route(model, tenant, route)
            self._add((model, tenant, route), tokens)
        self._add((model, tenant, ""), tokens)
        self._add((model, "", ""), tokens)
        while len(self._sketches) > KEYS_MAX:
            self._forget(next(iter(self._sketches)))

    def predict(
        self, tenant: str, model: str, q: float, max_tokens: int, *, min_tokens: int = 0, route: str = ""
    ) -> int:
        """The q-quantile of output tokens, between min_tokens and max_tokens."""
        keys: tuple[Key, ...] = ((model, tenant, ""), (model, "", ""))
        for key in ((model, tenant, route), *keys) if route else keys:
            sketch = self._sketches.get(key)
            if sketch is not None and sketch.count >= OBSERVATIONS_MIN:
                return max(1, min_tokens, min(sketch.quantile(q), max_tokens))
        unlearned = math.ceil(max_tokens * min(1.0, q)) if q < 0.75 else max_tokens
        return max(1, min_tokens, min(unlearned, max_tokens))

    def _add(self, key: Key, tokens: int) -> None:
        sketch = self._sketches.get(key)
        if sketch is None:
            sketch = self._sketches[key] = LengthSketch()
        else:
            self._sketches.move_to_end(key)
        sketch.add(tokens)

    def _note_route(self, model: str, tenant: str, route: str) -> None:
        routes = self._routes.setdefault((model, tenant), OrderedDict())
        routes[route] = None
        routes.move_to_end(route)
        if len(routes) > ROUTES_MAX:
            self._forget((model, tenant, next(iter(routes))))

    def _forget(self, key: Key) -> None:
        model, tenant, route = key
        del self._sketches[key]
        routes = self._routes.get((model, tenant)) if route else None
        if routes is not None:
            del routes[route]
            if not routes:
                del self._routes[model, tenant]


def _sketch() -> LogCollapsingLowestDenseDDSketch:
    return LogCollapsingLowestDenseDDSketch(relative_accuracy=RELATIVE_ACCURACY, bin_limit=BINS_MAX)
