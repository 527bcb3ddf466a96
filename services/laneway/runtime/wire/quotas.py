"""The record of a provider's quotas as bytes."""

from __future__ import annotations

from laneway.core.job import SCHEMA
from laneway.policy.breaker import Breaker
from laneway.policy.quota import Amount, Grant, QuotaRecord, Slice, Waiter, WindowUse
from laneway.policy.rate_headers import Told
from laneway.runtime.wire.reading import parse_message
from laneway.runtime.wire.records import check_schema
from laneway.runtime.wire.times import timestamp_of, unix_s
from laneway.v1 import bus_pb2


def encode_quota(record: QuotaRecord) -> bytes:
    return bus_pb2.ProviderQuota(
        schema=SCHEMA,
        grants=[
            bus_pb2.QuotaGrant(
                holder=grant.holder,
                number=grant.number,
                granted_at=timestamp_of(grant.granted_s),
                until=timestamp_of(grant.until_s),
                amount=_amount_to_proto(grant.amount),
                probe=grant.probe,
            )
            for grant in record.grants
        ],
        queue=[
            bus_pb2.QuotaPlace(
                holder=place.holder, until=timestamp_of(place.until_s), amount=_amount_to_proto(place.amount)
            )
            for place in record.queue
        ],
        windows=[
            bus_pb2.QuotaWindow(
                window_s=use.window_s,
                slices=[
                    bus_pb2.QuotaSlice(number=each.number, spent=_amount_to_proto(each.spent)) for each in use.slices
                ],
            )
            for use in record.used
        ],
        rest_until=timestamp_of(record.rest_until_s),
        failures=record.breaker.failures,
        openings=record.breaker.openings,
        open_until=timestamp_of(record.breaker.open_until_s),
        probing=record.breaker.probing,
        counts=[
            bus_pb2.ProviderCount(
                kind=told.kind,
                limit=told.limit,
                remaining=told.remaining,
                heard_at=timestamp_of(told.heard_s),
                full_at=timestamp_of(told.full_s),
            )
            for told in record.told
        ],
    ).SerializeToString()


def decode_quota(data: bytes) -> QuotaRecord:
    """Raises UnreadableMessage. Empty data is a record of which nothing was written yet."""
    if not data:
        return QuotaRecord()
    message = bus_pb2.ProviderQuota()
    parse_message(message, data, "quota record")
    check_schema(message.schema, "quota record")
    return QuotaRecord(
        grants=tuple(
            Grant(g.holder, g.number, unix_s(g.granted_at), unix_s(g.until), _amount_from_proto(g.amount), g.probe)
            for g in message.grants
        ),
        queue=tuple(Waiter(p.holder, unix_s(p.until), _amount_from_proto(p.amount)) for p in message.queue),
        used=tuple(
            WindowUse(w.window_s, tuple(Slice(s.number, _amount_from_proto(s.spent)) for s in w.slices))
            for w in message.windows
        ),
        rest_until_s=unix_s(message.rest_until),
        breaker=Breaker(message.failures, message.openings, unix_s(message.open_until), message.probing),
        told=tuple(Told(c.kind, c.limit, c.remaining, unix_s(c.heard_at), unix_s(c.full_at)) for c in message.counts),
    )


def _amount_to_proto(amount: Amount) -> bus_pb2.QuotaAmount:
    return bus_pb2.QuotaAmount(requests=amount.requests, tokens=amount.tokens, spend=amount.spend)


def _amount_from_proto(amount: bus_pb2.QuotaAmount) -> Amount:
    return Amount(amount.requests, amount.tokens, amount.spend)
