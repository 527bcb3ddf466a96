"""The gate of a pool of rented engines: which provider may be asked now, within the quotas that all workers share.

A Gate over one desk for each provider (provider_desk). A request goes to the cheapest provider that fits its deadline,
looked at again each second that it waits. What a provider refuses or fails at is asked again as policy.retry has it:
paid from a budget that first attempts fill, a few times at most, after full jitter; for how long the provider itself
wants to be left alone, and what its headers say of its own count, stands in the record and holds for all workers.

Estimates: an answer is taken to be as long as nine of ten of the pool's lately, and never longer than asked for. A
request that was dropped counts in full, as nobody knows how far it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from math import inf
from random import Random

import structlog
from msgspec import Struct

from laneway.core import subjects
from laneway.core.clock import Clock
from laneway.core.lanes import Lane
from laneway.policy.lengths import OBSERVATIONS_MIN, LengthSketch
from laneway.policy.providers import Offer, choose
from laneway.policy.quota import Amount, Grant, Quota
from laneway.policy.rate_headers import retry_after_s, told_of
from laneway.policy.retry import RetryBudget, RetryParams, backoff_s
from laneway.runtime.bus import Bus
from laneway.runtime.clock import SYSTEM_RANDOM
from laneway.runtime.kv import Key
from laneway.workers import metrics
from laneway.workers.engines.protocol import EngineRequest
from laneway.workers.engines.remote import RemoteRefusal
from laneway.workers.provider_desk import Desk, Outcome, Waiting

LOOK_S = 1.0  # between two choices of a provider for a request that waits
PRIORITY_S = 30.0  # the most urgent request passes those that came up to so long before it
REFUSED_S = 0.5  # for which a provider is left alone that refuses and does not say for how long
LENGTH_QUANTILE = 0.9
FAILED_MAX = 4096  # requests that failed and may come again, of which attempts are counted
_LANE = Lane.DEFERRABLE  # whose attempts and back-off count here; the gate knows of no lanes
_LEARN = 0.2  # weight of the newest answer in how long a token takes

_log = structlog.get_logger(__name__)


class Provider(Struct, frozen=True):
    """What the gate needs to know of one provider."""

    name: str
    quota: Quota = Quota()
    price_per_million_prompt_tokens: float = 0.0
    price_per_million_completion_tokens: float = 0.0
    counts_asked: bool = False  # it counts max_tokens of each request, whatever comes of it

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (
            prompt_tokens * self.price_per_million_prompt_tokens
            + completion_tokens * self.price_per_million_completion_tokens
        ) / 1e6

    def may_hold(self, prompt_tokens: int) -> bool:
        """Whether a prompt and a token of answer are within every window's quota."""
        least = self.amount(prompt_tokens, 1)
        return all(getattr(least, kind) <= limit for window in self.quota.windows for kind, limit in window.limits())

    def amount(self, prompt_tokens: int, completion_tokens: int) -> Amount:
        return Amount(1, prompt_tokens + completion_tokens, self.cost(prompt_tokens, completion_tokens))


class _Failed(Struct, frozen=True):
    attempts: int
    came_s: float  # when it came first


