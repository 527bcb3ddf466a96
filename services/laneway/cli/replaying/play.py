"""One replay from end to end: what there is to know of the stack, the passes over the trace, and the Run."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from laneway.cli.console import describe
from laneway.cli.replaying.asking import LABEL, Manner
from laneway.cli.replaying.fleet_watch import FleetWatch
from laneway.cli.replaying.notes import Keeping
from laneway.cli.replaying.played import only
from laneway.cli.replaying.player import LEAD_S, Player
from laneway.cli.replaying.prompts import WARM_SALT, Pieces, Prompts, find_pieces
from laneway.cli.replaying.show import Progress
from laneway.core.errors import LanewayError
from laneway.core.fleet import StepTimes
from laneway.core.lanes import JobState
from laneway.simulator.outcomes import Run
from laneway.simulator.trace import Trace

if TYPE_CHECKING:
    from laneway.client import Client, Model, SchedulerClient

CLEAN_UP_S = 20.0
LIVE_STATES = (JobState.WAITING, JobState.PARKED, JobState.READY, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    calls: int  # open at a time
    warm: bool  # caches know the shared parts of prompts from an earlier pass
    seed: int
    times: StepTimes | None  # of the engines, where known
    parameters: dict[str, float | str | bool]  # for the report


class Replay:
    """`clients`: one for each tenant of the trace, or one for all."""

    def __init__(
        self,
        trace: Trace,
        clients: Sequence[Client],
        scheduler: SchedulerClient,
        options: Options,
        console: Console,
        say: Callable[[str], None],
    ) -> None:
        self.stopped = False
        self._trace, self._clients, self._scheduler, self._options = trace, clients, scheduler, options
        self._console, self._say = console, say
        self._label = secrets.token_hex(4)
        self._player: Player | None = None

    def stop(self) -> None:
        """Ends it in order, with the figures so far."""
        self.stopped = True
        if self._player is not None:
            self._player.stop()

    async def run(self) -> tuple[Run, Keeping]:
        models = await self._models()
        self._say_what_does_not_fit(models)
        pieces = await find_pieces(self._quote)
        for client in self._clients[1:]:  # connected, and known to be let in, before time counts
            await client.quote(model=self._options.model, prompt=pieces.text(b"a"), max_tokens=1)
        if not pieces.exact:
            self._say("the tokenizer joins or splits what prompts are made of: their lengths are not the trace's")
        manner = Manner(
            model=self._options.model,
            run=self._label,
            ignore_eos=all("ignore_eos" in model.capabilities for model in models),
            draw=random.Random(self._options.seed).random,
        )
        if not manner.ignore_eos:
            self._say("not every pool of the model goes on past an end token: answers may be shorter than asked for")
        self._say(
            f"replay of {self._trace.name} at {self._clients[0].address}; the jobs have the label {LABEL}={self._label}"
        )
        pools = frozenset(model.pool for model in models)
        if self._options.warm:
            await self._pass(pieces, manner, pools, "first pass, to warm the caches")
        return await self._pass(pieces, manner, pools, "replay")

    async def _pass(self, pieces: Pieces, manner: Manner, pools: frozenset[str], what: str) -> tuple[Run, Keeping]:
        own_salt = secrets.token_hex(8)
        prompts = Prompts(
            self._trace, pieces, block_salt=WARM_SALT if self._options.warm else own_salt, own_salt=own_salt
        )
        player = self._player = Player(
            self._trace, prompts, self._clients, manner, calls=self._options.calls, times=self._options.times
        )
        watch = FleetWatch(self._scheduler, pools, player.notes)
        begin_s = asyncio.get_running_loop().time() + LEAD_S
        watching = asyncio.create_task(watch.run(begin_s))
        try:
            async with Progress(self._console, what, player, self._trace, watch):
                if not self.stopped:
                    await player.play(begin_s)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            if player.notes.ended < player.notes.begun:
                await self._clean_up()
        await watch.look()
        if watch.trouble is not None:
            self._say(f"the fleet was not seen: {describe(watch.trouble)}")
        return self._run(player, watch), player.notes.keeping()

    def _run(self, player: Player, watch: FleetWatch) -> Run:
        counts: dict[str, float] = {name: float(count) for name, count in player.notes.counts.items()}
        counts["prompt_tokens_off_mean"], counts["prompt_tokens_off_most"] = player.notes.prompt_tokens_off()
        trace, outcomes = self._trace, player.notes.outcomes
        if self.stopped:  # of an early end, what nobody came to ask for says nothing
            trace, outcomes = only(trace, outcomes, np.flatnonzero(~np.isnan(outcomes.asked_s)))
        return Run(
            policy="laneway, live",
            seed=self._options.seed,
            trace=trace,
            outcomes=outcomes,
            usage=watch.usage(),
            parameters={**self._options.parameters, "model": self._options.model, "run": self._label},
            counts=counts,
        )

    async def _models(self) -> list[Model]:
        """The pools that serve the model; none where the scheduler does not tell."""
        name, _, tier = self._options.model.partition("/")
        try:
            models = [model async for model in self._scheduler.list_models()]
        except LanewayError as error:
            self._say(f"the fleet is not seen: {describe(error)}")
            return []
        return [model for model in models if model.name == name and tier in ("", model.tier)]

    def _say_what_does_not_fit(self, models: Sequence[Model]) -> None:
        room = max((model.context_length for model in models), default=0)
        needed = self._trace.prompt_tokens + self._trace.max_tokens
        beyond = int(np.count_nonzero(needed > room)) if room else 0
        if beyond:
            self._say(
                f"{beyond} of {len(self._trace)} requests are longer than the context of {room} tokens and will be"
                f" refused (the longest has {int(needed.max())}): see --divide-prompt and --divide-output"
            )

    async def _quote(self, text: str) -> int:
        quote = await self._clients[0].quote(model=self._options.model, prompt=text, max_tokens=1)
        return quote.prompt_tokens

    async def _clean_up(self) -> None:
        """Cancels what has not ended, also what was accepted while its caller was being stopped."""
        try:
            async with asyncio.timeout(CLEAN_UP_S):
                left = [job async for job in self._live_jobs()]
                await asyncio.gather(*(client.cancel(job_id) for client, job_id in left))
                self._say(f"cancelled {len(left)} jobs of this replay that had not ended")
        except (TimeoutError, LanewayError) as error:
            why = describe(error) if isinstance(error, LanewayError) else f"it took more than {CLEAN_UP_S:g} s"
            self._say(f"not every open job was cancelled ({why}); find them by the label {LABEL}={self._label}")

    async def _live_jobs(self) -> AsyncIterator[tuple[Client, str]]:
        for client in self._clients:
            for state in LIVE_STATES:
                async for job in client.list_jobs(labels={LABEL: self._label}, state=state):
                    yield client, job.job_id
