"""What a provider still allows: one record of its quotas that all workers of a region share, and what may be taken.

A quota bounds requests, tokens and spend in any span of `window_s` seconds, and requests at once. What was granted
counts from its grant on for `window_s` and `margin_s` more: so no minute holds more than was allowed, wherever a
provider's minutes begin, and a token bucket of the same size is never overdrawn. Live grants are listed one by one with
an expiry; what has ended is kept as sums of time slices, a SLICES-th of the window each, rounded up to the slice's end.
A grant whose holder is not heard of any more counts as spent, in full.

A request is granted an estimate and settled with true counts. Where estimates were too small the record may hold more
than the quota; then nothing is granted until enough has passed.

Holders that wait stand in the record, one place each, in the order in which they came. Nobody is granted what would
have to be taken from those before him, so a large request gets its turn however many small ones there are; what is left
beside them is free to all.

Seconds of a clock that all holders share, requests, tokens, money. The rule is policy.md's (i), a bucket for each
provider with leases; windows instead of buckets, and places, are ADR 15's, where it was measured. O(slices + live
grants) for each decision. Known failure modes: estimates that are too small overdraw a window by as much; what was
taken at once comes back at once; a holder whose clock is off moves its grants by that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, inf

from msgspec import Struct
from msgspec.structs import replace

from laneway.policy import breaker as circuit
from laneway.policy.breaker import Breaker, BreakerParams
from laneway.policy.rate_headers import Told, told_wait_s

SLICES = 256  # of a window: an amount counts for half a slice too long on average, 0.2 %
_ROUNDING = 1e-9  # of sums of spend


class Amount(Struct, frozen=True):
    requests: int = 0
    tokens: int = 0
    spend: float = 0.0  # in the currency of the provider's prices

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.requests + other.requests, self.tokens + other.tokens, self.spend + other.spend)


class WindowQuota(Struct, frozen=True):
    """What may be used in any `window_s` seconds; 0: without limit."""

    window_s: float
    requests: int = 0
    tokens: int = 0
    spend: float = 0.0

    @property
    def slice_s(self) -> float:
        return self.window_s / SLICES

    def limits(self) -> Iterable[tuple[str, float]]:
        return ((kind, limit) for kind in KINDS if (limit := getattr(self, kind)) > 0)


KINDS = ("requests", "tokens", "spend")


class Quota(Struct, frozen=True):
    windows: tuple[WindowQuota, ...] = ()
    concurrency: int = 0  # requests at once; 0: without limit
    margin_s: float = 0.25  # by which requests may come later to the provider than they were granted


class Slice(Struct, frozen=True):
    """What was spent on grants of one time slice."""

    number: int  # since the epoch
    spent: Amount


class WindowUse(Struct, frozen=True):
    """What has ended and counts still, oldest slice first."""

    window_s: float
    slices: tuple[Slice, ...] = ()


class Grant(Struct, frozen=True):
    holder: str
    number: int  # unique for its holder
    granted_s: float
    until_s: float  # not renewed by then: its holder is dead
    amount: Amount
    probe: bool = False  # tries whether the provider is well again


class Waiter(Struct, frozen=True):
    """The place of a holder, with what it would take next."""

    holder: str
    until_s: float
    amount: Amount


class QuotaRecord(Struct, frozen=True):
    grants: tuple[Grant, ...] = ()
    queue: tuple[Waiter, ...] = ()  # who came first is first
    used: tuple[WindowUse, ...] = ()
    rest_until_s: float = 0.0  # the provider asked to be left alone until then
    breaker: Breaker = Breaker()
    told: tuple[Told, ...] = ()  # the provider's own count, by kind


class Taken(Struct, frozen=True):
    """What became of wants, in their order: those granted, and when the next of them may be."""

    record: QuotaRecord
    grants: tuple[Grant, ...]
    wait_s: float  # until the next want may be granted if nothing changes; 0 where there is none; inf: never


def swept(record: QuotaRecord, quota: Quota, now_s: float) -> QuotaRecord:
    """Without what is past. Grants of dead holders become spent."""
    dead = [grant for grant in record.grants if grant.until_s <= now_s]
    for grant in dead:
        record = _ended(record, quota, grant, grant.amount)
    used = []
    for use in record.used:
        window = WindowQuota(use.window_s)
        left = tuple(each for each in use.slices if _ends_s(window, quota, each.number) > now_s)
        if left:
            used.append(WindowUse(use.window_s, left))
    queue = tuple(waiter for waiter in record.queue if waiter.until_s > now_s)
    told = tuple(told for told in record.told if told.full_s > now_s)
    return replace(record, queue=queue, used=tuple(used), told=told)


def wait_s(record: QuotaRecord, quota: Quota, need: Amount, now_s: float) -> float:
    """Seconds until so much may be taken, `need.requests` of them at once, if nothing is taken or settled meanwhile.

    0: now; inf: never, as it is more than a window's whole quota. Whether the breaker lets it pass is apart from this.
    """
    waits = [0.0, record.rest_until_s - now_s]
    waits += (_window_wait_s(record, window, quota, need, now_s) for window in quota.windows)
    waits += (_told_wait_s(record, quota, told, need, now_s) for told in record.told)
    beyond = len(record.grants) + need.requests - quota.concurrency
    if quota.concurrency and beyond > 0:
        ends_s = sorted(grant.until_s for grant in record.grants)
        waits.append(ends_s[beyond - 1] - now_s if beyond <= len(ends_s) else inf)
    return max(waits)


def take(
    record: QuotaRecord,
    quota: Quota,
    holder: str,
    wants: Sequence[Amount],
    now_s: float,
    *,
    first_number: int,
    grant_s: float,
    place_s: float,
) -> Taken:
    """Grants of the holder's wants what may be granted, in their order. The first that may not keeps the holder's
    place, or gets one at the end; `grant_s` and `place_s` are how long grants and places last unless renewed."""
    record = swept(record, quota, now_s)
    granted: list[Grant] = []
    for want in wants:
        next_wait_s = _turn_s(record, quota, holder, want, now_s)
        if next_wait_s > 0.0:
            place = Waiter(holder, now_s + place_s, want)
            return Taken(_placed(record, place), tuple(granted), next_wait_s)
        probe = record.breaker.openings > 0
        grant = Grant(holder, first_number + len(granted), now_s, now_s + grant_s, want, probe)
        granted.append(grant)
        record = replace(
            _without_place(record, holder),
            grants=(*record.grants, grant),
            breaker=circuit.asked(record.breaker),
        )
    return Taken(_without_place(record, holder), tuple(granted), 0.0)


def turn_s(record: QuotaRecord, quota: Quota, holder: str, want: Amount, now_s: float) -> float:
    """Seconds until a holder may be granted a want, those before it considered; as take would say."""
    return _turn_s(swept(record, quota, now_s), quota, holder, want, now_s)


def settled(record: QuotaRecord, quota: Quota, holder: str, number: int, spent: Amount) -> QuotaRecord:
    """A grant came to its end. Where its holder was taken for dead, it counts as spent already."""
    grant = _grant(record, holder, number)
    return record if grant is None else _ended(record, quota, grant, spent)


def succeeded(record: QuotaRecord, holder: str, number: int) -> QuotaRecord:
    """The provider answered well. Call before the grant is settled, as with the next two."""
    grant = _grant(record, holder, number)
    return replace(record, breaker=circuit.succeeded(record.breaker, probe=grant is not None and grant.probe))


def failed(record: QuotaRecord, holder: str, number: int, now_s: float, params: BreakerParams) -> QuotaRecord:
    """The provider failed, or was not reached."""
    grant = _grant(record, holder, number)
    probe = grant is not None and grant.probe
    return replace(record, breaker=circuit.failed(record.breaker, now_s, probe=probe, params=params))


def undecided(record: QuotaRecord, holder: str, number: int) -> QuotaRecord:
    """The grant ended without a word about how well the provider is."""
    grant = _grant(record, holder, number)
    if grant is None or not grant.probe:
        return record
    return replace(record, breaker=circuit.probe_lost(record.breaker))


def renewed(record: QuotaRecord, holder: str, until_s: float) -> QuotaRecord:
    """The holder is alive, and its grants with it."""
    return replace(
        record,
        grants=tuple(replace(g, until_s=until_s) if g.holder == holder else g for g in record.grants),
    )


def rested(record: QuotaRecord, until_s: float) -> QuotaRecord:
    return replace(record, rest_until_s=max(record.rest_until_s, until_s))


def told(record: QuotaRecord, counts: Iterable[Told]) -> QuotaRecord:
    """With the provider's own counts where they are newer; of those of one moment, the one that leaves least."""
    newest: dict[str, Told] = {}
    for each in (*record.told, *counts):
        other = newest.get(each.kind)
        if other is None or (other.heard_s, -other.remaining) < (each.heard_s, -each.remaining):
            newest[each.kind] = each
    return replace(record, told=tuple(newest[kind] for kind in sorted(newest)))