class ProviderGate:
    """A Gate; open it with `provider_gate`."""

    def __init__(
        self,
        desks: Mapping[str, Desk],
        providers: Sequence[Provider],
        pool: str,
        token_s: float,
        clock: Clock,
        random: Random,
    ) -> None:
        self.desks = desks
        self._providers = {provider.name: provider for provider in providers}
        self._pool = pool
        self._clock = clock
        self._random = random
        self._retry_params = RetryParams()
        self._budget = RetryBudget()
        self._failed: dict[int, _Failed] = {}  # requests of which attempts failed, that may come again
        self._lengths = LengthSketch()
        self._token_s = dict.fromkeys(self._providers, token_s)  # time of an answer for each of its tokens

    async def enter(self, request: EngineRequest, provider: str = "") -> ProviderTicket:
        """Waits until some provider may be asked, or the one that is named. Raises RemoteRefusal. Cancelled, it holds
        nothing."""
        now_s = came_s = self._clock.monotonic()
        if request.id in self._failed:
            came_s = self._failed[request.id].came_s
        else:
            self._budget = self._budget.first_attempt(now_s, self._retry_params)
        among = [self._providers[provider]] if provider else list(self._providers.values())
        desk = self._desk_for(request, among, came_s)
        waiting = self._join(desk, request, came_s)
        try:
            while not (await asyncio.wait({waiting.granted}, timeout=LOOK_S))[0]:
                other = self._desk_for(request, among, came_s, desk, waiting)
                if other is not desk:
                    desk.leave(waiting)
                    desk, waiting = other, self._join(other, request, came_s)
        except BaseException:
            desk.leave(waiting)
            raise
        metrics.PROVIDER_GRANTS.labels(self._pool).inc()
        metrics.PROVIDER_WAIT.labels(self._pool).observe(self._clock.monotonic() - now_s)
        return ProviderTicket(self, desk, self._providers[desk.name], waiting.granted.result(), request, came_s)

    def heard(self, provider: str, headers: Mapping[str, str]) -> None:
        """What any answer says of the provider's own count."""
        self.desks[provider].tell(told_of(headers, self._clock.now()))

    @property
    def waiting(self) -> int:
        """Requests that wait here."""
        return sum(desk.waiting for desk in self.desks.values())

    # --- for tickets ---------------------------------------------------------------------------------

    def learn(self, request: EngineRequest, provider: str, completion_tokens: int, took_s: float) -> None:
        self._failed.pop(request.id, None)
        self._lengths.add(completion_tokens)
        token_s = took_s / max(1, completion_tokens)
        self._token_s[provider] += _LEARN * (token_s - self._token_s[provider])

    def retry_in_s(self, request: EngineRequest, came_s: float) -> float | None:
        """Pays for another attempt; None where there is to be none."""
        attempts = self._failed[request.id].attempts + 1 if request.id in self._failed else 1
        allowed = self._retry_params.attempts_max[_LANE]
        paid = None
        if allowed is None or attempts < allowed:
            paid = self._budget.spend(self._clock.monotonic(), self._retry_params)
        metrics.PROVIDER_RETRIES.labels(self._pool, "given_up" if paid is None else "paid").inc()
        if paid is None:
            self._failed.pop(request.id, None)
            return None
        self._budget = paid
        self._failed[request.id] = _Failed(attempts, came_s)
        if len(self._failed) > FAILED_MAX:
            del self._failed[next(iter(self._failed))]
        return backoff_s(attempts, _LANE, self._random.random(), self._retry_params)

    def forget(self, request: EngineRequest) -> None:
        self._failed.pop(request.id, None)

    @property
    def clock(self) -> Clock:
        return self._clock

    # --- choice --------------------------------------------------------------------------------------

    def _desk_for(
        self,
        request: EngineRequest,
        among: Sequence[Provider],
        came_s: float,
        at: Desk | None = None,
        waiting: Waiting | None = None,
    ) -> Desk:
        """Where it should wait. Who waits somewhere gives up that place only for one that is surely sooner."""
        offers = {
            provider.name: self._offer(provider, request, waiting if at is self.desks[provider.name] else None)
            for provider in among
        }
        left_s = inf
        if request.deadline_in_s is not None:
            left_s = request.deadline_in_s - (self._clock.monotonic() - came_s)
        chosen = choose(offers.values(), left_s)
        if chosen is None:
            raise RemoteRefusal("the prompt is more than the quota of any provider of this pool holds")
        if at is not None and chosen.done_in_s + LOOK_S >= offers[at.name].done_in_s:
            return at
        return self.desks[chosen.name]

    def _offer(self, provider: Provider, request: EngineRequest, waiting: Waiting | None) -> Offer:
        prompt_tokens, answer_tokens = len(request.prompt_ids), self._answer_tokens(request)
        wait_s = inf
        if provider.may_hold(prompt_tokens):
            wait_s = self.desks[provider.name].wait_s(self._want(provider, request), waiting)
        service_s = answer_tokens * self._token_s[provider.name]
        return Offer(provider.name, provider.cost(prompt_tokens, answer_tokens), wait_s, service_s)

    def _join(self, desk: Desk, request: EngineRequest, came_s: float) -> Waiting:
        order = came_s - request.priority * PRIORITY_S
        return desk.join(self._want(self._providers[desk.name], request), order)

    def _want(self, provider: Provider, request: EngineRequest) -> Amount:
        answer_tokens = request.max_tokens if provider.counts_asked else self._answer_tokens(request)
        return provider.amount(len(request.prompt_ids), answer_tokens)

    def _answer_tokens(self, request: EngineRequest) -> int:
        if self._lengths.count < OBSERVATIONS_MIN:
            return request.max_tokens
        return min(request.max_tokens, self._lengths.quantile(LENGTH_QUANTILE))


