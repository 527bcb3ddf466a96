"""When the settings are read again, and what is made of them. Files are real; nothing else is needed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from laneway.core.clock import ManualClock
from laneway.core.fleet import PolicyVersion
from laneway.runtime.live_policy import LivePolicy, policy_json
from laneway.runtime.settings import PolicySettings
from laneway.runtime.settings_source import SettingsSource
from laneway.scheduler import policy_reload
from laneway.scheduler.policy_reload import PolicyReload, changes
from laneway.scheduler.policy_versions import PolicyVersions
from tests.support.nats import eventually


class Reading:
    """A PolicyReload of a file, and what it said."""

    def __init__(self, path: Path) -> None:
        self.path = path
        source = SettingsSource(path, environ={})
        settings = source.load()
        self.policy = LivePolicy(settings.policy)
        self.news = 0
        self.reads = 0
        self.reload = PolicyReload(settings, self.policy, source, self._heard)
        self._reread = self.reload.reread
        self.reload.reread = self._count  # type: ignore[method-assign]

    def _heard(self) -> None:
        self.news += 1

    async def _count(self) -> None:
        self.reads += 1
        await self._reread()

    @property
    def weight(self) -> float:
        return self.policy.settings.batch_weight


@asynccontextmanager
async def reading(path: Path, monkeypatch: pytest.MonkeyPatch, poll_s: float = 0.02) -> AsyncIterator[Reading]:
    monkeypatch.setattr(policy_reload, "POLL_S", poll_s)
    monkeypatch.setattr(policy_reload, "SETTLE_S", 0.05)
    path.write_text("[policy]\nbatch_weight = 1.0\n")
    watched = Reading(path)
    task = asyncio.ensure_future(watched.reload.run())
    try:
        await eventually(lambda: watched.reads == 1)
        yield watched
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_file_that_does_not_change_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with reading(tmp_path / "laneway.toml", monkeypatch) as watched:
        (tmp_path / "laneway.toml").touch()
        await asyncio.sleep(0.2)
        assert (watched.reads, watched.news) == (1, 0)


async def test_a_file_that_is_still_being_written_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Half a file is a valid one too: all that is missing from it would go back to its default."""
    async with reading(tmp_path / "laneway.toml", monkeypatch) as watched:
        for line in range(20):
            watched.path.write_text("[policy]\n" + "# still writing\n" * line)
            await asyncio.sleep(0.02)
            assert watched.reads == 1
        watched.path.write_text("[policy]\nbatch_weight = 2.0\n")
        await eventually(lambda: watched.weight == 2.0)
        assert watched.reads == 2


async def test_it_looks_at_once_when_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with reading(tmp_path / "laneway.toml", monkeypatch, poll_s=600.0) as watched:
        watched.path.write_text("[policy]\nbatch_weight = 3.0\n")
        watched.reload.ask()
        await eventually(lambda: watched.weight == 3.0)


async def test_an_unnamed_file_that_comes_to_be_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(policy_reload, "POLL_S", 0.02)
    monkeypatch.setattr(policy_reload, "SETTLE_S", 0.02)
    source = SettingsSource(environ={})
    policy = LivePolicy(source.load().policy)
    task = asyncio.ensure_future(PolicyReload(source.load(), policy, source, lambda: None).run())
    await asyncio.sleep(0.1)
    (tmp_path / "laneway.toml").write_text("[policy]\nbatch_weight = 4.0\n")
    await eventually(lambda: policy.settings.batch_weight == 4.0)
    (tmp_path / "laneway.toml").unlink()
    await asyncio.sleep(0.2)
    assert policy.settings.batch_weight == 4.0, "a file that is gone is no word to go back to the defaults"
    task.cancel()


async def test_what_cannot_be_read_is_said_to_operators_until_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with reading(tmp_path / "laneway.toml", monkeypatch) as watched:
        watched.path.write_text("[policy]\ntheta = 0.99\ntheta_max = 0.9\n")
        await eventually(lambda: "theta must lie" in watched.reload.refused)
        assert (watched.weight, watched.news) == (1.0, 1)
        watched.path.write_text("[policy]\nbatch_weight = 1.0\n")
        await eventually(lambda: watched.reload.refused == "")
        assert watched.news == 2


async def test_no_file_however_bad_ends_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It would end the scheduler with it."""
    bad = {
        "deep": "policy = " + "[" * 20_000,
        "wide": "[policy]\nbatch_weight = " + "9" * 5_000,
        "binary": "[policy]\nbatch_weight = \x00",
        "nothing": "[policy]\nlower_lane_floor = 1e-320",
        "less than nothing": "[policy]\nbatch_weight = 1e-320",
    }
    async with reading(tmp_path / "laneway.toml", monkeypatch) as watched:
        for name, text in bad.items():
            watched.path.write_text(text)
            news = watched.news
            await eventually(lambda news=news: watched.news > news and bool(watched.reload.refused))  # type: ignore[misc]
            assert watched.weight == 1.0, name
        watched.path.write_text("[policy]\nbatch_weight = 5.0\n")
        await eventually(lambda: watched.weight == 5.0)


async def test_what_is_published_of_a_bad_file_holds_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with reading(tmp_path / "laneway.toml", monkeypatch) as watched:
        watched.path.write_text('[nats]\nurl = ["nats://me:hunter2@a:4222", "nats://me:hunter2@b:4222"]\n')
        await eventually(lambda: "nats.url" in watched.reload.refused)
        assert "hunter2" not in watched.reload.refused
        assert "a:4222" in watched.reload.refused


# --- versions ----------------------------------------------------------------------------------------

CLOCK = ManualClock(wall_s=1000.0)


def test_a_version_rises_with_each_change_and_stands_without():
    policy = LivePolicy(PolicySettings())
    versions = PolicyVersions(policy, CLOCK, PolicyVersion())
    first = versions.now()
    assert (first.version, first.loaded_s, policy.version) == (1, 1000.0, 1)
    assert versions.now() == first
    policy.set(PolicySettings(batch_weight=2.0))
    assert versions.now().version == 2
    assert versions.now().json == policy_json(policy.settings)


def test_a_leader_goes_on_from_what_the_plan_before_said():
    own = PolicySettings()
    before = PolicyVersion(7, policy_json(own), 500.0, "refused elsewhere", ("nats.url",))
    assert PolicyVersions(LivePolicy(own), CLOCK, before).now() == PolicyVersion(7, policy_json(own), 500.0)
    other = PolicyVersions(LivePolicy(PolicySettings(batch_weight=2.0)), CLOCK, before).now()
    assert (other.version, other.loaded_s) == (8, 1000.0)


def test_what_another_release_published_is_gone_on_from_as_well():
    for text in ('{"of_the_future": 1}', "not json", ""):
        assert PolicyVersions(LivePolicy(PolicySettings()), CLOCK, PolicyVersion(3, text)).now().version == 4


def test_changes_are_told_with_both_values():
    assert changes({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == {"b": "2 -> 3", "c": "None -> 4"}
