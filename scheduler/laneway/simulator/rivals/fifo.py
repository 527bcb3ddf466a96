"""First in, first out: one queue for all lanes, and workers that take from it what they have room for."""

from __future__ import annotations

from laneway.simulator.rivals.base import Rival
from laneway.simulator.rivals.order import ByKey, Order, as_they_came
from laneway.simulator.rivals.params import Common


class Fifo(Rival[Common]):
    """What a pool without lanes does: source, the default order of vLLM, TensorRT-LLM and most gateways.

    Simplified: nothing. A worker's pull is instant, so that none waits while another has work to give.
    """

    name = "fifo"

    def make_order(self) -> Order:
        return ByKey(as_they_came)
