"""Which of those who wait start in a second of fleet mode: the order of laneway.policy.pull, in the mean.

Priority starts first. Of so many starts one is a lower lane's while any waits (the floor), as far as the interference
budget has tokens for it. What is left goes to the lower lanes within what they are granted: several deferrable
requests for each batch request while both wait, then batch alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from laneway.core.lanes import LANES
from laneway.policy.pull import PullParams
from laneway.simulator.trace import Floats

SMALL = 1e-12


@dataclass(frozen=True, slots=True)
class Asked:
    """What whole lines would take, if all of them started. By region and lane."""

    count: Floats
    tokens: Floats  # of prompts
    places: Floats  # added by the second's end
    kv: Floats


@dataclass(slots=True)
class Room:
    """What a region has left for a second."""

    tokens: Floats
    places: Floats
    kv: Floats

    def fit(self, bundle: Floats, asked: Asked) -> Floats:
        """As much of a bundle (shares of lines, by region and lane) as there is room for, which is taken."""
        needs = [(bundle * each).sum(axis=1) for each in (asked.tokens, asked.places, asked.kv)]
        share = np.ones(len(bundle))
        for need, left in zip(needs, (self.tokens, self.places, self.kv), strict=True):
            share = np.minimum(share, np.where(need > SMALL, np.maximum(left, 0.0) / np.maximum(need, SMALL), 1.0))
        self.tokens = self.tokens - share * needs[0]
        self.places = self.places - share * needs[1]
        self.kv = self.kv - share * needs[2]
        return bundle * share[:, None]


def shares(asked: Asked, room: Room, lower_tokens: Floats, lower_places: Floats, params: PullParams) -> Floats:
    """Of each line, what starts. `lower_tokens`: granted to lower lanes; `lower_places`: left for them, at most."""
    lanes = np.eye(len(LANES))
    whole = np.ones((len(asked.count), 1))
    ratio = _with_deferrable(asked, params)
    floor = np.zeros_like(asked.count)
    if params.floor_turns and lower_tokens.any():
        first = Room(room.tokens, room.places, room.kv).fit(whole * lanes[0], asked)
        turns = (first[:, 0] * asked.count[:, 0] / (params.floor_turns - 1))[:, None]
        both = asked.count[:, 1] > 0.0
        part = np.where(both, params.deferrable_per_batch / (params.deferrable_per_batch + 1.0), 0.0)
        wanted = turns * np.stack([np.zeros_like(part), part, 1.0 - part], axis=1)
        wanted = np.minimum(1.0, wanted / np.maximum(asked.count, SMALL)) * (asked.count > 0.0)
        floor = Room(np.minimum(room.tokens, lower_tokens), room.places, room.kv).fit(wanted, asked)
        room.fit(floor, asked)
    out = floor + room.fit(whole * lanes[0], asked)
    used = (floor * asked.tokens).sum(axis=1), (out * asked.places).sum(axis=1)
    tokens, places = np.minimum(room.tokens, lower_tokens - used[0]), np.minimum(room.places, lower_places - used[1])
    below = Room(tokens, places, room.kv)
    out = out + below.fit(np.minimum(1.0 - out, ratio), asked) * (lanes[1] + lanes[2])
    out = out + below.fit((1.0 - out) * lanes[2], asked)
    return np.asarray(np.clip(out, 0.0, 1.0))


def _with_deferrable(asked: Asked, params: PullParams) -> Floats:
    """All that waits of the deferrable lane, and the part of the batch line that starts beside it."""
    each = params.deferrable_per_batch or math.inf
    beside = np.minimum(1.0, asked.count[:, 1] / each / np.maximum(asked.count[:, 2], SMALL))
    return np.stack([np.zeros_like(beside), np.ones_like(beside), beside], axis=1)
