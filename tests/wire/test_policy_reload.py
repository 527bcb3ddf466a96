"""[policy] while everything runs, against a real nats-server: who takes up a change of the file, and what a bad one
does."""

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import structlog

from laneway.core.fleet import PolicyVersion
from laneway.core.lanes import Lane
from laneway.runtime.bus import Bus
from laneway.runtime.local_nats import LocalNats
from laneway.runtime.settings import PolicySettings, Settings
from laneway.runtime.settings_source import SettingsSource
from laneway.scheduler import policy_reload
from laneway.scheduler.loop import Scheduler
from laneway.scheduler.server import serve
from laneway.v1 import admission_pb2 as pb
from laneway.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.support.admission import gate, spec
from tests.support.nats import eventually, nats_settings
from tests.support.scheduling import provision_for, running_scheduler
from tests.support.services import served
from tests.support.worker import worker_settings, yard

pytestmark = pytest.mark.wire


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_reload, "POLL_S", 0.1)
    monkeypatch.setattr(policy_reload, "SETTLE_S", 0.05)


class SettingsFile:
    """A laneway.toml of its own for one scheduler."""

    def __init__(self, path: Path, server: LocalNats) -> None:
        self.path = path
        nats = nats_settings(server)
        self._rest = (
            f'[nats]\nurl = "{nats.url}"\n[scheduler]\nlisten = "127.0.0.1:0"\nplan_interval_s = 0.05\n'
            'leader_ttl_s = 0.6\n[[models]]\nname = "chat"\nengine = "simulated"\nslots = 4\nworkers = 1\n'
            "queue_length = 1000\n"
        )
        self.write("")

    def write(self, policy: str, rest: str = "") -> None:
        """As editors do it: another file takes its place."""
        new = self.path.with_suffix(".new")
        new.write_text(f"{rest or self._rest}[policy]\n{policy}\n", encoding="utf-8")
        new.replace(self.path)

    def change_rest(self, before: str, after: str, policy: str = "") -> None:
        self.write(policy, self._rest.replace(before, after))

    @property
    def source(self) -> SettingsSource:
        return SettingsSource(self.path, environ={})


@pytest.fixture
def file(tmp_path: Path, nats_server: LocalNats) -> SettingsFile:
    return SettingsFile(tmp_path / "laneway.toml", nats_server)


@asynccontextmanager
async def scheduling(server: LocalNats, file: SettingsFile, name: str = "scheduler") -> AsyncIterator[Scheduler]:
    async with running_scheduler(server, file.source.load(), name, source=file.source) as scheduler:
        yield scheduler


def told(scheduler: Scheduler) -> PolicyVersion:
    """As the newest plan says."""
    plan = scheduler.plans.plan
    return plan.policy if plan is not None else PolicyVersion()


async def published(scheduler: Scheduler, version: int) -> PolicyVersion:
    def found() -> PolicyVersion | None:
        return told(scheduler) if told(scheduler).version >= version else None

    policy = await eventually(found)
    assert policy.version == version
    return policy


async def test_doors_and_workers_follow_the_file_while_they_work(
    nats_server: LocalNats, file: SettingsFile, tmp_path: Path
) -> None:
    async with (
        scheduling(nats_server, file) as scheduler,
        gate(nats_server, tmp_path) as door,
        yard(nats_server, workers=1) as place,
    ):
        worker = place.workers[0].worker
        await published(scheduler, 1)
        await eventually(lambda: worker.policy.version == 1)
        assert worker.policy.settings == PolicySettings(), "not its own any more"

        async def due_in_s() -> float:
            answer = await door.stub.Submit(pb.SubmitRequest(spec=spec("Hello", lane=Lane.BATCH)))
            record = await door.record(answer.job_id, "default")
            return record.contract.deadline_s - record.timings.created_s

        assert 86_300 < await due_in_s() < 86_500
        file.write("preemptions_max = 7\nready_ahead_s = 9.0\nbatch.deadline_s = 500.0")
        await published(scheduler, 2)
        await eventually(lambda: worker.policy.version == 2)
        assert worker.policy.settings.preemptions_max == 7

        async def soon() -> bool:
            return 490 < await due_in_s() < 510

        await eventually(soon)
        assert scheduler.lead is not None
        assert scheduler.lead.releaser._params().ready_ahead_s == 9.0


def says(scheduler: Scheduler, why: str) -> bool:
    return why in told(scheduler).refused


async def test_a_bad_file_keeps_what_was_before_and_says_which_key_is_wrong(
    nats_server: LocalNats, file: SettingsFile
) -> None:
    async with scheduling(nats_server, file) as scheduler:
        await published(scheduler, 1)
        file.write("batch_weight = 2.0")
        await published(scheduler, 2)
        with structlog.testing.capture_logs() as logs:
            for bad, why in (
                ("batch_wait = 3.0", "policy.batch_wait"),
                ("refusal_jitter_min = 2.0\nrefusal_jitter_max = 1.0", "refusal_jitter_min is above"),
                ("batch_weight = [", "not valid TOML"),
            ):
                file.write(bad)
                await eventually(partial(says, scheduler, why))
                assert scheduler.policy.settings.batch_weight == 2.0
                assert told(scheduler).version == 2
            refusals = [entry for entry in logs if entry["event"] == "policy_reload_refused"]
        assert len(refusals) == 3, "one line for each, not one a look"
        file.write("batch_weight = 2.5")
        assert (await published(scheduler, 3)).refused == ""


