"""What a rival keeps with a request and with a worker: where it is, what it was given, what is on its way."""

from __future__ import annotations

import math

from laneway.core.fleet import StepTimes
from laneway.core.lanes import LANES
from laneway.simulator.rivals.prefixes import SentPrefixes
from laneway.simulator.ticket import Ticket
from laneway.simulator.world import Worker


class Seat:
    """With a request. It waits, or has a station, or neither: refused for now, or lost with its worker."""

    __slots__ = (
        "began_s", "begun", "blocks", "entry", "first_s", "gone", "mark", "order", "prefill", "station", "waits",
        "yields",
    )  # fmt: skip

    def __init__(self, order: int) -> None:
        self.order = order  # in which requests came: no two are alike
        self.entry = 0  # of its queue that holds; older ones of it say nothing
        self.waits = False
        self.gone = False  # its caller left, or it was dropped
        self.station: Station | None = None
        self.blocks = 0  # KV that was set aside
        self.prefill = 0  # prompt tokens that its engine has to compute
        self.begun = False  # it decodes
        self.began_s = math.nan  # when it was given to its engine
        self.first_s = math.nan  # of this run
        self.yields = 0  # how often it made room for another
        self.mark = 0.0  # of the rival's own


class Station:
    """With a worker: the ledger of its slots and KV blocks, and what its engine has still to prefill."""

    def __init__(self, worker: Worker, times: StepTimes, kv_ceiling: float) -> None:
        engine = worker.engine
        self.worker = worker
        self.slots = engine.slots
        self.block_tokens = engine.block_tokens
        blocks = engine.kv_tokens // engine.block_tokens
        self.blocks = int(blocks * kv_ceiling)  # that are given away
        self.blocks_given = 0
        self.running: dict[Ticket, None] = {}  # in the order in which they came
        self.lanes = [0] * len(LANES)  # of these
        self.waiting = [0] * len(LANES)  # of these without a token yet
        self.prefill_tokens = [0] * len(LANES)  # of the latter, still to be computed
        self.prefixes = SentPrefixes(blocks)
        self._times = times
        self._prompt_tokens = 0
        self._token_s = times.prefill_token_s + times.base_s / max(1, times.chunk_tokens)

    @property
    def slots_free(self) -> int:
        return self.slots - len(self.running)

    @property
    def blocks_free(self) -> int:
        return self.blocks - self.blocks_given

    def enter(self, ticket: Ticket, blocks: int, prefill_tokens: int, now_s: float) -> None:
        seat: Seat = ticket.mind
        seat.station, seat.blocks, seat.prefill, seat.begun, seat.began_s = self, blocks, prefill_tokens, False, now_s
        self.running[ticket] = None
        self.blocks_given += blocks
        self.lanes[ticket.lane] += 1
        self.waiting[ticket.lane] += 1
        self.prefill_tokens[ticket.lane] += prefill_tokens
        self._prompt_tokens += ticket.prompt_tokens

    @property
    def step_s(self) -> float:
        """Of its engine, with what runs."""
        return self._times.decode_s(len(self.running), self._prompt_tokens)

    def begin(self, ticket: Ticket, now_s: float = math.nan) -> None:
        """Its first token of this run came."""
        seat: Seat = ticket.mind
        if not seat.begun:
            seat.begun, seat.first_s = True, now_s
            self.waiting[ticket.lane] -= 1
            self.prefill_tokens[ticket.lane] -= seat.prefill

    def leave(self, ticket: Ticket) -> None:
        seat: Seat = ticket.mind
        self.begin(ticket)
        del self.running[ticket]
        self.blocks_given -= seat.blocks
        self.lanes[ticket.lane] -= 1
        self._prompt_tokens -= ticket.prompt_tokens
        seat.station = None

    def first_token_s(self, prefill_tokens: int, lanes: int = len(LANES)) -> float:
        """Of one more prompt: what the engine has to compute before it and of it, at full chunks, and one step.

        `lanes`: how many of the first lanes' prompts go before it; all in an engine that serves them as they came.
        """
        ahead = sum(self.prefill_tokens[:lanes]) + prefill_tokens
        return ahead * self._token_s + self._times.decode_s(len(self.running) + 1, self._prompt_tokens)