class ProviderTicket:
    """A Ticket; its grant is live until one of the three ends."""

    def __init__(
        self, gate: ProviderGate, desk: Desk, provider: Provider, grant: Grant, request: EngineRequest, came_s: float
    ) -> None:
        self.provider = provider.name
        self._gate = gate
        self._desk = desk
        self._terms = provider
        self._grant = grant
        self._request = request
        self._came_s = came_s
        self._began_s = gate.clock.monotonic()

    def used(self, prompt_tokens: int, completion_tokens: int) -> None:
        took_s = self._gate.clock.monotonic() - self._began_s
        self._gate.learn(self._request, self.provider, completion_tokens, took_s)
        spent = self._terms.amount(prompt_tokens, completion_tokens)
        if self._terms.counts_asked:
            spent = Amount(1, max(spent.tokens, self._grant.amount.tokens), spent.spend)
        self._desk.end(self._grant, Outcome.WELL, spent)

    def failed(self, status: int, headers: Mapping[str, str]) -> float | None:
        """A refusal counts as a request, as many providers have it; a failure with the prompt as well."""
        rest_s = retry_after_s(headers, self._gate.clock.now())
        if rest_s is None and status == 429:
            rest_s = REFUSED_S
        if rest_s is not None:
            self._desk.rest(self._gate.clock.now() + rest_s)
        broken = status == 0 or status >= 500
        prompt_tokens = len(self._request.prompt_ids) if broken else 0
        self._desk.end(self._grant, Outcome.BROKEN if broken else Outcome.UNKNOWN, self._terms.amount(prompt_tokens, 0))
        _log.info("provider_refused", provider=self.provider, status=status, rest_s=rest_s)
        if broken or status in (408, 409, 425, 429):
            return self._gate.retry_in_s(self._request, self._came_s)
        self._gate.forget(self._request)
        return None

    def dropped(self) -> None:
        self._gate.forget(self._request)
        self._desk.end(self._grant, Outcome.UNKNOWN, self._grant.amount)


@asynccontextmanager
async def provider_gate(
    bus: Bus,
    region: str,
    pool: str,
    providers: Sequence[Provider],
    holder: str,
    clock: Clock,
    *,
    tokens_per_s: float = 50.0,
    random: Random = SYSTEM_RANDOM,
) -> AsyncIterator[ProviderGate]:
    """The gate of one worker while the block runs. `holder`: its incarnation; `clock`: that of NATS; `tokens_per_s`: of
    one answer, until measured."""
    desks = {
        provider.name: Desk(
            Key(bus, subjects.plan_bucket(region), subjects.quota_key(provider.name)),
            provider.name,
            provider.quota,
            pool,
            holder,
            clock,
            random,
        )
        for provider in providers
    }
    running = [asyncio.create_task(desk.run(), name=f"provider-{desk.name}") for desk in desks.values()]
    try:
        yield ProviderGate(desks, providers, pool, 1.0 / tokens_per_s, clock, random)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for desk in desks.values():
            await desk.close()