def used_of(record: QuotaRecord, window: WindowQuota, quota: Quota, now_s: float) -> Amount:
    """What counts against a window now, live grants included."""
    return sum((amount for ends_s, amount in _entries(record, window, quota) if ends_s > now_s), Amount())


def cut_to(quota: Quota, want: Amount) -> Amount:
    """An estimate may be more than a window's whole quota where the true amount is not."""
    for window in quota.windows:
        tokens = min(want.tokens, window.tokens or want.tokens)
        want = Amount(want.requests, tokens, min(want.spend, window.spend or want.spend))
    return want


# --- queue -----------------------------------------------------------------------------------------


def _turn_s(record: QuotaRecord, quota: Quota, holder: str, want: Amount, now_s: float) -> float:
    before = Amount()
    for waiter in record.queue:
        if waiter.holder == holder:
            break
        before += waiter.amount
    through_s = circuit.wait_s(record.breaker, now_s)
    if through_s is None:  # the probe's end is told by its holder, or comes with its expiry; then another may try
        through_s = max((g.until_s - now_s for g in record.grants if g.probe), default=0.0)
    if record.breaker.openings and before.requests:  # who is first probes
        return max(through_s, wait_s(record, quota, want, now_s), min(w.until_s - now_s for w in record.queue))
    alone_s = wait_s(record, quota, want, now_s)
    if alone_s == inf:
        return inf
    both_s = wait_s(record, quota, before + want, now_s) if before.requests else alone_s
    if both_s == inf:  # more than there ever is: after the first of them was served
        both_s = max(alone_s, min(w.until_s - now_s for w in record.queue))
    return max(through_s, both_s)


