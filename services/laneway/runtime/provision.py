"""Makes a region's streams, buckets and consumers what the layout says. The only place that creates or changes them.

Safe to run again and at the same time elsewhere: each step looks, changes only what differs, and takes somebody else's
equal result for its own. Whatever could drop messages or deliver them twice is refused by name, never done.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from laneway.core import subjects
from laneway.core.catalogue import Catalogue, Pool
from laneway.core.errors import ConfigError
from laneway.core.lanes import LANES, Lane
from laneway.runtime.bus import ApiError, Bus, NotPermitted
from laneway.runtime.bus_errors import ERR_CONSUMER_NOT_FOUND, ERR_STREAM_NOT_FOUND
from laneway.runtime.layout import Config, StreamPlan, region_layout
from laneway.runtime.settings import NatsSettings

ATTEMPTS = 4

# Limits by which an old message may be dropped: they may rise, never fall.
_LIMITS_UP = ("max_age", "max_bytes", "max_msgs", "max_msgs_per_subject")
# Changed at any time without touching stored messages. allow_msg_schedules and allow_msg_ttl can only be switched on.
_FREE = ("republish", "allow_direct", "num_replicas", "allow_rollup_hdrs", "deny_delete")
_ONLY_ON = ("allow_msg_schedules", "allow_msg_ttl")
_CONSUMER_FREE = ("ack_wait", "max_ack_pending", "max_deliver", "max_waiting")

_log = structlog.get_logger(__name__)


class ProvisionError(ConfigError):
    """What is there cannot be changed into what is wanted without harm; the message names it and what to do."""


async def provision(
    bus: Bus, region: str, catalogue: Catalogue, settings: NatsSettings, *, ack_wait_s: Mapping[Lane, float]
) -> list[str]:
    """Creates and updates what the region needs; returns what was changed, in words. Raises ProvisionError."""
    changes: list[str] = []
    for stream in region_layout(region, catalogue, settings, ack_wait_s):
        await _settle(bus, changes, _Item.of_stream(stream))
        for name in stream.consumers:
            await _settle(bus, changes, _Item.of_consumer(stream, name))
    await _say_what_is_left(bus, region, catalogue)
    if changes:
        _log.info("region_provisioned", region=region, changes=changes)
    return changes


async def _say_what_is_left(bus: Bus, region: str, catalogue: Catalogue) -> None:
    """Home slots that the settings have no longer keep their consumers, since a parked job may fire into one of them as
    long as it lives; workers look for them, and take what is in them. Removed, their jobs would be nobody's."""
    for pool in catalogue.pools:
        for home in await retired_homes(bus, region, pool):
            consumers = [subjects.consumer(lane, pool.name, home) for lane in LANES]
            _log.info("home_slot_kept", pool=pool.name, home=home, consumers=consumers)


async def retired_homes(bus: Bus, region: str, pool: Pool) -> tuple[str, ...]:
    """Home slots of a pool that have consumers and are not in its settings. Raises BusError."""
    found: list[str] = []
    for lane in LANES:
        stream, number = subjects.lane_stream(region, lane), len(pool.homes)
        while await _has_consumer(bus, stream, subjects.consumer(lane, pool.name, f"h{number}")):
            found.append(f"h{number}")
            number += 1
    return tuple(dict.fromkeys(found))


async def _has_consumer(bus: Bus, stream: str, consumer: str) -> bool:
    try:
        await bus.api(f"CONSUMER.INFO.{stream}.{consumer}", {})
    except ApiError as error:
        if error.err_code in (ERR_CONSUMER_NOT_FOUND, ERR_STREAM_NOT_FOUND):
            return False
        raise
    return True


