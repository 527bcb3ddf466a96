"""What a simulated worker knows of one request in its engine, or on its way there."""

from __future__ import annotations

import math

from laneway.core.lanes import LANES, Lane
from laneway.simulator.ticket import Ticket


class Entry:
    """As laneway.workers.prewarm has it: a prompt goes whole, or in slices through the prefix cache."""

    __slots__ = (
        "done", "entered_s", "first_s", "first_step", "in_flight", "kept", "lane", "left", "next_slice_s",
        "preemptions", "prompt", "reserved", "sliced", "slices", "submitted", "ticket",
    )  # fmt: skip

    def __init__(self, ticket: Ticket, reserved: int, now_s: float, *, kept: bool, preemptions: int) -> None:
        self.ticket = ticket
        self.lane: Lane = LANES[ticket.lane]
        self.prompt = ticket.prompt_tokens + ticket.made  # what its caller has is computed again
        self.reserved = reserved  # KV tokens in the ledger
        self.entered_s = now_s
        self.kept = kept  # the floor started it
        self.preemptions = preemptions
        self.done = 0  # prompt tokens computed by slices
        self.in_flight = 0
        self.slices = 0
        self.sliced = 0  # prompt tokens that its slices computed
        self.next_slice_s = -math.inf
        self.submitted = False
        self.first_s = math.nan
        self.first_step = 0
        self.left = False

    @property
    def left_tokens(self) -> int:
        return self.prompt - self.done

    @property
    def last_tokens(self) -> int:
        """What is to come after the slice that is in flight; of the real request, what it has in flight."""
        return self.left_tokens - (0 if self.submitted else self.in_flight)

    @property
    def waiting(self) -> bool:
        return not (self.submitted or self.left or self.in_flight)
