"""The parameters of a running process: whose word counts, and that each of them reaches somebody who decides by it."""

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import structlog
from msgspec.structs import replace

from laneway.core.errors import ConfigError
from laneway.core.fleet import Plan, PolicyVersion
from laneway.runtime import params
from laneway.runtime.config_load import leaves
from laneway.runtime.live_policy import LivePolicy, merged, policy_json
from laneway.runtime.settings import AdmissionSettings, PolicySettings
from laneway.runtime.wire.contracts import parse_contract
from laneway.v1 import common_pb2

OWN = PolicySettings(ready_ahead_s=7.0)
NEW = PolicySettings(ready_ahead_s=1.0, batch_weight=2.0)
ROOT = Path(__file__).parents[2]


def plan(version: int, policy: PolicySettings | None = None, *, epoch: int = 1, text: str = "") -> Plan:
    return Plan("local", epoch, policy=PolicyVersion(version, text or policy_json(policy or PolicySettings()), 5.0))


class TestWhoseWordCounts:
    def test_its_own_settings_hold_until_a_plan_says_otherwise(self):
        policy = LivePolicy(OWN)
        policy.take(Plan("local", 3))
        assert policy.settings is OWN
        policy.take(plan(1, NEW))
        assert (policy.settings, policy.version) == (NEW, 1)

    def test_a_process_does_not_start_with_values_that_contradict_each_other(self):
        with pytest.raises(ConfigError, match="policy: theta must lie"):
            LivePolicy(PolicySettings(theta=0.99))

    def test_an_older_version_changes_nothing(self):
        policy = LivePolicy(OWN)
        policy.take(plan(4, NEW))
        policy.take(plan(3, OWN))
        assert (policy.settings, policy.version) == (NEW, 4)

    def test_the_next_leader_counts_whatever_its_version_and_a_deposed_one_does_not(self):
        policy = LivePolicy(OWN)
        policy.take(plan(9, NEW, epoch=2))
        policy.take(plan(9, OWN, epoch=3))
        assert policy.settings == OWN
        policy.take(plan(10, NEW, epoch=2))
        assert policy.settings == OWN

    def test_a_change_is_told_once(self):
        policy = LivePolicy(OWN)
        heard: list[PolicySettings] = []
        policy.on_change(lambda: heard.append(policy.settings))
        for version in (1, 2, 2):
            policy.take(plan(version, NEW))
        assert heard == [NEW]
        assert policy.version == 2

    def test_what_is_derived_is_made_once_for_each_change(self):
        policy = LivePolicy(OWN)
        made: list[PolicySettings] = []

        def ahead_of(values: PolicySettings) -> float:
            made.append(values)
            return values.ready_ahead_s

        ahead = policy.derive(ahead_of)
        assert [ahead(), ahead()] == [7.0, 7.0]
        policy.take(plan(1, NEW))
        assert [ahead(), ahead()] == [1.0, 1.0]
        assert made == [OWN, NEW]


class TestOtherReleases:
    def test_keys_of_a_newer_scheduler_are_ignored_and_said_once(self):
        text = json.dumps({**json.loads(policy_json(NEW)), "of_the_future": 1, "batch": {"also_new": 2}})
        with structlog.testing.capture_logs() as logs:
            policy = LivePolicy(OWN)
            policy.take(plan(1, text=text))
            policy.take(plan(2, text=text))
        assert policy.settings == replace(NEW, batch=OWN.batch)
        (said,) = [entry for entry in logs if entry["event"] == "published_policy_partly_read"]
        assert said["ignored"] == ["batch.also_new", "of_the_future"]

    def test_what_an_older_scheduler_does_not_say_stays_its_own(self):
        text = json.dumps({"batch_weight": 3.0, "priority": {"deadline_s": 9.0}})
        settings = merged(text, OWN)
        assert (settings.ready_ahead_s, settings.batch_weight, settings.priority.deadline_s) == (7.0, 3.0, 9.0)
        assert settings.priority.ttft_target_s == OWN.priority.ttft_target_s

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"refusal_jitter_min": 5.0}', '{"theta": 0.99}', "null"])
    def test_what_cannot_be_read_or_makes_no_sense_together_changes_nothing(self, text: str):
        assert merged(text, OWN) is OWN

    def test_a_value_that_this_release_does_not_allow_stays_its_own(self):
        assert merged('{"batch_weight": -1.0, "ready_ahead_s": 3.0}', OWN) == replace(OWN, ready_ahead_s=3.0)

    def test_what_is_published_is_read_back_as_it_was(self):
        assert merged(policy_json(NEW), OWN) == NEW
        assert policy_json(NEW) == policy_json(merged(policy_json(NEW), OWN))