class _Item:
    """One stream or consumer: where to ask for it, how to make it, and what it should be."""

    def __init__(self, label: str, info: str, wanted: Config, not_found: int) -> None:
        self.label = label
        self.info = info
        self.wanted = wanted
        self.not_found = not_found
        self.create = self.update = ""
        self.harmless: tuple[str, ...] = ()  # what may be changed whatever it drops

    @classmethod
    def of_stream(cls, stream: StreamPlan) -> _Item:
        item = cls(f"stream {stream.name}", f"STREAM.INFO.{stream.name}", stream.config, ERR_STREAM_NOT_FOUND)
        item.create, item.update = f"STREAM.CREATE.{stream.name}", f"STREAM.UPDATE.{stream.name}"
        item.harmless = stream.harmless
        return item

    @classmethod
    def of_consumer(cls, stream: StreamPlan, name: str) -> _Item:
        wanted = stream.consumers[name]
        item = cls(
            f"consumer {name} of {stream.name}", f"CONSUMER.INFO.{stream.name}.{name}", wanted, ERR_CONSUMER_NOT_FOUND
        )
        item.create = item.update = f"CONSUMER.CREATE.{stream.name}.{name}.{wanted['filter_subject']}"
        return item

    @property
    def is_stream(self) -> bool:
        return self.create != self.update

    def body(self, config: Config, action: str) -> Config:
        if self.is_stream:
            return config
        return {"stream_name": self.info.split(".")[2], "config": config, "action": action}


async def _settle(bus: Bus, changes: list[str], item: _Item) -> None:
    """Looks and changes until there is nothing to change; a second provisioner at work shows as a refused step."""
    refusal: ApiError | None = None
    for _ in range(ATTEMPTS):
        present = await _present(bus, item)
        try:
            if present is None:
                await bus.api(item.create, item.body(item.wanted, "create"))
                changes.append(f"created {item.label}")
                return
            different = {name: value for name, value in item.wanted.items() if not _same(present.get(name), value)}
            if not different:
                return
            _refuse_harm(item, present, different)
            await bus.api(item.update, item.body(present | different, "update"))
            words = ", ".join(f"{name} {present.get(name)} -> {value}" for name, value in different.items())
            changes.append(f"changed {item.label}: {words}")
            return
        except ApiError as error:
            refusal = error
        except NotPermitted as error:
            raise ProvisionError(
                f"{item.label} is not as the settings want it, and this user may not change it: run `laneway provision`"
                f" with the operator's key first ({error.message})"
            ) from error
    assert refusal is not None
    raise ProvisionError(f"{item.label}: {refusal.description} ({refusal.err_code})")


async def _present(bus: Bus, item: _Item) -> Config | None:
    try:
        answer = await bus.api(item.info, {})
    except ApiError as error:
        if error.err_code == item.not_found:
            return None
        raise
    config: Config = answer["config"]
    config.pop("metadata", None)  # the server's own
    return config


def _same(present: object, wanted: object) -> bool:
    if isinstance(wanted, list) and isinstance(present, list):
        return sorted(map(str, present)) == sorted(map(str, wanted))
    if present is None:  # the API leaves out what is false, empty or zero
        return not wanted
    return present == wanted


def _refuse_harm(item: _Item, present: Config, different: Config) -> None:
    for name, value in different.items():
        safe = _stream_change_is_safe(name, present, value) if item.is_stream else name in _CONSUMER_FREE
        if not (safe or name in item.harmless):
            raise ProvisionError(
                f"{item.label}: refusing to change {name} from {present.get(name)} to {value}, which may drop or repeat"
                " accepted jobs; drain the region and remove it by hand first, or set it back"
            )


def _stream_change_is_safe(name: str, present: Config, value: object) -> bool:
    before = present.get(name)
    if name in _FREE:
        return True
    if name in _ONLY_ON:
        return bool(value)
    if name in _LIMITS_UP:
        # With discard=new a lower limit only refuses sooner; nothing that is stored is dropped.
        refuses = present.get("discard") == "new" and name in ("max_msgs", "max_bytes")
        return refuses or _limit(value) >= _limit(before)
    if name == "subjects":
        assert isinstance(value, list)
        return isinstance(before, list) and set(before) <= set(value)
    return False


def _limit(value: object) -> float:
    """A limit as a number; -1, 0 and absent mean none."""
    return float(value) if isinstance(value, int) and value > 0 else float("inf")
