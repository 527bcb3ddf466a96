"""Gates of several workers over one record on a real nats-server, against a provider that counts by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from random import Random

import pytest

from laneway.core import subjects
from laneway.policy.breaker import BreakerParams
from laneway.policy.quota import Amount, Quota, QuotaRecord, WindowQuota
from laneway.runtime.bus import Bus, PublishUnknown
from laneway.runtime.clock import SystemClock
from laneway.runtime.kv import Key
from laneway.runtime.wire.quotas import decode_quota
from laneway.workers import provider_desk, provider_quota
from laneway.workers.engines.protocol import EngineRequest
from laneway.workers.engines.remote import RemoteRefusal
from laneway.workers.provider_quota import Provider, ProviderGate, ProviderTicket, provider_gate
from tests.support.nats import REGION, connected, eventually
from tests.support.rights import guarded_region
from tests.support.strict_count import StrictCount

pytestmark = pytest.mark.wire

NOBODY_S = 30.0  # for hangs only
REFUSED = {"retry-after": "0"}
Gates = Callable[..., AbstractAsyncContextManager[ProviderGate]]


def request(number: int, prompt: int = 10, max_tokens: int = 20, **fields: float) -> EngineRequest:
    return EngineRequest(number, tuple(range(prompt)), max_tokens, **fields)  # type: ignore[arg-type]


@pytest.fixture
def gates(nats_server, provisioned_bus: Bus) -> Gates:
    """Gates of workers with a connection each, by default to one provider."""

    @asynccontextmanager
    async def one(holder: str, *providers: Provider) -> AsyncIterator[ProviderGate]:
        async with (
            connected(nats_server, holder) as bus,
            provider_gate(bus, REGION, "chat-small", providers, holder, SystemClock(), random=Random(holder)) as gate,
        ):
            yield gate

    return one


async def entered(gate: ProviderGate, asked: EngineRequest) -> ProviderTicket:
    async with asyncio.timeout(NOBODY_S):
        return await gate.enter(asked)


async def record_of(bus: Bus, provider: str = "p") -> QuotaRecord:
    value = await Key(bus, subjects.plan_bucket(REGION), subjects.quota_key(provider)).read()
    return decode_quota(value.data)


async def test_four_workers_that_want_five_times_as_much_use_the_quota_and_not_more(gates: Gates):
    """Windows of a second, so that two of them are soon over. The limits of a minute are the drill's."""
    window_s, windows = 1.0, 2
    quota = Quota((WindowQuota(window_s, requests=40, tokens=4000),), margin_s=0.02)
    provider, random = Provider("p", quota), Random(7)
    count = StrictCount(40, 4000, window_s)
    async with AsyncExitStack() as stack:
        four = [await stack.enter_async_context(gates(f"w{number}", provider)) for number in range(4)]
        end_s = time.monotonic() + windows * window_s

        async def caller(gate: ProviderGate, first: int) -> None:
            number = first
            while time.monotonic() < end_s:
                asked = request(number, random.randint(20, 90), random.randint(5, 60))
                ticket = await gate.enter(asked)
                judged = count.arrive(time.monotonic(), len(asked.prompt_ids), asked.max_tokens)
                await asyncio.sleep(0.01)
                assert judged.allowed
                judged.used = len(asked.prompt_ids) + random.randint(1, asked.max_tokens)
                ticket.used(len(asked.prompt_ids), judged.used - len(asked.prompt_ids))
                number += 1

        callers = [
            asyncio.create_task(caller(gate, 1000 * n + 100 * k)) for n, gate in enumerate(four) for k in range(8)
        ]
        await asyncio.sleep(windows * window_s)
        for task in callers:
            task.cancel()
        ended = await asyncio.gather(*callers, return_exceptions=True)
        assert not [error for error in ended if isinstance(error, Exception)]
        writes = [desk.writes for gate in four for desk in gate.desks.values()]
    requests, _ = count.most_in_any(window_s)
    assert requests <= 40
    granted = sum(each.granted for each in writes)
    assert granted >= 40 * (windows - 1)
    # Each grant costs a bounded number of writes, the lost ones and the settlements among them.
    assert sum(each.stored + each.lost for each in writes) <= 3 * granted