# --- every parameter reaches a decision --------------------------------------------------------------


def others(value: object, annotation: object) -> Iterator[object]:
    """Other values that the field allows."""
    candidates: tuple[object, ...] = (None,)
    if isinstance(value, bool):  # before int: a bool is one
        candidates = (not value,)
    elif isinstance(value, int | float):
        candidates = (value + 1, value / 2, value + 0.01, value - 0.01, 1)
    elif isinstance(value, dict):
        candidates = ({"acme": 2.0},)
    elif value is None:
        candidates = (3, 0.5, "x")
    elif isinstance(value, str):
        candidates = tuple(getattr(annotation, "__args__", ())) or (value + "x",)
    for candidate in candidates:
        if candidate != value:
            with contextlib.suppress(msgspec.ValidationError):
                yield msgspec.convert(candidate, type=annotation)


def changed(policy: PolicySettings, key: str) -> PolicySettings:
    names = key.split(".")
    holder: Any = policy
    for name in names[:-1]:
        holder = getattr(holder, name)
    annotation = next(field.type for field in msgspec.structs.fields(holder) if field.name == names[-1])
    for value in others(getattr(holder, names[-1]), annotation):
        with contextlib.suppress(ValueError):  # a check across keys
            made: Any = replace(holder, **{names[-1]: value})
            whole = replace(policy, **{names[0]: made}) if len(names) == 2 else made
            with contextlib.suppress(ConfigError):
                params.check_params(whole)
                return cast(PolicySettings, whole)
    raise AssertionError(f"no other value for {key}")


def made_of(policy: PolicySettings) -> Mapping[str, object]:
    """What services make of the settings at a decision: parameters, and contracts of callers who say nothing."""
    given = {"admission": AdmissionSettings(), "look_s": 0.25, "slots": 8}
    functions: dict[str, Callable[..., object]] = dict(inspect.getmembers(params, inspect.isfunction))
    made: dict[str, object] = {}
    for name, function in functions.items():
        arguments = list(inspect.signature(function).parameters)
        if name.endswith("_params") and name != "check_params":
            made[name] = function(policy, *(given[argument] for argument in arguments[1:]))
    for lane in (common_pb2.LANE_PRIORITY, common_pb2.LANE_DEFERRABLE, common_pb2.LANE_BATCH):
        made[f"contract {lane}"] = parse_contract(
            common_pb2.Contract(lane=lane), 1000.0, policy, attached=True, field="contract"
        )
    return made


@pytest.mark.parametrize("key", [key for key, _ in leaves(PolicySettings())])
def test_a_reload_of_any_parameter_changes_what_services_decide_by(key: str):
    before, after = PolicySettings(), changed(PolicySettings(), key)
    readers = [name for name, value in made_of(after).items() if value != made_of(before)[name]]
    if not readers:
        readers = [path.name for path in sources() if f".settings.{key}" in path.read_text(encoding="utf-8")]
    assert readers, f"nobody decides by policy.{key}: take it up in runtime/params.py"


def sources() -> list[Path]:
    return [
        path
        for folder in ("services", "scheduler", "workers")
        for path in (ROOT / folder / "laneway").rglob("*.py")
        if path.name not in ("params.py", "live_policy.py", "settings.py")
    ]


def test_nobody_keeps_parameters_from_its_start():
    """`settings.policy` is read where a LivePolicy begins, and parameters are made of the values that hold then."""
    begins = ("LivePolicy(settings.policy)", "policy=settings.policy,", "check_params(settings.policy)")
    kept: list[str] = []
    for path in (path for path in sources() if path.name != "policy_reload.py"):
        text = path.read_text(encoding="utf-8")
        kept += [line for line in text.splitlines() if "settings.policy" in line and not any(b in line for b in begins)]
        calls = [match[0] for match in re.finditer(r"(lambda values: )?\b\w+_params\(", text)]
        ours = [call for call in calls if hasattr(params, call.removeprefix("lambda values: ").removesuffix("("))]
        kept += [f"{path.name}: {call}" for call in ours if not call.startswith(("lambda values: ", "check_params("))]
    assert not kept


MAKERS = [name for name, _ in inspect.getmembers(params, inspect.isfunction) if name.endswith("_params")]


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "check_params"])
def test_values_that_the_policy_objects_to_are_refused_when_they_are_read(name: str, monkeypatch: pytest.MonkeyPatch):
    def objects(*_: object) -> None:
        raise ValueError("floor_turns must be 0 or at least 2")

    params.check_params(PolicySettings())
    monkeypatch.setattr(params, name, objects)
    with pytest.raises(ConfigError, match="policy: floor_turns must be"):
        params.check_params(PolicySettings())
