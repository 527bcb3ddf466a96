"""A caller's contract, checked, with the lane's defaults filled in."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from laneway.core.ids import REGION_LENGTH_MAX
from laneway.core.job import Contract
from laneway.core.lanes import Isolation, Lane, OnDisconnect
from laneway.runtime.settings import PolicySettings
from laneway.runtime.wire import checks, enums
from laneway.v1 import common_pb2

DEADLINE_S_MAX = 30 * 86_400.0  # a schedule far out would fire at once
REGIONS_MAX = 16
LABELS_MAX = 16
LABEL_CHARACTERS_MAX = 64
_REPEATED_MAX = 64
_repeated: dict[tuple[bytes, bool], tuple[PolicySettings, Contract]] = {}


def parse_repeated_contract(
    message: common_pb2.Contract, now_s: float, defaults: PolicySettings, *, attached: bool, field: str
) -> Contract:
    """As parse_contract. Callers with many jobs say the same in each, and get the same value while it holds.

    It holds at another time only if it has a deadline of its own, and until that or its not_before has passed.
    """
    if not message.HasField("deadline"):
        return parse_contract(message, now_s, defaults, attached=attached, field=field)
    key = message.SerializeToString(), attached
    before = _repeated.get(key)
    if before is not None:
        known_defaults, contract = before
        passed = contract.deadline_s <= now_s or 0.0 < contract.not_before_s <= now_s
        if known_defaults is defaults and not passed:
            return contract
    contract = parse_contract(message, now_s, defaults, attached=attached, field=field)
    if len(_repeated) >= _REPEATED_MAX:
        _repeated.clear()
    _repeated[key] = defaults, contract
    return contract


def parse_contract(
    message: common_pb2.Contract, now_s: float, defaults: PolicySettings, *, attached: bool, field: str
) -> Contract:
    checks.no_unknown_fields(message, field)
    has = message.HasField
    lane = checks.word(enums.LANE_FROM_WIRE, message.lane, Lane.PRIORITY, f"{field}.lane")
    unset = defaults.lane(lane)
    deadline_s = now_s + unset.deadline_s
    if has("deadline"):
        deadline_s = parse_deadline(message.deadline, now_s, f"{field}.deadline")
    on_disconnect = OnDisconnect.CANCEL if attached else OnDisconnect.KEEP
    return Contract(
        lane=lane,
        ttft_target_s=(
            checks.duration_s(message.ttft_target, 0.001, 3600.0, f"{field}.ttft_target")
            if has("ttft_target")
            else unset.ttft_target_s
        ),
        tpot_target_s=(
            checks.duration_s(message.tpot_target, 0.001, 60.0, f"{field}.tpot_target")
            if has("tpot_target")
            else unset.tpot_target_s
        ),
        deadline_s=deadline_s,
        not_before_s=_not_before(message, lane, now_s, deadline_s, f"{field}.not_before") if has("not_before") else 0.0,
        isolation=checks.word(
            enums.ISOLATION_FROM_WIRE, message.isolation, _isolation(defaults, lane), f"{field}.isolation"
        ),
        least_tier=checks.token(message.least_tier, f"{field}.least_tier") if message.least_tier else "",
        cost_max=_cost(message.cost_max, f"{field}.cost_max") if has("cost_max") else None,
        regions=_regions(message, f"{field}.regions") if message.regions else (),
        on_disconnect=checks.word(
            enums.ON_DISCONNECT_FROM_WIRE, message.on_disconnect, on_disconnect, f"{field}.on_disconnect"
        ),
        labels=_labels(message, f"{field}.labels") if message.labels else {},
    )


def _isolation(defaults: PolicySettings, lane: Lane) -> Isolation:
    """Of a contract that does not say. It is priority work that is kept from being slowed by others."""
    return Isolation(defaults.isolation) if lane is Lane.PRIORITY else Isolation.SLO


def parse_deadline(stamp: Timestamp, now_s: float, field: str) -> float:
    deadline_s = checks.time_s(stamp, field)
    if not deadline_s > now_s:
        checks.refuse(field, "is in the past")
    if not deadline_s <= now_s + DEADLINE_S_MAX:
        checks.refuse(field, "is more than 30 days ahead")
    return deadline_s


def _not_before(message: common_pb2.Contract, lane: Lane, now_s: float, deadline_s: float, field: str) -> float:
    not_before_s = checks.time_s(message.not_before, field)
    if not lane.may_park:
        checks.refuse(field, "is for the deferrable and batch lanes: priority work is answered now or refused now")
    if not not_before_s < deadline_s:
        checks.refuse(field, "is not before the deadline")
    return not_before_s if not_before_s > now_s else 0.0


def _cost(value: float, field: str) -> float:
    if not 0.0 <= value < float("inf"):
        checks.refuse(field, "must be finite and not negative")
    return abs(value)  # -0.0


def _regions(message: common_pb2.Contract, field: str) -> tuple[str, ...]:
    checks.at_most(message.regions, REGIONS_MAX, field)
    regions = [
        checks.token(region, f"{field}[{i}]", length_max=REGION_LENGTH_MAX) for i, region in enumerate(message.regions)
    ]
    return tuple(dict.fromkeys(regions))


def _labels(message: common_pb2.Contract, field: str) -> dict[str, str]:
    checks.at_most(message.labels, LABELS_MAX, field)
    for key, value in message.labels.items():
        if not 1 <= len(checks.text(key, field)) <= LABEL_CHARACTERS_MAX:
            checks.refuse(field, f"has a key that is not 1 to {LABEL_CHARACTERS_MAX} characters long")
        if len(checks.text(value, field)) > LABEL_CHARACTERS_MAX:
            checks.refuse(field, f"has a value of more than {LABEL_CHARACTERS_MAX} characters")
    return dict(message.labels)