async def test_what_a_dead_worker_took_is_spent_and_its_place_is_given_up(
    gates: Gates, provisioned_bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(provider_desk, "GRANT_S", 0.6)
    monkeypatch.setattr(provider_desk, "PLACE_S", 0.3)
    provider = Provider("p", Quota((WindowQuota(3600.0, requests=3),), concurrency=1))
    async with gates("alive", provider) as alive:
        dead = gates("dead", provider)
        gate = await dead.__aenter__()
        await entered(gate, request(1))
        for desk in gate.desks.values():  # as kill -9 leaves it
            desk._key = None  # type: ignore[assignment]
        ticket = await entered(alive, request(2))  # once the dead one's grant has run out
        ticket.used(10, 5)
        await eventually(lambda: _spent(provisioned_bus, Amount(2, 45)))
        (await entered(alive, request(3))).used(10, 20)
        assert await _never_enters(alive, request(4))  # three were taken in this hour


async def _spent(bus: Bus, expected: Amount) -> bool:
    record = await record_of(bus)
    spent = sum((each.spent for use in record.used for each in use.slices), Amount())
    return not record.grants and spent == expected


async def _never_enters(gate: ProviderGate, asked: EngineRequest) -> bool:
    task = asyncio.create_task(gate.enter(asked))
    await eventually(lambda: gate.waiting)
    for _ in range(20):
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return task.cancelled()


async def test_a_request_that_is_cancelled_while_it_waits_or_as_it_is_granted_holds_nothing(
    gates: Gates, provisioned_bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(provider_desk, "PLACE_S", 1000.0)  # who goes takes its place with it, at once
    monkeypatch.setattr(provider_desk, "GRANT_S", 1000.0)
    provider = Provider("p", Quota(concurrency=1))
    async with gates("w", provider) as gate:
        for number in range(20):
            tasks = [asyncio.create_task(gate.enter(request(100 * number + k))) for k in range(3)]
            for _ in range(number):
                await asyncio.sleep(0)
            await asyncio.sleep(0.0005 * number)
            for task in tasks:
                task.cancel()
            for end in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(end, ProviderTicket):
                    end.dropped()
        ticket = await entered(gate, request(1))
        late = asyncio.create_task(gate.enter(request(2)))
        await eventually(lambda: _queued(provisioned_bus))
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        await eventually(lambda: _none_queued(provisioned_bus))
        ticket.used(1, 1)
        await eventually(lambda: _empty(provisioned_bus))


async def _queued(bus: Bus) -> bool:
    return bool((await record_of(bus)).queue)


async def _none_queued(bus: Bus) -> bool:
    return not (await record_of(bus)).queue


async def test_a_grant_that_is_in_use_for_long_is_renewed(gates: Gates, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(provider_desk, "GRANT_S", 0.3)
    provider = Provider("p", Quota(concurrency=1))
    async with gates("a", provider) as a, gates("b", provider) as b:
        ticket = await entered(a, request(1))
        waiting = asyncio.create_task(b.enter(request(2)))
        _, pending = await asyncio.wait({waiting}, timeout=0.8)
        assert pending
        ticket.used(1, 1)
        async with asyncio.timeout(NOBODY_S):
            (await waiting).dropped()


async def test_what_a_write_took_of_which_nobody_heard_is_given_back(
    gates: Gates, provisioned_bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    provider = Provider("p", Quota((WindowQuota(3600.0, requests=2),)))
    async with gates("w", provider) as gate:
        (await entered(gate, request(1))).used(1, 1)
        await eventually(lambda: _spent(provisioned_bus, Amount(1, 2)))
        real, lost = Key.write, list[int]()

        async def write(self: Key, data: bytes, expected_sequence: int, *, timeout_s: float = 2.0) -> int:
            sequence = await real(self, data, expected_sequence, timeout_s=timeout_s)
            if not lost:
                lost.append(sequence)
                raise PublishUnknown("the answer was lost")
            return sequence

        monkeypatch.setattr(Key, "write", write)
        (await entered(gate, request(2))).used(1, 1)
        assert lost
        await eventually(lambda: _spent(provisioned_bus, Amount(2, 4)))


async def _empty(bus: Bus) -> bool:
    record = await record_of(bus)
    return not record.grants and not record.queue


async def test_a_worker_that_goes_settles_and_leaves_no_place(gates: Gates, provisioned_bus: Bus):
    provider = Provider("p", Quota((WindowQuota(60.0, tokens=100),)))
    async with gates("w", provider) as gate:
        ticket = await entered(gate, request(1, 50, 50))
        waiting = asyncio.create_task(gate.enter(request(2, 50, 50)))
        await eventually(lambda: gate.waiting)
        ticket.used(40, 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    record = await record_of(provisioned_bus)
    assert (record.grants, record.queue) == ((), ())
    assert record.used[0].slices[0].spent == Amount(1, 41)


async def test_a_refusal_is_asked_again_after_what_the_provider_says_and_the_others_wait_too(
    gates: Gates, provisioned_bus: Bus
):
    provider = Provider("p", Quota((WindowQuota(60.0, requests=10),)))
    async with gates("a", provider) as a, gates("b", provider) as b:
        ticket = await entered(a, request(1))
        assert ticket.failed(429, {"retry-after-ms": "400"}) is not None
        refused_s = time.monotonic()
        await eventually(lambda: _rests(provisioned_bus))
        await asyncio.gather(entered(a, request(1)), entered(b, request(2)))
        assert time.monotonic() - refused_s >= 0.399


async def _rests(bus: Bus) -> bool:
    return (await record_of(bus)).rest_until_s > 0


async def test_failures_are_paid_from_the_retry_budget_and_given_up_after_some_attempts(gates: Gates):
    async with gates("w", Provider("p")) as gate:
        waits = [(await entered(gate, request(1))).failed(429, REFUSED) for _ in range(4)]
        assert [wait is None for wait in waits] == [False, False, False, True]
        many = [(await entered(gate, request(n))).failed(429, REFUSED) is not None for n in range(2, 60)]
        assert not all(many)  # a budget at rest pays for ten, and a second earns one
        assert sum(many) < 20


async def test_attempts_are_counted_of_so_many_requests_and_no_more(gates: Gates, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(provider_quota, "FAILED_MAX", 2)
    async with gates("w", Provider("p")) as gate:
        for number in (1, 2, 1, 2, 3):
            assert (await entered(gate, request(number))).failed(429, REFUSED) is not None
        assert (await entered(gate, request(1))).failed(
            429, {"retry-after": "0"}
        ) is not None  # forgotten, so its first
        again = [(await entered(gate, request(3))).failed(429, REFUSED) for _ in range(3)]
        assert [wait is None for wait in again] == [False, False, True]


async def test_after_failures_in_a_row_one_probe_goes_and_its_success_lets_the_others_in(
    gates: Gates, provisioned_bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(provider_desk, "BREAKER", BreakerParams(failures_max=3, open_s=0.2))
    async with gates("a", Provider("p")) as a, gates("b", Provider("p")) as b:
        for number in range(3):
            (await entered(a, request(number))).failed(503, {})
        await eventually(lambda: _opened(provisioned_bus))
        tasks = [asyncio.create_task(gate.enter(request(10 + n))) for n, gate in enumerate((a, b, a, b))]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=NOBODY_S)
        await asyncio.sleep(0.1)
        assert len([task for task in tasks if task.done()]) == len(done) == 1  # the probe
        (await done.pop()).used(1, 1)
        async with asyncio.timeout(NOBODY_S):
            for task in tasks:
                (await task).dropped()


async def _opened(bus: Bus) -> bool:
    return (await record_of(bus)).breaker.openings == 1


async def test_the_cheapest_provider_is_asked_until_it_is_too_late_by_it(gates: Gates):
    cheap = Provider("cheap", Quota((WindowQuota(30.0, requests=1),)), 1.0, 1.0)
    dear = Provider("dear", Quota(), 2.0, 2.0)
    async with gates("w", dear, cheap) as gate:
        assert (await entered(gate, request(1, deadline_in_s=20.0))).provider == "cheap"
        assert (await entered(gate, request(2, deadline_in_s=20.0))).provider == "dear"
        patient = asyncio.create_task(gate.enter(request(3, deadline_in_s=3600.0)))
        await eventually(lambda: gate.desks["cheap"].waiting)
        patient.cancel()
        await asyncio.gather(patient, return_exceptions=True)


async def test_who_waits_at_a_provider_that_breaks_goes_to_another(gates: Gates, monkeypatch: pytest.MonkeyPatch):
    cheap, dear = Provider("cheap", Quota(concurrency=1), 1.0, 1.0), Provider("dear", Quota(), 2.0, 2.0)
    async with gates("w", dear, cheap) as gate:
        first = await entered(gate, request(1, deadline_in_s=25.0))
        waiting = asyncio.create_task(gate.enter(request(2, deadline_in_s=25.0)))
        await eventually(lambda: gate.desks["cheap"].waiting)
        first.failed(429, {"retry-after": "60"})
        async with asyncio.timeout(NOBODY_S):
            assert (await waiting).provider == "dear"


async def test_a_provider_that_counts_what_was_asked_for_is_counted_so(gates: Gates, provisioned_bus: Bus):
    provider = Provider("p", Quota((WindowQuota(3600.0, tokens=100),)), counts_asked=True)
    async with gates("w", provider) as gate:
        (await entered(gate, request(1, 10, 60))).used(10, 1)
        await eventually(lambda: _spent(provisioned_bus, Amount(1, 70)))
        assert await _never_enters(gate, request(2, 10, 30))


async def test_spend_is_counted_at_the_providers_prices(gates: Gates, provisioned_bus: Bus):
    provider = Provider("p", Quota((WindowQuota(3600.0, spend=1.0),)), 1e4, 2e4)  # 0.01 and 0.02 a token
    async with gates("w", provider) as gate:
        (await entered(gate, request(1, 20, 30))).used(20, 15)
        await eventually(lambda: _spent(provisioned_bus, Amount(1, 35, 0.5)))
        assert await _never_enters(gate, request(2, 20, 16))
        with pytest.raises(RemoteRefusal):
            await entered(gate, request(3, 99, 1))


async def test_who_is_urgent_passes_those_that_came_a_little_before(gates: Gates):
    async with gates("w", Provider("p", Quota(concurrency=1))) as gate:
        ticket = await entered(gate, request(1))
        order = list[int]()

        async def enters(number: int, priority: float) -> None:
            (await gate.enter(request(number, priority=priority))).used(1, 1)
            order.append(number)

        tasks = list[asyncio.Task[None]]()
        for here, (number, priority) in enumerate(((2, 0.0), (3, 0.0), (4, 1.0), (5, 0.5)), start=1):
            tasks.append(asyncio.create_task(enters(number, priority)))
            await eventually(partial(_waiting_are, gate, here))
        ticket.used(1, 1)
        async with asyncio.timeout(NOBODY_S):
            await asyncio.gather(*tasks)
        assert order == [4, 5, 2, 3]


def _waiting_are(gate: ProviderGate, count: int) -> bool:
    return gate.waiting == count


async def test_a_prompt_that_no_quota_holds_is_refused_at_once(gates: Gates):
    async with gates("w", Provider("p", Quota((WindowQuota(60.0, tokens=10),)))) as gate:
        with pytest.raises(RemoteRefusal, match="quota"):
            await entered(gate, request(1, prompt=10))
        (await entered(gate, request(2, prompt=9, max_tokens=500))).dropped()


async def test_the_providers_own_count_holds_for_all_workers(gates: Gates, provisioned_bus: Bus):
    provider = Provider("p", Quota((WindowQuota(60.0, requests=100),)))
    headers = {
        "x-ratelimit-limit-requests": "100",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "50s",
    }
    async with gates("a", provider) as a, gates("b", provider) as b:
        ticket = await entered(a, request(1))
        a.heard("p", headers)
        ticket.used(1, 1)
        await eventually(lambda: _counted(provisioned_bus))
        began_s = time.monotonic()
        await entered(b, request(2))  # half a second brings one back
        assert time.monotonic() - began_s >= 0.3


async def _counted(bus: Bus) -> bool:
    return bool((await record_of(bus)).told)


async def test_grants_go_on_after_nats_was_away(gates: Gates, nats_server, provisioned_bus: Bus):
    async with gates("w", Provider("p", Quota((WindowQuota(60.0, requests=10),)))) as gate:
        ticket = await entered(gate, request(1))
        await nats_server.kill()
        waiting = asyncio.create_task(gate.enter(request(2)))
        ticket.used(10, 3)
        await eventually(lambda: gate.waiting)
        await nats_server.start()
        async with asyncio.timeout(NOBODY_S):
            (await waiting).used(10, 4)
        await eventually(lambda: _spent(provisioned_bus, Amount(2, 27)), NOBODY_S)


async def test_a_worker_may_do_so_with_its_own_key(tmp_path):
    provider = Provider("p", Quota((WindowQuota(3600.0, requests=1),)))
    async with (
        guarded_region(tmp_path) as region,
        region.bus("worker") as bus,
        provider_gate(bus, REGION, "chat-small", [provider], "w", SystemClock()) as gate,
    ):
        (await entered(gate, request(1))).used(1, 1)
        await eventually(lambda: _spent(bus, Amount(1, 2)))


async def test_a_name_that_is_no_token_has_a_record_of_its_own():
    keys = {subjects.quota_key(name) for name in ("127.0.0.1:8080", "127-0-0-1-8080", "127.0.0.1-8080", "openai")}
    assert len(keys) == 4
    assert all(subjects.kv_subject("PLAN_x", key).count(".") == 3 for key in keys)
