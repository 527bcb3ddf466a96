"""Priority that a region cannot serve goes to others that can: policy.md (e), in the mean.

A region spills what comes beyond what it can start in a second, and all of it while it is away. Another lends at most
half of what it has free. Of those that lend, the near ones get more: in proportion to free capacity over RTT.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from laneway.simulator.trace import Floats

LENT_SHARE = 0.5
RTT_LEAST_S = 1e-3


def spill(
    arrived: Floats, priority: NDArray[np.bool_], waiting: Floats, can: Floats, up: NDArray[np.bool_], rtt_s: Floats
) -> tuple[Floats, Floats, Floats]:
    """What comes to each region (row) by class, of that the share that other regions sent, and the mean RTT of it.

    `arrived`: by region and class; `waiting`, `can`: priority requests of a region, and how many it can start a second.
    """
    mine = arrived[:, priority].sum(axis=1)
    over = np.where(up, np.clip(waiting + mine - can, 0.0, mine), mine)
    free = np.where(up, LENT_SHARE * np.maximum(can - mine - waiting, 0.0), 0.0)
    none = np.zeros(len(arrived))
    if not (over > 0.0).any() or not (free > 0.0).any():
        return arrived, none, none
    weight = free / np.maximum(rtt_s, RTT_LEAST_S)
    np.fill_diagonal(weight, 0.0)
    total = weight.sum(axis=1, keepdims=True)
    flow = over[:, None] * np.divide(weight, total, out=np.zeros_like(weight), where=total > 0.0)
    taken = flow.sum(axis=0)
    flow *= np.divide(np.minimum(taken, free), taken, out=np.zeros_like(taken), where=taken > 0.0)
    share = np.divide(arrived, mine[:, None], out=np.zeros_like(arrived), where=mine[:, None] > 0.0)
    share[:, ~priority] = 0.0
    came = arrived - flow.sum(axis=1)[:, None] * share + flow.T @ share
    taken = flow.sum(axis=0)
    now = came[:, priority].sum(axis=1)
    far_share = np.divide(taken, now, out=np.zeros_like(now), where=now > 0.0)
    far_s = np.divide((flow * rtt_s).sum(axis=0), taken, out=np.zeros_like(taken), where=taken > 0.0)
    return came, far_share, far_s