def _placed(record: QuotaRecord, place: Waiter) -> QuotaRecord:
    if any(waiter.holder == place.holder for waiter in record.queue):
        queue = tuple(place if waiter.holder == place.holder else waiter for waiter in record.queue)
    else:
        queue = (*record.queue, place)
    return replace(record, queue=queue)


def _without_place(record: QuotaRecord, holder: str) -> QuotaRecord:
    return replace(record, queue=tuple(waiter for waiter in record.queue if waiter.holder != holder))


# --- windows ---------------------------------------------------------------------------------------


def _ends_s(window: WindowQuota, quota: Quota, number: int) -> float:
    """When what was granted in a slice counts no more."""
    return (number + 1) * window.slice_s + window.window_s + quota.margin_s


def _slice_of(window: WindowQuota, granted_s: float) -> int:
    return floor(granted_s / window.slice_s)


def _entries(record: QuotaRecord, window: WindowQuota, quota: Quota) -> Iterable[tuple[float, Amount]]:
    for use in record.used:
        if use.window_s == window.window_s:
            yield from ((_ends_s(window, quota, each.number), each.spent) for each in use.slices)
    for grant in record.grants:
        yield _ends_s(window, quota, _slice_of(window, grant.granted_s)), grant.amount


def _window_wait_s(record: QuotaRecord, window: WindowQuota, quota: Quota, need: Amount, now_s: float) -> float:
    live = sorted((entry for entry in _entries(record, window, quota) if entry[0] > now_s), key=lambda entry: entry[0])
    longest_s = 0.0
    for kind, limit in window.limits():
        wanted = getattr(need, kind)
        beyond = sum(getattr(amount, kind) for _, amount in live) + wanted - limit
        if wanted <= 0 or beyond <= _ROUNDING:
            continue
        if wanted > limit + _ROUNDING:
            return inf
        for ends_s, amount in live:
            beyond -= getattr(amount, kind)
            if beyond <= _ROUNDING:
                longest_s = max(longest_s, ends_s - now_s)
                break
    return longest_s


def _told_wait_s(record: QuotaRecord, quota: Quota, told: Told, need: Amount, now_s: float) -> float:
    """By the provider's own count, and what was granted since."""
    since = sum(getattr(g.amount, told.kind) for g in record.grants if g.granted_s > told.heard_s)
    if quota.windows:
        window = min(quota.windows, key=lambda each: each.window_s)
        first = _slice_of(window, told.heard_s) + 1
        for use in record.used:
            if use.window_s == window.window_s:
                since += sum(getattr(each.spent, told.kind) for each in use.slices if each.number >= first)
    return told_wait_s(told, since + getattr(need, told.kind), now_s)


def _ended(record: QuotaRecord, quota: Quota, grant: Grant, spent: Amount) -> QuotaRecord:
    """The grant's amount becomes part of the slice in which it was granted, in every window that is kept."""
    record = replace(record, grants=tuple(each for each in record.grants if each is not grant))
    if spent == Amount():
        return record
    lengths_s = {window.window_s for window in quota.windows} | {use.window_s for use in record.used}
    return replace(record, used=tuple(_added(record, length_s, grant, spent) for length_s in sorted(lengths_s)))


def _added(record: QuotaRecord, window_s: float, grant: Grant, spent: Amount) -> WindowUse:
    slices = {each.number: each.spent for use in record.used if use.window_s == window_s for each in use.slices}
    number = _slice_of(WindowQuota(window_s), grant.granted_s)
    slices[number] = slices.get(number, Amount()) + spent
    return WindowUse(window_s, tuple(Slice(number, slices[number]) for number in sorted(slices)))


def _grant(record: QuotaRecord, holder: str, number: int) -> Grant | None:
    return next((each for each in record.grants if (each.holder, each.number) == (holder, number)), None)