async def test_a_file_that_is_gone_or_half_written_changes_nothing(nats_server: LocalNats, file: SettingsFile) -> None:
    async with scheduling(nats_server, file) as scheduler:
        await published(scheduler, 1)
        file.write("batch_weight = 2.0")
        await published(scheduler, 2)
        file.path.unlink()
        await eventually(partial(says, scheduler, "gone"))
        assert scheduler.policy.settings.batch_weight == 2.0
        file.write("batch_weight = 2.0")
        await eventually(lambda: not told(scheduler).refused)
        assert told(scheduler).version == 2


async def test_a_change_elsewhere_is_said_to_need_a_restart(nats_server: LocalNats, file: SettingsFile) -> None:
    async with scheduling(nats_server, file) as scheduler:
        await published(scheduler, 1)
        file.change_rest("plan_interval_s = 0.05", "plan_interval_s = 0.5", "batch_weight = 3.0")
        policy = await published(scheduler, 2)
        assert policy.restart == ("scheduler.plan_interval_s",)
        assert scheduler.lead is not None
        assert scheduler.lead._interval_s == 0.05
        file.write("batch_weight = 3.0")
        await eventually(lambda: not told(scheduler).restart)


async def test_flags_and_environment_keep_their_precedence(nats_server: LocalNats, file: SettingsFile) -> None:
    source = SettingsSource(file.path, {"policy.batch_weight": "5.0"}, {"LANEWAY_POLICY__READY_AHEAD_S": "6.0"})
    async with running_scheduler(nats_server, source.load(), source=source) as scheduler:
        await published(scheduler, 1)
        file.write("batch_weight = 2.0\nready_ahead_s = 1.0\npreemptions_max = 9")
        await published(scheduler, 2)
        policy = scheduler.policy.settings
        assert (policy.batch_weight, policy.ready_ahead_s, policy.preemptions_max) == (5.0, 6.0, 9)


async def test_a_hangup_has_the_process_read_its_settings_at_once(
    nats_server: LocalNats, file: SettingsFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_reload, "POLL_S", 600.0)
    run = partial(serve, source=file.source)
    async with served(run, file.source.load(), tmp_path / "ready.json") as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

        async def weight() -> float:
            plan = (await stub.GetPlan(scheduler_pb2.GetPlanRequest())).plan
            return float(json.loads(plan.policy.json or "{}").get("batch_weight", 0.0))

        async def weighs(value: float) -> bool:
            return await weight() == value

        await eventually(partial(weighs, 1.0))
        file.write("batch_weight = 2.0")
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(partial(weighs, 2.0))


async def test_a_new_leader_goes_on_from_the_version_and_publishes_its_own_where_that_differs(
    nats_server: LocalNats, file: SettingsFile, tmp_path: Path
) -> None:
    other = SettingsFile(tmp_path / "other.toml", nats_server)
    async with scheduling(nats_server, file) as first:
        await published(first, 1)
        file.write("batch_weight = 2.0")
        await published(first, 2)
        async with scheduling(nats_server, file, "same") as same:
            await eventually(lambda: same.plans.plan is not None)
            await first.leadership.resign()
            stood = told(first)
            await eventually(lambda: same.lead is not None and same.lead.plan is not None)
            assert same.lead is not None
            assert same.lead.plan is not None
            assert same.lead.plan.policy == stood, "the same values are no news"
    with structlog.testing.capture_logs() as logs:
        async with scheduling(nats_server, other, "other") as leader:
            await published(leader, 3)
    said = next(entry for entry in logs if entry["event"] == "policy_published")
    assert said["changed"] == {"batch_weight": "2.0 -> 1.0"}


async def test_a_scheduler_of_another_release_that_publishes_nothing_leaves_all_as_it_is(
    nats_server: LocalNats, bus: Bus, tmp_path: Path
) -> None:
    settings: Settings = worker_settings(nats_server, policy__preemptions_max=4)
    await provision_for(bus, settings)
    async with yard(nats_server, workers=1, policy__preemptions_max=4) as place, gate(nats_server, tmp_path) as door:
        await door.plan()
        await eventually(lambda: place.workers[0].worker._plans.plan is not None)
        assert place.workers[0].worker.policy.settings.preemptions_max == 4


async def test_what_was_published_holds_on_when_the_plan_is_stale(
    nats_server: LocalNats, bus: Bus, file: SettingsFile
) -> None:
    async with yard(nats_server, workers=1) as place:
        worker = place.workers[0].worker
        async with scheduling(nats_server, file) as scheduler:
            await published(scheduler, 1)
            file.write("preemptions_max = 5")
            await published(scheduler, 2)
            await eventually(lambda: worker.policy.version == 2)
        await eventually(lambda: not worker._plans.fresh(), timeout_s=8.0)
        assert worker.policy.settings.preemptions_max == 5
