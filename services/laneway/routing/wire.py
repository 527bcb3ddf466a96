"""Region digests as messages of laneway.v1, on NATS and in answers."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from laneway.policy.route import ModelDigest, RegionDigest, Route
from laneway.runtime.wire.times import duration_of, span_s, timestamp_of, unix_s
from laneway.v1 import routing_pb2 as pb


class UnreadableDigest(ValueError):
    """A digest that is malformed."""


def digest_to_proto(digest: RegionDigest) -> pb.RegionDigest:
    return pb.RegionDigest(
        region=digest.region,
        made_at=timestamp_of(digest.made_s),
        draining=digest.draining,
        healthy=digest.healthy,
        zones=digest.zones,
        models=[
            pb.ModelDigest(
                model=model.model,
                tier=model.tier,
                workers=model.workers,
                free_slots=model.free_slots,
                ttft_eta=duration_of(model.ttft_eta_s),
                batch_eta=duration_of(model.batch_eta_s),
                hot_prefixes=model.hot_prefixes,
            )
            for model in digest.models
        ],
        price_factor=digest.price_factor,
        round_trip=duration_of(digest.round_trip_s or None),
    )


def digest_from_proto(message: pb.RegionDigest) -> RegionDigest:
    return RegionDigest(
        region=message.region,
        made_s=unix_s(message.made_at),
        draining=message.draining,
        healthy=message.healthy,
        zones=tuple(message.zones),
        models=tuple(
            ModelDigest(
                model=model.model,
                tier=model.tier,
                workers=model.workers,
                free_slots=model.free_slots,
                ttft_eta_s=span_s(model.ttft_eta),
                batch_eta_s=span_s(model.batch_eta),
                hot_prefixes=tuple(model.hot_prefixes),
            )
            for model in message.models
        ),
        price_factor=message.price_factor,
        round_trip_s=span_s(message.round_trip),
    )


def decode_digest(data: bytes) -> RegionDigest:
    message = pb.RegionDigest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise UnreadableDigest("the region digest is not a valid protobuf message") from None
    if not message.price_factor > 0.0:  # NaN fails too
        raise UnreadableDigest("the region digest has no price factor")
    return digest_from_proto(message)


def route_to_proto(route: Route) -> pb.RouteResponse:
    scores = [
        pb.RegionScore(region=score.region, score_s=0.0 if score.excluded else score.score_s, excluded=score.excluded)
        for score in route.scores
    ]
    return pb.RouteResponse(region=route.region, reason=route.reason, scores=scores)
